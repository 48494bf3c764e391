"""The prompt from files, stdin and the argument: order, joining, and bytes that are no plain text."""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.cli import input as cli_input
from infer.cli.input import PromptInput, checked_argument, decode, join, read_prompt
from infer.cli.render import Notes
from infer.runtime.errors import UsageError

NOTES = Notes()


@pytest.fixture(autouse=True)
def stdin(monkeypatch: pytest.MonkeyPatch) -> type[None]:
    set_stdin(monkeypatch, b"")
    return type(None)


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data))
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_order_and_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / "b", b"second\n"), write(tmp_path / "a", b"first")]
    set_stdin(monkeypatch, b"piped\n\n")
    assert read_prompt(PromptInput(files, "ask"), NOTES) == "second\n\nfirst\n\npiped\n\nask"


def test_raw_is_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = "\ufeffa\r\n\x00b\n\n\n".encode()
    assert read_prompt(PromptInput([write(tmp_path / "a", data)], raw=True), NOTES) == data.decode()
    set_stdin(monkeypatch, b"one\n")
    assert read_prompt(PromptInput(prompt="two", raw=True), NOTES) == "one\n\ntwo"


@given(st.lists(st.text("a\n", min_size=1, max_size=4), min_size=1, max_size=4))
def test_joined_raw_parts_are_whole_and_apart(parts: list[str]) -> None:
    text = join(parts, raw=True)
    if len(parts) == 1:
        assert text == parts[0]
    rest = text
    for index, part in enumerate(parts):
        assert rest.startswith(part)
        rest = rest[len(part) :]
        if index < len(parts) - 1 and parts[index].endswith("a"):
            assert rest.startswith("\n\n")
            rest = rest[2:]
        elif index < len(parts) - 1:
            before = text[: len(text) - len(rest)]
            missing = 2 - min(2, len(before) - len(before.rstrip("\n")))
            assert rest.startswith("\n" * missing)
            rest = rest[missing:]
    assert rest == ""


def test_dash_is_stdin_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "f", b"file")
    set_stdin(monkeypatch, b"piped")
    assert read_prompt(PromptInput(["-", file], "ask"), NOTES) == "piped\n\nfile\n\nask"
    set_stdin(monkeypatch, b"piped")
    assert read_prompt(PromptInput([file], "-"), NOTES) == "file\n\npiped"
    with pytest.raises(UsageError, match="only once"):
        read_prompt(PromptInput(["-"], "-"), NOTES)
    with pytest.raises(UsageError, match="--no-stdin"):
        read_prompt(PromptInput(prompt="-", use_stdin=False), NOTES)


def test_no_stdin_never_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, b"piped")
    assert read_prompt(PromptInput(prompt="ask", use_stdin=False), NOTES) == "ask"


def test_terminal_and_closed_stdin_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, b"typed", terminal=True)
    assert read_prompt(PromptInput(prompt="ask"), NOTES) == "ask"
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompt(PromptInput(prompt="ask"), NOTES) == "ask"
    with pytest.raises(UsageError, match="stdin is closed"):
        read_prompt(PromptInput(prompt="-"), NOTES)


def test_a_terminal_is_read_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_stdin(monkeypatch, b"typed\n", terminal=True)
    assert read_prompt(PromptInput(prompt="-"), NOTES) == "typed"
    assert "Ctrl-D" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", [None, ""])
def test_nothing_to_say_is_an_error(prompt: str | None) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        read_prompt(PromptInput(prompt=prompt), NOTES)
    with pytest.raises(UsageError, match="the prompt is empty"):
        read_prompt(PromptInput(prompt=None, use_stdin=False, may_be_empty=True), NOTES)
    assert read_prompt(PromptInput(prompt="", use_stdin=False, may_be_empty=True), NOTES) == ""


def test_marks_and_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode("\ufeffa\r\nb\rc\r\n".encode(), "F", False, NOTES) == "a\nb\rc"
    notes = capsys.readouterr().err
    assert "F: byte order mark dropped" in notes
    assert "F: CRLF" in notes
    assert decode(b"plain\n", "F", False, NOTES) == "plain"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ok\xffrest", "F: not UTF-8 text: byte 0xff at offset 2"),
        ("caf\xe9".encode("latin-1"), "byte 0xe9 at offset 3"),
        (b"\xed\xa0\x80", "byte 0xed at offset 0"),
        ("hi".encode("utf-16"), "is UTF-16 text"),
        ("hi".encode("utf-32"), "is UTF-32 text"),
    ],
)
def test_what_is_not_utf8_is_an_error(data: bytes, message: str, raw: bool) -> None:
    with pytest.raises(UsageError, match=message):
        decode(data, "F", raw, NOTES)


def test_binary_is_an_error_unless_raw() -> None:
    with pytest.raises(UsageError, match="NUL byte at offset 3"):
        decode(b"GGU\x00F", "F", False, NOTES)
    assert decode(b"GGU\x00F", "F", True, NOTES) == "GGU\x00F"


@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_give_text_or_a_usage_error(data: bytes, raw: bool) -> None:
    try:
        text = decode(data, "F", raw, Notes(quiet=True))
    except UsageError as error:
        assert "\n" not in str(error)
        return
    assert not raw or text.encode("utf-8") == data


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_prompt(PromptInput([str(tmp_path / "missing")]), NOTES)
    with pytest.raises(UsageError, match="is a folder"):
        read_prompt(PromptInput([str(tmp_path)]), NOTES)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompt(PromptInput(["a\0b"]), NOTES)
    with pytest.raises(UsageError, match="the prompt is not UTF-8"):
        read_prompt(PromptInput(prompt="\udcff"), NOTES)


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_endless_input_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(cli_input, "LIMIT", 1 << 20)
    if source == "file":
        wanted = PromptInput(["/dev/zero"])
    else:
        set_stdin(monkeypatch, b"y\n" * (1 << 20))
        wanted = PromptInput()
    with pytest.raises(UsageError, match="more than 1 MiB"):
        read_prompt(wanted, NOTES)


def test_fifos_are_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(b"through a pipe\n",))
    writer.start()
    assert read_prompt(PromptInput([str(fifo)]), NOTES) == "through a pipe"
    writer.join()


def test_an_empty_file_name_is_named() -> None:
    with pytest.raises(UsageError, match="--file is empty"):
        read_prompt(PromptInput(["", "b"]), NOTES)


def test_an_argument_in_the_c_locale_is_utf8_all_the_same() -> None:
    text = "größe".encode().decode("ascii", "surrogateescape")
    assert checked_argument("the prompt", text) == "größe"
    with pytest.raises(UsageError, match="the prompt is not UTF-8"):
        checked_argument("the prompt", "\udcff")
