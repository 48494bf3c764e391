"""ggml's K-quants: super blocks of 256 weights whose group scales are small integers times a float16.

A super block is these parts without gaps (format: the block structs of ggml-common.h):

    Q2_K   s:16  q:64  d:2  dmin:2            84 bytes  16 groups of 16    w = d · scale · q - dmin · min
    Q3_K   h:32  q:64  s:12  d:2             110        16 groups of 16    w = d · scale · (q - 4)
    Q4_K   d:2  dmin:2  s:12         q:128   144         8 groups of 32    w = d · scale · q - dmin · min
    Q5_K   d:2  dmin:2  s:12  h:32   q:128   176         8 groups of 32    w = d · scale · q - dmin · min
    Q6_K   q:128  h:64  s:16  d:2            210        16 groups of 16    w = d · scale · (q - 32)

Q2_K: s has a group's scale in the low nibble and its minimum in the high one. q comes in halves of 32 bytes: bits
2k and 2k + 1 of byte i are column 32k + i of the half's 128.

Q3_K: q as above are the low two bits, and bit g of h[i] is bit 2 of column 32g + i. The 6-bit scales are stored plus
32: scale[j]'s low four bits in a nibble of s[j % 8], the low one for j < 8, its upper two in bits 2(j / 4) and above of
s[8 + j % 4].

Q4_K and Q5_K: q is four runs of 32 bytes; the low nibbles of run r are columns 64r … 64r + 31, its high
nibbles the next 32. Bit g of h[i] is bit 4 of column 32g + i. s packs eight 6-bit scales and minimums, bits
from high to low:

    byte 0 … 3     scale[j + 4] bits 5 4 │ scale[j] bits 5 … 0        j = byte
    byte 4 … 7     min[j + 4]   bits 5 4 │ min[j]   bits 5 … 0        j = byte - 4
    byte 8 … 11    min[j + 4]   bits 3 … 0 │ scale[j + 4] bits 3 … 0  j = byte - 8

Q6_K: s is int8. Columns come in halves of 128, each with 64 bytes of q and 32 of h. In quarter t of a half,
column 32t + i has its low four bits in q[32 · (t % 2) + i], the low nibble for t < 2 and else the high one,
and its upper two in h[i], bits 2t and 2t + 1.
"""

from __future__ import annotations

import abc

import torch

from infer.quant.base import (
    SUPER,
    QuantFormat,
    QuantizedTensor,
    chunks,
    decode_codes,
    field,
    interleave_nibbles,
    pack_nibbles,
    two_bit_codes,
)

# One byte repeated eight or four times: int64 and int32 arithmetic then handles that many codes in one lane.
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_LOW_PAIRS = 0x0303030303030303
_LOW_BITS = 0x0101010101010101


class KFormat(QuantFormat, abc.ABC):
    block = SUPER


class Q2KFormat(KFormat):
    name = "Q2_K"
    bits = 4
    type_size = 84

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        rows = shape[0]
        codes = decode_codes(blocks, 128, lambda some: pack_nibbles(two_bit_codes(some[:, 16:80])))
        return QuantizedTensor(
            shape, self.bits, 16, 0, codes.reshape(rows, -1),
            scales=(blocks[:, :16] & 15).reshape(rows, -1),
            mins=(blocks[:, :16] >> 4).reshape(rows, -1),
            super_scales=field(blocks, 80, 2, torch.float16).reshape(rows, -1),
            super_mins=field(blocks, 82, 2, torch.float16).reshape(rows, -1),
        )  # fmt: skip


class Q3KFormat(KFormat):
    name = "Q3_K"
    bits = 4
    type_size = 110

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        rows = shape[0]
        codes = decode_codes(blocks, 128, self._codes)
        return QuantizedTensor(
            shape, self.bits, 16, 4, codes.reshape(rows, -1),
            scales=self._scales(blocks[:, 96:108]).reshape(rows, -1),
            super_scales=field(blocks, 108, 2, torch.float16).reshape(rows, -1),
        )  # fmt: skip

    def _codes(self, blocks: torch.Tensor) -> torch.Tensor:
        high = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8).unsqueeze(1)) & 1
        return pack_nibbles(two_bit_codes(blocks[:, 32:96]) | high.flatten(1) << 2)

    def _scales(self, packed: torch.Tensor) -> torch.Tensor:
        low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), dim=1)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
        high = ((packed[:, None, 8:] >> shifts) & 3).flatten(1)
        return (low | high << 4).to(torch.int8) - 32


