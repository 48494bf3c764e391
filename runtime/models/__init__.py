"""Architectures: the maths of each model family, over the operations in `ops`."""
