"""Which safetensors files of a folder are the model, and the tensors in them.

`model.safetensors.index.json` maps every tensor to its file: {"weight_map": {NAME: FILE}}. What it names must be there
and nothing else in those files; a folder without one has a single file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.json_file import read_object
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.checkpoint.safetensors import parse_header
from infer.runtime.checkpoint.sniff import container_of
from infer.runtime.errors import CheckpointError, UnsupportedModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX = 1 << 26
_MOST_SHARDS = 1000
#: suffixes and names of files that run code when they are loaded
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")


@dataclass
class Shards:
    """tensors: by their stored names. files: open, in the order of their names; they close with `stack`."""

    stack: contextlib.ExitStack
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    files: dict[Path, ModelFile] = field(default_factory=dict)

    def add(self, path: Path) -> dict[str, RawTensor]:
        """Open one file; its tensors."""
        file = self.stack.enter_context(contextlib.closing(ModelFile(path)))
        container = container_of(file)
        if container != "safetensors":
            raise UnsupportedModelError(f"{shown_path(path)}: is a {container} file; download it again")
        self.files[path] = file
        return parse_header(file)


def open_shards(folder: Path, names: Sequence[str], stack: contextlib.ExitStack) -> Shards:
    """names: all entries of the folder.

    Raises CheckpointError for an index and files that contradict each other, UnsupportedModelError for a folder of
    another format.
    """
    where = shown_path(folder)
    if INDEX in names:
        if SINGLE in names:
            raise CheckpointError(
                f"{where}: holds both {SINGLE} and {INDEX}; remove the one that is not the model"
            )
        return _indexed(folder, stack)
    shards = Shards(stack)
    found = [name for name in names if name.endswith(".safetensors")]
    if SINGLE in found or len(found) == 1:
        shards.tensors = shards.add(folder / (SINGLE if SINGLE in found else found[0]))
        return shards
    if found:
        raise CheckpointError(
            f"{where}: holds {len(found)} safetensors files and no {INDEX}, which says what they are; download it"
        )
    if pickles := [name for name in names if name.lower().endswith(_PICKLES)]:
        raise _pickle(where, pickles[0])
    raise CheckpointError(f"{where}: holds no safetensors file; download the model again")


def _indexed(folder: Path, stack: contextlib.ExitStack) -> Shards:
    path = folder / INDEX
    index = shown_path(path)
    weight_map = read_object(path, _MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; download it again")
    for name, file in weight_map.items():
        if isinstance(file, str) and file.lower().endswith(_PICKLES):
            raise _pickle(index, file)
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                f"{index}: puts tensor {shown(name)} into {shown(str(file))}, which is no name of a safetensors file "
                "beside it; download it again"
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not os.path.lexists(folder / file)]
    if missing:
        raise CheckpointError(
            f"{shown_path(folder / missing[0])}: is missing ({len(missing)} of {len(files)} files are); "
            "download it into the same folder"
        )
    if len(files) > _MOST_SHARDS:
        raise CheckpointError(f"{index}: names {len(files)} files; {_MOST_SHARDS} is the most that is read")
    shards = Shards(stack)
    tensors = shards.tensors
    for file in files:
        for name, tensor in shards.add(folder / file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{shown_path(tensor.file)}: tensor {shown(name)} is also in "
                    f"{shown_path(tensors[name].file)}; download both again"
                )
            if weight_map.get(name) != file:
                raise CheckpointError(
                    f"{shown_path(tensor.file)}: tensor {shown(name)} is not of this file in {INDEX}; "
                    "download both again"
                )
            tensors[name] = tensor
    if len(tensors) != len(weight_map):
        lost = next(name for name in weight_map if name not in tensors)
        raise CheckpointError(
            f"{shown_path(folder / weight_map[lost])}: has no tensor {shown(lost)}, which {INDEX} puts there; "
            "download both again"
        )
    return shards


def _pickle(where: str, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: its weights are in {shown(name)}, a pickle that can run code when it is read; "
        "use the safetensors files of the same model"
    )


def _is_plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and not {"/", "\\"} & set(name)
        and name[0] != "."
    )
