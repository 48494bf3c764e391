"""What a kernel packs: a matrix as its file has it, decoded by torch a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from infer.quant.base import QuantFormat, QuantizedTensor
from infer.quant.bnb import BLOCK, quantize_table
from infer.quant.rtn import quantize_rtn

CHUNK_BYTES = 1 << 20  # stored bytes read and decoded at a time


@dataclass(frozen=True)
class WeightSource:
    """A matrix [N, K] waiting in a file.

    read(start, stop): the stored bytes of rows [start, stop) as a uint8 tensor. quant: "int8", "int4" or "nf4" rounds a
    float matrix to nearest while it is loaded; it has no effect on quantized ones.
    """

    name: str
    shape: tuple[int, int]
    format: QuantFormat
    read: Callable[[int, int], torch.Tensor]
    quant: str | None = None

    @property
    def requantized(self) -> bool:
        """Whether the rows need more than decoding."""
        group = BLOCK if self.quant == "nf4" else 32
        return self.quant is not None and self.format.block == 1 and self.shape[1] % group == 0

    def chunks(self, multiple: int = 64) -> Iterator[tuple[int, int]]:
        """Row ranges of about CHUNK_BYTES each, beginning at multiples of `multiple`."""
        rows, columns = self.shape
        step = max(1, CHUNK_BYTES // self.format.row_bytes(columns) // multiple) * multiple
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def decode(self, start: int, stop: int) -> QuantizedTensor | torch.Tensor:
        """Rows [start, stop) in the internal form, or as floats in the file's own dtype."""
        decoded = self.format.decode(self.read(start, stop), (stop - start, self.shape[1]))
        if self.requantized and isinstance(decoded, torch.Tensor):
            if self.quant == "nf4":
                return quantize_table(decoded)
            return quantize_rtn(decoded, 8 if self.quant == "int8" else 4, 32)
        return decoded

    def dequantize(self, start: int, stop: int) -> torch.Tensor:
        """float32 [stop - start, K]."""
        decoded = self.decode(start, stop)
        return decoded.dequantize() if isinstance(decoded, QuantizedTensor) else decoded.to(torch.float32)
