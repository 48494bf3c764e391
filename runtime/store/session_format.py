"""What a kept conversation is, and its form in a file of JSON lines.

The first line is the header, `{"infer_session": 1, "model", "created", "system"}`. Then user and assistant take
turns: `{"role", "content", "time"}`, the assistant's line also with the "model" that answered, the "finish" reason of
the answer and its "thinking", where there was any. Times are UTC, ISO 8601.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from infer.runtime.errors import SessionError

VERSION = 1
_ROLES = ("user", "assistant")
# JSON leaves these as they are, but terminals obey the first and other programs end lines at the last.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}

# device, inode, size, mtime_ns, ctime_ns: a file with another one is not the file that was read.
Stamp = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Message:
    """One line. Only an assistant's message has a model, as `-m` takes it, a finish reason and thinking."""

    role: str
    content: str
    time: str = ""
    model: str = ""
    finish: str = ""
    thinking: str = ""


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
    stamp: Stamp | None = None

    @property
    def turns(self) -> list[tuple[Message, Message]]:
        """Questions with their answers."""
        return list(zip(self.messages[::2], self.messages[1::2], strict=True))


def now() -> str:
    """UTC to the second, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def encode(session: Session, system: str | None, messages: Sequence[Message]) -> bytes:
    """The session's file with this system message and these messages.

    Lines it has already are kept byte for byte, whatever else they hold, as far as the messages are the same.
    """
    same = next(
        (i for i, pair in enumerate(zip(session.messages, messages, strict=False)) if pair[0] != pair[1]),
        min(len(session.messages), len(messages)),
    )
    if session.data and system == session.system and same == len(session.messages):
        data = session.data if session.data.endswith(b"\n") else session.data + b"\n"
    else:
        lines = [line for line in session.data.split(b"\n") if line.strip()]
        header: dict[str, object] = _fields(lines[0]) if lines else {"infer_session": VERSION}
        header |= {"model": session.model, "created": session.created, "system": system}
        data = _line(**header) + b"".join(line + b"\n" for line in lines[1 : 1 + same])
    for message in messages[same:]:
        more = {"model": message.model, "finish": message.finish} if message.role == "assistant" else {}
        more |= {"thinking": message.thinking} if message.thinking else {}
        data += _line(role=message.role, content=message.content, time=message.time, **more)
    return data


def _line(**fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).translate(_ESCAPES).encode("utf-8") + b"\n"


def parse(name: str, path: Path, data: bytes, stamp: Stamp) -> Session:
    """Raises SessionError, with the line, for what is not of the form."""
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
    more = {key: _text(fields, key) for key in ("time", "model", "finish", "thinking") if key in fields}
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
