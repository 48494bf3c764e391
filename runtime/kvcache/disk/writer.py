"""Stores entries in the background. The engine's thread only appends to a queue."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
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
from infer.runtime.kvcache.disk.write_queue import PendingEntry, WriteQueue
from infer.runtime.store.files import human_size

# this entry only; the next may go through
_PASSING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ENOENT, errno.EEXIST}
)
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
        self._warn = warn
        self._label = label
        self._thread: threading.Thread | None = None
        self.queue = WriteQueue(queue_bytes, stats)

    def offer(self, entry: PendingEntry) -> bool:
        """Whether the entry was taken."""
        taken = self.queue.add(entry)
        if taken:
            self._start()
        return taken

    def found(self, keys: Iterable[bytes], names: tuple[str, ...]) -> None:
        """These entries are on disk: mark them as just used, later."""
        self.queue.found(keys, names)
        self._start()

    def close(self, timeout: float) -> bool:
        """Write what is waiting, for `timeout` seconds at most, drop the rest. Whether the thread has ended."""
        self.queue.finish_by(time.monotonic() + timeout)
        if self._thread is None:
            return True
        self._thread.join(timeout + 0.05)
        return not self._thread.is_alive()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # on Linux this concerns the thread alone; elsewhere it would slow the whole process
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        queue = self.queue
        while (job := queue.take()) is not None:
            started = time.thread_time()
            if isinstance(job, PendingEntry):
                queue.done(job, self._store_or_stop(job))
            else:
                self._touch(job)
                queue.done(job, True)
            queue.rest(time.thread_time() - started)
        if not (self._quota.scanned or queue.stopped or queue.expired):
            collect_temporaries(self._folder.version)
        queue.clear()

    def _store_or_stop(self, entry: PendingEntry) -> bool:
        """Whether the entry is on disk now."""
        try:
            return self._store(entry)
        except OutOfTime:
            pass
        except OSError as error:
            if error.errno not in _PASSING:
                self._stop(f"cannot write to {self._folder.root}: {error.strerror or error}")
        except InferError as error:
            self._stop(str(error))
        except MemoryError:
            pass
        return False

    def _stop(self, reason: str) -> None:
        self.queue.stopped = True
        self._warn(f"{reason}; the prompt cache stores nothing more in this run")

    def _store(self, entry: PendingEntry) -> bool:
        """Raises OSError, OutOfTime, CacheFolderError."""
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
            temporary.write(header.encode(), entry.payload, lambda: self.queue.expired)
            if entry.revoked:  # perhaps before the last byte was read
                return False
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
