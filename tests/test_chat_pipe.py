"""`infer chat` away from the terminal, and what does not depend on where it runs."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import Script, ScriptedModel, install
from terminal import Terminal

from infer.cli.main import invoke

SCRIPTED = [sys.executable, str(Path(__file__).parent / "support" / "scripted_model.py")]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Home:
    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.path, self._monkeypatch, self._capsys = path, monkeypatch, capsys

    def chat(self, stdin: str | bytes, *arguments: str, **script: Any) -> tuple[int, str, str]:
        model = ScriptedModel(Script(**{"template": CHATML, **script}))
        install(model, self._monkeypatch.setattr)
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = invoke(["chat", *arguments])
        self.prompts = model.prompts
        return code, *self._capsys.readouterr()

    def texts(self, name: str) -> list[str]:
        lines = (self.path / "state" / "sessions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["content"] for line in lines[1:]]


@pytest.fixture
def home(scripted_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Home:
    return Home(scripted_home, monkeypatch, capsys)


def test_each_line_is_answered(home: Home) -> None:
    assert home.chat("hi\nand?\n") == (0, "Hello there.\nHello there.\n", "")
    assert home.prompts[1] == "<|user|>hi\n<|assistant|>Hello there.\n<|user|>and?\n<|assistant|>"
    assert home.chat("hi") == (0, "Hello there.\n", "")
    assert home.chat("\n  \n\r\n") == (0, "", "")
    assert home.chat("") == (0, "", "")
    assert home.chat("hi\r\n\r\nyou\r\n", text="Line.\n") == (0, "Line.\nLine.\n", "")
    assert home.prompts[1].endswith("<|user|>you\n<|assistant|>")


def test_a_piped_line_is_never_a_command(home: Home, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret", encoding="utf-8")
    code, out, err = home.chat(f"/read {secret}\n/exit\n/etc/passwd?\n", "-n", "5")
    assert (code, out.count("\n"), len(home.prompts)) == (0, 3, 3)
    assert "secret" not in home.prompts[2].replace(str(secret), "")
    assert [line.split("command: ")[1] for line in err.splitlines()] == ["/read too", "/exit too"]


def test_bad_bytes_are_an_error(home: Home) -> None:
    for data, message in (
        (b"hi\n\xff\n", "not UTF-8 text"),
        (b"a\0b\n", "binary input"),
        (b"\xff\xfeh\0", "UTF-16"),
    ):
        code, out, err = home.chat(data)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
        assert out == ("Hello there.\n" if data.startswith(b"hi") else "")


def test_sessions(home: Home) -> None:
    code, _, err = home.chat("one\n", "trip", "-s", "Be kind.")
    assert (code, err) == (0, "infer: note: new session trip\n")
    assert home.chat("two\n", "trip")[0] == 0
    assert home.prompts[0].startswith(
        "<|system|>Be kind.\n<|user|>one\n<|assistant|>Hello there.\n<|user|>two"
    )
    assert home.chat("three\n", "--continue")[0] == 0
    assert home.texts("trip")[::2] == ["one", "two", "three"]
    assert home.chat("x\n", "trip", "--session", "trip")[0] == 2
    assert home.chat("x\n", "trip", "-s", "Be rude.")[0] == 2
    assert home.chat("x\n", "a/b")[0] == 2
    code, _, err = home.chat("four\n", "trip", "-m", "gemma-3-270m")
    assert (code, err.count("\n")) == (0, 1)
    assert "was begun with smollm2-135m-instruct; gemma-3-270m answers this time" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["-q", "-v"], ["--context", "maybe"], ["--temp", "-1"], ["--think", "?"], ["--then-tty"], ["--kv-type", "x"],
        ["-s", "\udcff"],
    ],
)  # fmt: skip
def test_flags_that_make_no_sense(home: Home, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(Path, "open", lambda *a, **k: (_ for _ in ()).throw(OSError(6, "No such device")))
    code, out, err = home.chat("hi\n", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_failure_ends_it_and_keeps_what_was_said(home: Home) -> None:
    code, out, err = home.chat("one\ntwo\n", "s", "-q", fail_after=5)
    assert (code, out, err.count("\n")) == (1, "Hello\n", 1)
    assert home.texts("s") == ["one", "Hello"]
    code, out, err = home.chat("x" * 600 + "\n", "t", "-q")
    assert (code, out) == (4, "")
    assert "the message has" in err
    code, out, err = home.chat("x" * 2_000_000 + "\n", "-q")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert home.chat("hi\n", template=None)[0] == 2


def test_a_session_that_cannot_be_saved_is_said_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is answered, the conversation goes on, and the exit code tells."""
    import infer.runtime.store.sessions as store

    tries = []
    real = store.SessionStore._replace

    def replace(self: Any, path: Path, data: bytes) -> Any:
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, path, data)

    monkeypatch.setattr(store.SessionStore, "_replace", replace)
    code, out, err = home.chat("one\ntwo\n", "s")
    assert (code, out) == (1, "Hello there.\n" * 2)
    assert err.count("\n") == 2
    assert err.endswith(
        f"infer: error: {home.path}/state/sessions/s.jsonl: this turn cannot be kept: No space left on device; "
        "it is in memory, and the next turn tries again\n"
    )
    assert home.prompts[1] == "<|user|>one\n<|assistant|>Hello there.\n<|user|>two\n<|assistant|>"
    assert not (home.path / "state" / "sessions" / "s.jsonl").exists()
    tries.clear()
    code, out, err = home.chat("one\ntwo\nthree\nfour\n", "s")
    assert (code, err.splitlines()[2:]) == (0, ["infer: note: session s is kept again"])
    assert home.texts("s")[::2] == ["one", "two", "three", "four"]


