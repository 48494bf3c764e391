"""Conversations kept across runs: one JSONL file each, which is replaced whole and never edited in place.

`session_format` says what is in it. Lines that are there already are kept byte for byte, whatever else they hold; a
file that is not of this form is an error and stays as it is.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from infer.runtime.errors import SessionError, UsageError
from infer.runtime.store.files import sync_folder
from infer.runtime.store.lock import exclusive
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.session_format import Message, Session, Stamp, encode, parse

_SUFFIX = ".jsonl"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_LARGEST = 64 << 20  # bytes of a file


@dataclass(frozen=True)
class SessionFile:
    """modified: seconds since 1970; size in bytes."""

    name: str
    path: Path
    modified: float
    size: int


def check_name(name: str, what: str = "a session") -> str:
    """The name, if it can be a file name anywhere. what: for messages. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:120]!r} is no name for {what}: up to 100 letters, digits, '.', '_' and '-', "
            "beginning with a letter, a digit or '_'"
        )
    return name


class SessionStore:
    """The sessions of one user. The folder need not exist; it is made, for this user alone, by the first lock."""

    def __init__(self, dirs: DataDirs) -> None:
        self.folder = dirs.state / "sessions"

    def path(self, name: str) -> Path:
        """Where a session lies or would lie. Raises UsageError for what is no name."""
        return self.folder / (check_name(name) + _SUFFIX)

    def files(self) -> list[SessionFile]:
        """All sessions, the one used last first. Raises SessionError."""
        found = []
        try:
            paths = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failure(self.folder, "cannot be read", error) from None
        for path in paths:
            name = path.name.removesuffix(_SUFFIX)
            if name == path.name or not _NAME.fullmatch(name):
                continue
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found.append(
                        (status.st_mtime_ns, SessionFile(name, path, status.st_mtime, status.st_size))
                    )
        return [file for _, file in sorted(found, key=lambda item: item[0], reverse=True)]

    def read(self, name: str) -> Session | None:
        """The session, or None where there is none. Raises SessionError, with the line, for a damaged file."""
        path = self.path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failure(path, "cannot be read", error) from None
        try:
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise SessionError(f"{path}: is not a file; move it away")
                data = file.read(_LARGEST + 1)
        except OSError as error:
            raise _failure(path, "cannot be read", error) from None
        if len(data) > _LARGEST:
            raise SessionError(
                f"{path}: larger than {_LARGEST >> 20} MiB, which no context holds; begin another"
            )
        return parse(name, path, data, _stamp(status))

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the session, so that no other process writes it. Raises SessionError where one holds it already."""
        path = self.path(name)
        try:
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            mode = self.folder.stat().st_mode
        except OSError as error:
            raise _failure(self.folder, "cannot be created", error) from None
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise SessionError(
                f"{self.folder}: others can write there: `chmod 700` it, after a look at what it holds"
            )
        busy = f"session {name} is in use by another process: wait for it, or use another name"
        lock = exclusive(self.folder / f".{name}.lock", busy=busy, notify=None, error=SessionError)
        with ExitStack() as stack:
            try:
                stack.enter_context(lock)
            except OSError as error:
                raise _failure(path, "cannot be locked", error) from None
            yield

    def append(self, session: Session, user: Message, assistant: Message) -> Session:
        """The session with one more turn, durably on disk, to be called with the lock held (see `write`)."""
        return self.write(session, (*session.messages, user, assistant), session.system, what="this turn")

    def write(
        self, session: Session, messages: Sequence[Message], system: str | None, *, what: str = "the session"
    ) -> Session:
        """The session with these messages, durably on disk, to be called with the lock held.

        Whatever happens, the file holds the old content or the new one. Raises SessionError where it cannot be
        written, or is no longer what the session was read from. what: the thing that is then lost, for the message.
        """
        path = self.path(session.name)
        data = encode(session, system, messages)
        if len(data) > _LARGEST:
            raise SessionError(f"{path}: would be larger than {_LARGEST >> 20} MiB; begin another session")
        try:
            if self._stamp_now(path) != session.stamp:
                raise SessionError(f"{path}: was changed meanwhile by another program: {what} is not kept")
            stamp = self._replace(path, data)
        except OSError as error:
            raise _failure(path, f"{what} cannot be kept", error) from None
        return replace(session, system=system, messages=tuple(messages), data=data, stamp=stamp)

    def rename(self, old: str, new: str) -> bool:
        """Give a session another name; False where there is none. Raises SessionError, also where the name is taken."""
        path, target = self.path(old), self.path(new)
        if not os.path.lexists(path):
            return False
        if old == new:
            return True
        with self.locked(old), self.locked(new):
            if os.path.lexists(target):
                raise SessionError(
                    f"there is a session {new} already: choose another name, or remove it first"
                )
            try:
                path.rename(target)
                sync_folder(self.folder)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise _failure(path, "cannot be renamed", error) from None
        return True

    def remove(self, name: str) -> bool:
        """Delete a session; False where there is none. Raises SessionError, also where it is in use."""
        path = self.path(name)
        if not os.path.lexists(path):
            return False
        with self.locked(name):
            try:
                self._temporary(path).unlink(missing_ok=True)
                path.unlink()
                sync_folder(self.folder)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise _failure(path, "cannot be removed", error) from None
        return True

    @staticmethod
    def _temporary(path: Path) -> Path:
        # One name per session: what a killed process left is overwritten by the next, which holds the lock.
        return path.with_name(f".{path.name}.tmp")

    @staticmethod
    def _stamp_now(path: Path) -> Stamp | None:
        try:
            return _stamp(path.lstat())
        except FileNotFoundError:
            return None

    def _replace(self, path: Path, data: bytes) -> Stamp:
        temporary = self._temporary(path)
        temporary.unlink(missing_ok=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        return _stamp(path.lstat())


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _failure(path: Path, what: str, error: OSError) -> SessionError:
    return SessionError(f"{path}: {what}: {error.strerror or error}")
