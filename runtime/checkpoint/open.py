"""From a path to an open checkpoint, whatever its container."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from infer.runtime.checkpoint.base import Checkpoint
from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.checkpoint.sniff import container_of
from infer.runtime.checkpoint.splits import SplitName
from infer.runtime.errors import CheckpointError, ModelError, UnsupportedModelError

# Container → module and function that opens it; imported on first use.
_OPENERS: dict[str, tuple[str, str]] = {
    "gguf": ("infer.runtime.checkpoint.gguf", "open_gguf"),
}
CONFIG = "config.json"
_LISTED = 5


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model at `path`: a .gguf, any shard of a split one, or a folder of safetensors. The caller closes it.

    Raises ModelNotFoundError (no such path), UnsupportedModelError (a folder of other files, or a container this
    version cannot read; the message names the file to give where there is one) or CheckpointError.
    """
    if os.path.isdir(path):  # Path.is_dir raises on a path that holds a NUL
        return _open_folder(path)
    with contextlib.closing(ModelFile(path)) as file:
        container = container_of(file)
    if container not in _OPENERS:
        raise UnsupportedModelError(
            f"{shown_path(path)}: is a {container} file; give its folder, which also holds the model's configuration"
        )
    module, function = _OPENERS[container]
    opener = cast(Callable[[Path], Checkpoint], getattr(importlib.import_module(module), function))
    return opener(path)


def _open_folder(path: Path) -> Checkpoint:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(
            f"{shown_path(path)}: cannot list the folder: {error.strerror or error}"
        ) from None
    gguf = any(name.lower().endswith(".gguf") for name in names)
    if any(name.endswith(".safetensors") for name in names) or (CONFIG in names and not gguf):
        from infer.runtime.checkpoint.folder.checkpoint import open_folder

        return open_folder(path, names)
    raise _folder_error(path, names)


def _folder_error(path: Path, names: list[str]) -> ModelError:
    where = shown_path(path)
    # A split model counts once, under the first of its shards that is there.
    models: dict[str, str] = {}
    for name in names:
        if name.lower().endswith(".gguf"):
            split = SplitName.parse(name)
            models.setdefault(split.sibling(0) if split else name, name)
    first = next(iter(models.values()), None)
    if first is not None and len(models) == 1:
        return UnsupportedModelError(f"{where}: is a folder; give the file: {shown_path(path / first)}")
    if models:
        listed = ", ".join(shown(name) for name in list(models.values())[:_LISTED])
        more = f" and {len(models) - _LISTED} more" if len(models) > _LISTED else ""
        return UnsupportedModelError(
            f"{where}: is a folder of {len(models)} models; give one of {listed}{more}"
        )
    return UnsupportedModelError(
        f"{where}: is a folder without a model; give a .gguf file, or a folder of safetensors and config.json"
    )
