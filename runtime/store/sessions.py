"""Conversations kept across runs: one JSONL file each, which is replaced whole and never edited in place.

The first line is the header, `{"infer_session": 1, "model", "created", "system"}`. Then user and assistant take
turns: `{"role", "content", "time"}`, the assistant's line also with the "model" that answered and the "finish"
reason of the answer. Times are UTC, ISO 8601. Lines that are there already are kept byte for byte, whatever else
they hold; a file that is not of this form is an error and stays as it is.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from infer.runtime.errors import SessionError, UsageError
from infer.runtime.store.files import sync_folder
from infer.runtime.store.lock import exclusive
from infer.runtime.store.paths import DataDirs

VERSION = 1
_SUFFIX = ".jsonl"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_LARGEST = 64 << 20  # bytes of a file
_ROLES = ("user", "assistant")
# JSON leaves these as they are, but terminals obey the first and other programs end lines at the last.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}

# device, inode, size, mtime_ns, ctime_ns: a file with another one is not the file that was read.
_Stamp = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Message:
    """One line. Only an assistant's message has a model, as `-m` takes it, and a finish reason."""

    role: str
    content: str
    time: str = ""
    model: str = ""
    finish: str = ""


@dataclass(frozen=True)
class Session:
    """A conversation as it was read, or one to be written. messages: user, assistant, user, … in pairs.

    model: the one it was begun with, as `-m` takes it. system: None without a system message.
    """

    name: str
    model: str
    created: str
    system: str | None = None
    messages: tuple[Message, ...] = ()
    data: bytes = b""
    stamp: _Stamp | None = None

    @property
    def turns(self) -> list[tuple[Message, Message]]:
        """Questions with their answers."""
        return list(zip(self.messages[::2], self.messages[1::2], strict=True))


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


def now() -> str:
    """UTC to the second, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
        return _parse(name, path, data, _stamp(status))

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
        """The session with one more turn, durably on disk, to be called with the lock held.

        Whatever happens, the file holds the old content or the new one. Raises SessionError where it cannot be
        written, or is no longer what the session was read from.
        """
        path = self.path(session.name)
        data = session.data or _line(
            infer_session=VERSION, model=session.model, created=session.created, system=session.system
        )
        if not data.endswith(b"\n"):
            data += b"\n"
        for message in (user, assistant):
            more = {"model": message.model, "finish": message.finish} if message.role == "assistant" else {}
            data += _line(role=message.role, content=message.content, time=message.time, **more)
        if len(data) > _LARGEST:
            raise SessionError(f"{path}: would be larger than {_LARGEST >> 20} MiB; begin another session")
        try:
            if self._stamp_now(path) != session.stamp:
                raise SessionError(f"{path}: was changed meanwhile by another program: this turn is not kept")
            stamp = self._replace(path, data)
        except OSError as error:
            raise _failure(path, "this turn cannot be kept", error) from None
        messages = (*session.messages, user, assistant)
        return Session(
            session.name, session.model, session.created, session.system, messages, data=data, stamp=stamp
        )

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
    def _stamp_now(path: Path) -> _Stamp | None:
        try:
            return _stamp(path.lstat())
        except FileNotFoundError:
            return None

    def _replace(self, path: Path, data: bytes) -> _Stamp:
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


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _failure(path: Path, what: str, error: OSError) -> SessionError:
    return SessionError(f"{path}: {what}: {error.strerror or error}")


def _line(**fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).translate(_ESCAPES).encode("utf-8") + b"\n"


def _parse(name: str, path: Path, data: bytes, stamp: _Stamp) -> Session:
    header: dict[str, object] | None = None
    messages: list[Message] = []
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            fields = _fields(raw)
            if header is None:
                header = _header(fields)
            else:
                messages.append(_message(fields, _ROLES[len(messages) % 2]))
        except ValueError as error:
            raise SessionError(
                f"{path}: line {number}: {error}; repair it, or remove the session with `infer session rm {name}`"
            ) from None
    if header is None:
        raise SessionError(f"{path}: line 1: the header is missing; remove it with `infer session rm {name}`")
    if len(messages) % 2:
        raise SessionError(
            f"{path}: line {data.rstrip().count(10) + 1}: the question has no answer; remove that line"
        )
    system = header["system"]
    return Session(
        name=name,
        model=str(header["model"]),
        created=str(header["created"]),
        system=None if system is None else str(system),
        messages=tuple(messages),
        data=data,
        stamp=stamp,
    )


def _fields(raw: bytes) -> dict[str, object]:
    """One line as an object. Raises ValueError."""
    try:
        fields = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object in UTF-8") from None
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    return fields


def _header(fields: dict[str, object]) -> dict[str, object]:
    version = fields.get("infer_session")
    if type(version) is not int or version < 1:
        raise ValueError("not the header of a session")
    if version > VERSION:
        raise ValueError(f"written by a newer version of infer (format {version}, this one knows {VERSION})")
    system = fields.get("system")
    return {
        "model": _text(fields, "model"),
        "created": _text(fields, "created"),
        "system": None if system is None else _text(fields, "system"),
    }


def _message(fields: dict[str, object], role: str) -> Message:
    if fields.get("role") != role:
        raise ValueError(f"the role must be {role} here, as user and assistant take turns")
    more = {key: _text(fields, key) for key in ("time", "model", "finish") if key in fields}
    return Message(role, _text(fields, "content"), **more)


def _text(fields: dict[str, object], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is missing or no text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{key} holds half of a surrogate pair, which is no character") from None
    return value