class MinKFormat(KFormat):
    """Q4_K and Q5_K."""

    def __init__(self, name: str, bits: int) -> None:
        self.name = name
        self.bits = bits
        self._codes_at = 48 if bits == 5 else 16
        self.type_size = self._codes_at + 128

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        count, rows = blocks.shape[0], shape[0]
        codes = torch.empty((count, 128 if self.bits == 4 else 256), dtype=torch.uint8)
        scales, mins = torch.empty((2, count, 8), dtype=torch.uint8).unbind()
        for run, some in chunks(blocks):
            scales[run], mins[run] = _unpack_scales(field(some, 4, 12, torch.int32))
            codes[run] = self._codes(some)
        return QuantizedTensor(
            shape, self.bits, 32, 0, codes.reshape(rows, -1),
            scales=scales.reshape(rows, -1),
            mins=mins.reshape(rows, -1),
            super_scales=field(blocks, 0, 2, torch.float16).reshape(rows, -1),
            super_mins=field(blocks, 2, 2, torch.float16).reshape(rows, -1),
        )  # fmt: skip

    def _codes(self, blocks: torch.Tensor) -> torch.Tensor:
        if self.bits == 4:
            runs = field(blocks, self._codes_at, 128, torch.int16).reshape(-1, 4, 16)
            return interleave_nibbles(runs).reshape(-1, 128)
        split = field(blocks, self._codes_at, 128, torch.int64).reshape(-1, 4, 4)
        high = field(blocks, 16, 32, torch.int64)
        out = torch.empty((blocks.shape[0], 8, 4), dtype=torch.int64)
        for group in range(8):
            low = (split[:, group // 2] >> 4 * (group % 2)) & _LOW_NIBBLES
            out[:, group] = low | ((high >> group) & _LOW_BITS) << 4
        return out.view(torch.uint8).flatten(1)


class Q6KFormat(KFormat):
    name = "Q6_K"
    bits = 6
    type_size = 210

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        rows = shape[0]
        codes = decode_codes(blocks, 256, self._codes)
        return QuantizedTensor(
            shape, self.bits, 16, 32, codes.reshape(rows, -1),
            scales=field(blocks, 192, 16, torch.int8).reshape(rows, -1),
            super_scales=field(blocks, 208, 2, torch.float16).reshape(rows, -1),
        )  # fmt: skip

    def _codes(self, blocks: torch.Tensor) -> torch.Tensor:
        split = field(blocks, 0, 128, torch.int64).reshape(-1, 2, 2, 4)
        high = field(blocks, 128, 64, torch.int64).reshape(-1, 2, 4)
        out = torch.empty((blocks.shape[0], 2, 4, 4), dtype=torch.int64)
        for quarter in range(4):
            low = (split[:, :, quarter % 2] >> 4 * (quarter // 2)) & _LOW_NIBBLES
            out[:, :, quarter] = low | ((high >> 2 * quarter) & _LOW_PAIRS) << 4
        return out.view(torch.uint8).flatten(1)


def _unpack_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [blocks, 3] → scales and minimums, uint8 [blocks, 8] each; a lane is four bytes."""
    scale_low, min_low, high = packed.unbind(1)
    scale_top, min_top = (scale_low >> 2) & 0x30303030, (min_low >> 2) & 0x30303030
    scales = torch.stack((scale_low & 0x3F3F3F3F, (high & 0x0F0F0F0F) | scale_top), dim=1)
    mins = torch.stack((min_low & 0x3F3F3F3F, ((high >> 4) & 0x0F0F0F0F) | min_top), dim=1)
    return scales.view(torch.uint8), mins.view(torch.uint8)


FORMATS: dict[str, QuantFormat] = {
    "Q2_K": Q2KFormat(),
    "Q3_K": Q3KFormat(),
    "Q4_K": MinKFormat("Q4_K", bits=4),
    "Q5_K": MinKFormat("Q5_K", bits=5),
    "Q6_K": Q6KFormat(),
}
