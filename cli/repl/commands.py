"""The slash commands: a function and a line of `COMMANDS` each. What it says of itself is its docstring."""

from __future__ import annotations

import functools
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.cli import config, conversation, input, sessions, thinking, toml_edit
from infer.cli.options import (
    DialogOptions,
    SamplingOptions,
    ThinkOptions,
    complete_model,
    complete_session,
)
from infer.cli.repl import clipboard
from infer.cli.sampling import sampling_params
from infer.runtime.errors import InferError, UsageError

if TYPE_CHECKING:
    from infer.cli.chat import ChatOptions
    from infer.cli.repl.chat import Chat

_FORGET = "default"
_KEYS = (
    'Enter sends; a \\ at the end of the line, Alt-Enter or """ … """ make a message of several lines.',
    "Up and Ctrl-R find earlier lines, Ctrl-X Ctrl-E opens the editor, Ctrl-Z suspends.",
    "Ctrl-C stops an answer and clears the line; twice, it exits, as Ctrl-D does.",
    "A message that begins with / needs a space before it.",
)


def _help(chat: Chat, argument: str) -> None:
    """List the commands and keys."""
    names = {name: f"{name} {command.usage}".rstrip() for name, command in COMMANDS.items()}
    width = 2 + max(map(len, names.values()))
    room = max(20, shutil.get_terminal_size().columns - 1)
    indent = width if room > 2 * width else 4
    lines = [
        textwrap.fill(f"{names[name]:<{width}}{command.summary}", room, subsequent_indent=" " * indent)
        for name, command in COMMANDS.items()
    ]
    keys = [textwrap.fill(line, room) for line in _KEYS]
    chat.display.tell("\n".join([*lines, "", *keys]))


def _system(chat: Chat, argument: str) -> None:
    """Show or set the system message; "" stands for none."""
    if not argument:
        chat.display.tell(chat.talk.session.system or "there is no system message")
        return
    text = "" if argument == '""' else argument
    chat.talk.set_system(text)
    chat.display.tell("system message set" if text else "system message removed")


def _set(chat: Chat, argument: str) -> None:
    """Show settings, or change one: /set temp 0.2, /set context drop-oldest, /set seed default."""
    name, _, value = argument.partition(" ")
    name, value = name.removeprefix("--"), value.strip()
    if not name:
        chat.display.tell("\n".join(_settings(chat.options)))
        return
    setting = _known_settings().get(name)
    if setting is None:
        raise UsageError(f"there is no setting {name[:60]!r}: {', '.join(_known_settings())}")
    if not value:
        chat.display.tell(_line(chat.options, name))
        return
    found = setting.default if value == _FORGET else config.from_text(setting.setting, value, f"/set {name}")
    changes = {**chat.changes, setting.setting.name: found}
    changed = _with(chat.options, changes)
    check_settings(changed)
    chat.options, chat.changes = changed, changes
    chat.display.thoughts = not changed.hide_thinking
    chat.display.tell(_line(changed, name))


def _with(options: ChatOptions, changes: Mapping[str, Any]) -> ChatOptions:
    """The options with what `/set` changed."""
    origins = {field: f"/set {config.flag(field).removeprefix('--')}" for field in changes}
    return replace(options, **{"origins": {**options.origins, **origins}, **changes})


def _show(chat: Chat, argument: str) -> None:
    """Show model, session and settings; /show history the conversation."""
    session = chat.talk.session
    if argument == "history":
        chat.display.tell(sessions.as_text(session).rstrip("\n") or "nothing has been said yet")
        return
    if argument:
        raise UsageError(f"/show takes nothing or history, not {argument[:60]!r}")
    model = chat.worker.model
    facts = {
        "model": chat.talk.model if model is None else f"{model.name} ({chat.talk.model})",
        "session": chat.talk.name or "none: kept in memory only; /save NAME keeps it",
        "turns": str(len(session.turns)),
        "system": session.system or "none",
        "context": "the model is being loaded" if model is None else f"{model.engine.ctx} tokens",
        "device": "" if model is None else f"{model.device}, kernel {model.kernel}",
        "waiting": f"{_count(len(chat.files), 'file')}, for the next message" if chat.files else "",
    }
    lines = [f"{name + ':':<9} {value}" for name, value in facts.items() if value]
    chat.display.tell("\n".join([*lines, "settings:", *(f"  {line}" for line in _settings(chat.options))]))


