"""Where the answer goes: stdout or a file; as text, as one JSON object, or as JSON lines.

Without a terminal the text is exactly the model's bytes, UTF-8 whatever the locale. On a terminal control
characters are made visible and a last newline is added.

`-o FILE` is opened at the first byte of the answer, so that a run which fails before that leaves the old file
alone; from then on the file grows like one behind a shell's `>`, and what an interrupted run had said stays.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import io
import json
import os
import select
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from infer.cli.extract import ANY, FencedBlock
from infer.cli.render import TerminalText, is_terminal, sanitize, without_surrogates
from infer.cli.signals import held
from infer.cli.thinking import ThoughtsOnStderr, ThoughtsOnTerminal
from infer.runtime.errors import InferError, OutputError

if TYPE_CHECKING:
    from infer.runtime.generation import Generation

_CLOSED = "stdout is closed: send it to a file or a pipe"
_GONE = (errno.EPIPE, errno.ECONNRESET)
# A pipe that select calls writable takes this many bytes without blocking, so a write can be short and held.
_ATOMIC: int = getattr(select, "PIPE_BUF", 1 << 16)
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0), 0x2028, 0x2029)}


class ReaderGone(Exception):
    """Whoever reads the answer closed the pipe."""


class ClosedStdout(io.TextIOBase):
    """In place of a stdout that was closed before the program began: who writes to it fails, nobody else does."""

    def write(self, text: str) -> int:
        raise OutputError(_CLOSED)


class Writer(abc.ABC):
    """Bytes to one place, in two steps, so that an interrupt loses none and writes none twice.

    `drain` raises ReaderGone or OutputError.
    """

    terminal = False

    def __init__(self) -> None:
        self._pending = bytearray()

    def queue(self, data: bytes) -> None:
        """Take the bytes without writing any: cannot block, cannot fail."""
        self._pending += data

    @abc.abstractmethod
    def drain(self, timeout: float | None = None) -> None:
        """Write what is queued. An exception (Ctrl-C) on the way leaves the unwritten rest queued.

        timeout: seconds to wait for a reader that does not read, then the rest stays queued.
        """

    def close(self) -> None:  # noqa: B027 (most writers have nothing to close)
        """Give back what the writer opened itself. Raises OutputError, as a full disk may show only here."""


class DescriptorWriter(Writer):
    """An open file descriptor: pipe, file, terminal or device, blocking or not."""

    def __init__(self, descriptor: int, name: str, *, terminal: bool = False) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._name = name
        self.terminal = terminal

    def drain(self, timeout: float | None = None) -> None:
        while self._pending:
            try:
                # The wait can be interrupted, the write cannot: after a signal it is known what was written.
                if not select.select([], [self._descriptor], [], timeout)[1]:
                    return
                with held():
                    del self._pending[: os.write(self._descriptor, self._pending[:_ATOMIC])]
            except BlockingIOError:
                continue
            except OSError as error:
                raise output_error(error, self._name) from None


class StreamWriter(Writer):
    """A Python stream without a descriptor, as test runners put in place of stdout."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def drain(self, timeout: float | None = None) -> None:
        self._stream.write(bytes(self._pending))
        self._stream.flush()
        self._pending.clear()


class FileWriter(DescriptorWriter):
    """`-o FILE`: checked when made, opened at the first write (or at `close`, for an empty answer)."""

    def __init__(self, path: str) -> None:
        super().__init__(-1, path)
        folder = os.path.dirname(path) or "."
        try:
            there = os.stat(path)
        except FileNotFoundError:
            there = None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"{path}: cannot write there: {reason}") from None
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise OutputError(f"{path}: is a folder; -o needs a file")
        if not os.path.isdir(folder):
            raise OutputError(f"{path}: no such folder {folder}; create it first")
        if not os.access(folder if there is None else path, os.W_OK):
            raise OutputError(f"{path}: cannot write there: permission denied")

    def drain(self, timeout: float | None = None) -> None:
        if self._pending:
            self._open()
            super().drain(timeout)

    def close(self) -> None:
        self._open()
        self.drain(0.0)
        try:
            os.close(self._descriptor)
        except OSError as error:
            raise output_error(error, self._name) from None

    def _open(self) -> None:
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            except OSError as error:
                raise output_error(error, self._name) from None


def output_error(error: OSError, name: str) -> ReaderGone | OutputError:
    """What a failed write means."""
    if error.errno in _GONE:
        return ReaderGone(name)
    return OutputError(f"{name}: cannot write: {error.strerror or error}")


def open_writer(output: str | None) -> Writer:
    """stdout for None and "-", else the file. Raises OutputError."""
    if output is not None and output != "-":
        return FileWriter(output)
    if isinstance(sys.stdout, ClosedStdout):
        raise OutputError(_CLOSED)
    try:
        descriptor = sys.stdout.fileno()
    except (io.UnsupportedOperation, ValueError):
        return StreamWriter(sys.stdout.buffer)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    return DescriptorWriter(descriptor, "stdout", terminal=is_terminal(sys.stdout))


class TextStyle(Protocol):
    def push(self, text: str) -> str:
        """The same characters with styles around them."""


