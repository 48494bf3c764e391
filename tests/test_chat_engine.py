"""`infer chat` with a real engine: the answers of `infer run`, and no token computed twice."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from terminal import Terminal

from infer.cli.main import invoke

Invoke = Callable[..., tuple[int, str, str]]
QUESTIONS = [
    "The fox walks along the river.",
    "Talk about the harvest and the price of bread.",
    "And the machine?",
]
COMMON = ["--seed", "5", "-n", "40", "--ignore-eos"]
PROMPT, CACHED = re.compile(r"prompt: +(\d+) tokens, (\d+) cached"), re.compile(r"(\d+) from disk")


@pytest.fixture
def infer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_llama: Callable[..., Path],
) -> Invoke:
    """infer(*arguments, stdin=b"") on the tiny model."""
    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INFER_MODEL", str(tiny_llama(quant="Q8_0", ctx=1024)))
    monkeypatch.setenv("INFER_THREADS", "1")

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = invoke(list(arguments))
        return code, *capsys.readouterr()

    return call


def contents(home: Path, name: str) -> list[str]:
    lines = (home / "state" / "sessions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["content"] for line in lines[1:]]


def test_a_chat_answers_what_runs_answer(infer: Invoke, tmp_path: Path) -> None:
    chatted = infer("chat", "a", *COMMON, stdin="\n".join(QUESTIONS))
    answers = [infer("run", "--session", "b", "--no-cache", *COMMON, question)[1] for question in QUESTIONS]
    home = tmp_path / "home"
    assert contents(home, "a") == contents(home, "b")
    assert contents(home, "a")[1::2] == answers
    assert chatted[1] == "".join(answer if answer.endswith("\n") else answer + "\n" for answer in answers)


def test_only_the_new_tokens_are_prefilled(infer: Invoke) -> None:
    _, _, err = infer("chat", "a", "--stats", *COMMON, stdin="\n".join(QUESTIONS))
    prompts = [(int(total), int(cached)) for total, cached in PROMPT.findall(err)]
    assert (len(prompts), prompts[0][1]) == (3, 0)
    for (before, _), (total, cached) in pairwise(prompts):
        # A random model samples tokens that its text is not cut into when it is read again: that costs the answer.
        assert before <= cached < total
    _, _, err = infer("chat", "a", "--stats", *COMMON, stdin="One more thing.")
    total, cached = (int(number) for number in PROMPT.findall(err)[0])
    assert cached >= prompts[-1][0]
    assert int(CACHED.findall(err)[0]) == cached


def test_a_full_context_is_said(infer: Invoke) -> None:
    code, out, err = infer("chat", "--ctx", "64", "--ignore-eos", stdin="The fox")
    assert (code, bool(out), err.count("\n")) == (0, True, 1)
    assert "the answer ends here: context full (64 tokens)" in err
    code, _, err = infer("chat", "--ctx", "64", "--ignore-eos", "-n", "8", stdin="fox\n" * 8)
    assert code == 4
    code, out, err = infer(
        "chat", "--ctx", "96", "--ignore-eos", "-n", "8", "--context", "drop-oldest", stdin="fox\n" * 8
    )
    assert code == 0
    assert "turns are left out from now on" in err


@pytest.mark.model
def test_the_real_model_in_a_terminal(smollm2_path: Path, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    environment = {**kept, "INFER_HOME": str(tmp_path / "home"), "TERM": "xterm-256color"}
    command = [sys.executable, "-c", "from infer.cli.main import main; main()"]
    arguments = ["chat", "s", "-m", str(smollm2_path), "--seed", "1", "-n", "40"]
    pasted = "\n".join(f"{number}. line of a poem" for number in range(30))
    terminal = Terminal([*command, *arguments], environment, seconds=180)
    terminal.prompt()
    terminal.paste(pasted)
    terminal.wait("29. line of a poem")
    terminal.send("\r")
    terminal.wait("cached 0]")
    terminal.prompt()
    terminal.send("Write a long story about the sea.\r")
    shown = terminal.wait(lambda screen: screen.count("cached") == 2)
    total, cached = re.findall(r"context (\d+)/\d+, cached (\d+)", shown.replace("\n", ""))[1]
    assert int(cached) > 200
    assert int(total) - int(cached) < 40 + 60
    terminal.prompt()
    terminal.send("/set max-tokens 2000\r")
    terminal.wait("max-tokens 2000", since=len(terminal.raw))
    terminal.prompt()
    terminal.send("Go on.\r")
    terminal.wait("> Go on.\n")
    terminal.wait(lambda screen: len(screen.rpartition("> Go on.")[2]) > 40)
    terminal.interrupt()
    terminal.wait("[stopped")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.end() == 0
    terminal.close()
    said = contents(tmp_path / "home", "s")
    assert said[::2] == [pasted, "Write a long story about the sea.", "Go on."]
    assert said[5]

    terminal = Terminal([*command, *arguments], environment, seconds=180)
    terminal.prompt()
    terminal.send("Thanks.\r")
    shown = terminal.wait("cached")
    shown = terminal.wait(lambda screen: re.search(r"cached \d+\]", screen.replace("\n", "")) is not None)
    again = re.findall(r"context (\d+)/\d+, cached (\d+)", shown.replace("\n", ""))[0]
    assert int(again[1]) > int(total)
    terminal.close()
