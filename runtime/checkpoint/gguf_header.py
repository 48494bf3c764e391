"""Parser of one GGUF file's header: metadata and tensor infos, every number checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Layout, little-endian:
    "GGUF", version u32, tensor count u64, metadata count u64
    per metadata entry   key string, value type u32, value
    per tensor           name string, dimension count u32, dimensions u64 (fastest first), type u32,
                         offset u64 from the start of the data
    padding to general.alignment, then the tensors, each padded to general.alignment
A string is its length as u64, then its bytes; an array is element type u32, count u64, then the elements.
Versions 2 and 3 differ only in that 3 allows big-endian files, which this reader refuses.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from infer.runtime.checkpoint.arrays import NumberArray, TextArray
from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.gguf_types import REMOVED_TENSOR_TYPES, TENSOR_TYPES
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError, UnsupportedModelError

# Largest header parsed. The largest vocabularies in use take about 30 MiB; a header of 256 MiB that is one array of
# flags takes 2 GiB as a list.
MAX_HEADER = 256 << 20

_FIRST_READ = 1 << 20
_BATCH = 4096  # strings cut out one by one, at a time
_FEW = 256  # strings that it is worth looking for, or going on to look for, all at once
_MAX_NAME = 65535
_DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value type id → code of `struct` and `array`, which agree for these.
_NUMBERS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in _NUMBERS.items()}
_UINT32 = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# Least bytes of a metadata entry (key and value of one byte) and of a tensor info (of one dimension).
_MIN_ENTRY = 8 + 1 + 4 + 1
_MIN_INFO = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GGUFHeader:
    """What one file holds. Tensors keep the file's order, which is also the order of their data."""

    version: int
    metadata: dict[str, object]
    tensors: dict[str, RawTensor]


def parse_header(file: ModelFile) -> GGUFHeader:
    """Read and check the whole header, and that the tensors it lists fill the file exactly.

    Strings in values may hold any bytes: what is not UTF-8 becomes lone surrogates
    (`value.encode("utf-8", "surrogateescape")` gives the bytes back). Keys and tensor names must be UTF-8.
    Raises CheckpointError for a truncated or damaged file, UnsupportedModelError for other GGUF versions and
    tensor types. The file must begin with "GGUF".
    """
    return _Parser(file).parse()