def _undo(chat: Chat, argument: str) -> None:
    """Take back the last question and its answer."""
    turn = _last_turn(chat) and chat.talk.undo()
    if turn:
        chat.display.tell(f"taken back: {_short(turn.question)}")


def _regen(chat: Chat, argument: str) -> None:
    """Answer the last question again."""
    turn = _last_turn(chat)
    if turn:
        chat.ask(turn.question, instead=True)


def _edit(chat: Chat, argument: str) -> None:
    """Change the last question, here or to TEXT, and have it answered again."""
    turn = _last_turn(chat)
    if turn and argument:
        chat.ask(argument, instead=True)
    elif turn:
        chat.draft, chat.replacing = turn.question, True


def _clear(chat: Chat, argument: str) -> None:
    """Begin a new conversation without a name; a session stays as it was."""
    name = chat.talk.name
    chat.talk.clear()
    chat.files.clear()
    chat.forget_left_out()
    chat.display.tell(f"session {name} is left as it is; this is a new conversation" if name else "cleared")


def _save(chat: Chat, argument: str) -> None:
    """Keep the conversation under a name from now on."""
    if not argument and not chat.talk.name:
        raise UsageError("/save needs a name")
    if argument and argument != chat.talk.name:
        chat.talk.save(argument)
    chat.display.tell(f"session {chat.talk.name} is kept, and so is every further turn")


def _load(chat: Chat, argument: str) -> None:
    """Go on with a session."""
    if not argument:
        raise UsageError("/load needs the name of a session; /sessions lists them")
    chat.talk.load(argument)
    chat.files.clear()
    chat.forget_left_out()
    chat.display.tell(f"session {argument}, {len(chat.talk.session.turns)} turns so far")
    if chat.talk.session.model != chat.talk.model:
        chat.notes.note(
            f"session {argument} was begun with {chat.talk.session.model}; {chat.talk.model} goes on with its text"
        )


def _sessions(chat: Chat, argument: str) -> None:
    """List the sessions, or those that hold a text."""
    found = sessions.matches(chat.talk.store, argument) if argument else sessions.listing(chat.talk.store)
    chat.display.tell("\n".join(found) or "there is nothing like that")


def _model(chat: Chat, argument: str) -> None:
    """Show the model, or go on with another."""
    if not argument:
        chat.display.tell(chat.talk.model)
        return
    before, spec = chat.talk.model, conversation.model_spec(argument)
    options = _with(replace(config.for_model(chat.options, spec), model=spec), chat.changes)
    check_settings(options)
    try:
        chat.load_model(spec)
        model = chat.wait_for_model()
    except (InferError, KeyboardInterrupt):
        if chat.talk.model != before:
            chat.load_model(before)
        raise
    chat.options = options
    chat.forget_left_out()
    chat.display.tell(f"{model.name} goes on with the conversation")


def _read(chat: Chat, argument: str) -> None:
    """Put a file before the next message; without a name, take back those that wait."""
    if not argument:
        chat.display.tell(f"{_count(len(chat.files), 'file')} taken back" if chat.files else "no file waits")
        chat.files.clear()
        return
    path = os.path.expanduser(argument)
    text = input.decode(input.read_file(path), path, False, chat.notes)
    if not text:
        raise UsageError(f"{path}: is empty")
    chat.files.append(text)
    chat.display.tell(f"{path}: {_count(text.count(chr(10)) + 1, 'line')}, for the next message")


def _stats(chat: Chat, argument: str) -> None:
    """Tokens, speed and times of the last answer."""
    chat.display.tell("\n".join(chat.stats()) or "there is no answer yet")


def _copy(chat: Chat, argument: str) -> None:
    """Copy the last answer to the clipboard."""
    turn = _last_turn(chat)
    if turn:
        by = clipboard.copy(turn.answer)
        chat.display.tell(f"{len(turn.answer)} characters copied by {by}")


