"""Readers of model files: metadata and raw tensors, no maths."""
