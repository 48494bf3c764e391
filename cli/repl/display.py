"""How a chat shows things: answers on stdout, everything else on stderr, or where the terminal is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from infer.cli.output import TextAnswer, open_writer
from infer.cli.render import animated, ansi, coloured, is_terminal, one_line, sanitize
from infer.cli.repl.markdown import MarkdownStyle

if TYPE_CHECKING:
    from infer.runtime.generation import Generation

_CLEAR = "\r\x1b[K"


class Display:
    """interactive: whether a person types. plain: text as it is, for screen readers: no colours, nothing that moves."""

    def __init__(self, *, interactive: bool, plain: bool, quiet: bool, thoughts: bool) -> None:
        self.interactive = interactive
        self.thoughts = thoughts
        self._plain = plain
        self._quiet = quiet
        self._writer = open_writer(None)
        self._waiting = False
        if not plain and coloured(self._stream):
            ansi("dim", " ")  # rich is imported here, not between two signals

    @property
    def _stream(self) -> TextIO:
        """Where everything else goes: with stderr in a file, what a person asked for still has to be seen."""
        beside = self.interactive and not is_terminal(sys.stderr) and is_terminal(sys.stdout)
        return sys.stdout if beside else sys.stderr

    def answer(self) -> TextAnswer:
        """Where the next answer goes."""
        style = MarkdownStyle() if not self._plain and coloured(sys.stdout) else None
        thoughts = self.thoughts and (self._writer.terminal or not self._quiet)
        return TextAnswer(self._writer, stream=True, thoughts=thoughts, style=style, plain=self._plain)

    def end_line(self, text: str) -> None:
        """For a reader that is no terminal: every answer ends its line."""
        if not self._writer.terminal and not text.endswith("\n"):
            self._writer.queue(b"\n")
            self._writer.drain()

    def tell(self, text: str) -> None:
        """Lines for the user."""
        self.stop_waiting()
        self._write("".join(f"{line}\n" for line in sanitize(text).split("\n")))

    def status(self, generation: Generation, context: int) -> None:
        """The discreet line after an answer."""
        if self.interactive and not self._plain and not self._quiet:
            self.tell_dimly(f"[{status_line(generation, context)}]")

    def tell_dimly(self, line: str) -> None:
        """Something one may overlook."""
        line = one_line(line)
        self._write((ansi("dim", line) if not self._plain and coloured(self._stream) else line) + "\n")

    def wait(self, line: str) -> None:
        """Show that something goes on, on a line that disappears, until `stop_waiting`."""
        if self.interactive and not self._quiet and self._animated and not self._waiting:
            self._waiting = True
            self._write(ansi("dim", one_line(line)) if coloured(self._stream) else one_line(line))

    def stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._write(_CLEAR)

    def start_line(self) -> None:
        """Over what the terminal shows of a Ctrl-C."""
        if self._animated:
            self._write(_CLEAR)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Whatever happens in the block, no line is left behind."""
        try:
            yield
        finally:
            self.stop_waiting()

    @property
    def _animated(self) -> bool:
        return not self._plain and animated(self._stream)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def status_line(generation: Generation, context: int) -> str:
    """Speed, context and cache of an answer, in one line."""
    stats = generation.stats
    used = stats.prompt_tokens + stats.completion_tokens
    facts = {"cancelled": ["stopped"], "length": ["cut off"]}.get(str(generation.finish_reason), [])
    if stats.completion_tokens > 1 and stats.decode_s > 0:
        facts.append(f"{(stats.completion_tokens - 1) / stats.decode_s:.1f} tokens/s")
    return ", ".join([*facts, f"context {used}/{context}", f"cached {stats.cached_tokens}"])