def _exit(chat: Chat, argument: str) -> None:
    """Leave the chat."""
    chat.ended = True


def _last_turn(chat: Chat) -> Any:
    if not chat.talk.history:
        chat.display.tell("nothing has been said yet")
        return None
    return chat.talk.history[-1]


def _no_words(chat: Chat) -> Iterable[str]:
    return ()


def _setting_words(chat: Chat) -> Iterable[str]:
    return _known_settings()


@dataclass(frozen=True)
class Command:
    """words: what its argument can be; paths: whether it is the name of a file."""

    usage: str
    run: Callable[[Chat, str], None]
    words: Callable[[Chat], Iterable[str]] = _no_words
    paths: bool = False

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip()


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", _help),
    "/system": Command("[TEXT]", _system),
    "/set": Command("[NAME [VALUE]]", _set, _setting_words),
    "/show": Command("[history]", _show, lambda chat: ("history",)),
    "/undo": Command("", _undo),
    "/regen": Command("", _regen),
    "/edit": Command("[TEXT]", _edit),
    "/clear": Command("", _clear),
    "/save": Command("[NAME]", _save),
    "/load": Command("NAME", _load, lambda chat: complete_session("")),
    "/sessions": Command("[TEXT]", _sessions),
    "/model": Command("[MODEL]", _model, lambda chat: complete_model("")),
    "/read": Command("[FILE]", _read, paths=True),
    "/stats": Command("", _stats),
    "/copy": Command("", _copy),
    "/exit": Command("", _exit),
}


def is_command(text: str) -> bool:
    return text.startswith("/")


def is_known(text: str) -> bool:
    return bool(text.split()) and text.split()[0] in COMMANDS


def run(chat: Chat, text: str) -> None:
    """Raises UsageError for a command there is none of, and what the command raises."""
    name, *rest = text.split(maxsplit=1)
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(
            f"there is no command {name[:60]}: /help lists them; a space before the / sends it as a message"
        )
    argument = rest[0].strip() if rest else ""
    if argument and not command.usage:
        raise UsageError(f"{name} takes nothing after it")
    command.run(chat, argument)


def complete(chat: Chat, text: str) -> tuple[int, Iterable[str]]:
    """How many characters at the end of the text before the cursor to replace, and the words to choose from."""
    if not text.startswith("/") or "\n" in text:
        return 0, ()
    name, blank, argument = text.partition(" ")
    if not blank:
        return len(name), [command for command in COMMANDS if command.startswith(name)]
    command = COMMANDS.get(name)
    if command is None:
        return 0, ()
    if command.paths:
        return len(argument), _paths(argument)
    return len(argument), [word for word in command.words(chat) if word.startswith(argument)]


def _paths(start: str) -> list[str]:
    folder, name = os.path.split(start)
    try:
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda entry: entry.name)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: ~ and a user there is none of
        return []
    found = [entry for entry in entries if entry.name.startswith(name) and entry.name.isprintable()]
    return [os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "") for entry in found[:200]]


@dataclass(frozen=True)
class _Setting:
    setting: config.Setting
    default: object


@functools.cache
def _known_settings() -> dict[str, _Setting]:
    found = {}
    for group in (DialogOptions, SamplingOptions, ThinkOptions):
        for name, setting in config.settings(group).items():
            if name not in ("plain", "then_tty"):
                found[config.flag(name).removeprefix("--")] = _Setting(setting, getattr(group(), name))
    return found


def check_settings(options: ChatOptions) -> None:
    """Raises UsageError for a value out of range."""
    sampling_params(options, {}, seed=options.seed or 0)
    thinking.check(options)
    if options.context not in ("stop", "drop-oldest"):
        raise UsageError(f"{options.origin('context')} must be stop or drop-oldest, not {options.context!r}")


def _line(options: ChatOptions, name: str) -> str:
    value = getattr(options, _known_settings()[name].setting.name)
    shown = "default" if value is None else value if isinstance(value, str) else toml_edit.literal(value)
    return f"{name} {shown}"


def _settings(options: ChatOptions) -> list[str]:
    return [_line(options, name) for name in _known_settings()]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
