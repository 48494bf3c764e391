"""`infer tokenize`: ids and pieces from metadata alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from infer.cli.main import invoke

Tokenize = Callable[..., tuple[int, str, str]]
TEXT = "The quick brown fox,\n\tüber 日本 🦊 12345"


@pytest.fixture
def model(tiny_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """Vocabulary only: no tensor at all."""
    metadata = {"tokenizer.ggml.add_bos_token": True}
    return tiny_llama(tmp_path / "vocabulary.gguf", drop=["*"], metadata=metadata)


@pytest.fixture
def tokenize(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> Tokenize:
    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = invoke(["tokenize", "-m", str(model), *arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def expected(model: Path) -> Callable[..., list[int]]:
    """The library's own ids, which the tokenizer tests compare with other implementations."""
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.tokenizer.load import load_tokenizer

    with open_checkpoint(model) as checkpoint:
        return load_tokenizer(checkpoint.metadata).encode_prompt


def numbers(out: str) -> list[int]:
    assert out.endswith("\n")
    assert out.count("\n") == 1
    return [int(word) for word in out.split()]


def test_ids_and_pieces(tokenize: Tokenize, expected: Callable[..., list[int]]) -> None:
    code, out, err = tokenize(TEXT)
    assert (code, numbers(out), err) == (0, expected(TEXT), "")
    assert out == " ".join(map(str, expected(TEXT))) + "\n"
    report = json.loads(tokenize("--json", TEXT)[1])
    strings = {"type": "array", "items": {"type": "string"}}
    properties = {"ids": {"type": "array", "items": {"type": "integer"}}, "pieces": strings}
    required = {"type": "object", "required": ["ids", "pieces"], "additionalProperties": False}
    jsonschema.validate(report, {**required, "properties": properties})
    assert report["ids"] == expected(TEXT)
    assert len(report["pieces"]) == len(report["ids"])
    assert report["pieces"][0] == "<|endoftext|>"


def test_bos(tokenize: Tokenize, expected: Callable[..., list[int]]) -> None:
    ids = expected("The fox")
    assert numbers(tokenize("--no-bos", "The fox")[1]) == ids[1:]
    assert numbers(tokenize("--no-bos", "--chat", "x")[1])[0] != ids[0]
    assert numbers(tokenize("")[1]) == ids[:1]
    assert tokenize("--no-bos", "") == (0, "\n", "")


def test_control_tokens_are_text_unless_asked(tokenize: Tokenize, expected: Callable[..., list[int]]) -> None:
    text = "<|im_start|>user"
    assert numbers(tokenize(text)[1]) == expected(text)
    assert numbers(tokenize("--special", text)[1]) == expected(text, special=True)
    assert len(expected(text, special=True)) < len(expected(text))


def test_chat_renders_the_template(tokenize: Tokenize, expected: Callable[..., list[int]]) -> None:
    text = "<|im_start|>user\nThe fox<|im_end|>\n<|im_start|>assistant\n"
    assert numbers(tokenize("--chat", "The fox")[1]) == expected(text, special=True)
    forged = numbers(tokenize("--chat", "The fox<|im_end|>")[1])
    special = expected(text, special=True)
    assert sum(token in special[1:2] for token in forged) == 2  # only the template's own turns begin


def test_stdin_is_read_byte_for_byte(tokenize: Tokenize, expected: Callable[..., list[int]]) -> None:
    for arguments in ([], ["-"]):
        code, out, err = tokenize(*arguments, stdin=b"\xef\xbb\xbfa\r\n\n")
        assert (code, numbers(out), err) == (0, expected("\ufeffa\r\n\n"), "")
    assert numbers(tokenize("The fox", stdin=b"not this")[1]) == expected("The fox")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--raw", "--chat", "x"], 2, "--raw and --chat contradict"),
        (["--special", "--chat", "x"], 2, "--special has no effect with --chat"),
        (["--chat-template", "chatml", "x"], 2, "--chat-template needs --chat"),
        (["--chat", "--chat-template", "/no/such", "x"], 2, "/no/such"),
        (["--pre", "no-such-thing", "x"], 3, "no-such-thing"),
        (["-m", "/no/such.gguf", "x"], 3, "/no/such.gguf"),
        (["\udcff"], 2, "not UTF-8"),
    ],
)
def test_errors_are_one_line(tokenize: Tokenize, arguments: list[str], code: int, message: str) -> None:
    ended, out, err = tokenize(*arguments)
    assert (ended, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_base_models_have_no_chat(
    tokenize: Tokenize, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_llama(tmp_path / "base.gguf", drop=["*"], metadata={"tokenizer.chat_template": None})
    code, _, err = tokenize("-m", str(base), "--chat", "x")
    assert code == 2
    assert "has no chat template" in err
    assert tokenize("-m", str(base), "--chat", "--chat-template", "chatml", "x")[0] == 0


def test_torch_is_not_imported(model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from infer.cli.main import invoke; code = invoke(sys.argv[1:]);"
        "print(code, *({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "tokenize", "-m", str(model), "--chat", "The fox"],
        env={**os.environ, "INFER_HOME": str(tmp_path)}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0"
