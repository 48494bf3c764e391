"""The entry point: what it may import, help, version, completion, and errors that no command expects."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infer.cli import main as cli_main
from infer.cli.main import invoke
from infer.cli.options import complete_model

HEAVY = {
    "torch", "numpy", "tokenizers", "huggingface_hub", "transformers", "jinja2", "bitsandbytes",
    "safetensors", "sentencepiece", "rich", "platformdirs", "pydantic", "triton", "prompt_toolkit", "sqlite3",
}  # fmt: skip
MAY_IMPORT = re.compile(
    r"infer(\.(cli(\.\w+)?|samplers(\.params)?"
    r"|runtime(\.(config|errors|store(\.(paths|files|catalog|resolve))?))?))?"
)


ENTRY_POINT = "from infer.cli.main import main; main()"


def run(
    *arguments: str, home: Path, code: str = ENTRY_POINT, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment, "INFER_HOME": str(home), **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["run", "--no-such"], []]
)
def test_what_light_commands_import(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from infer.cli.main import invoke; code = invoke(sys.argv[1:]);"
        "print('\\nMODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, "INFER_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    modules = done.stdout.rpartition("\nMODULES ")[2].split()
    assert not {name.split(".")[0] for name in modules} & HEAVY
    ours = [name for name in modules if name.startswith("infer")]
    assert ("infer.cli.run" in ours) == ("run" in arguments)
    assert [name for name in ours if not MAY_IMPORT.fullmatch(name)] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ls"]])
def test_light_commands_are_quick(tmp_path: Path, arguments: list[str]) -> None:
    best = float("inf")
    for _ in range(3):
        before = os.times()
        assert run(*arguments, home=tmp_path).returncode == 0
        after = os.times()
        best = min(
            best, after.children_user + after.children_system - before.children_user - before.children_system
        )
        if best < 0.3:
            return
        time.sleep(0.1)
    pytest.fail(f"{best:.2f} s of CPU time")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([]) == 0
    without = capsys.readouterr().out
    assert invoke(["--help"]) == 0
    assert capsys.readouterr().out == without
    for command in ("run", "tokenize", "ls", "pull", "show", "rm"):
        assert re.search(rf"^  {command}  +\S", without, re.MULTILINE)
        assert invoke([command, "-h"]) == 0
        assert "Usage: infer " + command in capsys.readouterr().out
    assert invoke(["--version"]) == 0
    assert re.fullmatch(r"infer \d+\.\d+\S*\n", capsys.readouterr().out)


def test_unknown_commands_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["rnu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("infer: error: No such command 'rnu'")
    assert "run" in err
    assert err.count("\n") == 1


def test_bad_settings_end_with_one_line(tmp_path: Path) -> None:
    done = run("run", "hi", home=tmp_path, INFER_TOP_K="many")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infer: error: INFER_TOP_K: must be a whole number, not 'many'\n"
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("tempo = 1\n", encoding="utf-8")
    done = run("run", "hi", home=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "unknown key 'tempo'" in done.stderr


def test_missing_models_are_exit_3(tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path / "no.gguf")):
        done = run("run", "-m", name, "hi", home=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert name in done.stderr
    done = run("run", "hi", home=tmp_path, INFER_MODEL="from-the-environment")
    assert "from-the-environment" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tmp_path: Path, shell: str) -> None:
    done = run("--show-completion", shell, home=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_INFER_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("infer r", {"run", "rm"}),
        ("infer run -m smol", {"smollm2-135m-instruct"}),
        ("infer run --top", {"--top-k", "--top-p"}),
    ],
)
def test_completion(tmp_path: Path, words: str, expected: set[str]) -> None:
    variables = {
        "_INFER_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = run(home=tmp_path, **variables)
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("infer run -m my-", "my-model.gguf"),
        ("infer show smol", "smollm2-135m-instruct"),
        ("infer run --session tr", "trip"),
        ("infer session export ", "trip"),
        ("infer run -t sum", "summarize"),
        ("infer config set top_", "top_k"),
        ("infer cache pr", "prune"),
    ],
)
def test_names_complete_in_every_shell(tmp_path: Path, shell: str, words: str, expected: str) -> None:
    for file in ("models/my-model.gguf", "state/sessions/trip.jsonl", "config/templates/summarize.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    variables = {
        "_INFER_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = (
        "import sys; from infer.cli.main import invoke; invoke([]);"
        f"sys.exit(bool({HEAVY - {'rich', 'pydantic'}!r} & set(sys.modules)))"
    )
    done = run(home=tmp_path, code=code, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in re.split(r"[\s\"():]+", done.stdout)


def test_paths_complete_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x.gguf").touch()
    (tmp_path / "models" / "x.txt").touch()
    assert complete_model(f"{tmp_path}/mo") == [f"{tmp_path}/models/"]
    assert complete_model(f"{tmp_path}/models/") == [f"{tmp_path}/models/x.gguf"]
    assert complete_model(f"{tmp_path}/none/x") == []
    monkeypatch.chdir(tmp_path / "models")
    assert "x.gguf" in complete_model("x")
    assert complete_model("gemma-3") == ["gemma-3-270m"]


def test_every_ending_has_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endings: list[tuple[BaseException, int, str]] = [
        (KeyboardInterrupt(), 130, "infer: interrupted"),
        (cli_main.Terminated(), 143, "infer: terminated"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (cli_main.ReaderGone("stdout"), 141, ""),
        (OSError(28, "No space left on device", "/x"), 1, "infer: error: /x: No space left on device"),
        (MemoryError(), 1, "infer: error: out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            1,
            "infer: error: out of memory",
        ),
        (RuntimeError("std::bad_alloc"), 1, "infer: error: out of memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, "infer: error: out of memory"),
        (
            ImportError("libx.so: failed to map"),
            1,
            "infer: error: a library cannot be loaded: libx.so: failed",
        ),
        (ValueError("odd\x1b\nthing"), 1, "infer: error: unexpected ValueError: odd␛ thing; this is a bug"),
    ]

    for error, code, message in endings:

        def fail(arguments: object, error: BaseException = error) -> int:
            raise error

        monkeypatch.setattr(cli_main, "_dispatch", fail)
        assert invoke([]) == code
        err = capsys.readouterr().err
        assert err.startswith(message)
        assert err.count("\n") == bool(message)


def test_numbers_and_texts_need_no_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys; from infer.cli.main import invoke;"
        "invoke(['run', '-n', '1', '--temp', '0.5', '--seed=-1', '-m', '/nowhere', 'hi']);"
        "sys.exit('pydantic' in sys.modules)"
    )
    done = run(home=tmp_path, code=code)
    assert (done.returncode, "--seed must be" in done.stderr) == (0, True)
