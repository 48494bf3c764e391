"""Compute kernels for quantized weights, and the torch reference each one is tested against."""
