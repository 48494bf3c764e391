"""Weights stored as they are: F32, F16, BF16, little-endian, no blocks."""

from __future__ import annotations

import torch

from infer.quant.base import QuantFormat


class PlainFormat(QuantFormat):
    block = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self.type_size = dtype.itemsize
        self.bits = 8 * dtype.itemsize

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        data = self.blocks(raw, shape).reshape(-1)
        if data.storage_offset() % self.type_size or data.data_ptr() % self.type_size:
            data = data.clone()
        return data.view(self.dtype).reshape(shape)


FORMATS: dict[str, QuantFormat] = {
    "F32": PlainFormat("F32", torch.float32),
    "F16": PlainFormat("F16", torch.float16),
    "BF16": PlainFormat("BF16", torch.bfloat16),
}
