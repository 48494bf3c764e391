"""The layout of torch's int4 matrix product on the CPU, and wider codes as sums of such planes.

A code of more than 4 bits is hi * 2^e + lo, with hi its upper four bits: two planes, each with a scale of its own. A
`lo` of 1 or 2 bits is kept at that size and spread to nibbles when it is used. Groups of 16 columns, which the product
does not know, are two products over groups of 32, with the other half of each group's inputs set to zero.

Scales are spread to torch's form once where the file has one number per group of 32 or more. Products of two numbers
(K-quants) and those of smaller groups are kept as they are, at half the size or less, and spread when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.weight import PackedWeight

GROUP = 32  # columns that share a scale, at least, in torch's product
PANEL = 1 << 20  # weights whose scales or codes are spread at a time: what comes of them stays in the cache


@dataclass(frozen=True)
class NibblePlane:
    """The part `nibble` of w = scale * factor * nibble + …, `bits` (1, 2 or 4) of each.

    codes uint8 [N / (2 half), K * bits / 4, half]. With 4 bits, a byte's low nibble is of row r < half of the block,
    its high nibble of row half + r. With fewer, byte [b, k, r] holds the bytes [b, k + i K bits / 4, r] of such a
    plane, shifted left by i * bits.
    """

    codes: torch.Tensor
    bits: int
    factor: int

    def nibbles(self, codes: torch.Tensor) -> torch.Tensor:
        """Some of the codes, [blocks, K * bits / 4, …], with 4 bits: [blocks, K, …]."""
        if self.bits == 4:
            return codes
        blocks, short = codes.shape[:2]
        mask = ((1 << self.bits) - 1) * 0x11
        out = torch.empty((blocks, short * 4 // self.bits, *codes.shape[2:]), dtype=torch.uint8)
        for index in range(4 // self.bits):
            part = out[:, index * short : (index + 1) * short]
            torch.bitwise_and(codes >> (index * self.bits), mask, out=part)
        return out


@dataclass(frozen=True)
class Factors:
    """Scales as QuantizedTensor has them, transposed: [K / group, N] and [K / 256, N]."""

    scales: torch.Tensor
    mins: torch.Tensor | None
    super_scales: torch.Tensor | None
    super_mins: torch.Tensor | None
    zero: int

    def scale_zeros(
        self, planes: tuple[NibblePlane, ...], rows: slice | torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Per plane bfloat16 [K / group, rows, 2], for w = (nibble - 8) * scale + zero. The offset goes with the first
        plane, the high one, which it centres: the sums of both stay near the result's size."""
        scale = _product(self.scales, self.super_scales, rows)
        if self.mins is None:
            offset = scale * -self.zero
        else:
            offset = _product(self.mins, self.super_mins, rows)
            if self.super_mins is not None:
                offset.neg_()
        found: list[torch.Tensor] = []
        for plane in planes:
            scale_zero = torch.empty((*scale.shape, 2), dtype=torch.bfloat16)
            scale_zero[..., 0] = scale * plane.factor
            zero = scale * (8 * plane.factor)
            scale_zero[..., 1] = zero if found else zero + offset
            found.append(scale_zero)
        return tuple(found)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        parts = (self.scales, self.mins, self.super_scales, self.super_mins)
        return tuple(part for part in parts if part is not None)


