"""What `-m` means: a path, a catalog name, or a hub repository.

In this order, and nothing is guessed beyond it:
1. `hf:…` is a hub repository, `hf:org/repo[:file]`;
2. what holds a path separator, ends in `.gguf` or exists is a path; a bare `NAME.gguf` that does not exist
   here is looked up in the store;
3. anything else is a catalog name, upper and lower case being the same, or a checkpoint folder in the store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.checkpoint.open import CONFIG
from infer.runtime.errors import ModelNotFoundError, UsageError, did_you_mean
from infer.runtime.store import catalog as catalog_module
from infer.runtime.store import hub
from infer.runtime.store.catalog import DEFAULT_MODEL, CatalogEntry
from infer.runtime.store.hub import HubModel
from infer.runtime.store.paths import DataDirs


@dataclass(frozen=True)
class LocalPath:
    """A file or folder that exists."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class CatalogModel:
    entry: CatalogEntry

    def __str__(self) -> str:
        return self.entry.name


ModelSource = LocalPath | CatalogModel | HubModel


def resolve(
    spec: str | None, dirs: DataDirs, *, catalog: Sequence[CatalogEntry] | None = None
) -> ModelSource:
    """The source that `spec` names; None names the default model. Touches no network.

    Raises ModelNotFoundError, saying what comes close, and UsageError for an empty name.
    """
    entries = catalog_module.CATALOG if catalog is None else catalog
    if spec is None:
        spec = DEFAULT_MODEL
    elif not spec.strip():
        raise UsageError("the model name is empty; `infer ls` lists models")
    elif spec.startswith(hub.PREFIX):
        return hub.parse(spec)
    elif _is_path(spec):
        return LocalPath(_existing(spec, dirs))
    entry = catalog_module.find(spec, entries)
    if entry is None:
        if os.path.isfile(dirs.models / spec / CONFIG):
            return LocalPath(dirs.models / spec)
        raise ModelNotFoundError(_unknown(spec, [entry.name for entry in entries]))
    return CatalogModel(entry)


def _is_path(spec: str) -> bool:
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    return (
        any(separator in spec for separator in separators)
        or spec.lower().endswith(".gguf")
        or os.path.lexists(spec)
    )


def _existing(spec: str, dirs: DataDirs) -> Path:
    # A config file or variable may hold `~`, which no shell has replaced.
    path = Path(os.path.expanduser(spec))
    if not os.path.exists(path) and path.name == spec and os.path.isfile(dirs.models / spec):
        path = dirs.models / spec
    if not os.path.exists(path):
        raise ModelNotFoundError(
            f"{spec}: no such file or folder{did_you_mean(path.name, _neighbours(path))}"
        )
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise ModelNotFoundError(f"{spec}: neither a file nor a folder")
    return path


def _neighbours(path: Path) -> list[str]:
    """Names beside a path that may be models."""
    try:
        entries = list(os.scandir(path.parent))
        return [entry.name for entry in entries if entry.name.lower().endswith(".gguf") or entry.is_dir()]
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return []


def _unknown(spec: str, names: list[str]) -> str:
    return (
        f"no model is called {spec!r}{did_you_mean(spec, names, cutoff=0.5)}; "
        f"the catalog has {', '.join(names)}; a file is named by its path, a repository as hf:org/repo"
    )
