"""ggml's IQ1, IQ2 and IQ3 types: super blocks of 256 weights in vectors of 8 or 4 that are picked from a grid.

A super block is these parts without gaps (format: the block structs of ggml-common.h, grids: `iquant_grids`):

    IQ2_XXS  d:2  8 × (i:4  x:4)              66 bytes   8 groups of 32   w = ±d · (2s + 1) / 8 · g
    IQ2_XS   d:2  x:64  s:8                   74        16 groups of 16   w = ±d · (2s + 1) / 8 · g
    IQ2_S    d:2  i:32  sign:32  h:8  s:8     82        16 groups of 16   w = ±d · (2s + 1) / 8 · g
    IQ3_XXS  d:2  i:64  x:32                  98         8 groups of 32   w = ±d · (2s + 1) / 4 · g
    IQ3_S    d:2  i:64  h:8  sign:32  s:4    110         8 groups of 32   w = ±d · (2s + 1) · g
    IQ1_S    d:2  i:32  x:16                  50         8 groups of 32   w = d · (2s + 1) · (g ± 1/8)
    IQ1_M    i:32  h:16  x:8                  56        16 groups of 16   w = d · (2s + 1) · (g ± 1/8)

    i     low eight bits of a vector's index in the grid; h holds the bits above, lowest bits first
    sign  a byte for eight columns: bit j set, column j negative. Seven bits of it may be stored: then bit 7 makes
          the number of negatives even
    s     a nibble for each group, low nibble first
    x     IQ2_XXS, IQ3_XXS: words of a group: four times 7 sign bits, then s in the upper 4
          IQ2_XS: a half for each vector: 9 bits of index, 7 sign bits
          IQ1_S: a half for each group: four times 3 bits of index, 3 bits of s, 1 bit that makes the eighth negative
          IQ1_M: four halves with 3 bits of s for each of four groups and, in the upper 4 bits, a quarter of d
    h     IQ1_M: a nibble for each vector: 3 bits of index, 1 bit that makes the eighth negative

Every factor is exact in float32, so any order of multiplying them gives the same bits. The internal codes are the
signed grid values, scaled so that they are integers: 8-bit codes for IQ2, 6 for IQ3_XXS (g is even), 5 for the others.
"""

from __future__ import annotations

import abc
import functools

import torch

from infer.quant.base import SUPER, QuantFormat, QuantizedTensor, chunks, field, unpack_nibbles
from infer.quant.iquant_grids import code_grid

# Eight codes are handled as one int64. No byte ever borrows from its neighbour: each result is in 0 … 255.
_ONES = 0x0101010101010101


