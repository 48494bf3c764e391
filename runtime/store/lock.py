"""One process at a time per download, or per conversation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infer.runtime.errors import DownloadError, InferError
from infer.runtime.store.files import Notify


@contextmanager
def exclusive(
    path: Path, *, busy: str, notify: Notify | None, error: type[InferError] = DownloadError
) -> Iterator[None]:
    """Hold an flock on `path`, which is removed at the end.

    While another process holds it: say `busy` once through `notify` and wait, or raise error(busy) where
    notify is None. The kernel lets go of the lock when the holder dies, however it dies.
    """
    descriptor = _acquire(path, busy, notify, error)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, busy: str, notify: Notify | None, error: type[InferError]) -> int:
    import fcntl

    said = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if notify is None:
                    raise error(busy) from None
                if not said:
                    notify(busy)
                    said = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # The holder before us removed this file: what we locked has no name any more.
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
