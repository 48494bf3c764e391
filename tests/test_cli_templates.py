"""Prompt templates: what is filled in, what is an error, and `infer template`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_line import Infer, prompt_text

from infer.cli.templates import fill, variables


class Home:
    def __init__(self, infer: Infer, path: Path) -> None:
        self._infer, self.path = infer, path

    def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        return self._infer(*arguments, stdin=stdin)

    def prompt(self, *arguments: str, stdin: bytes = b"") -> str:
        """What `infer run --raw …` gives the model."""
        code, _, err = self("run", "--raw", *arguments, stdin=stdin)
        assert (code, err) == (0, "")
        return prompt_text(self._infer)


@pytest.fixture
def home(scripted_infer: Infer, tmp_path: Path) -> Home:
    return Home(scripted_infer, tmp_path / "home")


@pytest.mark.parametrize(
    ("text", "names", "result"),
    [
        ("{a} and {b}, {a}", ["a", "b"], "1 and {a}, 1"),
        ("{{a}} {a}", ["a"], "{a} 1"),
        ('{"k": {"n": 1}} { a } {} {1} {é} }{', [], None),
        ("{a}}", ["a"], "1}"),
        ("{{a} {b}}", ["a", "b"], "{1 {a}}"),
    ],
)
def test_variables(text: str, names: list[str], result: str | None) -> None:
    assert variables(text) == names
    assert fill(text, {"a": "1", "b": "{a}"}) == (text if result is None else result)


def test_a_template_takes_the_prompt(home: Home, tmp_path: Path) -> None:
    assert (
        home("template", "set", "sum", "In {lang}: {input}!")[2]
        == "infer: note: template sum: variables lang, input\n"
    )
    file = tmp_path / "text"
    file.write_text("A {lang} text.\n")
    assert home.prompt("-t", "sum", "--var", "lang=a=b", "-f", str(file)) == "In a=b: A {lang} text.\n!"
    assert home.prompt("-t", "sum", "--var", "lang=", "x", stdin=b"piped") == "In : piped\n\nx!"
    assert home("run", "-t", "sum", "--var", "lang=x")[0] == 2


def test_a_template_without_input_comes_last(home: Home) -> None:
    home("template", "set", "review", "-q", stdin=b"Review this.\r\n")
    assert home.prompt("-t", "review") == "Review this."
    assert home.prompt("-t", "review", stdin=b"diff\n") == "diff\n\nReview this."


def test_variable_and_key(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home("template", "set", "-q", "t", "{x}-{y}")
    monkeypatch.setenv("INFER_TEMPLATE", "t")
    monkeypatch.setenv("INFER_VAR", "x=1\ny=2")
    assert home.prompt() == "1-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-t", "tt"],
            "no template is called 'tt' (did you mean t?); `infer template set tt TEXT` makes one",
        ),
        (["-t", "t", "hi"], "template t needs 'x': give --var x=TEXT"),
        (["-t", "t", "--var", "z=1", "hi"], "template t has no variable 'z': it has input, x"),
        (["-t", "t", "--var", "x", "hi"], "--var: must be NAME=TEXT, not 'x'"),
        (["-t", "t", "--var", "input=1", "hi"], "--var: input is the prompt itself"),
        (["-t", "t", "--var", "x=1"], "the prompt is empty"),
        (["-t", "../t", "hi"], "is no name for a template"),
        (["--var", "x=1", "hi"], "--var needs a template"),
    ],
)
def test_mistakes_are_one_line(home: Home, arguments: list[str], message: str) -> None:
    home("template", "set", "-q", "t", "{x} {input}")
    code, out, err = home("run", "--raw", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_template_is_called_one_in_messages(home: Home) -> None:
    assert home("template", "set", "t", "")[2] == (
        "infer: error: the template is empty: give a text, or pipe something in\n"
    )
    assert "the template is not UTF-8 text" in home("template", "set", "t", "\udcff")[2]


def test_keeping_templates(home: Home) -> None:
    assert home("template", "ls") == (0, "NAME  VARIABLES\n", "")
    home("template", "set", "-q", "b", "{x} {y}")
    home("template", "set", "-q", "a", "first")
    home("template", "set", "-q", "a", "second\n")
    assert home("template", "ls")[1] == "NAME  VARIABLES\na\nb     x y\n"
    rows = json.loads(home("template", "ls", "--json")[1])["templates"]
    assert [(row["name"], row["variables"]) for row in rows] == [("a", []), ("b", ["x", "y"])]
    assert home("template", "show", "a") == (0, "second\n", "")
    assert home("template", "rm", "a")[0] == 2  # there is no terminal to ask on
    assert home("template", "rm", "-y", "a") == (0, "", "deleted template a\n")
    assert home("template", "rm", "-y", "a")[0] == 2
    os.mkfifo(home.path / "config" / "templates" / "pipe.txt")
    assert home("template", "show", "pipe")[0] == 2
    assert home("template", "ls")[1] == "NAME  VARIABLES\nb     x y\n"
    (home.path / "config" / "templates" / "bin.txt").write_bytes(b"\xff")
    assert home("template", "show", "bin")[0] == 2
