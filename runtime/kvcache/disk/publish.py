"""From bytes in memory to an entry that exists under its name whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

from infer.runtime.kvcache.disk.folder import FILE_MODE, close_quietly
from infer.runtime.kvcache.disk.format import TEMPORARY_PREFIX

_CHUNK = 1 << 20
# what file systems without hard links answer
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class OutOfTime(Exception):
    """The time to finish writing is over."""


class Temporary:
    """An entry that is being written, at its full size from the start.

    Its flock tells other processes that the writer lives; nobody waits for it. Use as a context manager: what
    was not published is removed.
    """

    def __init__(self, folder: int, final: str, size: int) -> None:
        """folder: descriptor of the model's folder, used as long as this object. final: the entry's name there.

        Raises OSError.
        """
        self._folder = folder
        self._final = final
        self._name = f"{TEMPORARY_PREFIX}{secrets.token_hex(12)}"
        self._file = self._alive = -1
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._name, flags, FILE_MODE, dir_fd=folder)
            self._alive = _flag_as_alive(self._file)
            os.ftruncate(self._file, size)
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Temporary:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write(self, header: bytes, payload: memoryview, expired: Callable[[], bool]) -> None:
        """Raises OSError; OutOfTime once `expired` says so, asked every MiB."""
        pieces = [memoryview(header), *(payload[at : at + _CHUNK] for at in range(0, len(payload), _CHUNK))]
        for piece in pieces:
            if expired():
                raise OutOfTime
            done = 0
            while done < len(piece):
                count = os.write(self._file, piece[done:])
                if count <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += count

    def publish(self) -> None:
        """Give the entry its name; the first writer wins, and being second is no error. Raises OSError."""
        file, self._file = self._file, -1
        os.close(file)  # some file systems report a failed write only here
        try:
            os.link(self._name, self._final, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(self._name, self._final, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def discard(self) -> None:
        """Remove the temporary name and close everything. Nothing is raised."""
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)
        for descriptor in (self._file, self._alive):
            if descriptor >= 0:
                close_quietly(descriptor)
        self._file = self._alive = -1


def _flag_as_alive(descriptor: int) -> int:
    """flock the file; the lock lasts as long as the duplicate that is returned (-1 where there are no such locks).

    A collector that comes between creation and lock takes the file away: then publishing fails, a miss.
    """
    import fcntl

    duplicate = os.dup(descriptor)
    try:
        fcntl.flock(duplicate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        close_quietly(duplicate)
        return -1
    return duplicate
