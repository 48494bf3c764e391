"""Keeps the store within its limit: what lies there, what has to go, and who may add how much.

The tree of blocks is read from the names, so a scan opens no entry. Leaves go first, the least recently used before
others (mtime is the time of last use), so that a parent never goes before its children. A time in the future
comes from a clock that jumped: it counts as older than any other.

With several processes: each may write a 256th of the limit per scan on its own account, and all together stop
at 15/16 of the limit, which leaves room for what 16 of them have not seen of each other. Where room has to be made, or
is scarce, one process at a time looks, evicts and reserves, under a lock that is never waited for: who does not get
it drops its entry. A temporary has its full size from the start, so a reservation is seen by everyone.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from infer.runtime.kvcache.disk.folder import FILE_MODE, close_quietly
from infer.runtime.kvcache.disk.format import (
    MODEL_FOLDER,
    TEMPORARY_PREFIX,
    parse_entry_name,
)

LOCK_NAME = "lock"
DEFAULT_LIMIT = 20 * 10**9
MAX_ENTRIES = 200_000  # bounds the time of a scan: about half a second

_DISK_BLOCK = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FUTURE_NS = 60 * 10**9
_ABANDONED_NS = 24 * 3600 * 10**9
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.01


class StoredEntry(NamedTuple):
    """One entry as its name and status tell it. path: below the version folder. used_ns: time of last use."""

    model: str
    path: str
    parent: str
    tokens: int
    key: str
    size: int
    used_ns: int

    @property
    def short(self) -> str:
        """What its children call it."""
        return self.key[:32]


@dataclass
class Usage:
    """entries: everything readable by this version. total: their bytes, those of temporaries and of folders."""

    entries: list[StoredEntry] = field(default_factory=list)
    total: int = 0
    temporaries: int = 0


class Room(Enum):
    """Whether an entry may be stored."""

    GRANTED = 0
    BUSY = 1  # another process is making room
    NONE = 2  # nothing else may go
    TOO_LARGE = 3  # larger than the limit
    DISK_FULL = 4  # the free-space floor


def disk_bytes(size: int) -> int:
    """What a file of that size takes on disk."""
    return -(-size // _DISK_BLOCK) * _DISK_BLOCK


def scan(version: int, *, collect: bool) -> Usage:
    """What lies in the version folder open as `version`. collect: remove temporaries whose writers are gone.

    Unknown names are passed over. Never raises OSError: what cannot be listed is not counted.
    """
    usage = Usage()
    for model in _models(version):
        _scan_model(version, model, usage, collect=collect)
    return usage


def collect_temporaries(version: int) -> None:
    """Remove temporaries whose writers are gone, without looking at entries. Never raises OSError."""
    for model in _models(version):
        with suppress(OSError), _opened(version, model) as folder:
            for name in os.listdir(folder):
                if name.startswith(TEMPORARY_PREFIX):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if _is_abandoned(folder, name, status.st_mtime_ns):
                        os.unlink(name, dir_fd=folder)


def remove(version: int, entry: StoredEntry) -> bool:
    """Whether the entry is gone now."""
    try:
        os.unlink(entry.path, dir_fd=version)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def evict(
    version: int, usage: Usage, target: int, *, keep: frozenset[str] = frozenset()
) -> list[StoredEntry]:
    """Remove leaves, least recently used first, until usage.total ≤ target; what was removed, usage brought up to date.

    keep: `short` names that stay. What cannot be removed stays, and its parents with it.
    """
    now = time.time_ns()
    children = Counter((entry.model, entry.parent) for entry in usage.entries)
    known = {(entry.model, entry.short): entry for entry in usage.entries}

    def rank(entry: StoredEntry) -> tuple[bool, int, str]:
        return entry.used_ns <= now + _FUTURE_NS, entry.used_ns, entry.path

    heap = [
        (rank(entry), place, entry)
        for place, entry in enumerate(usage.entries)
        if not children[entry.model, entry.short] and entry.short not in keep
    ]
    heapq.heapify(heap)
    gone: list[StoredEntry] = []
    while heap and usage.total > target:
        _, place, entry = heapq.heappop(heap)
        if not remove(version, entry):
            continue
        usage.total -= entry.size
        gone.append(entry)
        parent = (entry.model, entry.parent)
        children[parent] -= 1
        above = known.get(parent)
        if above is not None and not children[parent] and above.short not in keep:
            heapq.heappush(heap, (rank(above), place, above))
    removed = {entry.path for entry in gone}
    usage.entries = [entry for entry in usage.entries if entry.path not in removed]
    return gone


@contextmanager
def eviction_lock(version: int) -> Iterator[bool]:
    """Whether this process may make room now. Waits 40 ms at most."""
    import fcntl

    held = False
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(LOCK_NAME, flags, FILE_MODE, dir_fd=version)
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    break
                time.sleep(_LOCK_PAUSE_S)
            else:
                held = True
                break
        yield held
    finally:
        close_quietly(descriptor)


class Quota:
    """Admits entries. Used by one thread."""

    def __init__(self, version: int, limit: int | None, free_floor: int) -> None:
        """limit in bytes, None for a tenth of the free disk and 20 GB at most. free_floor: bytes to leave free."""
        self._version = version
        self._limit = limit
        self._floor = free_floor
        self._grant = 0
        self.scanned = False  # and thereby abandoned temporaries collected

    @contextmanager
    def admit(self, size: int, model: str, parent: str) -> Iterator[Room]:
        """Whether an entry file of `size` bytes, child of `parent`, may be stored. A lock may be held inside the
        `with`: create the temporary there, in its full size, and leave.

        Raises OSError when the lock file cannot be opened or the disk cannot be asked for its free space.
        """
        size = disk_bytes(size)
        if self._limit is not None and size > self._limit:
            yield Room.TOO_LARGE
            return
        free = self._free()
        if size <= self._grant and free - size >= self._floor:
            self._grant -= size
            yield Room.GRANTED
            return
        usage = scan(self._version, collect=True)
        self.scanned = True
        limit = self._limit_now(usage, free)
        share = limit // 256
        if size <= share and usage.total + share <= limit * 15 // 16 and free - share >= self._floor:
            self._grant = share - size if len(usage.entries) < MAX_ENTRIES else 0
            if self._grant:
                yield Room.GRANTED
                return
        with eviction_lock(self._version) as held:
            yield self._make_room(size, model, parent) if held else Room.BUSY

    def _make_room(self, size: int, model: str, parent: str) -> Room:
        usage = scan(self._version, collect=True)
        free = self._free()
        limit = self._limit_now(usage, free)
        if size > limit:
            return Room.TOO_LARGE
        # What may lie here with the new entry in: bounded by the limit, and by what leaves the floor free.
        ceiling = limit * 15 // 16 if size <= limit // 2 else limit
        by_disk = usage.total + free - self._floor
        if usage.total + size > min(ceiling, by_disk) or len(usage.entries) >= MAX_ENTRIES:
            target = min(ceiling * 9 // 10, ceiling - size, by_disk - size)
            if len(usage.entries) >= MAX_ENTRIES:
                target = min(target, usage.total * 9 // 10)
            evict(self._version, usage, target, keep=self._ancestors(usage, model, parent))
        if usage.total + size > by_disk:
            return Room.DISK_FULL
        return Room.GRANTED if usage.total + size <= ceiling else Room.NONE

    def _limit_now(self, usage: Usage, free: int) -> int:
        if self._limit is not None:
            return self._limit
        return min(DEFAULT_LIMIT, (usage.total + free) // 10)

    def _free(self) -> int:
        status = os.fstatvfs(self._version)
        return status.f_bavail * status.f_frsize

    @staticmethod
    def _ancestors(usage: Usage, model: str, parent: str) -> frozenset[str]:
        """The chain that the new entry continues: without it the entry could never be found."""
        parents = {entry.short: entry.parent for entry in usage.entries if entry.model == model}
        chain: set[str] = set()
        while parent in parents and parent not in chain:
            chain.add(parent)
            parent = parents[parent]
        return frozenset(chain)


def _models(version: int) -> list[str]:
    """Names of the models' folders; symlinks are none."""
    with suppress(OSError), _opened(version, ".") as descriptor, os.scandir(descriptor) as found:
        return [
            item.name
            for item in found
            if MODEL_FOLDER.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
        ]
    return []


