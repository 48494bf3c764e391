"""All weights as float32: four bytes a weight, for measuring what quantized arithmetic loses."""

from __future__ import annotations

import torch

from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.rows import RowWeight
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.tensor_kernel import TensorKernel
from infer.quant.kernels.weight import PackedWeight


class Float32Kernel(TensorKernel):
    name = "float32"
    exact = False
    version = 1

    def pack(self, source: WeightSource) -> RowWeight:
        values = torch.empty(source.shape, dtype=self.dtype, device=self.device)
        for start, stop in source.chunks():
            values[start:stop] = source.dequantize(start, stop).to(self.device)
        return RowWeight(values)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        values = weight.values if isinstance(weight, RowWeight) else None
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return torch.nn.functional.linear(x, values)

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return weight.select(ids)


def create(device: Device, threads: int, isa: str | None = None) -> WeightKernel:
    return Float32Kernel(device)
