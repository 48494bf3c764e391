"""A folder of safetensors, config.json and tokenizer files as a Checkpoint."""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from infer.runtime.checkpoint.base import Checkpoint, RawTensor
from infer.runtime.checkpoint.folder import fp8, mxfp4
from infer.runtime.checkpoint.folder.bitsandbytes import joined, quant_method
from infer.runtime.checkpoint.folder.config import ConfigReader
from infer.runtime.checkpoint.folder.families import family_of, translate
from infer.runtime.checkpoint.folder.names import Parts, renamed
from infer.runtime.checkpoint.folder.shards import INDEX, Shards, open_shards
from infer.runtime.checkpoint.folder.texts import read_texts
from infer.runtime.checkpoint.json_file import read_object
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError

CONFIG = "config.json"
_MAX_CONFIG = 1 << 20


class FolderCheckpoint(Checkpoint):
    """An open folder; open_folder makes it. Tensors have GGUF's names, metadata its keys.

    parts: of each tensor the stored ones that it is made of. vectors: data of tensors that config.json holds.
    """

    container = "safetensors"

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, object],
        tensors: Mapping[str, RawTensor],
        parts: Parts,
        vectors: Mapping[str, bytes],
        shards: Shards,
    ) -> None:
        self.path = path
        self.metadata = MappingProxyType(dict(metadata))
        self.tensors = MappingProxyType(dict(tensors))
        self._parts, self._vectors, self._files = parts, vectors, shards.files
        self._closer = weakref.finalize(self, shards.stack.pop_all().close)

    def read_into(self, tensor: RawTensor, buffer: memoryview, start: int = 0) -> None:
        self._check_range(tensor, buffer, start)
        if not buffer.nbytes:
            return
        to = buffer.cast("B")
        if tensor.name in self._vectors:
            to[:] = self._vectors[tensor.name][start : start + len(to)]
            return
        for part in self._parts.get(tensor.name, (tensor,)):
            if part.file not in self._files:
                raise ValueError(f"tensor {shown(tensor.name)} is not of this checkpoint")
            count = min(len(to), part.nbytes - start)
            if count > 0:
                self._files[part.file].read_into(part.offset + start, to[:count])
                to = to[count:]
            start = max(0, start - part.nbytes)

    def descriptor(self, tensor: RawTensor) -> int | None:
        parts = self._parts.get(tensor.name, (tensor,))
        whole = len(parts) == 1 and (parts[0].file, parts[0].offset) == (tensor.file, tensor.offset)
        if not whole or tensor.planes or tensor.name in self._vectors:
            return None
        return self._files[tensor.file].descriptor

    def close(self) -> None:
        """Close all files. May be called again."""
        self._closer()


def open_folder(path: Path, names: Sequence[str]) -> FolderCheckpoint:
    """Open a checkpoint folder that holds these entries, sorted by name.

    Raises CheckpointError for files that are missing, damaged or contradict each other, UnsupportedModelError for a
    model this version cannot run: an unknown family, key or rope scaling, weights in pickles, code of its own.
    """
    if CONFIG not in names:
        raise CheckpointError(f"{shown_path(path)}: holds no {CONFIG}; download it into the same folder")
    values = read_object(path / CONFIG, _MAX_CONFIG)
    config = ConfigReader(values, shown_path(path / CONFIG))
    family = family_of(config)
    method = quant_method(config)
    translated = translate(config, family)
    with contextlib.ExitStack() as stack:
        shards = open_shards(path, names, stack)
        stored: Mapping[str, RawTensor] = shards.tensors
        if method is not None:
            plain = {mxfp4.METHOD: mxfp4.joined, fp8.METHOD: fp8.joined}.get(method)
            stored = joined(shards) if plain is None else plain(stored)
        tensors, parts = renamed(stored, family, translated)
        vectors = {name: struct.pack(f"<{len(v)}f", *v) for name, v in translated.factors.items()}
        for name, data in vectors.items():
            tensors[name] = RawTensor(name, (len(data) // 4,), "F32", len(data), path / CONFIG, 0)
        texts = read_texts(path, names, values)
        metadata = {
            "general.architecture": family.architecture,
            "general.name": _name(path),
            **translated.metadata,
            **texts.metadata,
        }
        checkpoint = FolderCheckpoint(path, metadata, tensors, parts, vectors, shards)
    index = [path / INDEX] if INDEX in names else []
    checkpoint.files = (path / CONFIG, *texts.files, *index, *shards.files)
    return checkpoint


def _name(path: Path) -> str:
    """The folder's own, or the repository's where it is one of the hub's cache."""
    full = path.absolute()
    if full.parent.name == "snapshots":
        return full.parent.parent.name.removeprefix("models--").rpartition("--")[2]
    return full.name
