"""Messages of a chat that come through a pipe: each line is one, word for word."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infer.cli.input import CHUNK, LIMIT, decode, stdin_reader
from infer.cli.render import Notes
from infer.cli.repl.message import Message
from infer.runtime.errors import UsageError


class Lines:
    """Reads no further than to the end of the line that is asked for, as far as the pipe lets one choose."""

    def __init__(self, notes: Notes, read: Callable[[int], bytes] | None = None) -> None:
        self._notes = notes
        self._lines = self._split(read or stdin_reader())

    def next(self, default: str = "") -> Message | None:
        """The next line that is not blank; None at the end. Raises UsageError for what is not UTF-8 text."""
        for line in self._lines:
            text = decode(line.removesuffix(b"\r"), "stdin", False, self._notes)
            if text.strip():
                return Message(text, literal=True)
        return None

    @staticmethod
    def _split(read: Callable[[int], bytes]) -> Iterator[bytes]:
        rest = bytearray()
        while True:
            try:
                data = read(CHUNK)
            except OSError as error:
                raise UsageError(f"stdin: cannot read: {error.strerror or error}") from None
            if not data:
                break
            start = len(rest)
            rest += data
            if rest.find(b"\n", start) >= 0:
                *lines, last = bytes(rest).split(b"\n")
                yield from lines
                rest = bytearray(last)
            if len(rest) > LIMIT:
                raise UsageError(f"stdin: a line of more than {LIMIT >> 20} MiB, beyond any context")
        if rest:
            yield bytes(rest)
