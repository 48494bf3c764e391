"""`infer run` with a real engine on a tiny random model: the same answer in every form and by every road."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import Infer

from infer.cli.main import invoke

PROMPT = "The quick brown fox walks along the river and"


@pytest.fixture
def run(tiny_infer: Infer) -> Infer:
    """run(*arguments, stdin=b"") runs `infer run` on a tiny model."""
    return partial(tiny_infer, "run")


def report(run: Infer, *arguments: str) -> dict[str, Any]:
    code, out, err = run("--json", *arguments)
    assert (code, err) == (0, "")
    return dict(json.loads(out))


def test_every_road_gives_the_same_answer(run: Infer) -> None:
    common = ["--raw", "-n", "24", "--seed", "5", "--ignore-eos"]
    whole = report(run, *common, PROMPT)
    assert whole["usage"]["completion_tokens"] == len(whole["ids"]) == 24
    assert (whole["finish_reason"], whole["seed"]) == ("length", 5)
    assert whole["text"]
    roads = [
        run(*common, PROMPT)[1],
        run(*common, "--no-stream", PROMPT)[1],
        run(*common, "--no-cache", PROMPT)[1],
        run(*common, stdin=PROMPT.encode())[1],
        run(*common, "-", stdin=PROMPT.encode())[1],
    ]
    assert roads == [whole["text"]] * len(roads)
    lines = run("--jsonl", *common, PROMPT)[1].split("\n")[:-1]
    assert "".join(json.loads(line)["delta"] for line in lines[:-1]) == whole["text"]
    assert json.loads(lines[-1])["ids"] == whole["ids"]


def test_another_seed_is_another_answer(run: Infer) -> None:
    answers = {report(run, "--raw", "--temp", "3", "-n", "16", PROMPT)["text"] for _ in range(3)}
    assert len(answers) > 1


def test_the_report_names_the_model(run: Infer) -> None:
    model = report(run, "--raw", "-n", "1", PROMPT)["model"]
    assert (model["architecture"], model["name"]) == ("llama", "Tiny llama")
    assert len(model["fingerprint"]) == 64


def test_chat_and_tokenize_agree(run: Infer, capsys: pytest.CaptureFixture[str]) -> None:
    usage = report(run, "-n", "2", "The fox")["usage"]
    assert invoke(["tokenize", "--chat", "The fox"]) == 0
    assert usage["prompt_tokens"] == len(capsys.readouterr().out.split())


def test_stop_strings_end_the_answer(run: Infer) -> None:
    common = ["--raw", "--temp", "0", "--ignore-eos", "-n", "16"]
    text = report(run, *common, PROMPT)["text"]
    stop = text[4:7]
    stopped = report(run, *common, "--stop", stop, PROMPT)
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["text"] == text[: text.index(stop)]


def test_logprobs_are_those_of_the_answer(run: Infer) -> None:
    got = report(run, "--raw", "--temp", "0", "-n", "3", "--logprobs", "2", PROMPT)
    assert [item["id"] for item in got["logprobs"]] == got["ids"]
    for item in got["logprobs"]:
        assert item["top"][0]["id"] == item["id"]
        assert item["logprob"] == item["top"][0]["logprob"] >= item["top"][1]["logprob"]


def test_a_full_context(run: Infer) -> None:
    code, out, err = run("--raw", "fox " * 600)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "context holds 512" in err
    code, _, err = run("--raw", "--ctx", "64", "-n", "8", "--truncate", "tail", "fox " * 600)
    assert code == 0
    assert "to 56 tokens at its tail: context holds 64" in err
    ended = report(run, "--raw", "--ctx", "32", "--ignore-eos", "fox")
    assert ended["finish_reason"] == "length"
    assert sum(ended["usage"][name] for name in ("prompt_tokens", "completion_tokens")) in (32, 33)


def test_a_damaged_file_is_exit_3(run: Infer, tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:
    broken = tmp_path / "broken.gguf"
    data = tiny_llama(quant="Q8_0").read_bytes()
    for content in (data[: len(data) // 2], b"GGUF", b"", data[:200]):
        broken.write_bytes(content)
        code, out, err = run("-m", str(broken), "--raw", "x")
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert "broken.gguf" in err


def test_flags_of_the_engine_are_checked(run: Infer) -> None:
    for flags in (["--device", "tpu"], ["--kernel", "abacus"], ["--chat-template", "/no/such.jinja"]):
        code, out, err = run(*flags, "x")
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert flags[-1] in err


def test_flags_that_would_have_no_effect(run: Infer) -> None:
    code, _, err = run("--quant", "int4", "--raw", "-n", "1", PROMPT)
    assert code == 0
    assert (
        err
        == "infer: warning: --quant int4 rounds float weights, and this file has none: it runs as stored\n"
    )
    code, _, err = run("--isa", "scalar", "--kernel", "torch", PROMPT)
    assert code == 2
    assert "--isa scalar is for the native kernel, and torch is in use" in err


def test_the_installed_program(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    environment = {**os.environ, "INFER_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from infer.cli.main import main; main()", "run", "--raw", "-n", "4",
         "--stats", "--ignore-eos", "--seed", "1", "--threads", "1", "-m",
         str(tiny_llama(quant="Q8_0")), PROMPT],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert b"seed:        1\n" in done.stderr
