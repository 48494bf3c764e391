"""Checkpoint folders as listings show them: what is one, its bytes, the family it names."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.checkpoint.json_file import read_object
from infer.runtime.checkpoint.open import CONFIG
from infer.runtime.errors import InferError

_MAX_CONFIG = 1 << 20


@dataclass(frozen=True)
class FolderFacts:
    """size: bytes of the files directly inside, links followed. architecture: config.json's model_type, "" where it
    cannot be told."""

    size: int
    architecture: str


def describe_folder(path: Path) -> FolderFacts | None:
    """None for what is no folder with config.json and safetensors. Raises OSError."""
    if not path.is_dir():
        return None
    files = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.is_file()}
    if CONFIG not in files or not any(name.endswith(".safetensors") for name in files):
        return None
    found: object = ""
    with suppress(InferError):
        found = read_object(path / CONFIG, _MAX_CONFIG).get("model_type")
    return FolderFacts(sum(files.values()), found if isinstance(found, str) else "")
