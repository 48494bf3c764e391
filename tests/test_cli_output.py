"""Where answers go: bytes, files, JSON; and what an interrupt in the middle of a write leaves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.cli.output import (
    DescriptorWriter,
    FileWriter,
    JsonAnswer,
    JsonLinesAnswer,
    ReaderGone,
    TextAnswer,
    Writer,
    json_line,
    open_writer,
)
from infer.cli.render import Notes
from infer.cli.signals import held
from infer.runtime.errors import OutputError


class Memory(Writer):
    def __init__(self, *, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal
        self.closed = False

    def drain(self, timeout: float | None = None) -> None:
        """Everything stays queued, where the test looks."""

    def close(self) -> None:
        self.closed = True

    @property
    def data(self) -> bytes:
        return bytes(self._pending)


@given(st.text() | st.lists(st.text(max_size=5) | st.integers() | st.booleans() | st.none(), max_size=4))
def test_json_lines_are_safe_and_valid(value: object) -> None:
    line = json_line({"delta": value}).decode("utf-8")
    assert line.endswith("}\n")
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in line[:-1])
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"delta": value}


def test_json_has_no_surrogates_and_no_nan() -> None:
    assert json.loads(json_line("a\ud800")) == "a\ufffd"
    with pytest.raises(ValueError, match="JSON compliant"):
        json_line(float("nan"))


@pytest.mark.parametrize("stream", [True, False])
def test_text_off_a_terminal_is_the_models_bytes(stream: bool) -> None:
    writer = Memory()
    answer = TextAnswer(writer, stream=stream)
    for delta in ("\x1b[31m", "a\r", "\nü"):
        answer.delta(delta)
        assert stream or writer.data == b""
    answer.finish({})
    assert writer.data == "\x1b[31ma\r\nü".encode()


@pytest.mark.parametrize(
    ("deltas", "shown"),
    [
        (["a"], "a\n"),
        (["a\n"], "a\n"),
        ([], ""),
        (["\x1b", "[31mred", "\x1b[", "0m"], "␛[31mred␛[0m\n"),
        (["a\r", "\nb\r"], "a\nb␍\n"),
        (["[/INST]", " [bold]"], "[/INST] [bold]\n"),
    ],
)
@pytest.mark.parametrize("ending", ["finish", "abandon"])
@pytest.mark.parametrize("stream", [True, False])
def test_text_on_a_terminal(deltas: list[str], shown: str, ending: str, stream: bool) -> None:
    writer = Memory(terminal=True)
    answer = TextAnswer(writer, stream=stream)
    for delta in deltas:
        answer.delta(delta)
    if ending == "finish":
        answer.finish({})
    else:
        answer.abandon()
    assert writer.data.decode() == shown


def test_notes_wait_for_the_end_of_an_answer_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever thread says them, and however the answer ends."""
    notes = Notes()
    with pytest.raises(KeyboardInterrupt), notes.after(True):
        for function in (notes.warning, notes.note):
            thread = threading.Thread(target=function, args=("a",))
            thread.start()
            thread.join()
        assert capsys.readouterr().err == ""
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "infer: warning: a\ninfer: note: a\n"
    with notes.after(False):
        notes.note("b")
        assert capsys.readouterr().err == "infer: note: b\n"
    notes.note("c")
    assert capsys.readouterr().err == "infer: note: c\n"


def test_json_and_jsonl() -> None:
    writer = Memory()
    answer = JsonAnswer(writer)
    answer.delta("a")
    answer.finish({"text": "a"})
    assert writer.data == b'{"text": "a"}\n'
    writer = Memory()
    lines = JsonLinesAnswer(writer)
    lines.delta("a")
    lines.delta("b\n")
    lines.finish({"text": "ab\n"})
    assert [json.loads(line) for line in writer.data.splitlines()] == [
        {"delta": "a"},
        {"delta": "b\n"},
        {"text": "ab\n"},
    ]


def test_a_file_is_opened_at_the_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old answer")
    writer = open_writer(str(path))
    writer.drain()
    assert path.read_bytes() == b"old answer"
    writer.queue(b"new")
    writer.drain()
    assert path.read_bytes() == b"new"
    writer.queue(b"er")
    writer.close()
    assert path.read_bytes() == b"newer"


def test_an_empty_answer_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    FileWriter(str(path)).close()
    assert path.read_bytes() == b""


def test_links_and_modes_survive(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x")
    target.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(target)
    writer = FileWriter(str(link))
    writer.queue(b"y")
    writer.close()
    assert link.is_symlink()
    assert target.read_bytes() == b"y"
    assert target.stat().st_mode & 0o777 == 0o640


def test_bad_files_are_errors_before_any_work(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "out"), "no such folder"),
        ("a\0b", "cannot write there"),
        ("x" * 5000, "cannot write there"),
    ):
        with pytest.raises(OutputError, match=message):
            open_writer(name)


def test_a_full_disk_is_an_error() -> None:
    writer = open_writer("/dev/full")
    writer.queue(b"x")
    with pytest.raises(OutputError, match="/dev/full: cannot write: No space left on device"):
        writer.drain()


def test_a_reader_that_left() -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = DescriptorWriter(descriptor, "stdout")
    writer.queue(b"x")
    with pytest.raises(ReaderGone):
        writer.drain()
    os.close(descriptor)


def test_a_slow_reader_on_a_pipe_that_does_not_block() -> None:
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, False)
    data = os.urandom(300_000)
    received = bytearray()

    def read() -> None:
        while len(received) < len(data):
            received.extend(os.read(reader, 1 << 14))

    thread = threading.Thread(target=read)
    writer = DescriptorWriter(descriptor, "stdout")
    writer.queue(data)
    thread.start()
    writer.drain()
    thread.join()
    assert received == data
    os.close(reader)
    os.close(descriptor)


def test_an_interrupted_write_goes_on_where_it_stopped() -> None:
    reader, descriptor = os.pipe()
    data = os.urandom(200_000)
    writer = DescriptorWriter(descriptor, "stdout")
    writer.queue(data)
    main = threading.get_ident()
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        writer.drain()
    started = time.monotonic()
    writer.drain(timeout=0.05)  # a reader that never reads is not waited for
    assert time.monotonic() - started < 1
    received = bytearray()
    thread = threading.Thread(target=lambda: received.extend(read_to_end(reader)))
    thread.start()
    writer.drain()
    os.close(descriptor)
    thread.join()
    assert received == data
    os.close(reader)


def read_to_end(descriptor: int) -> bytes:
    data = b""
    while piece := os.read(descriptor, 1 << 16):
        data += piece
    return data


def test_held_signals_arrive_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        done.append("the block ran to its end")
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
