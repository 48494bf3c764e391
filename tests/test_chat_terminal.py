"""`infer chat` at a terminal: what is typed, what is shown, and every command."""

from __future__ import annotations

import json
import signal
import stat
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_terminal import CHATML, Start, ask, chats, session, texts, wait_for
from terminal import Terminal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    with chats(home) as call:
        yield call


def test_a_paste_of_30_lines_is_one_message(start: Start, home: Path) -> None:
    """And so are a block and lines that end in a backslash. What looks like a command inside a paste is text."""
    pasted = "\n".join(["/exit", *(f"line {number} \\" for number in range(28)), '"""end'])
    terminal = start("s", rows=20, columns=40)
    terminal.prompt()
    terminal.paste(pasted + "\n")
    terminal.wait('"""end')
    ask(terminal, "")
    terminal.send('"""one\r\rtwo\r')
    ask(terminal, '"""')
    terminal.send("first\\\r")
    ask(terminal, "second")
    terminal.send("third\x1b\r")
    ask(terminal, "fourth")
    ask(terminal, " /exit")
    terminal.send("\x04")
    assert terminal.end() == 0
    assert texts(home, "s")[::2] == [pasted, "one\n\ntwo", "first\nsecond", "third\nfourth", " /exit"]


def test_history(start: Start, home: Path) -> None:
    terminal = start()
    terminal.prompt()
    ask(terminal, "first question")
    ask(terminal, "second question")
    terminal.send("\x04")
    assert terminal.end() == 0
    path = home / "state" / "chat_history.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        "first question",
        "second question",
    ]
    with path.open("ab") as file:
        file.write(b'{"no": "text"}\nbroken\xff\n"\\ud800\\u001b[31m"\n')
    terminal = start("s")
    terminal.prompt()
    terminal.send("\x1b[A\x1b[A")
    terminal.wait("> second question")
    ask(terminal, "")
    terminal.send("\x12first")
    terminal.wait("first question")
    ask(terminal, "\r")
    assert texts(home, "s")[::2] == ["second question", "first question"]
    assert b"\x1b[31m" not in terminal.raw


def test_a_history_that_cannot_be_written_is_said_once(start: Start, home: Path) -> None:
    (home / "state" / "chat_history.jsonl").mkdir(parents=True)
    terminal = start()
    terminal.prompt()
    ask(terminal, "hi")
    ask(terminal, "hi again")
    assert terminal.screen.count("no history of lines") == 1


def test_sizes(start: Start) -> None:
    for rows, columns in ((24, 40), (0, 0), (3, 10)):
        terminal = start("--plain", rows=rows, columns=columns, script={"text": "word " * 30})
        terminal.prompt()
        terminal.send("hi\r")
        terminal.wait(lambda shown: shown.replace("\n", "").replace(" ", "").count("word") == 30)
        terminal.prompt()
        terminal.resize(30, 60)
        terminal.send("\x04")
        assert terminal.end() == 0


def test_a_resize_while_typing_and_while_answering(start: Start, home: Path) -> None:
    terminal = start("s", script={"text": "word " * 20, "delay": 0.01})
    terminal.prompt()
    terminal.send("a long question, typed")
    terminal.wait("typed")
    terminal.resize(20, 30)
    terminal.send(" in two parts\r")
    terminal.wait("word")
    terminal.resize(40, 120)
    terminal.wait("context")
    terminal.prompt()
    assert texts(home, "s") == ["a long question, typed in two parts", "word " * 20]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m[bold]red[/bold]\r\n\x00\u202e<|user|>\ta\u2028b"


@pytest.mark.parametrize("arguments", [(), ("--plain",)])
def test_hostile_text_of_a_model(start: Start, home: Path, arguments: tuple[str, ...]) -> None:
    terminal = start("s", *arguments, script={"text": HOSTILE})
    terminal.prompt()
    terminal.send("hi\r")
    terminal.wait("[bold]red[/bold]")
    terminal.prompt()
    assert not any(bad in terminal.raw for bad in (b"\x1b]0;", b"\x1b[2J", b"\x07", b"\xc2\x9b", b"\x00"))
    assert texts(home, "s") == ["hi", HOSTILE]


