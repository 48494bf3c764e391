"""`infer session`: the conversations that `infer run --session` keeps."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli import render
from infer.cli.config import data_dirs
from infer.cli.options import JsonOptions, NoteOptions, Options, complete_session, takes
from infer.cli.output import write_result
from infer.runtime.errors import SessionError, UsageError, did_you_mean

if TYPE_CHECKING:
    from infer.runtime.store.session_format import Message, Session
    from infer.runtime.store.sessions import SessionFile, SessionStore

_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name of `infer session ls`.", autocompletion=complete_session)
]


_FORMATS = ("md", "jsonl", "json")
_AROUND = 30  # characters shown on both sides of what was searched for


@takes(JsonOptions)
def ls(options: JsonOptions) -> None:
    """List sessions, the one used last first.

    Examples:
      infer session ls
      infer session ls --json | jq -r '.sessions[].name'
    """
    store = _store()
    if options.json:
        rows = [_row(store, file) for file in store.files()]
        render.emit(json.dumps({"folder": str(store.folder), "sessions": rows}))
        return
    for line in listing(store):
        render.emit(line)


def listing(store: SessionStore) -> list[str]:
    """A table of all sessions, for people."""
    rows = [_row(store, file) for file in store.files()]
    lines = [("NAME", "TURNS", "LAST USED", "MODEL")]
    for row in rows:
        used = render.local_time(row["modified"])
        turns = "-" if row["turns"] is None else str(row["turns"])
        lines.append((row["name"], turns, used, row["model"] or f"damaged: {row['error']}"))
    return render.columns(lines, right=(1,))


@takes(JsonOptions)
def show(options: JsonOptions, name: _Name) -> None:
    """Print a conversation.

    Examples:
      infer session show trip
      infer session show trip --json
    """
    session = _read(_store(), name)
    write_result(_object(session) if options.json else as_text(session))


@takes(JsonOptions)
def search(
    options: JsonOptions,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="In any case: upper, lower or mixed.")],
) -> None:
    """Find sessions by what was said in them.

    Examples:
      infer session search "train to Rome"
      infer session search rome --json | jq -r '.matches[].session'
    """
    if not text:
        raise UsageError("search needs a text to look for")
    store = _store()
    if not options.json:
        for line in matches(store, text):
            render.emit(line)
        return
    found = [
        {"session": session.name, "message": number, "role": message.role, "content": message.content}
        for session, number, message in _search(store, text)
    ]
    render.emit(json.dumps({"matches": found}))


def matches(store: SessionStore, text: str) -> list[str]:
    """A table of the messages that hold a text, for people."""
    lines = [
        (session.name, str((number + 1) // 2), message.role, _excerpt(message.content, text))
        for session, number, message in _search(store, text)
    ]
    return render.columns([("NAME", "TURN", "ROLE", "TEXT"), *lines], right=(1,)) if lines else []


def _search(store: SessionStore, text: str) -> Iterator[tuple[Session, int, Message]]:
    """Messages that hold the text, with their number, from 1; the system message is 0. Damaged sessions hold none."""
    from infer.runtime.store.session_format import Message

    wanted = text.casefold()
    for file in store.files():
        try:
            session = store.read(file.name)
        except SessionError as error:
            render.say(f"infer: warning: {error}")
            continue
        if session is None:
            continue
        system = [] if session.system is None else [(0, Message("system", session.system))]
        for number, message in [*system, *enumerate(session.messages, 1)]:
            if wanted in message.content.casefold():
                yield session, number, message


def _excerpt(content: str, text: str) -> str:
    at = max(0, content.casefold().find(text.casefold()))  # of the folded text, which may be a little longer
    start, end = max(0, at - _AROUND), at + len(text) + _AROUND
    line = " ".join(content[start:end].split())
    return ("…" if start else "") + line + ("…" if end < len(content) else "")


@takes(NoteOptions)
def rename(
    options: NoteOptions,
    name: _Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The name it gets.")],
) -> None:
    """Give a conversation another name.

    Examples:
      infer session rename trip rome-2026
    """
    store = _store()
    if not store.rename(name, new):
        raise _unknown(store, name)
    if not options.quiet:
        render.say(f"session {name} is now {new}")


@takes(NoteOptions)
def rm(
    options: NoteOptions,
    name: _Name,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a conversation.

    What the prefix cache holds of it is another matter: see `infer cache clear`.

    Examples:
      infer session rm trip
      infer session rm -y trip
    """
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
        str,
        typer.Option(
            "--format",
            metavar="md|jsonl|json",
            help="jsonl: a line for each message, word for word; json: what `show --json` prints.",
        ),
    ] = "md",
) -> None:
    """Print a conversation as Markdown, JSON lines or JSON.

    Examples:
      infer session export trip > trip.md
      infer session export trip --format jsonl
    """
    if form not in _FORMATS:
        raise UsageError(f"--format must be md, jsonl or json, not {form!r}")
    session = _read(_store(), name)
    if form == "md":
        write_result(_markdown(session))
    else:
        write_result(*([_object(session)] if form == "json" else _messages(session)))


def _store() -> SessionStore:
    from infer.runtime.store.sessions import SessionStore

    return SessionStore(data_dirs())


def _read(store: SessionStore, name: str) -> Session:
    session = store.read(name)
    if session is None:
        raise _unknown(store, name)
    return session


def _unknown(store: SessionStore, name: str) -> SessionError:
    meant = did_you_mean(name, (file.name for file in store.files()))
    return SessionError(
        f"there is no session {name!r} in {store.folder}{meant}; `infer session ls` lists them"
    )


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
    return {
        "name": session.name,
        "model": session.model,
        "created": session.created,
        "messages": _messages(session),
    }


def _messages(session: Session) -> list[dict[str, object]]:
    system = [{"role": "system", "content": session.system}] if session.system is not None else []
    messages = [
        {key: value for key, value in dataclasses.asdict(message).items() if value or key == "content"}
        for message in session.messages
    ]
    return [*system, *messages]


def _about(session: Session, message: Message) -> str:
    """What of an answer is out of the ordinary: another model than the session's, an answer that was cut short."""
    facts = [message.model] if message.model not in ("", session.model) else []
    facts += [message.finish] if message.finish not in ("", "stop") else []
    return ", ".join(facts)


def as_text(session: Session) -> str:
    """For people."""
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
