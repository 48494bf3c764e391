"""Quantized weights with torch's own operations: the path without a compiler, and on CUDA.

On the CPU one row goes through torch's int4 kernel and many rows through dequantization to bfloat16 a panel at a
time (measured on 2 cores at [1536, 576]: int4 36 µs for 1 row against 118 µs; bf16 6 ms for 512 rows against
29 ms). Codes of 5 to 8 bits are two nibble planes, the upper four bits and the rest, so that both paths
serve every format whose groups have 32 columns or more. Groups of 16 (Q6_K), tables (NF4) and CUDA keep codes by
row and dequantize in row chunks.

Scales are rounded to bfloat16 and sums depend on the number of rows: this kernel is not exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from infer.quant.base import QuantizedTensor
from infer.quant.kernels.base import PackedWeight, WeightKernel, WeightSource
from infer.quant.kernels.rows import RowWeight, gather_rows

PANEL = 1 << 22  # weights dequantized at a time: 8 MiB of bfloat16


@dataclass(frozen=True)
class NibblePlane:
    """torch's int4 layout and its scales: w = (code - 8) * scale + zero.

    packed uint8 [N / (2 half), K, half]: low nibbles are rows 0..half-1 of the block, high nibbles the rest.
    scale_zero bfloat16 [K / group, N, 2].
    """

    packed: torch.Tensor
    scale_zero: torch.Tensor


@dataclass(frozen=True)
class NibbleWeight(PackedWeight):
    """One plane for 4-bit codes, two (high, low nibble) for 5 to 8 bits; N padded to whole blocks."""

    shape: tuple[int, int]
    group: int
    planes: tuple[NibblePlane, ...]

    @property
    def nbytes(self) -> int:
        return sum(plane.packed.nbytes + plane.scale_zero.nbytes for plane in self.planes)


class TorchKernel(WeightKernel):
    name = "torch"
    exact = False
    version = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16
        self._half = _int4_half_block() if device.type == "cpu" else 0

    def pack(self, source: WeightSource) -> PackedWeight:
        rows, columns = source.shape
        first = source.decode(0, min(rows, 1))
        if isinstance(first, torch.Tensor):
            return gather_rows(source, self.device)
        if self._half and first.table is None and first.group >= 32 and columns % first.group == 0:
            return self._pack_nibbles(source, first)
        return gather_rows(source, self.device)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        rows, _ = weight.shape
        if isinstance(weight, NibbleWeight):
            if x.shape[0] <= 4:
                total = _int4(x, weight.planes[0], weight.group)
                for plane in weight.planes[1:]:
                    total += _int4(x, plane, weight.group)
                return total if total.shape[1] == rows else total[:, :rows]
            return self._matmul_panels(x, weight)
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        values = weight.values
        if isinstance(values, torch.Tensor):
            return linear(x.to(values.dtype), values).to(self.dtype)
        out = x.new_empty((x.shape[0], rows))
        step = max(1, PANEL // weight.shape[1])
        for start in range(0, rows, step):
            panel = values.rows(start, min(rows, start + step)).dequantize().to(self.dtype)
            torch.mm(x, panel.T, out=out[:, start : start + step])
        return out

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, NibbleWeight):
            block, lane = ids // (2 * self._half), ids % (2 * self._half)
            total = torch.zeros((len(ids), weight.shape[1]), dtype=torch.float32)
            for plane in weight.planes:
                picked = plane.packed[block, :, lane % self._half]
                low = (lane < self._half).unsqueeze(1)
                codes = torch.where(low, picked & 15, picked >> 4).float().view(len(ids), -1, weight.group)
                scale, zero = plane.scale_zero[:, ids].float().permute(2, 1, 0).unsqueeze(-1)
                total += ((codes - 8) * scale + zero).flatten(1)
            return total.to(self.dtype)
        if not isinstance(weight, RowWeight):
            raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
        return weight.select(ids).to(self.dtype)

    def _matmul_panels(self, x: torch.Tensor, weight: NibbleWeight) -> torch.Tensor:
        rows, columns = weight.shape
        half, group = self._half, weight.group
        padded = weight.planes[0].scale_zero.shape[1]
        out = x.new_empty((x.shape[0], padded))
        step = max(1, PANEL // columns // (2 * half))
        for block in range(0, padded // (2 * half), step):
            panel: torch.Tensor | None = None
            for plane in weight.planes:
                part = plane.packed[block : block + step].permute(1, 0, 2)
                codes = torch.stack((part & 15, part >> 4), dim=2).to(self.dtype)  # [K, blocks, 2, half]
                start, stop = block * 2 * half, (block + part.shape[1]) * 2 * half
                scale, zero = plane.scale_zero[:, start:stop].unbind(-1)
                flat = codes.view(columns // group, group, stop - start).sub_(8)
                flat = torch.addcmul(zero.unsqueeze(1), flat, scale.unsqueeze(1))
                panel = flat if panel is None else panel.add_(flat)
            if panel is not None:
                torch.mm(x, panel.view(columns, -1), out=out[:, start:stop])
        return out[:, :rows]

    def _pack_nibbles(self, source: WeightSource, first: QuantizedTensor) -> NibbleWeight:
        rows, columns = source.shape
        block = 2 * self._half
        padded = -(-rows // block) * block
        group = first.group
        count = 1 if first.bits == 4 else 2
        planes = tuple(
            NibblePlane(
                torch.empty((padded // block, columns, self._half), dtype=torch.uint8),
                torch.zeros((columns // group, padded, 2), dtype=torch.bfloat16),
            )
            for _ in range(count)
        )
        for start, stop in source.chunks(block):
            part = source.decode(start, stop)
            if not isinstance(part, QuantizedTensor):
                raise TypeError(f"{source.name}: {source.format.name} gave floats")
            codes = part.unpacked_codes()
            scale = part.group_scales()
            mins = part.group_mins()
            offset = -scale * part.zero if mins is None else mins
            if stop % block:
                codes = torch.nn.functional.pad(codes, (0, 0, 0, block - stop % block))
            shift = first.bits - 4
            nibbles = (codes,) if count == 1 else (codes >> shift, codes & ((1 << shift) - 1))
            factors = (1.0,) if count == 1 else (float(1 << shift), 1.0)
            for plane, nibble, factor in zip(planes, nibbles, factors, strict=True):
                blocked = nibble.view(-1, 2, self._half, columns)
                target = plane.packed[start // block : start // block + blocked.shape[0]]
                target.copy_((blocked[:, 0] | blocked[:, 1] << 4).transpose(1, 2))
                plane.scale_zero[:, start:stop, 0] = (scale * factor).T.to(torch.bfloat16)
                # the offset goes with the high plane, which it centres: the sums of both stay near the result's size
                zero = scale * (8 * factor)
                if plane is planes[0]:
                    zero = zero + offset
                plane.scale_zero[:, start:stop, 1] = zero.T.to(torch.bfloat16)
        return NibbleWeight(source.shape, group, planes)


def _int4(x: torch.Tensor, plane: NibblePlane, group: int) -> torch.Tensor:
    flat = plane.packed.view(-1, x.shape[1] // 2)
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, flat, group, plane.scale_zero)
    return product


def _int4_half_block() -> int:
    """Rows in half a block of torch's int4 layout on this processor (32 with AVX-512, 16 with AVX2), found by packing a
    pattern; 0 when the layout is another one, and then weights stay by row."""
    columns = 32
    codes = torch.randint(
        0, 16, (128, columns), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2).reshape(-1)
    except (RuntimeError, AttributeError):
        return 0
    for half in (32, 16):
        blocked = codes.to(torch.uint8).view(-1, 2, half, columns)
        if torch.equal(packed, (blocked[:, 0] | blocked[:, 1] << 4).transpose(1, 2).reshape(-1)):
            return half
    return 0


def create(device: torch.device, threads: int, isa: str | None = None) -> WeightKernel:
    return TorchKernel(device)