class _Parser:
    """Cursor over the file's first bytes: `data` has what was read of them, `pos` is the next byte."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.data = b""
        self.pos = 0
        self.part = "its header"  # what is being read, for messages

    def parse(self) -> GGUFHeader:
        self.take(4)
        version = self.version()
        tensor_count, entry_count = self.u64(), self.u64()
        self.require(entry_count * _MIN_ENTRY + tensor_count * _MIN_INFO)
        metadata: dict[str, object] = {}
        alignment = _DEFAULT_ALIGNMENT
        for index in range(entry_count):
            self.part = f"metadata entry {index + 1} of {entry_count}"
            key = self.name()
            if key in metadata:
                raise self.damaged(f"metadata key {shown(key)} appears twice")
            self.part = f"metadata key {shown(key)}"
            kind = self.u32()
            metadata[key] = self.value(kind)
            if key == "general.alignment":
                alignment = self.alignment(kind, metadata[key])
        return GGUFHeader(version, metadata, self.tensors(tensor_count, alignment))

    def version(self) -> int:
        version = self.u32()
        where = shown_path(self.file.path)
        if version in (2, 3):
            return version
        if version == 1:
            raise UnsupportedModelError(f"{where}: is GGUF version 1; convert the model again to version 3")
        if version and version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{where}: is a big-endian GGUF file; get the little-endian one")
        raise UnsupportedModelError(
            f"{where}: is GGUF version {version}; this program reads 2 and 3: update it or use another file"
        )

    def alignment(self, kind: int, value: object) -> int:
        if kind != _UINT32 or not isinstance(value, int):
            raise self.damaged("general.alignment is not a uint32")
        if value == 0 or value % 8:
            raise self.damaged(f"general.alignment is {value}, not a multiple of 8")
        return value

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            start = self.take(scalar.size)
            return scalar.unpack_from(self.data, start)[0]
        if kind == _STRING:
            return self.byte_strings(1)[0].decode("utf-8", "surrogateescape")
        if kind == _BOOL:
            return self.bools(1)[0]
        if kind != _ARRAY:
            raise self.damaged(f"{self.part} has unknown value type {kind}")
        element, count = self.u32(), self.u64()
        if element in _NUMBERS:
            return self.numbers(element, count)
        if element == _STRING:
            return self.strings(count)
        if element == _BOOL:
            return self.bools(count)
        if element == _ARRAY:
            raise self.damaged(f"{self.part} is an array of arrays, which no model uses")
        raise self.damaged(f"{self.part} is an array of unknown value type {element}")

    def numbers(self, kind: int, count: int) -> NumberArray[int] | NumberArray[float]:
        size = count * _SCALARS[kind].size
        start = self.take(size)
        values = array(_NUMBERS[kind])
        values.frombytes(memoryview(self.data)[start : start + size])
        if sys.byteorder == "big":
            values.byteswap()
        return NumberArray(values)

    def bools(self, count: int) -> list[bool]:
        start = self.take(count)
        values = self.data[start : start + count]
        if values.translate(None, b"\x00\x01"):
            raise self.damaged(f"{self.part} holds a bool that is neither 0 nor 1")
        return list(map(bool, values))

    def strings(self, count: int) -> TextArray:
        self.require(8 * count)
        return TextArray.joined(self.batches(count))

    def batches(self, count: int) -> Iterator[tuple[bytes, Iterable[int]]]:
        """Strings as `TextArray.joined` takes them."""
        vectorized = count >= _FEW and "numpy" in sys.modules  # to import it would take longer than it saves
        while count:
            lengths: list[int] = []
            if vectorized:
                from infer.runtime.checkpoint.gguf_strings import leading_strings

                text, lengths, self.pos = leading_strings(self.data, self.pos, count)
                yield text, lengths
                count -= len(lengths)
            if len(lengths) < _FEW:
                strings = self.byte_strings(min(count, _BATCH))
                yield b"".join(strings), map(len, strings)
                count -= len(strings)

    def byte_strings(self, count: int) -> list[bytes]:
        # Without numpy hundreds of thousands come this way: nothing here but one unpack and one slice each.
        values: list[bytes] = []
        append, unpack = values.append, _U64.unpack_from
        data, pos, have = self.data, self.pos, len(self.data)
        for _ in range(count):
            if pos + 8 > have:
                self.pos = pos
                self.fill(8)
                data, have = self.data, len(self.data)
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            if pos > have:
                self.pos = start
                self.fill(pos - start)
                data, have = self.data, len(self.data)
            append(data[start:pos])
        self.pos = pos
        return values

    def name(self) -> str:
        """A metadata key or a tensor name: 1 to 65535 bytes of UTF-8."""
        length = self.u64()
        if not 1 <= length <= _MAX_NAME:
            raise self.damaged(f"{self.part} has a name of {length} bytes; 1 to {_MAX_NAME} are allowed")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{self.part} has a name that is not UTF-8") from None

    def tensors(self, count: int, alignment: int) -> dict[str, RawTensor]:
        self.require(count * _MIN_INFO)
        # name → shape, type, bytes, offset from the start of the data
        infos: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
        end = padded_end = 0
        for index in range(count):
            self.part = f"tensor {index + 1} of {count}"
            name = self.name()
            if name in infos:
                raise self.damaged(f"tensor {shown(name)} appears twice")
            self.part = f"tensor {shown(name)}"
            shape, kind, nbytes, offset = self.tensor_info()
            if offset != padded_end:
                what = (
                    "is not aligned"
                    if offset % alignment
                    else "leaves a gap"
                    if offset > padded_end
                    else "overlaps"
                )
                raise self.damaged(f"{self.part} starts at data byte {offset}, not {padded_end}: it {what}")
            infos[name] = (shape, kind, nbytes, offset)
            end = offset + nbytes
            padded_end = _padded(end, alignment)
        self.check_size(end, padded_end, alignment)
        base = _padded(self.pos, alignment)
        path = self.file.path
        return {
            name: RawTensor(name, shape, kind, nbytes, path, base + offset)
            for name, (shape, kind, nbytes, offset) in infos.items()
        }

    def tensor_info(self) -> tuple[tuple[int, ...], str, int, int]:
        """Shape (outermost dimension first), type name, bytes of data, offset from the start of the data."""
        dimensions = self.u32()
        if not 1 <= dimensions <= 4:
            raise self.damaged(f"{self.part} has {dimensions} dimensions; 1 to 4 are allowed")
        shape = tuple(self.u64() for _ in range(dimensions))[::-1]
        kind, offset = self.u32(), self.u64()
        if 0 in shape:
            raise self.damaged(f"{self.part} has shape {list(shape)}: a dimension is zero")
        if kind not in TENSOR_TYPES:
            removed = REMOVED_TENSOR_TYPES.get(kind)
            what = f"the withdrawn type {kind} ({removed})" if removed else f"the unknown type {kind}"
            raise UnsupportedModelError(
                f"{shown_path(self.file.path)}: {self.part} has {what}; use a file of another quantization"
            )
        form = TENSOR_TYPES[kind]
        if shape[-1] % form.block:
            raise self.damaged(
                f"{self.part} has rows of {shape[-1]}, but {form.name} needs a multiple of {form.block}"
            )
        return shape, form.name, prod(shape) // form.block * form.nbytes, offset

    def check_size(self, end: int, padded_end: int, alignment: int) -> None:
        """The file must end with the last tensor, or with the padding after it, whole or in part."""
        size, base = self.file.size, _padded(self.pos, alignment)
        if end and size < base + end:
            raise CheckpointError(
                f"{shown_path(self.file.path)}: truncated: it ends at byte {size} of {base + end}; "
                "download it again"
            )
        if size > base + padded_end:
            raise self.damaged(f"{size - base - padded_end} unexpected bytes after the last tensor")

    def u32(self) -> int:
        start = self.take(4)
        return int(_U32.unpack_from(self.data, start)[0])

    def u64(self) -> int:
        start = self.take(8)
        return int(_U64.unpack_from(self.data, start)[0])

    def take(self, count: int) -> int:
        """Step over `count` bytes that then are in `data`; the position of the first."""
        start = self.pos
        if start + count > len(self.data):
            self.fill(count)
        self.pos = start + count
        return start

    def require(self, count: int) -> None:
        """Raise unless the file, and the part of it that may be a header, has `count` more bytes."""
        end = self.pos + count
        if end > self.file.size:
            raise CheckpointError(
                f"{shown_path(self.file.path)}: truncated or damaged: it ends at byte {self.file.size}, but "
                f"{self.part} needs {end} bytes or more; download it again"
            )
        if end > MAX_HEADER:
            raise self.damaged(f"{self.part} makes the header larger than {MAX_HEADER >> 20} MiB")

    def fill(self, count: int) -> None:
        """Read on until `data` reaches `count` bytes past `pos`, doubling it so that reads are few."""
        self.require(count)
        have = len(self.data)
        end = max(self.pos + count, min(self.file.size, MAX_HEADER, max(2 * have, _FIRST_READ)))
        self.data += self.file.read(have, end - have)

    def damaged(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{shown_path(self.file.path)}: damaged GGUF file: {text}; use another copy of it"
        )


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
