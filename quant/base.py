"""The internal form of a quantized weight, and the registry of formats that become it.

A weight matrix has N rows (outputs) and K columns (inputs). It is stored as unsigned integer codes and, per
group of `group` consecutive columns, a scale and maybe a minimum:

    w[n, k] = scale[n, k // group] * (code[n, k] - zero) + minimum[n, k // group]

`zero` is one integer per format (8 for Q4_0, 128 for Q8_0); formats with a minimum have zero = 0.
K-quants store scale = super_scale * integer: both factors are kept, since their product does not fit half
precision without loss:

    scale[n, g]   = super_scale[n, k // 256] * scales[n, g]        scales int8 (Q3_K, Q6_K) or uint8
    minimum[n, g] = -super_min[n, k // 256] * mins[n, g]           mins uint8

Other formats have float16 (or float32) `scales` and `mins` and no super tensors. Formats with a table of 16 floats have
float32 scales alone, and w[n, k] = table[code[n, k]] * scale[n, k // group].
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

#: type name in a file → module of this package that registers it
_FORMATS = {
    "F32": "plain", "F16": "plain", "BF16": "plain",
    "Q4_0": "legacy", "Q4_1": "legacy", "Q5_0": "legacy", "Q5_1": "legacy", "Q8_0": "legacy",
    "Q2_K": "kquant", "Q3_K": "kquant", "Q4_K": "kquant", "Q5_K": "kquant", "Q6_K": "kquant",
    "IQ1_S": "iquant", "IQ1_M": "iquant", "IQ2_XXS": "iquant", "IQ2_XS": "iquant", "IQ2_S": "iquant",
    "IQ3_XXS": "iquant", "IQ3_S": "iquant",
    "IQ4_NL": "table4", "IQ4_XS": "table4", "MXFP4": "table4", "NVFP4": "table4",
    "TQ1_0": "ternary", "TQ2_0": "ternary", "Q1_0": "ternary",
    "NF4": "bnb", "FP4": "bnb", "INT8": "bnb", "F8_E4M3": "fp8",
}  # fmt: skip

SUPER = 256  # columns that share a super scale in K-quants

_CHUNK_BYTES = 1 << 19  # raw bytes decoded at once: the temporaries, a few times as large, stay in the cache


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized [N, K] weight in the internal form (see the module).

    codes: uint8, row-major planes. bits 4: [N, K // 2], byte j of a row holds column 2j in its low nibble and
    column 2j + 1 in its high nibble. bits 5, 6 and 8: [N, K], one code per byte.
    scales: [N, K // group]; float16/float32, or uint8/int8 with super_scales [N, K // 256] float16.
    mins, super_mins: the same shapes, or None when the format has no minimum. table: float32 [16], or None.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    zero: int
    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    super_mins: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def unpacked_codes(self) -> torch.Tensor:
        """uint8 [N, K], one code per byte."""
        if self.bits != 4:
            return self.codes
        return unpack_nibbles(self.codes)

    def group_scales(self) -> torch.Tensor:
        """float32 [N, K // group]."""
        return _spread(self.scales, self.super_scales)

    def group_mins(self) -> torch.Tensor | None:
        """float32 [N, K // group], or None."""
        if self.mins is None:
            return None
        mins = _spread(self.mins, self.super_mins)
        return mins if self.super_mins is None else -mins

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K], with the operations in the order in which `gguf` and ggml do them (bit-equal)."""
        codes = self.unpacked_codes()
        weight = codes.to(torch.float32) if self.table is None else self.table[codes.int()]
        weight = weight.reshape(self.shape[0], -1, self.group)
        if self.zero:
            weight -= self.zero
        weight *= self.group_scales().unsqueeze(-1)
        mins = self.group_mins()
        if mins is not None:
            weight += mins.unsqueeze(-1)
        return weight.reshape(self.shape)

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows [start, stop) as views of the same storage."""
        return self._map(lambda t: t[start:stop])

    def gather(self, ids: torch.Tensor) -> QuantizedTensor:
        """Rows `ids` (int64 [M]), copied."""
        return self._map(lambda t: t[ids])

    def empty_like(self, rows: int, device: torch.device) -> QuantizedTensor:
        """Uninitialized storage of the same format for another number of rows."""
        made = self._map(lambda t: torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device=device))
        return made if self.table is None else replace(made, table=self.table.to(device))

    def copy_(self, source: QuantizedTensor) -> None:
        """Overwrite with a tensor of the same format and shape."""
        for mine, theirs in zip(self._tensors(), source._tensors(), strict=True):
            mine.copy_(theirs)

    def _tensors(self) -> list[torch.Tensor]:
        parts = (self.codes, self.scales, self.mins, self.super_scales, self.super_mins)
        return [t for t in parts if t is not None]

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        def each(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else change(t)

        codes, scales = change(self.codes), change(self.scales)
        mins, super_scales, super_mins = each(self.mins), each(self.super_scales), each(self.super_mins)
        shape = (codes.shape[0], self.shape[1])
        return QuantizedTensor(
            shape, self.bits, self.group, self.zero, codes, scales, mins, super_scales, super_mins, self.table
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors())


def _spread(fine: torch.Tensor, coarse: torch.Tensor | None) -> torch.Tensor:
    if coarse is None:
        return fine.to(torch.float32)
    rows, supers = coarse.shape
    grouped = fine.to(torch.float32).reshape(rows, supers, -1) * coarse.to(torch.float32).unsqueeze(-1)
    return grouped.reshape(fine.shape)


class QuantFormat(abc.ABC):
    """How one type of a file stores a matrix: `block` weights in `type_size` bytes, row after row."""

    name: str
    block: int
    type_size: int
    bits: int  # of a code; 16 or 32 for plain floats

    @property
    def rows_as(self) -> str:
        """Name of the format that rows are in as they are read: its own, unless they are put together as another's."""
        return self.name

    @property
    def expands(self) -> bool:
        """Whether the codes alone take more memory than all of the block does in the file."""
        return self.block * self.bits > 8 * self.type_size

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row. Raises ValueError when the columns do not fill whole blocks."""
        if columns % self.block:
            raise ValueError(f"{columns} columns are not a multiple of {self.name}'s block of {self.block}")
        return columns // self.block * self.type_size

    @abc.abstractmethod
    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor | torch.Tensor:
        """The [N, K] matrix that `raw`, uint8 [N * row_bytes(K)] on the CPU, holds.

        Quantized formats give the internal form in new memory, plain ones a tensor [N, K] of their own dtype
        that shares raw's memory where it is aligned. Raises ValueError when the matrix is empty, raw is not
        uint8 of exactly that size or K does not fill whole blocks.
        """

    def blocks(self, raw: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """raw as uint8 [number of blocks, type_size], row after row. Raises ValueError as `decode` does."""
        rows, columns = shape
        if rows < 1 or columns < 1:
            raise ValueError(f"an empty matrix [{rows}, {columns}] cannot be decoded")
        expected = rows * self.row_bytes(columns)
        if raw.dtype != torch.uint8 or raw.numel() != expected:
            found = f"{raw.numel()} elements of {raw.dtype}"
            raise ValueError(f"{self.name} [{rows}, {columns}] takes {expected} bytes, not {found}")
        return raw.reshape(-1, self.type_size)


#: (first byte, how many) → uint8 [so many] of one part of a weight
Plane = Callable[[int, int], torch.Tensor]


class PlanarFormat(QuantFormat):
    """A format whose files keep codes, scales, … as tensors of their own. `open` puts rows together as `decode` and
    `row_bytes` have them; that form is its own choice."""

    @abc.abstractmethod
    def open(
        self, planes: Mapping[str, Plane], settings: Mapping[str, float], shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        """A reader of rows [start, stop): uint8 [(stop - start) * row_bytes]. settings: numbers that the file has
        beside the planes. Raises ValueError where they do not fit."""

    def rows_of(self, raw: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """raw as uint8 [N, row_bytes]. Raises ValueError as `decode` does."""
        rows, columns = shape
        if (
            rows < 1
            or columns < 1
            or raw.dtype != torch.uint8
            or raw.numel() != rows * self.row_bytes(columns)
        ):
            raise ValueError(f"{self.name} [{rows}, {columns}] is not {raw.numel()} elements of {raw.dtype}")
        return raw.reshape(rows, -1)


def chunks(blocks: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Runs of consecutive blocks, each small enough that temporaries of its size do not count."""
    step = max(1, _CHUNK_BYTES // blocks.shape[1])
    for start in range(0, blocks.shape[0], step):
        run = slice(start, start + step)
        yield run, blocks[run]


def decode_codes(
    blocks: torch.Tensor, width: int, decode: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """uint8 [blocks, width]: what `decode` makes of the blocks, a run of them at a time."""
    codes = torch.empty((blocks.shape[0], width), dtype=torch.uint8)
    for run, some in chunks(blocks):
        codes[run] = decode(some)
    return codes


def field(blocks: torch.Tensor, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [start, start + size) of each block as numbers; a copy [blocks, size // itemsize]."""
    return blocks[:, start : start + size].clone(memory_format=torch.contiguous_format).view(dtype)


def interleave_nibbles(split: torch.Tensor) -> torch.Tensor:
    """From ggml's order, where a run's low nibbles are the first half of its columns and its high nibbles the
    second half, to the internal one, where neighbours share a byte.

    split: int16 [..., run // 2], a run's bytes in pairs. Returns uint8 [..., run].

    pair of bytes:  hi(b+1) lo(b+1) hi(b) lo(b)  →  first half: lo(b+1) lo(b), second half: hi(b+1) hi(b)
    """
    out = torch.empty((*split.shape[:-1], 2, split.shape[-1]), dtype=torch.uint8)
    out[..., 0, :] = (split & 0x0F) | ((split >> 4) & 0xF0)
    out[..., 1, :] = ((split >> 4) & 0x0F) | ((split >> 8) & 0xF0)
    return out.flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, a byte each, [..., n] → [..., n // 2] as the internal form has them."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse: uint8 [..., n] → [..., 2n], low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def two_bit_codes(packed: torch.Tensor) -> torch.Tensor:
    """From ggml's order, where bits 2k and 2k + 1 of byte i of a run of 32 are column 32k + i of the run's 128.

    packed: uint8 [blocks, runs * 32]. Returns uint8 [blocks, runs * 128], a byte each.
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    runs = packed.reshape(packed.shape[0], -1, 1, 32)
    return ((runs >> shifts) & 3).flatten(1)


def get_format(name: str) -> QuantFormat:
    """The format of that type name. Raises ValueError with the supported ones."""
    if name not in _FORMATS:
        raise ValueError(f"quantization type {name} is not supported; supported: {', '.join(_FORMATS)}")
    module = importlib.import_module(f"infer.quant.{_FORMATS[name]}")
    found: QuantFormat = module.FORMATS[name]
    return found
