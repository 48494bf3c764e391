"""What lies in the store's folder: listing and removal."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.errors import ModelError, ModelNotFoundError, UsageError, did_you_mean
from infer.runtime.store import catalog as catalog_module
from infer.runtime.store.catalog import CatalogEntry
from infer.runtime.store.folders import describe_folder
from infer.runtime.store.manifest import manifest_path, read_manifest
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.pull import remove_partial


@dataclass(frozen=True)
class LocalModel:
    """A model of the store, a .gguf file or a checkpoint folder. name: the catalog's where it is one of its files, else
    that of the file or folder.

    size in bytes, modified in seconds since 1970; source, license and architecture are empty where unknown.
    """

    name: str
    path: Path
    size: int
    modified: float
    source: str = ""
    license: str = ""
    architecture: str = ""


def list_models(dirs: DataDirs, catalog: Sequence[CatalogEntry] | None = None) -> list[LocalModel]:
    """The models directly inside the store's folder, by name. A missing folder is an empty store."""
    entries = {entry.file_name: entry for entry in (catalog_module.CATALOG if catalog is None else catalog)}
    found = []
    try:
        paths = sorted(dirs.models.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ModelError(
            f"{dirs.models}: the model store cannot be read: {error.strerror or error}"
        ) from None
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            facts = describe_folder(path)
            if facts is not None:
                found.append(
                    LocalModel(path.name, path, facts.size, status.st_mtime, architecture=facts.architecture)
                )
            if not path.name.lower().endswith(".gguf") or not stat.S_ISREG(status.st_mode):
                continue
            manifest = read_manifest(path)
            entry = entries.get(path.name)
            if entry is not None and entry.size != status.st_size:
                entry = None
            found.append(
                LocalModel(
                    name=entry.name if entry else path.name,
                    path=path,
                    size=status.st_size,
                    modified=status.st_mtime,
                    source=manifest.source if manifest else "",
                    license=entry.license if entry else manifest.license if manifest else "",
                )
            )
    return found


def stored_file(name: str, dirs: DataDirs, catalog: Sequence[CatalogEntry] | None = None) -> Path:
    """Path a name has inside the store: a catalog name's file, or the file or folder itself. It need not exist.

    Raises UsageError for anything that is not a plain name, so that no path outside the store comes back.
    """
    entry = catalog_module.find(name, catalog)
    if entry is not None:
        return dirs.models / entry.file_name
    separators = [separator for separator in ("/", "\\", os.sep, os.altsep, "\0") if separator]
    if not name or name.startswith(".") or any(separator in name for separator in separators):
        raise UsageError(f"{name!r} is not a name in the model store; `infer ls` lists them")
    return dirs.models / name


def remove(name: str, dirs: DataDirs, catalog: Sequence[CatalogEntry] | None = None) -> int:
    """Delete a model of the store with its manifest and any interrupted download of it; returns bytes freed.

    A folder goes with all that is in it. A link is removed, never what it points to. Raises UsageError for names that
    are paths, ModelNotFoundError where there is nothing of that name, ModelError where it cannot be deleted or is being
    downloaded.
    """
    path = stored_file(name, dirs, catalog)
    entry = catalog_module.find(name, catalog)
    try:
        freed = remove_partial(entry, dirs) if entry is not None else 0
        facts = describe_folder(path) if entry is None else None
        if facts is not None and not path.is_symlink():
            shutil.rmtree(path)
            return facts.size
        gguf = path.name.lower().endswith(".gguf")
        status = path.lstat() if (gguf or facts is not None) and os.path.lexists(path) else None
        if status is None:
            if freed:
                return freed
            meant = did_you_mean(name, (model.name for model in list_models(dirs, catalog)))
            raise ModelNotFoundError(
                f"no model {name!r} in {dirs.models}{meant}; `infer ls` lists what is there"
            )
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise ModelError(f"{path} is not a file; remove it by hand if it is not needed")
        path.unlink()
        manifest_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{path}: cannot be removed: {error.strerror or error}") from None
    return freed + status.st_size