@dataclass(frozen=True)
class NibbleWeight(PackedWeight):
    """block: rows of a block, 2 half. scales: `Factors`, or what its scale_zeros gives for all rows."""

    shape: tuple[int, int]
    group: int
    block: int
    planes: tuple[NibblePlane, ...]
    scales: Factors | tuple[torch.Tensor, ...]

    @property
    def padded_rows(self) -> int:
        return self.planes[0].codes.shape[0] * self.block

    @property
    def nbytes(self) -> int:
        scales = self.scales.tensors if isinstance(self.scales, Factors) else self.scales
        return sum(t.nbytes for t in (*scales, *(plane.codes for plane in self.planes)))

    def matmul_int4(self, x: torch.Tensor) -> torch.Tensor:
        """x bfloat16 [M, K] → [M, N]."""
        x = x.contiguous()
        if isinstance(self.scales, Factors):
            out = x.new_zeros((x.shape[0], self.padded_rows))
            for rows in self.panels(PANEL):
                self._add_int4(x, rows, out[:, rows])
        else:
            out, *others = (
                _int4(x, plane.nibbles(plane.codes), self.group, scale_zero)
                for plane, scale_zero in zip(self.planes, self.scales, strict=True)
            )
            for other in others:
                out += other
        return out if self.padded_rows == self.shape[0] else out[:, : self.shape[0]]

    def panels(self, weights: int) -> Iterator[slice]:
        """Ranges of whole blocks of rows, with about `weights` weights each."""
        step = max(1, weights // self.shape[1] // self.block) * self.block
        for start in range(0, self.padded_rows, step):
            yield slice(start, min(start + step, self.padded_rows))

    def panel(self, rows: slice) -> torch.Tensor:
        """Whole blocks of rows dequantized and transposed: bfloat16 [K, rows]."""
        blocks = self._blocks(rows)
        codes, *others = [self._codes(plane.nibbles(plane.codes[blocks])) for plane in self.planes]
        scale_zeros = [scale_zero.float() for scale_zero in self._scale_zeros(rows)]
        scale, zero = scale_zeros[-1].unbind(-1)
        zero = zero - 8 * scale
        for plane, low, scale_zero in zip(self.planes, others, scale_zeros, strict=False):
            codes = codes.mul_(plane.factor).add_(low)
            zero += scale_zero[..., 1] - 8 * scale_zero[..., 0]
        flat = codes.to(torch.bfloat16).view(-1, self.group, scale.shape[1])
        scale, zero = scale.to(torch.bfloat16), zero.to(torch.bfloat16)
        return torch.addcmul(zero.unsqueeze(1), flat, scale.unsqueeze(1)).flatten(0, 1)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` int64 [M]: float32 [M, K]."""
        half = self.block // 2
        block, lane = ids // self.block, ids % self.block
        low = (lane < half).unsqueeze(1)
        total = torch.zeros((len(ids), self.shape[1]), dtype=torch.float32)
        for plane, scale_zero in zip(self.planes, self._scale_zeros(ids), strict=True):
            picked = plane.nibbles(plane.codes[block, :, lane % half])
            codes = torch.where(low, picked & 15, picked >> 4).float()
            codes = codes.view(len(ids), self.shape[1] // self.group, self.group)
            scale, zero = scale_zero.float().permute(2, 1, 0).unsqueeze(-1)
            total += ((codes - 8) * scale + zero).flatten(1)
        return total

    def _add_int4(self, x: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
        blocks = self._blocks(rows)
        for plane, scale_zero in zip(self.planes, self._scale_zeros(rows), strict=True):
            nibbles = plane.nibbles(plane.codes[blocks])
            for inputs, scales in self._halves(x, scale_zero):
                out += _int4(inputs, nibbles, max(self.group, GROUP), scales)

    def _blocks(self, rows: slice) -> slice:
        return slice(rows.start // self.block, rows.stop // self.block)

    def _scale_zeros(self, rows: slice | torch.Tensor) -> tuple[torch.Tensor, ...]:
        if isinstance(self.scales, Factors):
            return self.scales.scale_zeros(self.planes, rows)
        return tuple(scale_zero[:, rows] for scale_zero in self.scales)

    def _codes(self, nibbles: torch.Tensor) -> torch.Tensor:
        """One code per byte, transposed: [K, blocks, 2, half]."""
        blocks, columns, half = nibbles.shape
        codes = torch.empty((columns, blocks, 2, half), dtype=torch.uint8)
        part = nibbles.permute(1, 0, 2)
        torch.bitwise_and(part, 15, out=codes[:, :, 0])
        torch.bitwise_right_shift(part, 4, out=codes[:, :, 1])
        return codes

    def _halves(
        self, x: torch.Tensor, scale_zero: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.group >= GROUP:
            yield x, scale_zero
            return
        count = GROUP // self.group
        grouped = x.view(len(x), x.shape[1] // GROUP, count, self.group)
        for index in range(count):
            masked = torch.zeros_like(grouped)
            masked[:, :, index] = grouped[:, :, index]
            yield masked.view_as(x), scale_zero[index::count].contiguous()


def _int4(x: torch.Tensor, nibbles: torch.Tensor, group: int, scale_zero: torch.Tensor) -> torch.Tensor:
    flat = nibbles.view(-1, x.shape[1] // 2)
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, flat, group, scale_zero)
    return product


def _product(fine: torch.Tensor, coarse: torch.Tensor | None, rows: slice | torch.Tensor) -> torch.Tensor:
    """float32 [K / group, rows]."""
    picked = fine[:, rows].float()
    if coarse is None:
        return picked
    supers = coarse[:, rows].float()
    return (picked.view(len(supers), -1, picked.shape[1]) * supers.unsqueeze(1)).flatten(0, 1)


def pack_planes(source: WeightSource, first: QuantizedTensor, half: int) -> NibbleWeight:
    """first: a row of the matrix, decoded. half: see `half_block`."""
    rows, columns = source.shape
    block = 2 * half
    padded = -(-rows // block) * block
    low_bits = first.bits - 4
    planes = tuple(
        NibblePlane(
            torch.empty((padded // block, columns * bits // 4, half), dtype=torch.uint8), bits, factor
        )
        for bits, factor in ((4, 1 << low_bits), (low_bits, 1))
        if bits
    )

    def room(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros((like.shape[1], padded), dtype=like.dtype)

    others = (first.mins, first.super_scales, first.super_mins)
    mins, super_scales, super_mins = (None if part is None else room(part) for part in others)
    factors = Factors(room(first.scales), mins, super_scales, super_mins, first.zero)
    for start, stop in source.chunks(block):
        part = source.decode(start, stop)
        if not isinstance(part, QuantizedTensor):
            raise TypeError(f"{source.name}: {source.format.name} gave floats")
        parts = (part.scales, part.mins, part.super_scales, part.super_mins)
        for target, values in zip(factors.tensors, [t for t in parts if t is not None], strict=True):
            target[:, start:stop] = values.T
        codes = part.unpacked_codes()
        if stop % block:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, block - stop % block))
        blocks = slice(start // block, -(-stop // block))
        planes[0].codes[blocks] = _blocked(codes >> low_bits, half)
        if low_bits:
            low = _blocked(codes & ((1 << low_bits) - 1), half)
            planes[1].codes[blocks] = _narrowed(low, low_bits)
    spread = factors.super_scales is None and first.group >= GROUP
    scales = factors.scale_zeros(planes, slice(None)) if spread else factors
    return NibbleWeight(source.shape, first.group, block, planes, scales)


def _blocked(codes: torch.Tensor, half: int) -> torch.Tensor:
    """[rows, K] of 4 bits in torch's layout, [rows / (2 half), K, half]."""
    blocks = codes.view(-1, 2, half, codes.shape[1])
    return (blocks[:, 0] | blocks[:, 1] << 4).transpose(1, 2)


def _narrowed(nibbles: torch.Tensor, bits: int) -> torch.Tensor:
    """[blocks, K, half] with `bits` of each nibble in use, at that size: the inverse of `NibblePlane.nibbles`."""
    count = 4 // bits
    out, *others = nibbles.chunk(count, dim=1)
    for index, part in enumerate(others, 1):
        out = out | part << index * bits
    return out


def half_block() -> int:
    """Rows in half a block of torch's int4 layout on this processor (32 with AVX-512, 16 with AVX2), found by packing a
    pattern; 0 when the layout is another one."""
    columns = 32
    codes = torch.randint(
        0, 16, (128, columns), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2).reshape(-1)
    except (RuntimeError, AttributeError):
        return 0
    for half in (32, 16):
        if torch.equal(packed, _blocked(codes.to(torch.uint8), half).reshape(-1)):
            return half
    return 0
