"""Messages from a terminal that knows no escape sequences, such as a shell inside an editor: it edits the lines itself.

Between two \"\"\", and after a line that ends in a backslash, the next line belongs to the same message.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import TextIO

from infer.cli.render import say
from infer.cli.repl.message import CONTINUATION, PROMPT, Message, in_block, typed
from infer.cli.signals import dealt_with

_SIZE = 1 << 16


class DumbEditor:
    """Asks for messages as `editor.Editor` does. on_ready: called once, behind the first prompt."""

    def __init__(
        self, source: TextIO, target: TextIO, *, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._source, self._target = source.fileno(), target
        self._on_ready = on_ready
        self._failure: BaseException | None = None
        self._woken, self._wake = os.pipe()
        self._rest = b""

    def next(self, default: str = "") -> Message | None:
        """The next message, which is not blank; None at the end of input. default: shown, to be typed again.

        Raises KeyboardInterrupt for a Ctrl-C pressed twice, `Terminated`, and what `abort` was told.
        """
        if default:
            say(f"infer: note: this terminal cannot edit it, so type it again: {default}")
        armed = False
        while True:
            try:
                text = self._text()
            except KeyboardInterrupt:
                if armed:
                    raise
                armed, self._rest = True, b""
                dealt_with()
                self._show("\n")
                say("press Ctrl-C again to exit, or Ctrl-D")
                continue
            message = None if text is None else typed(text)
            if text is None or message is not None:
                return message
            armed = False

    def abort(self, error: BaseException) -> None:
        """From any thread: end the prompt, now or when it is next asked for, with this error."""
        self._failure = error
        os.write(self._wake, b"\0")

    def _text(self) -> str | None:
        text = ""
        self._show(PROMPT)
        while (line := self._line()) is not None:
            text += line.removesuffix("\n")
            if not line.endswith("\n"):
                return text
            if in_block(text):
                text += "\n"
            elif text.endswith("\\"):
                text = text[:-1] + "\n"
            else:
                return text
            self._show(CONTINUATION)
        return text or None

    def _line(self) -> str | None:
        """A line with its end; without one where Ctrl-D ended it. None at the end of input."""
        ready, self._on_ready = self._on_ready, lambda: None
        ready()
        while b"\n" not in self._rest:
            found = select.select([self._source, self._woken], [], [])[0]
            if self._failure is not None:
                raise self._failure
            if self._source in found:
                try:
                    data = os.read(self._source, _SIZE)
                except OSError:  # the terminal is gone
                    data = b""
                self._rest += data
                if not data.endswith(b"\n"):
                    break
        line, end, self._rest = self._rest.partition(b"\n")
        return (line + end).decode("utf-8", "surrogateescape") if line or end else None

    def _show(self, text: str) -> None:
        self._target.write(text)
        self._target.flush()
