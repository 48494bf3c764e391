"""The CPU matmul's semantics in plain torch: the oracle of the native kernels, exact and slow.

A row x is quantized per block of 32 inputs: sx = amax / 127, xq = round(x * (127 / amax)) to nearest even; NaN or
infinity anywhere in a block makes its sx NaN, and a block below 2**-119 is zero. Then, block after block, and within
a block group after group (two when group is 16, else one):

    D = Σ (code - zero) xq,  S = Σ xq
    acc = fma(D, sx * scale, acc);  acc = fma(minimum, sx * S, acc)

D and S are exact integers whatever the order; here they come out of float32 products whose sums stay below 2**24.
Float weights, and those of a format with a table, multiply in float32, four sums by k % 4, added (0 + 1) + (2 + 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.rows import RowWeight, gather_rows
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.tensor_kernel import TensorKernel
from infer.quant.kernels.weight import PackedWeight

BLOCK = 32
TINY = 2.0**-119  # below it 127 / amax would not be a normal number


@dataclass(frozen=True)
class QuantizedRows:
    """codes int8 [M, K], scales float32 [M, K / 32]."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """x: float32 [M, K], K a multiple of 32."""
    blocks = x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    peak = blocks.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(peak)
    scales = torch.where(finite, peak / 127, torch.nan)
    small = peak < TINY
    scales = torch.where(small, 0.0, scales)
    inverse = torch.where(finite & ~small, 127 / peak, 0.0)
    codes = torch.round(torch.where(finite, blocks, 0.0) * inverse)
    return QuantizedRows(codes.to(torch.int8).reshape(x.shape), scales.squeeze(-1))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32(a * b + c), rounded once (results below 2**-126 twice).

    The product is exact in float64. Where the float64 sum lies halfway between two float32 numbers after having been
    rounded itself, it is moved to the side that it was rounded from.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    halfway = (total.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    if bool(halfway.any()):
        part = total - addend
        error = (product - part) + (addend - (total - part))
        side = torch.where(error > 0, torch.inf, -torch.inf)
        total = torch.where(halfway & (error != 0), torch.nextafter(total, side.double()), total)
    return total.float()


def matmul_codes(x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """x float32 [M, K] → float32 [M, N]."""
    rows = quantize_rows(x)
    codes = weight.unpacked_codes().float() - weight.zero
    scales, mins = weight.group_scales(), weight.group_mins()
    xq = rows.codes.float()
    acc = x.new_zeros((x.shape[0], weight.shape[0]))
    width = min(weight.group, BLOCK)
    for start in range(0, weight.shape[1], width):
        span, index = slice(start, start + width), start // weight.group
        sx = rows.scales[:, start // BLOCK, None]
        acc = fma(xq[:, span] @ codes[:, span].T, sx * scales[:, index], acc)
        if mins is not None:
            acc = fma(mins[:, index], sx * xq[:, span].sum(dim=1, keepdim=True), acc)
    return acc


def matmul_floats(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x float32 [M, K], weight [N, K] in any float dtype → float32 [M, N]."""
    sums = [x.new_zeros((x.shape[0], weight.shape[0])) for _ in range(4)]
    for k in range(weight.shape[1]):
        sums[k % 4] = fma(x[:, k : k + 1], weight[:, k].float(), sums[k % 4])
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


class ReferenceKernel(TensorKernel):
    name = "reference"
    exact = True
    version = 1

    def pack(self, source: WeightSource) -> RowWeight:
        return gather_rows(source, self.device)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        if isinstance(weight.values, torch.Tensor):
            return matmul_floats(x, weight.values)
        if weight.values.table is not None:
            return matmul_floats(x, weight.values.dequantize())
        return matmul_codes(x, weight.values)

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return weight.select(ids)


def create(device: Device, threads: int, isa: str | None = None) -> WeightKernel:
    return ReferenceKernel(device)
