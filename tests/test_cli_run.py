"""`infer run` with a model that says what it is told: flags, output forms, errors and their exit codes."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from scripted_model import BOS, EOS, Script, ScriptedModel, install, stub_engine

from infer.cli.main import invoke

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "text", "ids", "finish_reason", "stop_reason", "usage", "cache", "timings", "model", "seed", "device",
        "exact",
    ],
    "properties": {
        "text": {"type": "string"},
        "ids": {"type": "array", "items": {"type": "integer"}},
        "finish_reason": {"enum": ["stop", "length", "cancelled"]},
        "stop_reason": {"type": ["string", "integer", "null"]},
        "usage": {
            "type": "object",
            "additionalProperties": False,
            "required": ["prompt_tokens", "cached_tokens", "completion_tokens"],
            "properties": {"prompt_tokens": {"type": "integer"}, "cached_tokens": {"type": "integer"},
                           "completion_tokens": {"type": "integer"}},
        },
        "cache": {
            "type": "object",
            "additionalProperties": False,
            "required": ["memory_tokens", "disk_tokens", "loaded_bytes", "loaded_s", "saved_s"],
            "properties": {
                **{key: {"type": "integer"} for key in ("memory_tokens", "disk_tokens", "loaded_bytes")},
                **{key: {"type": "number"} for key in ("loaded_s", "saved_s")},
            },
        },
        "timings": {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": 0},
            "required": ["load_s", "tokenize_s", "prefill_s", "ttft_s", "decode_s", "tpot_s"],
        },
        "model": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "required": ["name", "fingerprint", "architecture", "quantization"],
        },
        "seed": {"type": "integer"},
        "device": {"type": "string"},
        "exact": {"type": "boolean"},
        "logprobs": {"type": "array"},
    },
}  # fmt: skip


@dataclass
class Result:
    code: int
    out: str
    err: str
    model: ScriptedModel

    @property
    def prompt(self) -> list[int]:
        return list(self.model.engine.requests[0].prompt_ids)

    @property
    def sampling(self) -> Any:
        return self.model.engine.requests[0].sampling

    @property
    def report(self) -> dict[str, Any]:
        report = json.loads(self.out.splitlines()[-1])
        jsonschema.validate(report, SCHEMA)
        return dict(report)


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """run(*arguments, script=Script(…), stdin=b"") runs `infer run` in this process."""
    stub_engine(monkeypatch)
    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))

    def call(*arguments: str, script: Script | None = None, stdin: bytes = b"") -> Result:
        model = ScriptedModel(script or Script())
        install(model, monkeypatch.setattr)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = invoke(["run", *arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err, model)

    return call


def test_stdout_is_the_answer(run: Run) -> None:
    result = run("--raw", "hi", script=Script("\x1b[1mHéllo\r\n[bold]"))
    assert (result.code, result.out, result.err) == (0, "\x1b[1mHéllo\r\n[bold]", "")
    assert result.prompt == [BOS, *b"hi"]
    assert result.model.closed


@pytest.mark.parametrize("flag", ["--json", "--no-stream", "--jsonl"])
def test_every_form_has_the_same_text(run: Run, flag: str) -> None:
    text = "Grüße\n\x1b[0m\u2028"
    result = run("--raw", flag, "hi", script=Script(text))
    assert result.code == 0
    if flag == "--no-stream":
        assert result.out == text
        return
    assert result.report["text"] == text
    assert result.report["ids"] == [*text.encode(), EOS]
    assert (result.report["finish_reason"], result.report["stop_reason"]) == ("stop", EOS)
    assert result.report["usage"] == {
        "prompt_tokens": 3,
        "cached_tokens": 3,
        "completion_tokens": len(text.encode()) + 1,
    }
    assert result.report["timings"]["load_s"] == 0.25
    assert result.report["model"]["name"] == "scripted"
    if flag == "--jsonl":
        deltas = [json.loads(line)["delta"] for line in result.out.split("\n")[:-2]]
        assert "".join(deltas) == text
        assert all(deltas)


def test_the_prompt_is_assembled(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("stable\n", encoding="utf-8")
    result = run("--raw", "-f", str(file), "ask", stdin=b"piped")
    assert bytes(result.prompt[1:]) == b"stable\n\npiped\n\nask"


def test_chat(run: Run) -> None:
    result = run("-s", "Be kind.", "--prefill", "Sure", "hi", script=Script(template=CHATML))
    text = bytes(token for token in result.prompt if token < 256)
    assert text == b"<|system|>Be kind.\n<|user|>hi\n<|assistant|>Sure"
    assert (result.code, result.out, result.err) == (0, "Hello there.", "")


def test_base_models_continue_the_text_and_say_so(run: Run) -> None:
    result = run("hi")
    assert result.prompt == [BOS, *b"hi"]
    assert result.err.count("\n") == 1
    assert "has no chat template" in result.err
    assert run("-q", "hi").err == ""
    for flags in (("-s", "x"), ("--prefill", "x")):
        result = run(*flags, "hi")
        assert result.code == 2
        assert "needs a chat template" in result.err


def test_special_tokens_only_on_request(run: Run) -> None:
    assert run("--raw", "a<eos>").prompt == [BOS, *b"a<eos>"]
    assert run("--raw", "--special", "a<eos>").prompt == [BOS, *b"a", EOS]


def test_the_seed_is_drawn_once_and_reported(run: Run) -> None:
    first, second = run("--raw", "--json", "hi"), run("--raw", "--json", "hi")
    assert first.report["seed"] == first.sampling.seed != second.report["seed"]
    assert run("--raw", "--json", "--seed", str(2**64 - 1), "hi").report["seed"] == 2**64 - 1
    stats = run("--raw", "--stats", "--seed", "77", "hi")
    assert "seed:        77" in stats.err


def test_stats_are_lines_on_stderr(run: Run) -> None:
    result = run("--raw", "--stats", "-q", "hi")
    assert result.out == "Hello there."
    names = [line.split(":")[0] for line in result.err.splitlines()]
    assert names == [
        "model", "prompt", "cache", "answer", "finish", "load", "tokenize", "prefill", "first token", "decode",
        "device", "seed",
    ]  # fmt: skip
    assert "3 tokens, 3 cached" in result.err
    assert "exact: true" in result.err


def test_verbose(run: Run) -> None:
    result = run("--raw", "-v", "hi", script=Script(warnings=("odd file",)))
    assert result.out == "Hello there."
    for part in ("odd file", "3 tokens, context 512", "kernel scripted", "sampling", "peak memory"):
        assert part in result.err


def test_sampling_precedence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(defaults={"temperature": 0.6, "top_k": 7})
    monkeypatch.setenv("INFER_TOP_P", "0.25")
    result = run("--raw", "--temp", "0.1", "-n", "3", "hi", script=script)
    assert (result.sampling.temperature, result.sampling.top_k, result.sampling.top_p) == (0.1, 7, 0.25)
    assert result.out == "Hel"


def test_length_and_zero_tokens(run: Run) -> None:
    assert run("--raw", "--json", "-n", "2", "hi").report["finish_reason"] == "length"
    result = run("--raw", "--json", "-n", "0", "hi")
    assert (result.report["text"], result.report["ids"], result.report["finish_reason"]) == ("", [], "length")


def test_stop_strings(run: Run) -> None:
    report = run("--raw", "--json", "--stop", " th", "hi").report
    assert (report["text"], report["finish_reason"], report["stop_reason"]) == ("Hello", "stop", " th")


def test_logprobs(run: Run) -> None:
    report = run("--raw", "--json", "--logprobs", "2", "-n", "1", "hi").report
    assert report["logprobs"] == [
        {
            "id": 72,
            "token": "H",
            "logprob": -0.5,
            "top": [
                {"id": 72, "token": "H", "logprob": -0.5},
                {"id": 1, "token": "\x01", "logprob": None},
            ],
        }
    ]


def test_output_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "answer"
    result = run("--raw", "-o", str(path), "hi", script=Script("\x1b[0mHi"))
    assert (result.out, path.read_bytes()) == ("", b"\x1b[0mHi")
    run("--raw", "--json", "-o", str(path), "hi")
    jsonschema.validate(json.loads(path.read_bytes()), SCHEMA)
    assert run("--raw", "-o", "-", "hi").out == "Hello there."


def test_a_failed_run_leaves_the_old_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "answer"
    path.write_bytes(b"old")
    assert run("--raw", "-o", str(path), "x" * 600).code == 4
    assert path.read_bytes() == b"old"


def test_a_failure_keeps_the_text_so_far(run: Run) -> None:
    result = run("--raw", "hi", script=Script(fail_after=5))
    assert (result.code, result.out, result.err) == (1, "Hello", "infer: error: the logits are NaN\n")
    assert result.model.closed


def test_a_prompt_longer_than_the_context(run: Run) -> None:
    result = run("--raw", "x" * 600)
    assert (result.code, result.out) == (4, "")
    assert "prompt has 601 tokens, context holds 512" in result.err
    assert "--truncate" in result.err
    hopeless = run("--raw", stdin=b"x" * 3_000_000)
    assert (hopeless.code, hopeless.out, hopeless.err.count("\n")) == (4, "", 1)
    assert "prompt has 3000000 characters, of which the first 1048576 are 10485" in hopeless.err
    exactly = run("--raw", "x" * 511)
    assert (exactly.code, len(exactly.prompt)) == (0, 512)


@pytest.mark.parametrize(("side", "kept"), [("head", "cde"), ("tail", "abc")])
@pytest.mark.parametrize("chat", [False, True])
def test_truncation_is_opted_in_and_reported(run: Run, side: str, kept: str, chat: bool) -> None:
    text = "a" * 200 + "bcd" * 100 + "e" * 200
    script = Script(template=CHATML if chat else None)
    flags = ("-s", "SYS") if chat else ("--raw",)
    result = run(*flags, "--truncate", side, "-n", "4", text, script=script)
    assert result.code == 0
    assert len(result.prompt) == 508
    assert f"to 508 tokens at its {side}: context holds 512" in result.err
    prompt = bytes(token for token in result.prompt if token < 256).decode()
    if chat:
        assert prompt.startswith("<|system|>SYS\n<|user|>")
        assert prompt.endswith("\n<|assistant|>")
    body = prompt.removeprefix("<|system|>SYS\n<|user|>").removesuffix("\n<|assistant|>")
    assert text.endswith(body) if side == "head" else text.startswith(body)
    assert kept[0] in body
    assert run(*flags, "--truncate", side, "short", script=script).err == ""


def test_truncation_keeps_whole_characters(run: Run) -> None:
    result = run("--truncate", "head", "-n", "5", "é" * 400, script=Script(template=CHATML))
    assert result.code == 0
    bytes(token for token in result.prompt if token < 256).decode("utf-8")


def test_a_template_that_leaves_no_room(run: Run) -> None:
    result = run("-s", "x" * 600, "--truncate", "head", "hi", script=Script(template=CHATML))
    assert result.code == 4
    assert "template and system message" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-q", "-v", "hi"], "--quiet and --verbose"),
        (["--json", "--jsonl", "hi"], "--json and --jsonl"),
        (["--jsonl", "--no-stream", "hi"], "--no-stream and --jsonl"),
        (["--logprobs", "3", "hi"], "--logprobs needs --json or --jsonl"),
        (["--special", "hi"], "--special needs --raw"),
        (["--truncate", "middle", "hi"], "--truncate must be head or tail"),
        (["--raw", "-s", "x", "hi"], "--system belongs to a chat"),
        (["--raw", "--prefill", "x", "hi"], "--prefill belongs to a chat"),
        (["--raw", "--chat-template", "x", "hi"], "--chat-template belongs to a chat"),
        (["-s", "\udcff", "hi"], "--system is not UTF-8"),
        (["--temp", "-1", "hi"], "--temp must be"),
        (["--temp", "warm", "hi"], "--temp"),
        (["--kv-type", "q4", "hi"], "--kv-type must be"),
        (["--logprobs", "101", "--json", "hi"], "--logprobs must be"),
        (["--no-such-flag", "hi"], "--no-such-flag"),
        (["one", "two"], "unexpected extra argument"),
        ([], "the prompt is empty"),
        (["-f", "/no/such/file"], "/no/such/file: no such file"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.startswith("infer: error: ")
    assert result.err.count("\n") == 1
    assert not result.model.engine.requests


def test_an_empty_system_switches_off_the_configured_one(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "home" / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('system = "Be kind."\n', encoding="utf-8")
    assert run("hi").code == 2  # a base model
    assert f"system in {config}" in run("hi").err
    assert run("--raw", "hi").code == 0
    assert run("-s", "", "hi").code == 0


@pytest.mark.parametrize(
    ("variable", "arguments", "out"),
    [
        ("JSON", ["--jsonl"], '{"delta": "'),
        ("JSONL", ["--json"], '{"text": "'),
        ("JSONL", ["--no-stream"], "Hello"),
        ("QUIET", ["-v"], "Hello"),
        ("VERBOSE", ["-q"], "Hello"),
        ("NO_CACHE", ["--cache-read-only"], "Hello"),
        ("RAW", ["-s", ""], "Hello"),
    ],
)
def test_a_flag_beats_an_opposite_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, arguments: list[str], out: str
) -> None:
    monkeypatch.setenv(f"INFER_{variable}", "1")
    result = run(*arguments, "hi")
    assert result.code == 0
    assert result.out.startswith(out)
    assert ("infer: sampling" in result.err) == ("-v" in arguments)


def test_a_dash_beats_no_stdin_of_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_NO_STDIN", "1")
    assert run("--raw", "-", stdin=b"piped").code == 0
    assert run("--raw", "--no-stdin", "-", stdin=b"piped").code == 2


def test_a_bad_output_file_is_found_before_the_model_is_loaded(run: Run, tmp_path: Path) -> None:
    result = run("--raw", "-o", str(tmp_path), "hi")
    assert result.code == 1
    assert "is a folder" in result.err
    assert not result.model.engine.requests


def test_unexpected_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, request: object) -> None:
        raise RuntimeError("line one\nline two\x1b[2J")

    monkeypatch.setattr("scripted_model.ScriptedEngine.add", broken)
    result = run("--raw", "hi")
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert "RuntimeError: line one line two␛[2J" in result.err
    assert "INFER_DEBUG=1" in result.err
    monkeypatch.setenv("INFER_DEBUG", "1")
    assert "Traceback" in run("--raw", "hi").err


def test_engine_flags_reach_the_loader(run: Run) -> None:
    result = run("--raw", "--no-cache", "--threads", "2", "hi")
    assert (result.model.engine_config.prefix_cache, result.model.engine_config.threads) == (False, 2)
