"""What waits to be written, between the engine's thread and the writer's.

Nobody holds its lock during a system call, so a disk that hangs never blocks the engine.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from infer.runtime.kvcache.disk.stats import StoreStats

_REMEMBERED = 1 << 16
# Of the time of one core. The threads of a kernel wait for each other, so what one core loses they all lose, and a
# little more: at a hundredth, decode seemed to lose 2 to 3 % (38 pairs, within their noise).
_SHARE = 1 / 200


@dataclass(eq=False)
class PendingEntry:
    """payload: bytes that nobody changes any more, or lent ones, which nobody changes before `revoked`."""

    key: bytes
    parent: bytes
    tokens: int
    payload: memoryview
    lent: bool = False
    revoked: bool = False

    @property
    def own_bytes(self) -> int:
        """Memory that waits with it."""
        return 0 if self.lent else len(self.payload)


Job = PendingEntry | tuple[str, ...]  # names: entries to be marked as just used


class _Keys(OrderedDict[bytes, None]):
    """The last 65,536 keys put in."""

    def put(self, key: bytes) -> None:
        self[key] = None
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


class WriteQueue:
    """Entries in the order they came. One whose parent was dropped could never be found, so it is dropped too; what was
    dropped may be offered again.

    Bounded: copied payloads by most_bytes, lent ones by the blocks that there are.
    """

    def __init__(self, most_bytes: int, stats: StoreStats) -> None:
        self._most_bytes = most_bytes
        self._stats = stats
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._resting = threading.Condition(lock)
        self._jobs: OrderedDict[Job, None] = OrderedDict()
        self._current: Job | None = None
        self._bytes = 0
        self._known = _Keys()  # stored, found or waiting
        self._dropped = _Keys()  # and not stored since
        self._busy = False
        self._draining = False
        self._deadline: float | None = None
        self.stopped = False

    @property
    def expired(self) -> bool:
        """Whether the time to finish writing is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    # the engine's thread

    def wants(self, key: bytes, size: int) -> bool:
        """Whether an entry would be taken that is neither stored nor waiting. size: bytes of its payload, 0 if lent."""
        with self._changed:
            return key not in self._known and self._has_room(size)

    def add(self, entry: PendingEntry) -> bool:
        """Take an entry, or drop it when there is no room, writing has stopped, or its parent was dropped."""
        with self._changed:
            if entry.key in self._known:
                return False
            orphan = entry.parent in self._dropped and entry.parent not in self._known
            if orphan or not self._has_room(entry.own_bytes):
                self._drop(entry)
                return False
            self._known.put(entry.key)
            self._bytes += entry.own_bytes
            self._push(entry)
        return True

    def found(self, keys: Iterable[bytes], names: tuple[str, ...]) -> None:
        """These entries are on disk; they are marked as just used, later."""
        with self._changed:
            for key in keys:
                self._known.put(key)
                self._dropped.pop(key, None)
            if names and self._has_room(0):
                self._push(names)

    def withdraw(self, entry: PendingEntry) -> None:
        """Drop an entry if it still waits."""
        with self._changed:
            if entry in self._jobs:
                del self._jobs[entry]
                self._settle(entry, stored=False)

    def set_busy(self, busy: bool) -> None:
        """Whether somebody computes, so that the writer has to keep out of the way."""
        if busy != self._busy:
            with self._changed:
                self._busy = busy
                self._resting.notify()

    def finish_by(self, deadline: float) -> None:
        """Take nothing more, and let the writer go on at full speed until that time (of `time.monotonic`)."""
        with self._changed:
            if self._deadline is None:
                self._deadline = deadline
            self._changed.notify_all()
            self._resting.notify()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is waiting or being written. False after `timeout` seconds."""
        with self._changed:
            self._draining = True
            self._resting.notify()
            try:
                return self._changed.wait_for(self._is_empty, timeout)
            finally:
                self._draining = False

    # the writer's thread

    def take(self) -> Job | None:
        """The next job, waited for; None when there is to be no other."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._jobs or self._deadline is not None)
                if not self._jobs or self.stopped or self.expired:
                    return None
                job, _ = self._jobs.popitem(last=False)
                if isinstance(job, tuple) or job.parent not in self._dropped:
                    self._current = job
                    return job
                self._settle(job, stored=False)

    def done(self, job: Job, stored: bool) -> None:
        """Of the job last taken."""
        with self._changed:
            self._current = None
            self._settle(job, stored)

    def rest(self, cpu_s: float) -> None:
        """Wait as long as the share of a core asks for after `cpu_s` seconds of its time, or until nobody computes, or
        somebody waits for what is to be written."""
        with self._changed:
            self._resting.wait_for(self._may_go_on, cpu_s * (1 / _SHARE - 1))

    def clear(self) -> None:
        """Drop what is left."""
        with self._changed:
            while self._jobs:
                self._settle(self._jobs.popitem(last=False)[0], stored=False)

    # with the lock held

    def _has_room(self, size: int) -> bool:
        return not self.stopped and self._deadline is None and self._bytes + size <= self._most_bytes

    def _is_empty(self) -> bool:
        return self.stopped or not (self._jobs or self._current)

    def _may_go_on(self) -> bool:
        return not self._busy or self._draining or self._deadline is not None

    def _push(self, job: Job) -> None:
        self._jobs[job] = None
        self._changed.notify()

    def _settle(self, job: Job, stored: bool) -> None:
        if isinstance(job, PendingEntry):
            self._bytes -= job.own_bytes
            if stored:
                self._dropped.pop(job.key, None)
            else:
                self._drop(job)
        self._changed.notify_all()

    def _drop(self, entry: PendingEntry) -> None:
        self._known.pop(entry.key, None)
        self._dropped.put(entry.key)
        self._stats.dropped_entries += 1
