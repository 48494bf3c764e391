"""The line a user types: prompt_toolkit with the keys of a chat.

Enter sends. It begins another line instead after a backslash, which it takes away, and inside a block between two
\"\"\". A paste of several lines is text, word for word, whatever it begins with.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.shortcuts import CompleteStyle

from infer.cli import signals
from infer.cli.render import coloured, one_line, say
from infer.cli.repl.message import CONTINUATION, PROMPT, Message, in_block, typed

# (text before the cursor) → (how much of its end is replaced, the words to choose from)
Complete = Callable[[str], tuple[int, Iterable[str]]]


class Editor:
    """Asks for messages on a terminal. on_ready: called once, when the first prompt is on the screen."""

    def __init__(
        self,
        source: TextIO,
        target: TextIO,
        history: History,
        complete: Complete,
        *,
        plain: bool,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._armed = False  # the next Ctrl-C on an empty line exits
        self._cleared = False
        self._pasted = ""
        self._on_ready = on_ready
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        output = Vt100_Output.from_pty(target, term=os.environ.get("TERM"))
        # Terminals that answer late would type the answer into the next prompt.
        output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUATION,
            history=history,
            completer=_Completer(complete),
            complete_style=CompleteStyle.READLINE_LIKE if plain else CompleteStyle.COLUMN,
            complete_while_typing=Condition(lambda: not plain and self._text.startswith("/")),
            reserve_space_for_menu=6,
            search_ignore_case=True,
            enable_open_in_editor=True,
            enable_suspend=True,
            key_bindings=self._keys(),
            include_default_pygments_style=False,
            color_depth=None if coloured(target) and not plain else ColorDepth.DEPTH_1_BIT,
            input=Vt100Input(source),
            output=output,
        )
        self._session.default_buffer.on_text_changed += self._typed

    def next(self, default: str = "") -> Message | None:
        """The next message, which is not blank; None at the end of input.

        Raises KeyboardInterrupt for a Ctrl-C pressed twice, `Terminated`, and what `abort` was told.
        """
        self._cleared = False
        while True:
            self._armed, self._pasted = False, ""
            if self._failure is not None:
                raise self._failure
            try:
                with signals.lent(), patch_stdout(raw=True):
                    text = self._session.prompt(default=default, pre_run=self._start)
            except EOFError:
                return None
            finally:
                self._loop = None
                self._ready()
            literal = "\n" in self._pasted and text.startswith(self._pasted)
            if message := typed(text, literal=literal, fresh=self._cleared):
                return message
            default = ""

    def abort(self, error: BaseException) -> None:
        """From any thread: end the prompt, now or when it is next asked for, with this error."""
        self._failure = error
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._exit, error)

    @property
    def _text(self) -> str:
        return self._session.default_buffer.text

    def _exit(self, error: BaseException) -> None:
        app = self._session.app
        if app.is_running and app.future is not None and not app.future.done():
            app.exit(exception=error)

    def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._exit, signals.Terminated())
        # After what the event loop has yet to do, which is to draw the prompt.
        self._loop.call_later(0.01, self._ready)

    def _ready(self) -> None:
        ready, self._on_ready = self._on_ready, lambda: None
        ready()

    def _typed(self, _: object) -> None:
        if self._text:
            self._armed = False

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        editing = has_focus(DEFAULT_BUFFER)

        @keys.add("enter", filter=editing)
        def enter(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            text = buffer.text
            if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
                buffer.complete_state = None
            elif text.startswith(self._pasted) and "\n" in self._pasted:
                buffer.validate_and_handle()
            elif text.endswith("\\") and buffer.cursor_position == len(text):
                buffer.delete_before_cursor()
                buffer.newline(copy_margin=False)
            elif in_block(text):
                buffer.newline(copy_margin=False)
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=editing)
        def newline(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add(Keys.BracketedPaste, filter=editing)
        def paste(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n")
            if not event.current_buffer.text:
                self._pasted = text
            event.current_buffer.insert_text(text)

        @keys.add("c-c", filter=editing)
        @keys.add("<sigint>")
        def interrupt(event: KeyPressEvent) -> None:
            if self._text:
                self._session.default_buffer.reset()
                self._cleared, self._pasted = True, ""
            elif self._armed:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
                return
            else:
                run_in_terminal(lambda: say("press Ctrl-C again to exit, or Ctrl-D"))
            self._armed = True

        return keys


class _Completer(Completer):
    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        length, words = self._complete(document.text_before_cursor)
        for word in words:
            yield Completion(word, start_position=-length, display=one_line(word))
