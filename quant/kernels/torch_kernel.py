"""Quantized weights with torch's own operations: the path without a compiler, and on CUDA.

On the CPU few rows go through torch's int4 kernel and many through dequantization to bfloat16, a panel at a time
(measured on 2 cores at [1536, 576]: int4 36 µs for 1 row against 118 µs; bf16 6 ms for 512 rows against 29 ms). The
layout is `nibbles`'s. CUDA, tables (NF4) and matrices that do not fit that layout keep codes by row and dequantize in
row chunks.

Scales are rounded to bfloat16 and sums depend on the number of rows: this kernel is not exact.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.nibbles import GROUP, PANEL, NibbleWeight, half_block, pack_planes
from infer.quant.kernels.rows import RowWeight, gather_rows
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.tensor_kernel import TensorKernel
from infer.quant.kernels.weight import PackedWeight

INT4_ROWS = 4  # up to here the int4 kernel is the faster way


class TorchKernel(TensorKernel):
    name = "torch"
    exact = False
    version = 2
    dtype = torch.bfloat16

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._half = half_block() if device.type == "cpu" else 0

    def pack(self, source: WeightSource) -> PackedWeight:
        first = source.decode(0, min(source.shape[0], 1))
        if not self._half or isinstance(first, torch.Tensor) or first.table is not None:
            return gather_rows(source, self.device)
        if source.shape[1] % max(GROUP, first.group):
            return gather_rows(source, self.device)
        # Q2_K's minimums, rounded, weigh more than its codes.
        if first.mins is not None and first.group < GROUP:
            return gather_rows(source, self.device)
        return pack_planes(source, first, self._half)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        rows, columns = weight.shape
        if isinstance(weight, NibbleWeight):
            if x.shape[0] <= INT4_ROWS:
                return weight.matmul_int4(x)
            padded = x.new_empty((x.shape[0], weight.padded_rows))
            for part in weight.panels(PANEL):
                torch.mm(x, weight.panel(part), out=padded[:, part])
            return padded[:, :rows]
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        values = weight.values
        if isinstance(values, torch.Tensor):
            return linear(x.to(values.dtype), values).to(self.dtype)
        out = x.new_empty((x.shape[0], rows))
        step = max(1, PANEL // columns)
        for start in range(0, rows, step):
            rows_of_panel = values.rows(start, min(rows, start + step)).dequantize().to(self.dtype)
            torch.mm(x, rows_of_panel.T, out=out[:, start : start + step])
        return out

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, NibbleWeight):
            return weight.rows(ids).to(self.dtype)
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return weight.select(ids).to(self.dtype)


def create(device: Device, threads: int, isa: str | None = None) -> WeightKernel:
    return TorchKernel(device)
