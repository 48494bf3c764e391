"""All weights as float32: four bytes a weight, for measuring what quantized arithmetic loses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infer.quant.kernels.base import PackedWeight, WeightKernel, WeightSource


@dataclass(frozen=True)
class DenseWeight(PackedWeight):
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


class Float32Kernel(WeightKernel):
    name = "float32"
    exact = False
    version = 1
    dtype = torch.float32

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pack(self, source: WeightSource) -> DenseWeight:
        values = torch.empty(source.shape, dtype=self.dtype, device=self.device)
        for start, stop in source.chunks():
            values[start:stop] = source.dequantize(start, stop).to(self.device)
        return DenseWeight(values)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        if not isinstance(weight, DenseWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return torch.nn.functional.linear(x, weight.values)

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, DenseWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return weight.values[ids]


def create(device: torch.device, threads: int, isa: str | None = None) -> WeightKernel:
    return Float32Kernel(device)