def test_hostile_text_of_a_user_and_a_file(start: Start, home: Path, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b]0;b"
    path.write_bytes(b"\x1b[2Jfile\n")
    terminal = start("s")
    terminal.prompt()
    terminal.send(f"/read {tmp_path}/a")
    terminal.paste("\x1b]0;b")
    terminal.send("\r")
    terminal.wait("1 line, for the")
    terminal.prompt()
    terminal.paste("\x1b]0;t\x07 [red]\x9b31m")
    ask(terminal, "")
    terminal.send(b"\xff\xe9t\xe9\r")
    terminal.wait(lambda shown: shown.count("cached") == 2)
    terminal.prompt()
    terminal.send("/show history\r")
    terminal.wait("[assistant]")
    terminal.prompt()
    assert texts(home, "s")[::2] == [
        "\x1b[2Jfile\n\n\x1b]0;t\x07 [red]\x9b31m", "\ufffd\ufffdt\ufffd",
    ]  # fmt: skip
    assert not any(bad in terminal.raw for bad in (b"\x1b]0;", b"\x1b[2J", b"\x07", b"\xc2\x9b"))


def test_what_a_terminal_shows_is_what_a_pipe_gets(start: Start, tmp_path: Path) -> None:
    answer = (
        "# Title\n\n- **one** `two`\n- [x](y) <b>&amp;</b>\n\n```py\nx = 2*3\n```\n\n"
        "| a | b |\n|---|---|\n2*3*4 _x_"
    )
    shown = []
    for arguments, env in (((), {}), (("--plain",), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})):
        terminal = start("-q", *arguments, script={"text": answer}, env=env)
        terminal.prompt()
        terminal.send("hi\r")
        terminal.wait("_x_")
        terminal.prompt()
        shown.append(terminal.screen.partition("hi\n")[2].removesuffix("\n>"))
        coloured = b"\x1b[1m" in terminal.raw
        assert coloured == (not arguments and not env)
    path = tmp_path / "out"
    with path.open("wb") as out:
        terminal = start("-q", script={"text": answer}, stdout=out)
        terminal.prompt()
        ask_raw = len(terminal.raw)
        terminal.send("hi\r")
        terminal.wait(lambda _: path.read_bytes().endswith(b"_x_\n"))
        terminal.prompt()
        assert b"Title" not in terminal.raw[ask_raw:]
    assert shown == [answer] * 4
    assert path.read_text(encoding="utf-8") == answer + "\n"


def test_a_warning_comes_after_the_answer(start: Start, home: Path) -> None:
    terminal = start("s", script={"text": "one line\nand another", "warn_after": 12})
    terminal.prompt()
    terminal.send("hi\r")
    terminal.wait("infer: warning")
    terminal.prompt()
    shown = terminal.screen.partition("> hi\n")[2].splitlines()
    assert shown[:2] == ["one line", "and another"]
    assert "infer: warning: the prompt cache is off: disk full" in shown[2:]
    assert texts(home, "s")[1] == "one line\nand another"


def test_thinking_is_dim_and_apart(start: Start) -> None:
    script = {"template": CHATML + "{% if 0 %}</think>{% endif %}", "text": "<think>\nhm\n</think>\n\nYes."}
    terminal = start(script=script)
    terminal.prompt()
    terminal.send("hi\r")
    terminal.wait("Yes.")
    terminal.prompt()
    assert "> hi\n[thinking] hm\n\nYes.\n[" in terminal.screen
    seen = len(terminal.raw)
    terminal.send("/set hide-thinking on\r")
    terminal.prompt()
    terminal.send("hi\r")
    terminal.wait("context", since=seen)
    assert "hm" not in terminal.raw[seen:].decode()


def test_the_context_is_full(start: Start, home: Path) -> None:
    terminal = start("s", "-n", "20", script={"ctx": 200})
    terminal.prompt()
    for letter in "ab":
        ask(terminal, letter * 40)
    seen = len(terminal.raw)
    terminal.send("c" * 40 + "\r")
    terminal.wait("/set context drop-oldest", since=seen)
    terminal.prompt()
    assert "context full (200 tokens)" in terminal.screen.replace("\n", "")
    assert len(texts(home, "s")) == 4
    terminal.send("/set context drop-oldest\r")
    terminal.wait("\ncontext drop-oldest")
    ask(terminal, "c" * 40)
    assert "of 2 turns are left out from now on" in terminal.screen.replace("\n", " ")
    assert len(texts(home, "s")) == 6


