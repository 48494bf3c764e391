"""Formats whose 4-bit codes pick from 16 values that are not evenly spaced: IQ4_NL, IQ4_XS, MXFP4, NVFP4.

A block is these parts without gaps (format: the block structs of ggml-common.h):

    IQ4_NL  d:2             q:16    18 bytes    32 weights              w = d · v
    IQ4_XS  d:2  h:2  l:4   q:128  136         256, 8 groups of 32      w = d · (s - 32) · v
    MXFP4   e:1             q:16    17          32                      w = 2^(e - 128) · v
    NVFP4   e:4             q:32    36          64, 4 groups of 16      w = e / 2 · v

    q  runs of 32 columns (NVFP4: 16); byte i of a run holds column i in its low nibble and column i + 16 (NVFP4:
       i + 8) in its high one
    v  IQ4: an integer of -127 … 113. FP4: twice the value of an E2M1 number, so an integer too
    s  the low four bits of a group's scale in a nibble of l, low nibble first, the upper two in h, lowest bits first
    e  MXFP4: an E8M0 exponent with bias 127, hence the 2 that v has too much. NVFP4: an unsigned E4M3 number; 0x7F is 0
       (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)

The internal codes are these integers: 8 bits for IQ4, 5 for FP4.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping

import torch

from infer.quant.base import (
    SUPER,
    PlanarFormat,
    Plane,
    QuantFormat,
    QuantizedTensor,
    decode_codes,
    field,
    unpack_nibbles,
)

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class TableFormat(QuantFormat, abc.ABC):
    """run: columns of a run of q, which ends the block."""

    values: tuple[int, ...]
    group = 32
    run = 32

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        rows = shape[0]
        zero = 1 << (self.bits - 1)
        # a byte of q → its two codes, as one int16
        table = torch.tensor(self.values) + zero
        pairs = (table.repeat(16) | table.repeat_interleave(16) << 8).to(torch.int16)

        def look_up(some: torch.Tensor) -> torch.Tensor:
            packed = some[:, -(self.block // 2) :]
            both = pairs.index_select(0, packed.flatten().int()).view(torch.uint8)
            return both.reshape(-1, self.run // 2, 2).transpose(1, 2).reshape(-1, self.block)

        codes = decode_codes(blocks, self.block, look_up)
        scales, supers = self.scales(blocks)
        return QuantizedTensor(
            shape, self.bits, self.group, zero, codes.reshape(rows, -1),
            scales=scales.reshape(rows, -1),
            super_scales=None if supers is None else supers.reshape(rows, -1),
        )  # fmt: skip

    @abc.abstractmethod
    def scales(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales [blocks, block / group] and super scales [blocks, 1]."""


class IQ4NL(TableFormat):
    name, block, type_size, bits, values = "IQ4_NL", 32, 18, 8, _IQ4

    def scales(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return field(blocks, 0, 2, torch.float16), None


class IQ4XS(TableFormat):
    name, block, type_size, bits, values = "IQ4_XS", SUPER, 136, 8, _IQ4

    def scales(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        low = unpack_nibbles(blocks[:, 4:8])
        high = (field(blocks, 2, 2, torch.int16).int() >> torch.arange(0, 16, 2)) & 3
        return (low + (high << 4) - 32).to(torch.int8), field(blocks, 0, 2, torch.float16)


class MXFP4(TableFormat, PlanarFormat):
    """A file may also hold e and q as tensors of their own, `scales` and `blocks`. Byte i of q then has column 2i in
    its low nibble and 2i + 1 in its high one, and row r is their row r · step + first."""

    name, block, type_size, bits, values = "MXFP4", 32, 17, 5, _FP4

    def scales(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        exponent = blocks[:, :1].int()
        bits = torch.where(exponent < 2, 1 << (exponent.clamp(max=1) + 21), (exponent - 1) << 23)
        return bits.view(torch.float32), None

    def open(
        self, planes: Mapping[str, Plane], settings: Mapping[str, float], shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        step, first = int(settings["step"]), int(settings["first"])
        blocks = shape[1] // self.block

        def plane(name: str, start: int, stop: int, size: int) -> torch.Tensor:
            """uint8 [(stop - start) · blocks, size]."""
            width = blocks * size
            rows = planes[name](start * step * width, (stop - start) * step * width).view(-1, step, width)
            return rows[:, first].reshape(-1, size)

        def read(start: int, stop: int) -> torch.Tensor:
            q = plane("blocks", start, stop, 16)
            codes = unpack_nibbles(q)
            return torch.cat(
                (plane("scales", start, stop, 1), codes[:, :16] | codes[:, 16:] << 4), dim=1
            ).flatten()

        return read


class NVFP4(TableFormat):
    name, block, type_size, bits, values, group, run = "NVFP4", 64, 36, 5, _FP4, 16, 16

    def scales(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        stored = blocks[:, :4].int()
        exponent, mantissa = (stored >> 3) & 15, stored & 7
        normal = (mantissa + 8) << (exponent - 1).clamp(min=0)
        units = torch.where(exponent == 0, mantissa, normal)  # of 2**-9
        return (torch.where(stored == 0x7F, 0, units) * 2.0**-10).to(torch.float16), None


FORMATS: dict[str, QuantFormat] = {kind.name: kind() for kind in (IQ4NL, IQ4XS, MXFP4, NVFP4)}
