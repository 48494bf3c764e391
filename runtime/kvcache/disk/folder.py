"""Opens cache folders, and refuses those that somebody else could write to or has planted.

Checked on the open directory, and everything below it is reached through that descriptor, so that a folder swapped
afterwards changes nothing. Folders above the root are not checked: who may rename them can at worst put a folder of
their own in its place, and that is refused as another user's.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from infer.runtime.errors import InferError
from infer.runtime.kvcache.disk.format import VERSION_FOLDER

FOLDER_MODE = 0o700
FILE_MODE = 0o600


class CacheFolderError(InferError):
    """The cache folder cannot be used."""


def open_root(root: Path, *, create: bool) -> int | None:
    """Descriptor of <root>/kv-v1; None where it does not exist and is not to be created.

    Raises CacheFolderError when either is a symlink, no folder, another user's, writable for group or others, or out
    of reach.
    """
    if not hasattr(os, "geteuid"):
        raise CacheFolderError(f"{root}: this system cannot keep a cache folder private")
    try:
        if create and not os.path.lexists(root):
            root.parent.mkdir(parents=True, exist_ok=True)
        base = _open_folder(str(root), None, root, create=create)
    except OSError as error:
        raise _unusable(root, error) from None
    if base is None:
        return None
    try:
        version = open_own_folder(VERSION_FOLDER, base, root / VERSION_FOLDER, create=create)
    finally:
        close_quietly(base)
    return version


def close_quietly(descriptor: int) -> None:
    """For descriptors nothing was written to: whether closing them fails matters to nobody."""
    with suppress(OSError):
        os.close(descriptor)


def open_own_folder(name: str, parent: int, shown: Path, *, create: bool) -> int | None:
    """A folder that only this program fills, with mode 0700; None where it is missing and not to be created.

    Raises CacheFolderError like `open_root`. shown: the path for messages.
    """
    try:
        descriptor = _open_folder(name, parent, shown, create=create)
        if descriptor is not None and create:
            with suppress(OSError):
                if os.fstat(descriptor).st_mode & 0o077:
                    os.fchmod(descriptor, FOLDER_MODE)
    except OSError as error:
        raise _unusable(shown, error) from None
    return descriptor


def _open_folder(name: str, parent: int | None, shown: Path, *, create: bool) -> int | None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            return None
        with suppress(FileExistsError):
            os.mkdir(name, FOLDER_MODE, dir_fd=parent)
        descriptor = os.open(name, flags, dir_fd=parent)
    try:
        reason = _refusal(os.fstat(descriptor))
        if reason is not None:
            raise CacheFolderError(f"{shown}: {reason}")
    except BaseException:
        close_quietly(descriptor)
        raise
    return descriptor


def _refusal(status: os.stat_result) -> str | None:
    if status.st_uid != os.geteuid():
        return "the cache folder belongs to another user; choose one of your own with --cache-dir"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "the cache folder is writable for others; make it private with chmod 700"
    return None


def _unusable(shown: Path, error: OSError) -> CacheFolderError:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return CacheFolderError(f"{shown}: the cache folder is a symlink or no folder; name a real one")
    return CacheFolderError(f"{shown}: the cache folder cannot be used: {error.strerror or error}")