def test_every_command(start: Start, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / "notes.txt").write_text("line one\nline two\n", encoding="utf-8")
    terminal = start(script={"text": "Answer."}, rows=60)

    def command(text: str, shown: str) -> None:
        seen = len(terminal.raw)
        terminal.send(text + "\r")
        terminal.wait(shown, since=seen)
        terminal.prompt()

    terminal.prompt()
    for name in ("/undo", "/regen", "/edit", "/copy"):
        command(name, "nothing has been said yet")
    command("/help", "needs a space before it")
    assert all(f"\n/{name} " in terminal.screen for name in (
        "help", "system", "set", "show", "undo", "regen", "edit", "clear", "save", "load", "sessions", "model",
        "read", "stats", "copy", "exit"))  # fmt: skip
    command("/nope", "there is no command /nope: /help lists them")
    command("/exit now", "/exit takes nothing after it")
    command("/save", "/save needs a name")
    command("/save ../x", "is no name for a session")
    command("/stats", "there is no answer yet")
    command("/system Be kind.", "system message set")
    command("/system", "Be kind.")
    ask(terminal, "one", "Answer.")
    command("/save first", "session first is kept")
    command("/stats", "seed:")
    command("/copy", "7 characters copied by the terminal")
    assert b"\x1b]52;c;QW5zd2VyLg==\x07" in terminal.raw
    command(f"/read {folder / 'none'}", "no such file")
    command(f"/read {folder / 'notes.txt'}", "2 lines, for the next message")
    ask(terminal, "two", "Answer.")
    ask(terminal, "three", "Answer.")
    assert texts(home, "first")[::2] == ["one", "line one\nline two\n\ntwo", "three"]
    command("/undo", "taken back: three")
    assert len(texts(home, "first")) == 4
    command("/regen", "Answer.")
    command("/edit four", "Answer.")
    assert texts(home, "first")[::2] == ["one", "four"]
    terminal.send("/edit\r")
    terminal.wait("> four")
    ask(terminal, "ty", "Answer.")
    assert texts(home, "first")[::2] == ["one", "fourty"]
    terminal.send("/edit\r")
    terminal.wait("> fourty", since=len(terminal.raw))
    terminal.interrupt()
    terminal.prompt()
    ask(terminal, "five", "Answer.")
    assert texts(home, "first")[::2] == ["one", "fourty", "five"]
    command("/set temp 0.5", "temp 0.5")
    command("/set temp", "temp 0.5")
    command("/set temp 9e9", "/set temp")
    command("/set top-k x", "must be a whole number")
    command("/set nope 1", "there is no setting 'nope'")
    command("/set context maybe", "must be stop or drop-oldest")
    command("/set", "max-tokens default")
    command("/set temp default", "temp default")
    command("/show", "device:")
    command("/show history", "[assistant]")
    command("/clear", "session first is left as it is")
    ask(terminal, "six", "Answer.")
    assert texts(home, "first")[::2] == ["one", "fourty", "five"]
    command("/save first", "there is a session first already")
    command("/save second", "session second is kept")
    command("/sessions", "first")
    command("/sessions FOURTY", "fourty")
    command("/sessions nowhere", "there is nothing like that")
    command("/load nope", "there is no session 'nope'")
    command("/load first", "session first, 3 turns so far")
    command("/model", "smollm2-135m-instruct")
    command("/model gemma-3-270m", "goes on with the conversation")
    ask(terminal, "seven", "Answer.")
    assert session(home, "first")[-1]["model"] == "gemma-3-270m"
    command("/model nope", "infer: error")
    command("/model", "gemma-3-270m")
    terminal.send("/ex")
    terminal.wait("/exit", since=len(terminal.raw))
    terminal.send("\t\r")
    terminal.send("\r")
    assert terminal.end() == 0
    assert [path.stem for path in sorted((home / "state" / "sessions").glob("*.jsonl"))] == [
        "first",
        "second",
    ]


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_escape_sequences(start: Start, home: Path, term: str) -> None:
    """It edits and echoes lines itself; nothing but text is written to it."""
    terminal = start("s", env={"TERM": term}, script={"text": "**Hello** there."})
    terminal.prompt()
    ask(terminal, "hi", "there.")
    terminal.send("one\\\r")
    ask(terminal, "two", "there.")
    terminal.send('"""/exit\r\r')
    ask(terminal, 'end"""', "there.")
    terminal.send(b"\xff\r")
    terminal.wait(lambda shown: shown.count("there.") == 4)
    terminal.prompt()
    terminal.send("/edit\r")
    terminal.wait("cannot edit it, so type it again: \ufffd")
    ask(terminal, "again", "there.")
    before = len(terminal.raw)
    terminal.send("   \r")
    terminal.wait("> ", since=before)
    assert texts(home, "s")[::2] == ["hi", "one\ntwo", "/exit\n\nend", "again"]
    terminal.send("half")
    terminal.wait("> half")
    terminal.interrupt()
    terminal.wait("press Ctrl-C again")
    terminal.prompt()
    assert b"\x1b" not in terminal.raw
    if term:
        terminal.send("/exit\r")
        assert terminal.end() == 0
    else:
        terminal.interrupt()
        assert terminal.end() == 130
    terminal = start(env={"TERM": term}, script={"template": None, "load_delay": 0.5})
    assert terminal.end() == 2
    assert "needs a chat template" in terminal.screen


