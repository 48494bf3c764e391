"""Matrices in strips of 16 rows, the native kernels' form, and what each stored type becomes there. Imports no torch.

The layout is drawn in `cpu/infer_cpu.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.arena import Arena
from infer.quant.kernels.weight import PackedWeight

_SCALE_BYTES = {abi.SCALE_F16: 2, abi.SCALE_F32: 4, abi.SCALE_SUPER: 1}


@dataclass(frozen=True)
class Planes:
    """How a type's codes and scales are stored; the names are those of infer_weight. grid: whether infer_pack wants the
    vectors that the codes are made of."""

    elem: int = abi.ELEM_CODES
    bits: int = 0
    group: int = 0
    zero: int = 0
    scale: int = abi.SCALE_F16
    signed_scales: bool = False
    mins: bool = False
    table: tuple[float, ...] = ()
    grid: bool = field(default=False, compare=False)

    def row_bytes(self, columns: int) -> dict[str, int]:
        """Bytes that a row takes of each plane. Raises ValueError when it does not fill whole blocks and groups."""
        if self.elem not in (abi.ELEM_CODES, abi.ELEM_TABLE):
            return {"codes": columns * (4 if self.elem == abi.ELEM_F32 else 2)}
        unit = abi.SUPER if self.scale == abi.SCALE_SUPER else max(abi.BLOCK, self.group)
        if columns % unit:
            raise ValueError(f"{columns} columns are not a multiple of {unit}")
        sizes = {"codes": columns if self.bits == 8 else columns // 2}
        if self.bits in (5, 6):
            sizes["high"] = columns // 8 if self.bits == 5 else columns // 4
        sizes["scales"] = columns // self.group * _SCALE_BYTES[self.scale]
        if self.mins:
            sizes["mins"] = sizes["scales"]
        if self.scale == abi.SCALE_SUPER:
            sizes["super_scales"] = columns // abi.SUPER * 2
            if self.mins:
                sizes["super_mins"] = sizes["super_scales"]
        return sizes


def _legacy(bits: int, mins: bool) -> Planes:
    return Planes(bits=bits, group=32, zero=0 if mins else 1 << (bits - 1), mins=mins)


_TERNARY = Planes(bits=4, group=128, zero=8)
#: types whose stored bytes the library unpacks itself
STORED: Mapping[str, Planes] = {
    "Q4_0": _legacy(4, False), "Q4_1": _legacy(4, True), "Q5_0": _legacy(5, False), "Q5_1": _legacy(5, True),
    "Q8_0": _legacy(8, False),
    "Q4_K": Planes(bits=4, group=32, scale=abi.SCALE_SUPER, mins=True),
    "Q5_K": Planes(bits=5, group=32, scale=abi.SCALE_SUPER, mins=True),
    "Q6_K": Planes(bits=6, group=16, zero=32, scale=abi.SCALE_SUPER, signed_scales=True),
    "Q2_K": Planes(bits=4, group=16, scale=abi.SCALE_SUPER, mins=True),
    "Q3_K": Planes(bits=4, group=16, zero=4, scale=abi.SCALE_SUPER, signed_scales=True),
    "IQ4_NL": Planes(bits=8, group=32, zero=128),
    "IQ4_XS": Planes(bits=8, group=32, zero=128, scale=abi.SCALE_SUPER, signed_scales=True),
    "MXFP4": Planes(bits=5, group=32, zero=16, scale=abi.SCALE_F32),
    "NVFP4": Planes(bits=5, group=16, zero=16),
    "TQ1_0": _TERNARY, "TQ2_0": _TERNARY, "Q1_0": _TERNARY,
    "IQ1_S": Planes(bits=5, group=32, zero=16, scale=abi.SCALE_F32, grid=True),
    "IQ1_M": Planes(bits=5, group=16, zero=16, scale=abi.SCALE_F32, grid=True),
    "IQ2_XXS": Planes(bits=8, group=32, zero=128, scale=abi.SCALE_F32, grid=True),
    "IQ2_XS": Planes(bits=8, group=16, zero=128, scale=abi.SCALE_F32, grid=True),
    "IQ2_S": Planes(bits=8, group=16, zero=128, scale=abi.SCALE_F32, grid=True),
    "IQ3_XXS": Planes(bits=6, group=32, zero=32, scale=abi.SCALE_F32, grid=True),
    "IQ3_S": Planes(bits=5, group=32, zero=16, scale=abi.SCALE_SUPER, grid=True),
    "F32": Planes(abi.ELEM_F32), "F16": Planes(abi.ELEM_F16), "BF16": Planes(abi.ELEM_BF16),
}  # fmt: skip


def grid_address(kind: str) -> int | None:
    """Of the vectors that infer_pack wants for a stored type; None for types without."""
    if not STORED[kind].grid:
        return None
    from infer.quant.iquant_grids import code_grid

    return code_grid(kind).ctypes.data


@dataclass(frozen=True)
class NativeWeight(PackedWeight):
    """A matrix in strips. struct points into `planes`, which own the memory; the last strip is padded."""

    shape: tuple[int, int]
    kind: Planes
    struct: abi.Weight
    planes: Mapping[str, memoryview] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())

    @classmethod
    def empty(cls, shape: tuple[int, int], kind: Planes, arena: Arena | None = None) -> NativeWeight:
        """Uninitialized. Raises ValueError when the columns do not fill whole blocks and groups, OSError without
        memory."""
        arena = arena or Arena()
        rows = -(-shape[0] // abi.STRIP) * abi.STRIP
        planes = {name: arena.take(rows * size) for name, size in kind.row_bytes(shape[1]).items()}
        if kind.table:
            planes["table"] = memoryview(bytearray((ctypes.c_float * len(kind.table))(*kind.table)))
        return cls.over(shape, kind, planes)

    @classmethod
    def over(cls, shape: tuple[int, int], kind: Planes, planes: Mapping[str, memoryview]) -> NativeWeight:
        struct = abi.Weight(
            n=shape[0], k=shape[1], elem=kind.elem, bits=kind.bits, group=kind.group, zero=kind.zero, scale=kind.scale,
            signed_scales=int(kind.signed_scales), **{name: address(plane) for name, plane in planes.items()},
        )  # fmt: skip
        return cls(shape, kind, struct, planes)

    def part(self, first: int, rows: int) -> NativeWeight | None:
        """A view of the rows [first, first + rows); None where they do not begin and end with strips."""
        stop = first + rows
        if first % abi.STRIP or (stop % abi.STRIP and stop != self.shape[0]):
            return None
        planes = {
            name: self.planes[name][first * size : -(-stop // abi.STRIP) * abi.STRIP * size]
            for name, size in self.kind.row_bytes(self.shape[1]).items()
        }
        return NativeWeight.over((rows, self.shape[1]), self.kind, planes)


def address(memory: memoryview) -> int:
    """Where writable memory lies; the view must outlive the use of it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
