"""Stores entries in the background. The engine's thread only appends to a queue."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.errors import InferError
from infer.runtime.kvcache.disk.checksum import payload_digest
from infer.runtime.kvcache.disk.eviction import Quota, Room, collect_temporaries
from infer.runtime.kvcache.disk.folder import close_quietly
from infer.runtime.kvcache.disk.format import HEADER_BYTES, Header, entry_name, short_key
from infer.runtime.kvcache.disk.label import write_label
from infer.runtime.kvcache.disk.publish import OutOfTime, Temporary
from infer.runtime.kvcache.disk.stats import StoreStats
from infer.runtime.store.files import human_size

# this entry only; the next may go through
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ENOENT, errno.EEXIST}
)
_REMEMBERED = 1 << 16
_NICE = 10


@dataclass(frozen=True)
class StoreFolder:
    """Descriptors of <root>/kv-v1 and of a model's folder in it, called `name`."""

    root: Path
    version: int
    model: int
    name: str

    def close(self) -> None:
        for descriptor in (self.model, self.version):
            close_quietly(descriptor)


@dataclass(frozen=True)
class PendingEntry:
    """payload: bytes that nobody changes any more."""

    key: bytes
    parent: bytes
    tokens: int
    payload: memoryview


class KeySet:
    """The last 65,536 keys put in."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        if len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)


class BackgroundWriter:
    """One thread, started with the first job. After a failure that will not pass, nothing more is written."""

    def __init__(
        self,
        folder: StoreFolder,
        fingerprint: bytes,
        quota: Quota,
        stats: StoreStats,
        *,
        queue_bytes: int,
        warn: Callable[[str], None],
        label: str,
    ) -> None:
        """queue_bytes: payloads that may wait. warn: may be called from the thread."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._quota = quota
        self._stats = stats
        self._queue_bytes = queue_bytes
        self._warn = warn
        self._label = label
        self._changed = threading.Condition()
        self._jobs: deque[PendingEntry | tuple[str, ...]] = deque()
        self._waiting_bytes = 0
        self._deadline: float | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._dropped = KeySet()

    def has_room(self, size: int) -> bool:
        """Whether an entry of `size` payload bytes would be taken now."""
        return (
            not self._stopped and self._deadline is None and self._waiting_bytes + size <= self._queue_bytes
        )

    def offer(self, entry: PendingEntry) -> bool:
        """Take an entry, or drop it when the queue is full, writing has stopped, or its parent was dropped."""
        size = len(entry.payload)
        with self._changed:
            if not self.has_room(size) or entry.parent in self._dropped:
                self._drop(entry)
                return False
            self._waiting_bytes += size
            self._push(entry)
        return True

    def touch(self, names: tuple[str, ...]) -> None:
        """Mark entries as just used, later."""
        with self._changed:
            if names and not self._stopped and self._deadline is None:
                self._push(names)

    def close(self, timeout: float) -> bool:
        """Write what is waiting, for `timeout` seconds at most, drop the rest. Whether the thread has ended."""
        with self._changed:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout + 0.05)
        return not thread.is_alive()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is waiting or being written. False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs or self._stopped, timeout)

    def _push(self, job: PendingEntry | tuple[str, ...]) -> None:
        self._jobs.append(job)
        self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
            self._thread.start()

    def _drop(self, entry: PendingEntry) -> None:
        self._dropped.add(entry.key)
        self._stats.dropped_entries += 1

    def _expired(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _run(self) -> None:
        # on Linux this concerns the thread alone; elsewhere it would slow the whole process
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._deadline is not None)
                if not self._jobs or self._stopped or self._expired():
                    break
                job = self._jobs[0]
            if isinstance(job, PendingEntry):
                self._store_or_stop(job)
            else:
                self._touch(job)
            with self._changed:
                self._jobs.popleft()
                if isinstance(job, PendingEntry):
                    self._waiting_bytes -= len(job.payload)
                self._changed.notify_all()
        if not (self._quota.scanned or self._stopped or self._expired()):
            collect_temporaries(self._folder.version)
        with self._changed:
            for job in self._jobs:
                if isinstance(job, PendingEntry):
                    self._drop(job)
            self._jobs.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def _store_or_stop(self, entry: PendingEntry) -> None:
        stored = False
        try:
            stored = entry.parent not in self._dropped and self._store(entry)
        except OutOfTime:
            pass
        except OSError as error:
            if error.errno not in _PASSING:
                self._stop(f"cannot write to {self._folder.root}: {error.strerror or error}")
        except InferError as error:
            self._stop(str(error))
        except MemoryError:
            pass
        with self._changed:
            if stored:
                self._dropped.discard(entry.key)
            else:
                self._drop(entry)

    def _stop(self, reason: str) -> None:
        self._stopped = True
        self._warn(f"{reason}; the prompt cache stores nothing more in this run")

    def _store(self, entry: PendingEntry) -> bool:
        """Whether the entry is on disk now. Raises OSError, OutOfTime, CacheFolderError."""
        name = entry_name(entry.parent, entry.tokens, entry.key)
        size = HEADER_BYTES + len(entry.payload)
        if self._is_stored(name):
            return True
        temporary: Temporary | None = None
        with self._quota.admit(size, self._folder.name, short_key(entry.parent)) as room:
            if room is Room.GRANTED:
                temporary = Temporary(self._folder.model, name, size)
        if temporary is None:
            self._explain(room, size)
            return False
        with temporary:
            header = Header(
                key=entry.key,
                parent=entry.parent,
                fingerprint=self._fingerprint,
                tokens=entry.tokens,
                payload_bytes=len(entry.payload),
                checksum=payload_digest(entry.payload),
            )
            temporary.write(header.encode(), entry.payload, self._expired)
            temporary.publish()
        self._stats.written_entries += 1
        self._stats.written_bytes += size
        if self._label:
            write_label(self._folder.model, self._label)
            self._label = ""
        return True

    def _is_stored(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._folder.model, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _explain(self, room: Room, size: int) -> None:
        if room is Room.TOO_LARGE:
            self._warn(
                f"one entry of the prompt cache takes {human_size(size)}, more than --cache-limit allows"
            )
        elif room is Room.DISK_FULL:
            self._stop(f"the disk of {self._folder.root} is nearly full")

    def _touch(self, names: tuple[str, ...]) -> None:
        for name in names:
            with suppress(OSError):
                os.utime(name, dir_fd=self._folder.model, follow_symlinks=False)
