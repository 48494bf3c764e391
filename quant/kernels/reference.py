"""The CPU matmul's semantics in plain torch: the oracle of the native kernels, exact and slow.

A row x is quantized per block of 32 inputs: sx = amax / 127, xq = round(x * (127 / amax)) to nearest even; NaN or
infinity anywhere in a block makes its sx NaN. Then, block after block,

    I = Σ_groups s Σ_k (code - zero) xq        J = Σ_groups m Σ_k xq
    acc = fma(I, sx * scale, acc)              acc = fma(J, sx * minimum, acc)

with s and m the integer factors of K-quants (else 1) and scale and minimum the float ones. I and J are exact
integers whatever the order; here they come out of float32 products whose sums stay below 2**24. The fma is made in
float64 and rounded once more, which differs from a hardware fma in the last bit of about one in 2**29 results.
Float weights multiply in float32, four sums by k % 4, added (0 + 1) + (2 + 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels.base import PackedWeight, WeightKernel, WeightSource
from infer.quant.kernels.rows import RowWeight, gather_rows

BLOCK = 32


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
    # a peak so small that 127 / peak overflows counts as zero, as does zero itself
    inverse = 127 / peak
    inverse = torch.where(finite & torch.isfinite(inverse), inverse, 0.0)
    codes = torch.round(torch.where(finite, blocks, 0.0) * inverse)
    return QuantizedRows(codes.to(torch.int8).reshape(x.shape), scales.squeeze(-1))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32(a * b + c), the product not rounded."""
    return (a.double() * b.double() + c.double()).float()


def matmul_codes(x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """x float32 [M, K] → float32 [M, N]."""
    rows = quantize_rows(x)
    group = weight.group
    codes = weight.unpacked_codes().float() - weight.zero
    xq = rows.codes.float()
    acc = x.new_zeros((x.shape[0], weight.shape[0]))
    for block in range(weight.shape[1] // BLOCK):
        sx = rows.scales[:, block : block + 1]
        parts = _parts(weight, codes, xq, block, group)
        for integer, scale in parts:
            acc = fma(integer, sx * scale, acc)
    return acc


def _parts(
    weight: QuantizedTensor, codes: torch.Tensor, xq: torch.Tensor, block: int, group: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(integer sums [M, N], float factors [N]) of one block, in the order in which they are added."""
    start = block * BLOCK
    spans = [(c, c + min(group, BLOCK)) for c in range(start, start + BLOCK, min(group, BLOCK))]
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    integers: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    for low, high in spans:
        index = low // group
        dot = xq[:, low:high] @ codes[:, low:high].T
        total = xq[:, low:high].sum(dim=1, keepdim=True)
        if weight.super_scales is not None:
            integers.append(dot * weight.scales[:, index].float())
            if weight.mins is not None:
                offsets.append(total * weight.mins[:, index].float())
            continue
        parts.append((dot, weight.scales[:, index].float()))
        if weight.mins is not None:
            parts.append((total.expand(dot.shape), weight.mins[:, index].float()))
    if weight.super_scales is not None:
        parts.append((_total(integers), weight.super_scales[:, start // 256].float()))
        if weight.super_mins is not None:
            parts.append((_total(offsets), -weight.super_mins[:, start // 256].float()))
    return parts


def _total(integers: list[torch.Tensor]) -> torch.Tensor:
    """The exact integer sum, rounded to float32 once as the conversion from int32 does."""
    return torch.stack(integers).double().sum(dim=0).float()


def matmul_floats(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x float32 [M, K], weight [N, K] in any float dtype → float32 [M, N]."""
    sums = [x.new_zeros((x.shape[0], weight.shape[0])) for _ in range(4)]
    for k in range(weight.shape[1]):
        sums[k % 4] = fma(x[:, k : k + 1], weight[:, k].float(), sums[k % 4])
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


class ReferenceKernel(WeightKernel):
    name = "reference"
    exact = True
    version = 1
    dtype = torch.float32

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pack(self, source: WeightSource) -> RowWeight:
        return gather_rows(source, self.device)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        if isinstance(weight.values, torch.Tensor):
            return matmul_floats(x, weight.values)
        return matmul_codes(x, weight.values)

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return weight.select(ids)


def create(device: torch.device, threads: int) -> WeightKernel:
    return ReferenceKernel(device)
