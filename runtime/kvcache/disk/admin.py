"""What `infer cache` does: list, check, trim and empty the disk tier. Only files of this format version are touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.kvcache.disk.eviction import (
    DEFAULT_LIMIT,
    StoredEntry,
    Usage,
    evict,
    eviction_lock,
    remove,
    scan,
)
from infer.runtime.kvcache.disk.folder import close_quietly, open_root
from infer.runtime.kvcache.disk.format import (
    HEADER_BYTES,
    VERSION,
    Header,
    is_foreign,
    model_folder,
    parse_header,
    short_key,
)
from infer.runtime.kvcache.disk.label import read_label, remove_label
from infer.runtime.kvcache.keys import root_key

_PIECE = 1 << 20  # a multiple of the checksum's rows
_FOREIGN_BYTES = 4096


@dataclass(frozen=True)
class ModelUsage:
    """Entries of one model. folder: 32 hex digits of its fingerprint. label: its name, "" where unknown.

    tokens counts positions stored, shared beginnings once. used_ns: latest use, nanoseconds since 1970.
    """

    folder: str
    label: str
    entries: int
    tokens: int
    nbytes: int
    used_ns: int


@dataclass(frozen=True)
class StoreInfo:
    """nbytes: everything in the store, temporaries and folders included. limit: the bytes it may take."""

    path: Path
    models: int
    entries: int
    tokens: int
    nbytes: int
    temporaries: int
    limit: int
    free: int


@dataclass(frozen=True)
class DamagedEntry:
    """path: below the store's version folder. (device, inode) of the file that was read."""

    path: str
    reason: str
    inode: tuple[int, int]


@dataclass(frozen=True)
class Verification:
    """checked: entries that were read whole. unreadable: paths that could not be read, which says nothing."""

    checked: int
    nbytes: int
    damaged: tuple[DamagedEntry, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True)
class Removal:
    """What went. complete: whether everything that was to go went."""

    entries: int
    nbytes: int
    complete: bool


def list_models(root: Path) -> list[ModelUsage]:
    """Models in the store, most recently used first. Raises CacheFolderError."""
    with _opened(root) as version:
        if version is None:
            return []
        groups: dict[str, list[StoredEntry]] = {}
        for entry in scan(version, collect=False).entries:
            groups.setdefault(entry.model, []).append(entry)
        models = [
            ModelUsage(
                folder=name,
                label=read_label(version, name),
                entries=len(entries),
                tokens=sum(entry.tokens for entry in entries),
                nbytes=sum(entry.size for entry in entries),
                used_ns=max(entry.used_ns for entry in entries),
            )
            for name, entries in groups.items()
        ]
    return sorted(models, key=lambda model: (-model.used_ns, model.folder))