class Answer(abc.ABC):
    """Takes an answer as it grows: `delta` and `finish` queue, `drain` writes.

    wants_report: whether `finish` needs the object of `--json`, which may cost a pass over the model file.
    """

    wants_report = False

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @abc.abstractmethod
    def delta(self, text: str) -> None:
        """More text of the answer."""

    def think(self, text: str) -> None:  # noqa: B027 (an object holds it anyway)
        """More of what the model says to itself before the answer."""

    @abc.abstractmethod
    def finish(self, report: Mapping[str, object] | None) -> None:
        """The answer is over; report is the object `--json` prints, None unless it is wanted."""

    def abandon(self) -> None:  # noqa: B027 (only text has something to put right)
        """The run failed: leave the terminal at the start of a line."""

    @property
    def terminal(self) -> bool:
        """Whether a person sees it grow."""
        return self._writer.terminal

    def failure(self) -> InferError | None:
        """Why the finished answer is not what was asked for."""
        return None

    def drain(self, timeout: float | None = None) -> None:
        """Write what is queued (see `Writer.drain`)."""
        self._writer.drain(timeout)

    def close(self) -> None:
        self._writer.close()


class TextAnswer(Answer):
    """The text as it comes, or all at once when stream is False.

    thoughts: whether thinking is shown: before the answer on a terminal, else on stderr. style: dresses text that goes
    to a terminal. plain: no colours.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        stream: bool,
        thoughts: bool = True,
        style: TextStyle | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__(writer)
        self._stream = stream
        self._held: list[str] = []
        self._terminal = TerminalText() if writer.terminal else None
        self._style = style if writer.terminal else None
        self._line_open = False
        self._thoughts = (
            ThoughtsOnTerminal(self._put_as_is, plain) if writer.terminal else ThoughtsOnStderr(plain)
        )
        self._show_thoughts = thoughts

    @property
    def terminal(self) -> bool:
        return super().terminal or (self._show_thoughts and is_terminal(sys.stderr))

    def think(self, text: str) -> None:
        if self._show_thoughts:
            self._thoughts.push(text)

    def delta(self, text: str) -> None:
        self._show(text)

    def _show(self, text: str) -> None:
        if text:
            self._thoughts.finish()
        if not self._stream:
            self._held.append(text)
        elif self._terminal is None:
            self._put(text)
        else:
            self._put(self._terminal.push(text))

    def finish(self, report: Mapping[str, object] | None) -> None:
        self._end()

    def abandon(self) -> None:
        self._end()

    def _end(self) -> None:
        self._stream = True
        self._thoughts.finish()
        self._show("".join(self._held))
        self._held.clear()
        if self._terminal is not None:
            self._put(self._terminal.finish())
            self._put_as_is("\n" if self._line_open else "")

    def _put(self, text: str) -> None:
        if text:
            self._line_open = not text.endswith("\n")
            self._put_as_is(text if self._style is None else self._style.push(text))

    def _put_as_is(self, text: str) -> None:
        self._writer.queue(text.encode("utf-8", "replace"))


class CodeAnswer(TextAnswer):
    """Of the text, what the first fenced code block holds. Where there is none, `-o FILE` stays as it was."""

    def __init__(self, writer: Writer, *, stream: bool, language: str, thoughts: bool = True) -> None:
        super().__init__(writer, stream=stream, thoughts=thoughts)
        self._language = language
        self._block = FencedBlock(language)

    def delta(self, text: str) -> None:
        self._show(self._block.push(text))

    def _end(self) -> None:
        self._show(self._block.finish())
        super()._end()

    def failure(self) -> InferError | None:
        if self._block.found:
            return None
        kind = "" if self._language == ANY else f"{self._language} "
        return InferError(f"the answer holds no fenced {kind}code block: ask for one, or drop --extract")

    def close(self) -> None:
        if self._block.found:
            super().close()


class JsonAnswer(Answer):
    """One object, when the answer is over."""

    wants_report = True

    def delta(self, text: str) -> None:
        """Nothing: the text is in the object."""

    def finish(self, report: Mapping[str, object] | None) -> None:
        self._writer.queue(json_line(report))


class JsonLinesAnswer(JsonAnswer):
    """A line for each delta, then the object."""

    def delta(self, text: str) -> None:
        self._writer.queue(json_line({"delta": text}))


def json_line(value: object) -> bytes:
    """One line of JSON in UTF-8, safe on a terminal: no control character, no surrogate, no NaN in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return (without_surrogates(text.translate(_JSON_ESCAPES)) + "\n").encode("utf-8")


class Relay:
    """Hands each character of a growing answer on once, interrupts or not."""

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self._generation = generation
        self._answer = answer
        self._taken = self._thought = 0

    @property
    def text(self) -> str:
        """What has been handed on of the answer."""
        return self._generation.text[: self._taken]

    def take(self) -> None:
        thinking, text = self._generation.thinking, self._generation.text
        if len(thinking) > self._thought:
            self._answer.think(thinking[self._thought :])
            self._thought = len(thinking)
        if len(text) > self._taken:
            self._answer.delta(text[self._taken :])
            self._taken = len(text)

    def forward(self) -> None:
        with held():
            self.take()
        self._answer.drain()


def write_path(path: Path) -> None:
    """The path alone, for `$(…)`: byte for byte, unless stdout is a terminal. Raises OutputError."""
    writer = open_writer(None)
    writer.queue((sanitize(str(path)).encode() if writer.terminal else os.fsencode(path)) + b"\n")
    writer.drain()
    writer.close()


def write_result(*contents: str | Mapping[str, object]) -> None:
    """Texts, or JSON objects, to stdout: byte for byte, unless that is a terminal. Raises OutputError."""
    writer = open_writer(None)
    for content in contents:
        if isinstance(content, str):
            writer.queue((sanitize(content) if writer.terminal else content).encode())
        else:
            writer.queue(json_line(content))
    writer.drain()
    writer.close()
