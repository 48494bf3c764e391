"""`infer session`: the conversations that `infer run --session` keeps."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli import render
from infer.cli.config import data_dirs
from infer.cli.options import JsonOptions, NoteOptions, Options, complete_session, takes
from infer.cli.output import json_line, open_writer
from infer.runtime.errors import SessionError, UsageError

if TYPE_CHECKING:
    from infer.runtime.store.session_format import Message, Session
    from infer.runtime.store.sessions import SessionFile, SessionStore

HELP = "Conversations kept by `infer run --session`."

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name of `infer session ls`.", autocompletion=complete_session)
]


_FORMATS = ("md", "json")


@takes(JsonOptions)
def ls(options: JsonOptions) -> None:
    """List sessions, the one used last first."""
    store = _store()
    rows = [_row(store, file) for file in store.files()]
    if options.json:
        render.emit(json.dumps({"folder": str(store.folder), "sessions": rows}))
        return
    lines = [("NAME", "TURNS", "LAST USED", "MODEL")]
    for row in rows:
        used = render.local_time(row["modified"])
        turns = "-" if row["turns"] is None else str(row["turns"])
        lines.append((row["name"], turns, used, row["model"] or f"damaged: {row['error']}"))
    for line in render.columns(lines, right=(1,)):
        render.emit(line)


@takes(JsonOptions)
def show(options: JsonOptions, name: _Name) -> None:
    """Print a conversation."""
    session = _read(_store(), name)
    _write(_object(session) if options.json else _text(session))


@takes(NoteOptions)
def rm(
    options: NoteOptions,
    name: _Name,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a conversation. What the prefix cache holds of it is another matter: see `infer cache clear`."""
    store = _store()
    path = store.path(name)
    if os.path.lexists(path) and not yes and not render.confirm_deletion("session rm", str(path)):
        return
    if not store.remove(name):
        raise _unknown(store, name)
    if not options.quiet:
        render.say(f"deleted session {name}")


@takes(Options)
def export(
    options: Options,
    name: _Name,
    form: Annotated[
        str, typer.Option("--format", metavar="md|json", help="json: what `show --json` prints.")
    ] = "md",
) -> None:
    """Print a conversation as Markdown or JSON."""
    if form not in _FORMATS:
        raise UsageError(f"--format must be md or json, not {form!r}")
    session = _read(_store(), name)
    _write(_object(session) if form == "json" else _markdown(session))


def _store() -> SessionStore:
    from infer.runtime.store.sessions import SessionStore

    return SessionStore(data_dirs())


def _read(store: SessionStore, name: str) -> Session:
    session = store.read(name)
    if session is None:
        raise _unknown(store, name)
    return session


def _unknown(store: SessionStore, name: str) -> SessionError:
    return SessionError(f"there is no session {name!r} in {store.folder}; `infer session ls` lists them")


def _row(store: SessionStore, file: SessionFile) -> dict[str, Any]:
    """One line of `ls`. turns and model are null for a damaged file, whose error says what is wrong."""
    row: dict[str, Any] = {**dataclasses.asdict(file), "path": str(file.path)}
    try:
        session = store.read(file.name)
    except SessionError as error:
        return {**row, "turns": None, "model": None, "created": None, "error": str(error)}
    if session is None:  # removed since it was listed
        return {**row, "turns": 0, "model": "", "created": None, "error": "removed"}
    return {
        **row,
        "turns": len(session.turns),
        "model": session.model,
        "created": session.created,
        "error": None,
    }


def _object(session: Session) -> dict[str, object]:
    """The whole conversation; "messages" is what chat APIs take, the system message included."""
    system = [{"role": "system", "content": session.system}] if session.system is not None else []
    messages = [
        {key: value for key, value in dataclasses.asdict(message).items() if value or key == "content"}
        for message in session.messages
    ]
    return {
        "name": session.name,
        "model": session.model,
        "created": session.created,
        "messages": [*system, *messages],
    }


def _about(session: Session, message: Message) -> str:
    """What of an answer is out of the ordinary: another model than the session's, an answer that was cut short."""
    facts = [message.model] if message.model not in ("", session.model) else []
    facts += [message.finish] if message.finish not in ("", "stop") else []
    return ", ".join(facts)


def _text(session: Session) -> str:
    parts = [f"[system]\n{session.system}\n"] if session.system is not None else []
    for message in session.messages:
        about = _about(session, message)
        parts.append(
            f"[{message.role}{': ' + render.one_line(about) if about else ''}]\n{message.content.rstrip()}\n"
        )
    return "\n".join(parts)


def _markdown(session: Session) -> str:
    parts = [f"# {session.name}\n\n{render.one_line(session.model)}, {render.one_line(session.created)}\n"]
    if session.system is not None:
        parts.append(f"## System\n\n{session.system}\n")
    for message in session.messages:
        about = _about(session, message)
        title = message.role.capitalize() + (f" ({render.one_line(about)})" if about else "")
        parts.append(f"## {title}\n\n{message.content.rstrip()}\n")
    return "\n".join(parts)


def _write(content: str | dict[str, object]) -> None:
    """Text, or one JSON object, to stdout: byte for byte, unless that is a terminal. Raises OutputError."""
    writer = open_writer(None)
    if isinstance(content, dict):
        writer.queue(json_line(content))
    else:
        writer.queue((render.sanitize(content) if writer.terminal else content).encode())
    writer.drain()
    writer.close()