def info(root: Path, limit: int | None) -> StoreInfo:
    """limit: as configured, None for the default. Raises CacheFolderError, OSError when the disk cannot be asked."""
    with _opened(root) as version:
        usage = Usage() if version is None else scan(version, collect=False)
        there = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
        status = os.statvfs(there)
        free = status.f_bavail * status.f_frsize
        return StoreInfo(
            path=root,
            models=len({entry.model for entry in usage.entries}),
            entries=len(usage.entries),
            tokens=sum(entry.tokens for entry in usage.entries),
            nbytes=usage.total,
            temporaries=usage.temporaries,
            limit=min(DEFAULT_LIMIT, (usage.total + free) // 10) if limit is None else limit,
            free=free,
        )


def verify(
    root: Path, folder: str | None = None, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Verification:
    """Read every entry (of one model) and compare it with its checksums and its name. Removes nothing.

    on_progress(bytes done, bytes in all). Raises CacheFolderError.
    """
    damaged: list[DamagedEntry] = []
    unreadable: list[str] = []
    checked = done = 0
    with _opened(root) as version:
        entries = [] if version is None else _select(scan(version, collect=False), folder)
        total = sum(entry.size for entry in entries)
        for entry in entries:
            try:
                bad = None if version is None else _check(version, entry)
            except OSError:
                unreadable.append(entry.path)
            else:
                checked += 1
                if bad is not None:
                    damaged.append(bad)
            done += entry.size
            on_progress(done, total)
    return Verification(checked, done, tuple(damaged), tuple(unreadable))


def remove_damaged(root: Path, damaged: Sequence[DamagedEntry]) -> Removal:
    """Remove what `verify` found, where it still is the same file. Raises CacheFolderError."""
    count = size = 0
    complete = True
    with _opened(root) as version:
        for bad in damaged if version is not None else ():
            try:
                status = os.stat(bad.path, dir_fd=version, follow_symlinks=False)
                if (status.st_dev, status.st_ino) == bad.inode:
                    os.unlink(bad.path, dir_fd=version)
                    count += 1
                    size += status.st_size
            except FileNotFoundError:
                continue
            except OSError:
                complete = False
    return Removal(count, size, complete)


def prune(root: Path, target: int) -> Removal:
    """Remove abandoned temporaries, entries whose beginning is gone, and then the least recently used until at
    most `target` bytes are left. Not complete when another process is making room. Raises CacheFolderError, OSError.
    """
    with _opened(root) as version:
        if version is None:
            return Removal(0, 0, True)
        with eviction_lock(version) as held:
            if not held:
                return Removal(0, 0, False)
            before = scan(version, collect=False).total
            usage = scan(version, collect=True)
            gone = _remove_orphans(version, usage)
            gone += evict(version, usage, target)
            return Removal(len(gone), before - usage.total, usage.total <= max(target, 0))


def clear(root: Path, folder: str | None = None) -> Removal:
    """Remove every entry (of one model) and abandoned temporary. Raises CacheFolderError."""
    with _opened(root) as version:
        if version is None:
            return Removal(0, 0, True)
        entries = _select(scan(version, collect=True), folder)
        gone = [entry for entry in entries if remove(version, entry)]
        for model in {entry.model for entry in entries}:
            remove_label(version, model)
        return Removal(len(gone), sum(entry.size for entry in gone), len(gone) == len(entries))


def model_name(fingerprint: bytes) -> str:
    """The `folder` of a model with that fingerprint, 32 bytes."""
    return model_folder(fingerprint)


@contextmanager
def _opened(root: Path) -> Iterator[int | None]:
    version = open_root(root, create=False)
    try:
        yield version
    finally:
        if version is not None:
            close_quietly(version)


def _select(usage: Usage, folder: str | None) -> list[StoredEntry]:
    return [entry for entry in usage.entries if folder is None or entry.model == folder]


def _remove_orphans(version: int, usage: Usage) -> list[StoredEntry]:
    """Entries that no chain from a first block reaches; a first block's parent has no entry and no name of its own,
    so the roots are told by their headers."""
    known = {(entry.model, entry.short) for entry in usage.entries}
    lost = [entry for entry in usage.entries if (entry.model, entry.parent) not in known]
    gone: list[StoredEntry] = []
    while lost:
        lost = [entry for entry in lost if not _is_first(version, entry) and remove(version, entry)]
        gone += lost
        removed = {(entry.model, entry.short) for entry in lost}
        lost = [entry for entry in usage.entries if (entry.model, entry.parent) in removed]
    paths = {entry.path for entry in gone}
    usage.entries = [entry for entry in usage.entries if entry.path not in paths]
    usage.total -= sum(entry.size for entry in gone)
    return gone


def _is_first(version: int, entry: StoredEntry) -> bool:
    """Whether the entry is a first block. True in doubt: then it stays."""
    try:
        with _entry_file(version, entry) as descriptor:
            header = parse_header(os.read(descriptor, HEADER_BYTES))
    except OSError:
        return True
    return header is None or short_key(root_key(VERSION, header.fingerprint)) == entry.parent


def _check(version: int, entry: StoredEntry) -> DamagedEntry | None:
    """What is wrong with an entry. Raises OSError when it cannot be read."""
    from infer.runtime.kvcache.disk.checksum import PayloadHash  # numpy: only for those who verify

    with _entry_file(version, entry) as descriptor:
        status = os.fstat(descriptor)
        start = os.pread(descriptor, _FOREIGN_BYTES, 0)
        header = parse_header(start[:HEADER_BYTES])
        if header is None:
            if is_foreign(start):
                return None
            reason = "the header is damaged"
        elif not _is_named(header, entry):
            reason = "it is another entry than its name says"
        elif status.st_size != HEADER_BYTES + header.payload_bytes or header.payload_bytes % header.tokens:
            reason = "it is not as long as it should be"
        else:
            payload = PayloadHash()
            with open(descriptor, "rb", closefd=False) as file:
                file.seek(HEADER_BYTES)
                while piece := file.read(_PIECE):  # buffered: whole pieces up to the end
                    payload.update(piece)
            if payload.digest() == header.checksum:
                return None
            reason = "the payload is damaged"
    return DamagedEntry(entry.path, reason, (status.st_dev, status.st_ino))


def _is_named(header: Header, entry: StoredEntry) -> bool:
    return (header.key.hex(), short_key(header.parent), header.tokens, model_folder(header.fingerprint)) == (
        entry.key,
        entry.parent,
        entry.tokens,
        entry.model,
    )


@contextmanager
def _entry_file(version: int, entry: StoredEntry) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(entry.path, flags, dir_fd=version)
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)
