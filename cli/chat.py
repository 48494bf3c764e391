"""`infer chat`: a conversation with a model."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer

from infer.cli import config, conversation, session, signals
from infer.cli.conversation import ConversationOptions
from infer.cli.input import checked_argument
from infer.cli.log import LogOptions
from infer.cli.options import (
    ChatTemplateOptions,
    DialogOptions,
    EngineOptions,
    NoteOptions,
    SamplingOptions,
    StatsOptions,
    ThinkOptions,
    complete_session,
    takes,
)
from infer.cli.render import Notes, animated, is_terminal
from infer.runtime.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from infer.cli.repl.chat import Chat
    from infer.cli.repl.editor import Editor
    from infer.runtime.loader import LoadedModel

_HISTORY = "chat_history.jsonl"
_CLOSE_S = 2.0  # for the cache to write what it holds


@dataclass(frozen=True, kw_only=True)
class ChatOptions(
    DialogOptions,
    ConversationOptions,
    LogOptions,
    ThinkOptions,
    StatsOptions,
    ChatTemplateOptions,
    SamplingOptions,
    EngineOptions,
    NoteOptions,
):
    """Every flag of `infer chat`."""


@takes(ChatOptions)
def chat(
    options: ChatOptions,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Keep the conversation under this name, or go on with the one that is.",
            show_default=False,
            autocompletion=complete_session,
        ),
    ] = None,
) -> None:
    """Talk with a model.

    On a terminal, /help lists commands and keys. With NAME the conversation is kept; --continue goes on with the one
    used last. Through a pipe each line is a message and each answer ends with a line break.

    Examples:
      infer chat
      infer chat trip -s "Be brief."
      cat questions.txt | infer chat -q
    """
    options = _named(options, name)
    _check(options)
    from infer.cli.repl.chat import Chat
    from infer.cli.repl.display import Display
    from infer.cli.repl.lines import Lines
    from infer.cli.repl.talk import Talk

    notes = Notes(quiet=options.quiet, verbose=options.verbose)
    session.engine_config(options)
    target = next((stream for stream in (sys.stdout, sys.stderr) if is_terminal(stream)), None)
    typed = sys.stdin if target is not None and is_terminal(sys.stdin) else None
    with ExitStack() as stack:
        if typed is None and options.then_tty:
            then = stack.enter_context(_open_terminal("r"))
            target = target or stack.enter_context(_open_terminal("w"))
        else:
            then = None
        stack.enter_context(session.logging_to(notes))
        display = Display(
            interactive=typed is not None,
            plain=options.plain,
            quiet=options.quiet,
            thoughts=not options.hide_thinking,
        )
        talk = Talk(options, notes)
        stack.callback(talk.close)
        options = dataclasses.replace(config.for_model(options, talk.model), model=talk.model)
        _check(options)
        talker = Chat(options, notes, display, talk)
        try:
            if typed is None:
                talker.load_model(talk.model)
                talker.converse(Lines(notes))
                typed = then
                display.interactive = typed is not None
            if typed is not None and target is not None:
                _converse_on_terminal(talker, typed, target)
        finally:
            closed = talker.worker.close(_CLOSE_S)
    code = 1 if talk.unsaved else 0
    if not closed:
        # Python must not take the libraries away from a thread that is inside them.
        sys.stdout.flush()
        signals.leave(code)
    if code:
        raise typer.Exit(code)


def _named(options: ChatOptions, name: str | None) -> ChatOptions:
    """NAME is what --session says elsewhere."""
    if name is None:
        return options
    if options.is_flag("session"):
        raise UsageError("NAME and --session are the same thing: give one of them")
    origins = {**options.origins, "session": config.flag("session")}
    given = MappingProxyType({**options.given, "session": name})
    return dataclasses.replace(options, session=name, origins=MappingProxyType(origins), given=given)


def _check(options: ChatOptions) -> None:
    """Raise UsageError for flags out of range and for those that contradict each other."""
    from infer.cli.repl.commands import check_settings

    conversation.check(options)
    check_settings(options)
    if options.system:
        checked_argument(options.origin("system"), options.system)


def _open_terminal(mode: str) -> TextIO:
    try:
        return cast(TextIO, Path("/dev/tty").open(mode, encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"--then-tty: there is no terminal to go on at: {error.strerror or error}") from None


def _converse_on_terminal(chat: Chat, source: TextIO, target: TextIO) -> None:
    """The model is loaded once the prompt is on the screen, and while the user types."""
    from infer.cli.repl import commands
    from infer.cli.repl.dumb import DumbEditor
    from infer.cli.repl.echo import unechoed

    path = None if chat.worker.started else chat.locate(chat.talk.model)
    if not chat.options.quiet:
        kept = f"session {chat.talk.name}" if chat.talk.name else "not kept until /save NAME"
        chat.display.tell_dimly(f"infer chat: {chat.talk.model}, {kept}; /help lists commands")

    def fail_at_once(loading: Future[LoadedModel]) -> None:
        error = loading.exception()
        if error is not None:
            editor.abort(error)

    def load() -> None:
        if path is not None:
            chat.begin_loading(path)
            chat.worker.loading.add_done_callback(fail_at_once)

    if not animated(target):
        editor: DumbEditor | Editor = DumbEditor(source, target, on_ready=load)
        chat.converse(editor)
        return
    from infer.cli.repl.editor import Editor
    from infer.cli.repl.history import HistoryFile

    editor = Editor(
        source,
        target,
        HistoryFile(config.data_dirs().state / _HISTORY, chat.notes),
        lambda text: commands.complete(chat, text),
        plain=chat.options.plain,
        on_ready=load,
    )
    with unechoed(source):
        chat.converse(editor)