def test_a_full_context(home: Home) -> None:
    lines = "".join(letter * 40 + "\n" for letter in "abcdef")
    code, out, err = home.chat(lines, "-n", "20", ctx=200)
    assert (code, out.count("\n"), err.count("\n")) == (4, 2, 1)
    assert "--context drop-oldest" in err
    code, out, err = home.chat(lines, "-n", "20", "--context", "drop-oldest", "-s", "SYS", ctx=200)
    assert (code, out.count("\n")) == (0, 6)
    assert all(
        len(prompt) + 20 < 200 and prompt.startswith("<|system|>SYS\n<|user|>") for prompt in home.prompts
    )
    assert "turns are left out from now on" in err


def test_thinking_goes_to_stderr(home: Home) -> None:
    script = {"template": CHATML + "{% if 0 %}</think>{% endif %}", "text": "<think>hm</think>Yes."}
    assert home.chat("hi\n", **script) == (0, "Yes.\n", "hm\n")
    assert home.chat("hi\n", "--hide-thinking", **script) == (0, "Yes.\n", "")


# -- processes

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(home: Home) -> Iterator[Start]:
    running = []

    def call(script: dict[str, Any], *arguments: str) -> subprocess.Popen[bytes]:
        command = [*SCRIPTED, json.dumps({"template": CHATML, **script}), "chat", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, env={**os.environ, "INFER_HOME": str(home.path)}, **pipes))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.communicate()


def test_an_answer_comes_before_the_next_line_is_there(start: Start) -> None:
    process = start({})
    assert process.stdin is not None
    assert process.stdout is not None
    for line in (b"hi\n", b"and?\n"):
        process.stdin.write(line)
        process.stdin.flush()
        assert process.stdout.readline() == b"Hello there.\n"
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_keeps_the_partial_answer(
    start: Start, home: Home, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    marker = tmp_path / "marker"
    process = start({"hang_after": 5, "marker": str(marker)}, "s", "-q")
    assert process.stdin is not None
    process.stdin.write(b"hi\nnext\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count(b"\n")) == (code, b"Hello\n", 1)
    assert home.texts("s") == ["hi", "Hello"]


def test_a_reader_that_leaves(home: Home) -> None:
    script = json.dumps({"template": CHATML, "delay": 0.001, "repeat": 1000, "ctx": 1 << 20})
    command = 'echo hi | "$@" | head -c 5; echo " ${PIPESTATUS[1]}"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", *SCRIPTED, script, "chat", "-q", "s"],
        env={**os.environ, "INFER_HOME": str(home.path)}, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"Hello 141\n", b"")
    assert home.texts("s")[1].startswith("Hello")


def test_going_on_at_the_terminal(home: Home) -> None:
    environment = {**os.environ, "INFER_HOME": str(home.path), "TERM": "xterm-256color"}
    reader, writer = os.pipe()
    os.write(writer, b"from the pipe\n")
    os.close(writer)
    command = [*SCRIPTED, json.dumps({"template": CHATML}), "chat", "s", "--then-tty"]
    terminal = Terminal(command, environment, stdin=reader)
    os.close(reader)
    terminal.prompt()
    assert "Hello there." in terminal.screen
    terminal.send("typed\r")
    terminal.wait("context")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.end() == 0
    terminal.close()
    assert home.texts("s")[::2] == ["from the pipe", "typed"]


def test_answers_are_logged_when_asked_for(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert home.chat("one\ntwo\n", "trip", "--log", "-q", "-s", "Be brief.")[0] == 0
    home.chat("three\n", "-q")
    assert invoke(["log", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["exchanges"]
    assert [(row["command"], row["session"], row["system"], row["prompt"]) for row in found] == [
        ("chat", "trip", "Be brief.", "two"),
        ("chat", "trip", "Be brief.", "one"),
    ]
    assert all(row["answer"] for row in found)
