"""The prompt as text: files, stdin and the argument, in that order, one blank line between them.

Policy for files and stdin:
- UTF-8 only. Anything else is an error that names the first bad byte; a UTF-16 or UTF-32 file is told apart.
- At most `LIMIT` bytes each, so that an endless pipe ends in an error and not in all memory used.
- Raw (`--raw`): byte for byte. A byte order mark, `\\r\\n` and NUL bytes stay; between two parts come as many
  newlines as the first lacks to end in a blank line.
- Otherwise: a byte order mark is dropped and `\\r\\n` read as `\\n`, each with a note; NUL means binary and
  is an error; newlines at the end of a part are dropped, so that `echo hi | infer run` and `infer run hi` are
  the same prompt; parts are joined by one blank line.

The argument is used as it was typed.
"""

from __future__ import annotations

import codecs
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infer.cli.render import Notes, is_terminal
from infer.runtime.errors import UsageError

LIMIT = 64 << 20
SILENT_S = 2.0
STDIN = "-"
CHUNK = 1 << 16
# The longest mark first: UTF-32-LE begins with UTF-16-LE's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


@dataclass(frozen=True)
class PromptInput:
    """What the command line asks to read. files and prompt: "-" stands for stdin. may_be_empty: a text without any
    characters will do; optional: so will no text. what: the text is called in messages."""

    files: Sequence[str] = ()
    prompt: str | None = None
    use_stdin: bool = True
    raw: bool = False
    may_be_empty: bool = False
    optional: bool = False
    what: str = "prompt"


def read_prompt(wanted: PromptInput, notes: Notes) -> str:
    """The prompt text. Raises UsageError when there is none, or for input that breaks the policy."""
    if "" in wanted.files:
        raise UsageError("--file is empty: give the name of a file")
    named = [*wanted.files, wanted.prompt].count(STDIN)
    if named > 1:
        raise UsageError("stdin can be read once: give - only once")
    if named and not wanted.use_stdin:
        raise UsageError("- reads stdin, which --no-stdin forbids: drop one of them")

    def read(name: str) -> str:
        if name == STDIN:
            return read_stdin(wanted.raw, notes, wanted.what)
        return decode(read_file(name), name, wanted.raw, notes)

    parts = [read(name) for name in wanted.files]
    if wanted.prompt == STDIN or (not named and wanted.use_stdin and _stdin_has_input()):
        parts.append(read(STDIN))
    if wanted.prompt is not None and wanted.prompt != STDIN:
        parts.append(checked_argument(f"the {wanted.what}", wanted.prompt))
    text = join([part for part in parts if part], raw=wanted.raw)
    files = ", -f FILE" if wanted.what == "prompt" else ""
    if not text and not wanted.optional and not (parts and wanted.may_be_empty):
        raise UsageError(f"the {wanted.what} is empty: give a text{files}, or pipe something in")
    return text


def join(parts: Sequence[str], *, raw: bool) -> str:
    """The parts with one blank line between them (see the policy above)."""
    if not raw:
        return "\n\n".join(parts)
    text = ""
    for part in parts:
        if text:
            text += "\n" * (2 - min(2, len(text) - len(text.rstrip("\n"))))
        text += part
    return text


def checked_argument(what: str, text: str) -> str:
    """The text as UTF-8, whatever the locale. Raises UsageError for bytes that are not (surrogates in Python)."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        try:
            return os.fsencode(text).decode("utf-8")  # in the C locale Python takes arguments for ASCII
        except ValueError:
            raise UsageError(
                f"{what} is not UTF-8 text (character {error.start + 1}): re-encode it"
            ) from None


def decode(data: bytes, name: str, raw: bool, notes: Notes) -> str:
    """Bytes of one file or of stdin to text, as the policy says."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            raise UsageError(
                f"{name}: is {encoding} text, not UTF-8; convert it: iconv -f {encoding} -t UTF-8 {name}"
            )
    if not raw and b"\0" in data:
        raise UsageError(f"{name}: binary input (a NUL byte at offset {data.index(0)}); give UTF-8 text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise UsageError(f"{name}: not UTF-8 text: {bad}; convert it to UTF-8") from None
    if raw:
        return text
    if text.startswith("\ufeff"):
        notes.note(f"{name}: byte order mark dropped")
        text = text[1:]
    if "\r\n" in text:
        notes.note(f"{name}: CRLF line ends read as LF (--raw keeps them)")
        text = text.replace("\r\n", "\n")
    return text.rstrip("\n")


def read_stdin(raw: bool, notes: Notes, what: str = "prompt") -> str:
    """All of stdin. Says so on stderr when nothing has come for `SILENT_S` seconds."""
    if is_terminal(sys.stdin):
        notes.note(f"reading the {what} from the terminal; end it with Ctrl-D on a line of its own")
        return decode(_read_all(stdin_reader(), "stdin"), "stdin", raw, notes)
    hint = threading.Timer(
        SILENT_S, notes.note, ["reading stdin, which is open but silent … (--no-stdin does not wait for it)"]
    )
    hint.daemon = True
    hint.start()
    try:
        return decode(_read_all(stdin_reader(), "stdin", first=hint.cancel), "stdin", raw, notes)
    finally:
        hint.cancel()


def _stdin_has_input() -> bool:
    """Whether stdin is anything but a terminal. A closed stdin is none; /dev/null reads as empty."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    return not is_terminal(sys.stdin)


def stdin_reader() -> Callable[[int], bytes]:
    """Reads up to N bytes; b"" at the end. Raises UsageError where stdin was closed before the program began."""
    if sys.stdin is None:
        raise UsageError("stdin is closed: give the text as an argument, in a file or through a pipe")
    try:
        descriptor = sys.stdin.fileno()
    except (io.UnsupportedOperation, ValueError):
        return sys.stdin.buffer.read
    return lambda size: os.read(descriptor, size)


def _read_all(read: Callable[[int], bytes], name: str, first: Callable[[], object] = lambda: None) -> bytes:
    data = bytearray()
    try:
        while piece := read(CHUNK):
            first()
            data += piece
            if len(data) > LIMIT:
                raise UsageError(
                    f"{name}: more than {LIMIT >> 20} MiB, beyond any context: cut it before it gets here"
                )
    except OSError as error:
        raise UsageError(f"{name}: cannot read: {error.strerror or error}") from None
    return bytes(data)


def read_file(name: str) -> bytes:
    try:
        descriptor = os.open(name, os.O_RDONLY)
    except FileNotFoundError:
        raise UsageError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{name}: cannot read: {reason}") from None
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise UsageError(f"{name}: is a folder; give a file")
        return _read_all(lambda size: os.read(descriptor, size), name)
    finally:
        os.close(descriptor)