def _scan_model(version: int, model: str, usage: Usage, *, collect: bool) -> None:
    user = os.geteuid()
    with (
        suppress(OSError),
        _opened(version, model) as descriptor,
        os.scandir(descriptor) as found,
    ):
        usage.total += os.fstat(descriptor).st_blocks * 512
        for item in found:
            name = parse_entry_name(item.name)
            if name is None and not item.name.startswith(TEMPORARY_PREFIX):
                continue
            try:
                status = item.stat(follow_symlinks=False)
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_uid != user:
                continue
            size = max(disk_bytes(status.st_size), status.st_blocks * 512)
            if name is not None:
                parent, tokens, key = name
                path = f"{model}/{item.name}"
                usage.entries.append(StoredEntry(model, path, parent, tokens, key, size, status.st_mtime_ns))
            elif collect and _is_abandoned(descriptor, item.name, status.st_mtime_ns):
                with suppress(OSError):
                    os.unlink(item.name, dir_fd=descriptor)
                continue
            else:
                usage.temporaries += 1
            usage.total += size


def _is_abandoned(folder: int, name: str, written_ns: int) -> bool:
    """Writers keep an flock on their temporary, and the kernel drops it when they die, however they die.

    Where the file system knows no flock, a day without a change decides.
    """
    import fcntl

    try:
        descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        return abs(time.time_ns() - written_ns) > _ABANDONED_NS
    finally:
        close_quietly(descriptor)
    return True


@contextmanager
def _opened(version: int, path: str) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER, dir_fd=version)
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)
