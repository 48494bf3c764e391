"""Help, docs/cli.md and the manual page say the same, and every command has examples that its parser accepts."""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infer.cli import reference
from infer.cli.commands import COMMANDS, Group, Line, import_all, with_commands
from infer.cli.main import app, invoke

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
LINES = [
    (f"infer {name} {inner}", line) if isinstance(entry, Group) else (f"infer {name}", line)
    for name, entry in COMMANDS.items()
    for inner, line in (entry.lines.items() if isinstance(entry, Group) else [("", entry)])
]


@pytest.fixture(scope="module")
def pages() -> list[reference.Page]:
    return reference.pages()


def test_docs_are_up_to_date(pages: list[reference.Page]) -> None:
    assert reference.as_markdown(pages) == DOCS.read_text(encoding="utf-8"), (
        "run: infer man --markdown > docs/cli.md"
    )


@pytest.mark.parametrize(("name", "line"), LINES)
def test_the_line_of_a_command_is_the_beginning_of_its_help(name: str, line: Line) -> None:
    import_all()
    function = getattr(importlib.import_module(f"infer.cli.{line.module}"), line.target.partition(":")[2])
    assert " ".join((inspect.getdoc(function) or "").split()).startswith(line.help)
    assert line.help.endswith(".")


def test_every_command_is_there_with_examples_that_parse(pages: list[reference.Page]) -> None:
    assert [page.name for page in pages] == ["infer", *(name for name, _ in LINES)]
    root = with_commands(app, COMMANDS, "infer")
    for page in pages[1:]:
        assert page.examples, page.name
        for example in page.examples:
            words = shlex.split(example.replace('"$(', "").replace(')"', ""), comments=True)
            stages = [list(stage) for _, stage in itertools.groupby(words, lambda word: word not in "|<>")]
            for stage in stages:
                if "infer" in stage:
                    parse(root, stage[stage.index("infer") + 1 :])


def parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Raises typer's usage errors; runs nothing."""
    name = "infer" if parent is None else words.pop(0)
    context = command.make_context(name, words, parent=parent, resilient_parsing=parent is None)
    if rest := getattr(context, "_protected_args", None):
        parse(context.command.commands[rest[0]], [*rest, *context.args], context)


def test_help_ends_with_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["config", "set", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("Options:") < out.index("Examples:\n    infer config set model ")


def test_the_manual_page(pages: list[reference.Page], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["man"]) == 0
    text = capsys.readouterr().out
    assert text == reference.as_manual(pages)
    for page in pages[1:]:
        assert f".SS {page.name}".replace("-", "\\-") in text
    assert not re.search(r"^[.'](?!TH|SH|SS|TP|PP|B |nf|fi)", text, re.MULTILINE)
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-K", "utf8"],
            input=text.encode(),
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert "infer cache prune --cache-limit 1GB" in re.sub(r"\x1b\[\d+m|.\x08", "", done.stdout.decode())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "No such command 'rnu' (did you mean 'run'?); see `infer --help`"),
        (["cache", "verfy"], "No such command 'verfy' (did you mean 'verify'?); see `infer cache --help`"),
        (["run", "--temprature", "1"], "No such option: --temprature (did you mean --temp"),
        (["run", "--zzzz"], "No such option: --zzzz; see `infer run --help`"),
        (
            ["run", "-m", "qwen", "hi"],
            "no model is called 'qwen' (did you mean qwen2.5-coder-1.5b-instruct?)",
        ),
        (["show", "smolm2-135m"], "(did you mean smollm2-135m-instruct"),
        (["session", "show", "tripp"], "there is no session 'tripp' in "),
        (["bench"], None),
    ],
)
def test_what_was_meant(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str | None,
) -> None:
    monkeypatch.setenv("INFER_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    folder = tmp_path / "state" / "sessions"
    folder.mkdir(parents=True)
    (folder / "trip.jsonl").touch()
    if message is None:  # a path: what lies beside it
        (tmp_path / "model.gguf").touch()
        arguments, message = [*arguments, "-m", str(tmp_path / "modle.gguf")], "(did you mean model.gguf?)"
    assert invoke(arguments) in (1, 2, 3)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    if arguments[0] == "session":
        assert "(did you mean trip?)" in err
