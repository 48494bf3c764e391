"""Reads one entry into a buffer, believing nothing: the result is exactly what was stored, or a miss."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from infer.runtime.kvcache.disk.checksum import payload_digest
from infer.runtime.kvcache.disk.folder import close_quietly
from infer.runtime.kvcache.disk.format import HEADER_BYTES, Header, entry_name, is_foreign, parse_header

Payload = npt.NDArray[np.uint8]
_FOREIGN_BYTES = 4096


class Outcome(Enum):
    VERIFIED = 0
    MISS = 1
    DAMAGED = 2  # a miss, and the file was removed if it still was the one that had been read


@dataclass(frozen=True)
class Wanted:
    """The one entry that would do. key and parent: 32 bytes. size: payload bytes, from the model."""

    key: bytes
    parent: bytes
    tokens: int
    size: int

    @property
    def name(self) -> str:
        return entry_name(self.parent, self.tokens, self.key)


def exists(model: int, wanted: Wanted) -> bool:
    """Whether something goes by that name."""
    try:
        os.stat(wanted.name, dir_fd=model, follow_symlinks=False)
    except OSError:
        return False
    return True


def read_entry(model: int, fingerprint: bytes, wanted: Wanted, out: Payload, *, clean: bool) -> Outcome:
    """Fill `out`, uint8 [wanted.size], with the payload; its contents mean nothing unless VERIFIED comes back.

    model: descriptor of the model's folder. clean: remove a damaged file. A file that cannot be read, is not a
    regular one, or belongs to another user or format version is a miss and stays.
    """
    name = wanted.name
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=model)
    except OSError:
        return Outcome.MISS
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return Outcome.MISS
        if status.st_size == HEADER_BYTES + wanted.size:
            header = bytearray(HEADER_BYTES)
            if not _fill(descriptor, [memoryview(header), out.data]):
                return Outcome.MISS
            if _is_exact(bytes(header), fingerprint, wanted, out):
                return Outcome.VERIFIED
        if is_foreign(os.pread(descriptor, _FOREIGN_BYTES, 0)):
            return Outcome.MISS
        if clean:
            remove_same(model, name, status)
    except (OSError, MemoryError):
        return Outcome.MISS
    finally:
        close_quietly(descriptor)
    return Outcome.DAMAGED


def remove_same(folder: int, name: str, status: os.stat_result) -> bool:
    """Remove what goes by `name` if it is the file of `status`, by device and inode. Raises OSError."""
    named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
        return False
    os.unlink(name, dir_fd=folder)
    return True


def _is_exact(header: bytes, fingerprint: bytes, wanted: Wanted, payload: Payload) -> bool:
    found = parse_header(header)
    return found == Header(
        key=wanted.key,
        parent=wanted.parent,
        fingerprint=fingerprint,
        tokens=wanted.tokens,
        payload_bytes=wanted.size,
        checksum=payload_digest(payload),
    )


def _fill(descriptor: int, buffers: list[memoryview]) -> bool:
    """Read until the buffers are full; False when the file ends before. Raises OSError."""
    while buffers:
        count = os.readv(descriptor, buffers)
        if count <= 0:
            return False
        while buffers and count >= len(buffers[0]):
            count -= len(buffers[0])
            del buffers[0]
        if buffers:
            buffers[0] = buffers[0][count:]
    return True
