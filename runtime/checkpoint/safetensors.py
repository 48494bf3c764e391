"""The header of one safetensors file, every number checked before it is used.

Format: https://github.com/huggingface/safetensors#format. Layout, little-endian:
    header length u64, that many bytes of UTF-8 JSON (padded with blanks), the data
    {"__metadata__": {text: text}, NAME: {"dtype": …, "shape": […], "data_offsets": [begin, end]}, …}
Offsets count from the start of the data; in order of offset the tensors fill it without holes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.json_file import parse_object
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError, UnsupportedModelError

MAX_HEADER = 1 << 25  # bytes; 100,000 tensors take half of it
_MAX_DIMENSIONS = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
#: dtype → bytes of an element
DTYPES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


def parse_header(file: ModelFile) -> dict[str, RawTensor]:
    """The tensors of a file by name, in order of their data; `type` is the dtype.

    Raises CheckpointError for a header that breaks a rule, UnsupportedModelError for an unknown dtype.
    """
    where = shown_path(file.path)
    if file.size < 8:
        raise CheckpointError(f"{where}: ends at byte {file.size}, inside its header; download it again")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise CheckpointError(
            f"{where}: promises a header of {length} bytes and has {file.size} in all; download it again"
        )
    if length > MAX_HEADER:
        raise CheckpointError(f"{where}: a header of {length} bytes; {MAX_HEADER} is the most that is read")
    text = file.read(8, length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{where}: its header does not begin with {{; download it again")
    entries = parse_object(text, f"{where}: header")
    notes = entries.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise CheckpointError(f"{where}: __metadata__ is not an object of texts; download it again")
    begin = 8 + length
    tensors = [_tensor(file, begin, name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = begin
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{where}: tensor {shown(tensor.name)} {what}; download it again")
        end += tensor.nbytes
    if end != file.size:
        raise CheckpointError(
            f"{where}: its tensors end at byte {end}, the file at {file.size}; download it again"
        )
    return {tensor.name: tensor for tensor in tensors}


def _tensor(file: ModelFile, begin: int, name: str, entry: object) -> RawTensor:
    where = f"{shown_path(file.path)}: tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise CheckpointError(f"{where} is not given by dtype, shape and data_offsets; download it again")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has a shape that is no list of sizes; download it again")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets that are no range; download it again")
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{where} has dtype {shown(str(dtype))}; this version reads {', '.join(DTYPES)}"
        )
    nbytes = math.prod(shape) * DTYPES[dtype]
    if nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where} has {offsets[1] - offsets[0]} bytes where its shape takes {nbytes}; download it again"
        )
    return RawTensor(name, tuple(shape), dtype, nbytes, file.path, begin + offsets[0])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
