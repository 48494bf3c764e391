"""Weights stored as they are: F32, F16, BF16, little-endian, no blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from infer.quant.base import PlanarFormat, Plane, QuantFormat


class PlainFormat(PlanarFormat):
    """A file may also hold matrices [rows, K] transposed, one after another, each row's column `step` apart:
    `transposed` is [matrices, K, rows · step], and row r of one its column r · step + first."""

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

    def open(
        self, planes: Mapping[str, Plane], settings: Mapping[str, float], shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        rows, step, first = (int(settings[name]) for name in ("rows", "step", "first"))
        columns, size = shape[1], shape[1] * rows * step * self.type_size
        held: tuple[int, torch.Tensor] | None = None  # a matrix is read once, not for each run of its rows

        def matrix(index: int) -> torch.Tensor:
            nonlocal held
            if held is None or held[0] != index:
                stored = self.decode(planes["transposed"](index * size, size), (columns, rows * step))
                held = index, stored[:, first::step].T
            return held[1]

        def read(start: int, stop: int) -> torch.Tensor:
            parts = []
            while start < stop:
                index, row = divmod(start, rows)
                count = min(rows - row, stop - start)
                parts.append(matrix(index)[row : row + count].reshape(-1))
                start += count
            return torch.cat(parts).view(torch.uint8)

        return read


FORMATS: dict[str, QuantFormat] = {
    "F32": PlainFormat("F32", torch.float32),
    "F16": PlainFormat("F16", torch.float16),
    "BF16": PlainFormat("BF16", torch.bfloat16),
}
