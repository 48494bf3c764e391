"""Quantized weights: one internal form, the formats that become it, the kernels that multiply with it."""