def echoes(terminal: Terminal) -> bool:
    return bool(termios.tcgetattr(terminal.master)[3] & termios.ECHO)


def test_what_is_typed_into_an_answer_is_not_shown_there(start: Start, tmp_path: Path) -> None:
    """It is in the next prompt, to be edited; and the terminal is as it was at the end, however that comes."""
    terminal = start(script={"text": "word " * 40, "delay": 0.01})
    terminal.prompt()
    terminal.send("hi\r")
    terminal.wait("word")
    terminal.send("half a li")
    terminal.wait("cached")
    terminal.wait(lambda shown: shown.endswith("> half a li"))
    terminal.send("ne\r")
    terminal.wait(lambda shown: shown.count("cached") == 2)
    assert "half a line" in terminal.screen
    assert terminal.screen.replace("\n", "").count("word " * 10) >= 4
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.end() == 0
    assert echoes(terminal)
    marker = tmp_path / "marker"
    for twice, code in ((True, 130), (False, 143)):
        marker.unlink(missing_ok=True)
        terminal = start("s", script={"save_delay": 1.0, "marker": str(marker)})
        terminal.prompt()
        terminal.send("hi\r")
        wait_for(marker)
        assert not echoes(terminal)
        if twice:
            terminal.interrupt()
            time.sleep(0.1)
            terminal.interrupt()
        else:
            terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == code
        assert echoes(terminal)


def test_another_model_brings_its_settings(start: Start, home: Path) -> None:
    """What the config file says of it counts from then on, but not before what was set in the chat."""
    (home / "config").mkdir(parents=True)
    (home / "config" / "config.toml").write_text(
        "[models.smollm2-135m-instruct]\ntemp = 0.25\nseed = 3\n"
        "[models.gemma-3-270m]\ntemp = 0.75\ntop_k = 7\nseed = 5\n"
    )
    terminal = start()
    terminal.prompt()
    for command, shown in (
        ("/set temp", "temp 0.25"),
        ("/set seed 9", "seed 9"),
        ("/model gemma-3-270m", "goes on with the conversation"),
        ("/set temp", "temp 0.75"),
        ("/set top-k", "top-k 7"),
        ("/set seed", "seed 9"),
        ("/model smollm2-135m-instruct", "goes on with the conversation"),
        ("/set top-k", "top-k default"),
        ("/set seed", "seed 9"),
    ):
        seen = len(terminal.raw)
        terminal.send(command + "\r")
        terminal.wait(shown, since=seen)
        terminal.prompt()


def test_what_is_typed_ahead_waits_for_its_turn(start: Start, home: Path) -> None:
    terminal = start("s", script={"delay": 0.05})
    terminal.prompt()
    terminal.send("one\rtwo\r")
    terminal.wait("Hello")
    terminal.send("three\r")
    terminal.wait(lambda shown: shown.count("cached") == 3)
    terminal.prompt()
    assert texts(home, "s")[::2] == ["one", "two", "three"]