class GridFormat(QuantFormat, abc.ABC):
    """unit: float32 scale = d · (2s + 1) · unit; where it is 1 both factors are kept as they are."""

    block = SUPER
    group = 32
    unit = 1.0

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        rows = shape[0]
        codes = torch.empty((blocks.shape[0], SUPER), dtype=torch.uint8)
        factors = torch.empty((blocks.shape[0], SUPER // self.group), dtype=torch.uint8)
        for run, some in chunks(blocks):
            lanes, steps = self.unpack(some)
            codes[run] = lanes.view(torch.uint8).reshape(-1, SUPER)
            factors[run] = 2 * steps + 1
        halves = self.halves(blocks)
        if self.unit == 1:
            scales, supers = factors, halves.reshape(rows, -1)
        else:
            scales, supers = halves.float() * factors * self.unit, None
        return QuantizedTensor(
            shape, self.bits, self.group, 1 << (self.bits - 1), codes.reshape(rows, -1),
            scales=scales.reshape(rows, -1),
            super_scales=supers,
        )  # fmt: skip

    def halves(self, blocks: torch.Tensor) -> torch.Tensor:
        """float16 [blocks, 1]: d."""
        return field(blocks, 0, 2, torch.float16)

    @abc.abstractmethod
    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes, int64 [blocks, 32] of eight bytes each, and s, integers [blocks, groups]."""

    def pick(self, index: torch.Tensor) -> torch.Tensor:
        """The vectors of the grid at `index` [blocks, …], int64 [blocks, 32] of eight bytes each."""
        flat = _grid(self.name).index_select(0, index.flatten().int())
        return flat.view(torch.int64).reshape(index.shape[0], -1)

    def signed(self, index: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """zero ± the vectors of the grid. index: any integers; negative: int64 [blocks, 32] of bytes 0 or 255."""
        values = self.pick(index)
        zero = int.from_bytes(bytes([1 << (self.bits - 1)] * 8), "little", signed=True)
        return values - ((values & negative) << 1) + zero


class IQ2XXS(GridFormat):
    name, type_size, bits, unit = "IQ2_XXS", 66, 8, 0.125

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = field(blocks, 2, 64, torch.uint8).reshape(-1, 8, 8)[:, :, :4]
        negative, steps = _signs_and_step(field(blocks, 2, 64, torch.int32)[:, 1::2])
        return self.signed(index, negative), steps


class IQ2XS(GridFormat):
    name, type_size, bits, unit, group = "IQ2_XS", 74, 8, 0.125, 16

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = field(blocks, 2, 64, torch.int16).int()
        negative = _even_signs()[(words >> 9) & 127]
        return self.signed(words & 511, negative), unpack_nibbles(blocks[:, 66:])


class IQ2S(GridFormat):
    name, type_size, bits, unit, group = "IQ2_S", 82, 8, 0.125, 16

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = _join(blocks[:, 2:34], blocks[:, 66:74], bits=2)
        negative = _signs()[blocks[:, 34:66].int()]
        return self.signed(index, negative), unpack_nibbles(blocks[:, 74:])


class IQ3XXS(GridFormat):
    name, type_size, bits, unit = "IQ3_XXS", 98, 6, 0.5

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        negative, steps = _signs_and_step(field(blocks, 66, 32, torch.int32))
        return self.signed(blocks[:, 2:66], negative), steps


class IQ3S(GridFormat):
    name, type_size, bits = "IQ3_S", 110, 5

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = _join(blocks[:, 2:66], blocks[:, 66:74], bits=1)
        negative = _signs()[blocks[:, 74:106].int()]
        return self.signed(index, negative), unpack_nibbles(blocks[:, 106:])


class IQ1S(GridFormat):
    name, type_size, bits, unit = "IQ1_S", 50, 5, 0.125

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = field(blocks, 34, 16, torch.int16).int()
        high = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7
        index = blocks[:, 2:34].int() | high.flatten(1) << 8
        return self.pick(index) + _eighth(words < 0).repeat_interleave(4, 1), (words >> 12) & 7


class IQ1M(GridFormat):
    name, type_size, bits, unit, group = "IQ1_M", 56, 5, 0.125, 16

    def halves(self, blocks: torch.Tensor) -> torch.Tensor:
        quarters = (field(blocks, 48, 8, torch.int16).int() >> 12) & 15
        bits = (quarters << torch.tensor([0, 4, 8, 12])).sum(dim=1, keepdim=True)
        return bits.to(torch.int16).view(torch.float16)

    def unpack(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nibbles = unpack_nibbles(blocks[:, 32:48]).int()
        index = blocks[:, :32].int() | (nibbles & 7) << 8
        words = field(blocks, 48, 8, torch.int16).int()
        steps = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7
        return self.pick(index) + _eighth(nibbles > 7), steps.flatten(1)


def _signs_and_step(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [blocks, 8] → masks of the negatives, int64 [blocks, 32], and s [blocks, 8]."""
    sevens = (words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21])) & 127
    return _even_signs()[sevens.flatten(1)], (words >> 28) & 15


def _join(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 indices [blocks, n]: eight low bits, and above them `bits` bits out of `high`, lowest first."""
    above = (high.unsqueeze(-1).int() >> torch.arange(0, 8, bits)) & ((1 << bits) - 1)
    return low.int() | above.flatten(1) << 8


def _eighth(negative: torch.Tensor) -> torch.Tensor:
    """The IQ1 types' ± 1/8, in eighths: int64, eight bytes of 1 to add, or to take away where `negative`."""
    return torch.where(negative, -_ONES, _ONES)


@functools.cache
def _signs() -> torch.Tensor:
    """int64 [256]: for each byte, eight bytes that hold 255 where its bits 0 to 7 are set."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return (bits * 255).to(torch.uint8).view(torch.int64).flatten()


@functools.cache
def _even_signs() -> torch.Tensor:
    """int64 [128]: the same for seven bits and the one that makes the number of negatives even."""
    seven = torch.arange(128)
    parity = ((seven.unsqueeze(1) >> torch.arange(7)) & 1).sum(dim=1) & 1
    return _signs()[seven | parity << 7]


@functools.cache
def _grid(name: str) -> torch.Tensor:
    """A vector as one number: int64, or int32 where it is of four."""
    vectors = torch.from_numpy(code_grid(name))
    return vectors.view(torch.int64 if vectors.shape[1] == 8 else torch.int32).flatten()


FORMATS: dict[str, QuantFormat] = {
    kind.name: kind() for kind in (IQ1S, IQ1M, IQ2XXS, IQ2XS, IQ2S, IQ3XXS, IQ3S)
}  # fmt: skip
