"""GGUF files, whole or split into shards, as a Checkpoint."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from infer.runtime.checkpoint.base import Checkpoint, RawTensor
from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.gguf_header import GGUFHeader, parse_header
from infer.runtime.checkpoint.metadata import get_int
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.checkpoint.sniff import container_of
from infer.runtime.checkpoint.splits import SplitName
from infer.runtime.errors import CheckpointError, UnsupportedModelError


class GGUFCheckpoint(Checkpoint):
    """An open GGUF model; open_gguf makes it.

    path and metadata are those of the first shard, tensors those of all shards in order. files: every shard's
    path. version: of the first shard. Strings that are not UTF-8 hold lone surrogates, see `parse_header`.
    """

    container = "gguf"

    def __init__(self, files: Sequence[ModelFile], header: GGUFHeader, tensors: dict[str, RawTensor]) -> None:
        self.path = files[0].path
        self.files = tuple(file.path for file in files)
        self.version = header.version
        self.metadata = MappingProxyType(header.metadata)
        self.tensors = MappingProxyType(tensors)
        self._files = {file.path: file for file in files}
        # Also closes the files of a checkpoint that was dropped without close().
        self._closer = weakref.finalize(self, _close, tuple(files))

    def read_into(self, tensor: RawTensor, buffer: memoryview, start: int = 0) -> None:
        file = self._files.get(tensor.file)
        if file is None or self.tensors.get(tensor.name) != tensor:
            raise ValueError(f"tensor {shown(tensor.name)} is not of this checkpoint")
        self._check_range(tensor, buffer, start)
        if buffer.nbytes:  # a view with a zero in its shape cannot be cast
            file.read_into(tensor.offset + start, buffer.cast("B"))

    def descriptor(self, tensor: RawTensor) -> int | None:
        return self._files[tensor.file].descriptor

    def close(self) -> None:
        """Close all files. May be called again."""
        self._closer()


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF file. Any shard of a split model opens the whole model; the shards lie in one folder.

    Raises ModelNotFoundError (no such path), UnsupportedModelError (another kind of file, GGUF version or
    tensor type) or CheckpointError (truncated, damaged, a shard missing or of another model).
    """
    with contextlib.ExitStack() as stack:
        shard = _open_shard(path, stack)
        shards = [shard] if shard.count <= 1 else _open_siblings(shard, stack)
        tensors = _joined(shards)
        checkpoint = GGUFCheckpoint([shard.file for shard in shards], shards[0].header, tensors)
        stack.pop_all()
    return checkpoint


@dataclass(frozen=True)
class _Shard:
    """One file and what its metadata says of its place among others: `index` from 0; count 0 or 1 when alone.

    total: tensors of the whole model, None when the shard does not say.
    """

    file: ModelFile
    header: GGUFHeader
    index: int
    count: int
    total: int | None


def _open_shard(path: Path, stack: contextlib.ExitStack) -> _Shard:
    file = stack.enter_context(contextlib.closing(ModelFile(path)))
    container = container_of(file)
    if container != "gguf":
        raise UnsupportedModelError(f"{shown_path(path)}: is a {container} file, not GGUF; use a .gguf file")
    header = parse_header(file)
    try:
        index = get_int(header.metadata, "split.no", default=0)
        count = get_int(header.metadata, "split.count", default=0)
        total = get_int(header.metadata, "split.tensors.count", default=None)
    except CheckpointError as error:
        raise CheckpointError(f"{shown_path(path)}: {error}") from None
    return _Shard(file, header, index, count, total)


def _open_siblings(given: _Shard, stack: contextlib.ExitStack) -> list[_Shard]:
    """All shards of the model in order, `given` among them."""
    path, index, count = given.file.path, given.index, given.count
    name = SplitName.parse(path.name)
    if name is None or (name.index, name.count) != (index, count):
        raise CheckpointError(
            f"{shown_path(path)}: is shard {index + 1} of {count}, but its name does not say so; "
            f"name it …-{index + 1:05d}-of-{count:05d}.gguf like its siblings"
        )
    paths = [path.with_name(name.sibling(number)) for number in range(count)]
    missing = [sibling for sibling in paths if not os.path.lexists(sibling)]
    if missing:
        raise CheckpointError(
            f"{shown_path(missing[0])}: is missing ({len(missing)} of {count} shards are); "
            "download it into the same folder"
        )
    shards = [given if number == index else _open_shard(paths[number], stack) for number in range(count)]
    for number, shard in enumerate(shards):
        if (shard.index, shard.count) != (number, count):
            what = f"is shard {shard.index + 1} of {shard.count}" if shard.count > 1 else "is a whole model"
            raise CheckpointError(
                f"{shown_path(shard.file.path)}: {what}, not shard {number + 1} of {count} as its name says; "
                "download it again"
            )
    return shards


def _joined(shards: Sequence[_Shard]) -> dict[str, RawTensor]:
    """Tensors of all shards, once they are known to be one model's."""
    tensors: dict[str, RawTensor] = {}
    for shard in shards:
        for name, tensor in shard.header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{shown_path(tensor.file)}: tensor {shown(name)} is also in "
                    f"{shown_path(tensors[name].file)}; the shards are not of one model, download them again"
                )
            tensors[name] = tensor
    if len(shards) > 1:
        for shard in shards:
            # The first shard must state the total; llama.cpp's writer puts it into every shard.
            if shard.total != len(tensors) and (shard.total is not None or shard is shards[0]):
                raise CheckpointError(
                    f"{shown_path(shard.file.path)}: promises {shard.total or 'no number of'} tensors "
                    f"(split.tensors.count), the shards hold {len(tensors)}; download them again"
                )
    return tensors


def _close(files: Sequence[ModelFile]) -> None:
    for file in files:
        file.close()
