"""What people see: the one sanitizer for foreign text, plain lines, and rich consoles for tables and bars.

Text of a model, a file or an error is never handed to rich markup: it goes through `sanitize` (whole texts)
or `TerminalText` (text that arrives in pieces) and is then written as it is. rich is imported on first use.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

from infer.runtime.errors import OutputError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

# C0 controls become their control pictures (U+2400 block); C1 controls, which 8-bit terminals execute as
# escape sequences, have no pictures and become U+FFFD, as do lone surrogates, which UTF-8 cannot carry.
_KEPT = "\t\n"
_VISIBLE: dict[int, int] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
_VISIBLE[0x7F] = 0x2421
_VISIBLE.update(dict.fromkeys(range(128, 160), 65533))
_SURROGATES = re.compile("[\ud800-\udfff]")
_ONE_LINE = {**_VISIBLE, 0x09: 0x20, 0x0A: 0x20, 0x0D: 0x20, 0x2028: 0x20, 0x2029: 0x20}


def sanitize(text: str) -> str:
    """The text with every control character made visible, `\\n` and `\\t` excepted; `\\r\\n` becomes `\\n`.

    The result holds no ESC, no C0, no DEL, no C1 and no surrogate, so no terminal acts on any part of it.
    """
    return without_surrogates(text.replace("\r\n", "\n").translate(_VISIBLE))


def one_line(text: str) -> str:
    """`sanitize`, with line breaks and tabs as spaces: for messages that must stay on one line."""
    return without_surrogates(text.replace("\r\n", " ").translate(_ONE_LINE))


def without_surrogates(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates. (Among the tables above they would take half a megabyte.)"""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


class TerminalText:
    """`sanitize` for text in pieces: any way of cutting a text gives the same characters as the whole."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> str:
        """What may be shown now. A final `\\r` waits, since only the next character says what it is."""
        text = self._held + piece
        self._held = "\r" if text.endswith("\r") else ""
        return sanitize(text.removesuffix("\r") if self._held else text)

    def finish(self) -> str:
        """What was held back at the end of the text."""
        held, self._held = self._held, ""
        return sanitize(held)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads this stream. A closed or missing stream is no terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def animated(stream: TextIO | None = None) -> bool:
    """Whether bars and carriage returns may be used on the stream (stderr by default)."""
    return is_terminal(sys.stderr if stream is None else stream) and os.environ.get("TERM", "") not in (
        "dumb",
        "",
    )


def coloured(stream: TextIO | None = None) -> bool:
    """Whether text on the stream (stderr by default) may be dressed in colours."""
    return animated(stream) and not os.environ.get("NO_COLOR")


def ansi(style: str, text: str) -> str:
    """Sanitized text in a style, such as "bold cyan", of the 16 colours that every terminal has."""
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def _console(stream: TextIO, *, wide: bool) -> Console:
    from rich.console import Console

    terminal = is_terminal(stream)
    plain = not terminal or bool(os.environ.get("NO_COLOR")) or not animated(stream)
    return Console(
        file=stream,
        force_terminal=terminal,
        # rich's own NO_COLOR still writes bold and dim: without a colour system it writes no escape at all.
        color_system=None if plain else "auto",
        width=10_000 if wide and not terminal else None,
        markup=False,
        highlight=False,
        emoji=False,
    )


def console() -> Console:
    """rich console on stdout, for tables. Off a terminal lines are never wrapped and no ANSI is written."""
    return _console(sys.stdout, wide=True)


def err_console() -> Console:
    """rich console on stderr, for bars and tables beside the answer."""
    return _console(sys.stderr, wide=False)


def say(line: str) -> None:
    """One line for the user on stderr, sanitized. A stderr that went away is no reason to fail."""
    _write_line(sys.stderr, one_line(line))


def emit(line: str) -> None:
    """One line of a command's result on stdout, sanitized.

    Raises OutputError when stdout cannot be written, BrokenPipeError when its reader went away.
    """
    try:
        sys.stdout.write(one_line(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"stdout: cannot write: {error.strerror or error}") from error


def columns(lines: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Rows as aligned lines, numbers in the columns `right`: without rich, whose import takes 0.08 s."""
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def local_time(seconds: float) -> str:
    """A moment, in seconds since 1970, as the clock on the wall shows it; "?" for what is no moment."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def can_ask() -> bool:
    """Whether there is a terminal to ask the user on."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def confirm_deletion(command: str, what: str) -> bool:
    """Ask on the terminal whether to delete. Raises UsageError, which names -y, where there is none to ask on."""
    if not can_ask():
        raise UsageError(
            f"{command} asks before it deletes {what}, but there is no terminal to ask on: give -y"
        )
    import typer

    if typer.confirm(f"Delete {one_line(what)}?", err=True):
        return True
    say("nothing was deleted")
    return False


def _write_line(stream: TextIO | None, line: str) -> None:
    if stream is None:  # started with the descriptor closed
        return
    with suppress(OSError, ValueError):
        stream.write(line + "\n")
        stream.flush()


class _Lines:
    """`say` for every thread, now or once what stands on the terminal has ended its line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[str] | None = None

    def say(self, line: str) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(line)
                return
        say(line)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        with self._lock:
            self._waiting = []
        try:
            yield
        finally:
            with self._lock:
                waiting, self._waiting = self._waiting or [], None
            for line in waiting:
                say(line)


@dataclass(frozen=True)
class Notes:
    """Lines about a run on stderr: warnings and notes unless quiet, details only when verbose."""

    quiet: bool = False
    verbose: bool = False
    _lines: _Lines = field(default_factory=_Lines, compare=False)

    def warning(self, text: str) -> None:
        """Something the user may not expect."""
        if not self.quiet:
            self._lines.say(f"infer: warning: {text}")

    def note(self, text: str) -> None:
        """Something that was decided for the user."""
        if not self.quiet:
            self._lines.say(f"infer: note: {text}")

    def detail(self, text: str) -> None:
        """Something only `--verbose` asks for."""
        if self.verbose:
            self._lines.say(f"infer: {text}")

    def after(self, answer: bool) -> AbstractContextManager[None]:
        """What is said in the block, by any thread, comes at its end, if an answer is on the terminal meanwhile."""
        return self._lines.postponed() if answer else nullcontext()


class ProgressCallback(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


@contextmanager
def progress(description: str, *, after_s: float = 1.0, enabled: bool = True) -> Iterator[ProgressCallback]:
    """A bar on stderr that shows up only on a capable terminal, and only once `after_s` seconds have passed.

    Yields a callback (done, total), both in bytes. The bar is removed, and the cursor restored, however the
    block ends.
    """
    started = time.monotonic()
    show = enabled and animated()
    bar = None

    def update(done: int, total: int) -> None:
        nonlocal bar
        if not show or (bar is None and time.monotonic() - started < after_s):
            return
        if bar is None:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
            bar = Progress(*columns, console=err_console(), transient=True)
            bar.add_task(one_line(description), total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield update
    finally:
        if bar is not None:
            bar.stop()
