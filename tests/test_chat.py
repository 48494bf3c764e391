"""`infer chat` at a terminal: what interrupts it, and when. The real program in a pty, with a scripted model."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_terminal import Start, ask, chats, session, texts, wait_for


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    with chats(home) as call:
        yield call


def test_a_conversation(start: Start, home: Path) -> None:
    terminal = start("trip")
    terminal.prompt()
    assert "session trip; /help lists commands" in terminal.screen
    ask(terminal, "hi")
    assert "cached 3]" in terminal.screen
    ask(terminal, "and?")
    terminal.send(b"\x04")
    assert terminal.end() == 0
    assert texts(home, "trip") == ["hi", "Hello there.", "and?", "Hello there."]


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(start: Start, home: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    terminal = start("s", script={"hang_after": 5, "marker": str(marker)})
    terminal.prompt()
    for count in (1, 2, 3):
        marker.unlink(missing_ok=True)
        terminal.send("hi\r")
        wait_for(marker)
        terminal.interrupt()
        terminal.wait(lambda shown, count=count: shown.count("[stopped") == count)
        terminal.prompt()
    assert texts(home, "s") == ["hi", "Hello"] * 3
    assert session(home, "s")[-1]["finish"] == "cancelled"
    terminal.send("half a line")
    terminal.wait("> half a line")
    terminal.interrupt()
    terminal.prompt()
    ask_nothing = len(terminal.raw)
    terminal.send("x\x7f")
    terminal.interrupt()
    terminal.wait("again to exit", since=ask_nothing)
    terminal.interrupt()
    assert terminal.end() == 130
    assert len(texts(home, "s")) == 6


def test_ctrl_c_before_the_first_token(start: Start, home: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    terminal = start("s", script={"hang_after": 0, "marker": str(marker)})
    terminal.prompt()
    terminal.send("hi\r")
    wait_for(marker)
    terminal.wait("one moment")
    terminal.interrupt()
    terminal.wait("stopped before the answer began")
    terminal.prompt()
    assert "one moment" not in terminal.screen
    assert not (home / "state" / "sessions" / "s.jsonl").exists()
    terminal.send("\x04")
    assert terminal.end() == 0


def test_ctrl_c_while_loading(start: Start, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    terminal = start(script={"load_delay": 300, "marker": str(marker)})
    terminal.prompt()
    wait_for(marker)
    terminal.send("typed while it loads\r")
    terminal.wait("one moment")
    terminal.interrupt()
    terminal.wait("stopped before")
    terminal.prompt()
    terminal.send("/show\r")
    terminal.wait("the model is being loaded")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.end() == 0


def test_ctrl_c_while_saving(start: Start, home: Path, tmp_path: Path) -> None:
    """The turn is whole on disk, and the chat goes on; pressed twice, it ends, and the old or the new content stays."""
    marker = tmp_path / "marker"
    terminal = start("s", script={"save_delay": 1.0, "marker": str(marker)})
    terminal.prompt()
    terminal.send("hi\r")
    wait_for(marker)
    terminal.interrupt()
    terminal.wait("infer: interrupted")
    terminal.prompt()
    assert texts(home, "s") == ["hi", "Hello there."]
    marker.unlink()
    terminal.send("again\r")
    wait_for(marker)
    terminal.interrupt()
    time.sleep(0.1)
    terminal.interrupt()
    assert terminal.end() == 130
    assert len(texts(home, "s")) in (2, 4)
    assert ask_once_more(start, home) in (4, 6)


def ask_once_more(start: Start, home: Path) -> int:
    terminal = start("s")
    terminal.prompt()
    ask(terminal, "once more")
    return len(texts(home, "s"))


def test_a_warning_while_one_types(start: Start, home: Path) -> None:
    terminal = start("s", script={"load_delay": 1.0, "warnings": ["the \x1b[31mmodel is odd"]})
    terminal.prompt()
    terminal.send("half a ")
    terminal.wait("infer: warning: the \u241b[31mmodel is odd\n> half a")
    ask(terminal, "question")
    assert texts(home, "s")[0] == "half a question"


def test_what_is_typed_while_loading_is_answered(start: Start) -> None:
    terminal = start(script={"load_delay": 1.5})
    terminal.prompt()
    ask(terminal, "early")
    assert "> early\nHello there.\n[" in terminal.screen


def test_a_signal_at_the_prompt_and_in_an_answer(start: Start, home: Path, tmp_path: Path) -> None:
    terminal = start()
    terminal.prompt()
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    marker = tmp_path / "marker"
    terminal = start("s", script={"hang_after": 5, "marker": str(marker)})
    terminal.prompt()
    terminal.send("hi\r")
    wait_for(marker)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    assert texts(home, "s") == ["hi", "Hello"]


def test_a_terminal_that_is_closed_loses_nothing(start: Start, home: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, the shell another one, and every write fails."""
    for name, hang_after in (("idle", None), ("busy", 5)):
        marker = tmp_path / name
        terminal = start(name, script={"hang_after": hang_after, "marker": str(marker)} if hang_after else {})
        terminal.prompt()
        if hang_after:
            terminal.send("hi\r")
            wait_for(marker)
        else:
            ask(terminal, "hi")
        terminal.hang_up()
        if hang_after:
            terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(60) in (
            1,
            143,
        )  # the failed write, or the signal: which comes first is open
        assert texts(home, name) == ["hi", "Hello" if hang_after else "Hello there."]


def test_a_model_that_cannot_be_loaded_ends_the_chat(start: Start) -> None:
    terminal = start(script={"template": None})
    assert terminal.end() == 2
    assert "a chat needs a chat template, and scripted has none" in terminal.screen
    assert "Traceback" not in terminal.screen
