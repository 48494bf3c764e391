"""Weights kept row after row, as the file has them: the internal form, or plain floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.weight import PackedWeight


@dataclass(frozen=True)
class RowWeight(PackedWeight):
    values: QuantizedTensor | torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def select(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, dequantized to float32."""
        if isinstance(self.values, torch.Tensor):
            return self.values[ids].float()
        return self.values.gather(ids).dequantize()

    def all(self) -> torch.Tensor:
        """Every row, dequantized to float32."""
        return self.values.float() if isinstance(self.values, torch.Tensor) else self.values.dequantize()


def gather_rows(source: WeightSource, device: torch.device) -> RowWeight:
    """The whole matrix, decoded chunk by chunk into storage made once."""
    whole: QuantizedTensor | torch.Tensor | None = None
    rows = source.shape[0]
    for start, stop in source.chunks():
        part = source.decode(start, stop)
        if isinstance(part, QuantizedTensor):
            if whole is None:
                whole = part.empty_like(rows, device)
            if isinstance(whole, QuantizedTensor):
                whole.rows(start, stop).copy_(part)
        else:
            if whole is None:
                whole = torch.empty(source.shape, dtype=part.dtype, device=device)
            if isinstance(whole, torch.Tensor):
                whole[start:stop] = part
    if whole is None:
        raise ValueError(f"an empty matrix {list(source.shape)} cannot be loaded")
    return RowWeight(whole)
