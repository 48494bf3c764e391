"""`--extract`: which block, what of it, how early, and where a language may stand on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Infer
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.cli.extract import ANY, FencedBlock
from infer.cli.words import attach_language, values_last

ANSWER = "Sure:\n\n```python\nprint(1)\n\n```\nand\n~~~ sh -e\nls `x`\n~~~\n"


def extract(text: str, language: str = ANY, pieces: int | None = None) -> tuple[bool, str]:
    block = FencedBlock(language)
    parts = [text] if pieces is None else [text[i : i + pieces] for i in range(0, len(text), pieces)]
    out = "".join(map(block.push, parts)) + block.finish()
    return block.found, out


@pytest.mark.parametrize(
    ("text", "language", "code"),
    [
        (ANSWER, ANY, "print(1)\n\n"),
        (ANSWER, "py", "print(1)\n\n"),
        (ANSWER, "bash", "ls `x`\n"),
        (ANSWER, "SH", "ls `x`\n"),
        (ANSWER, "rust", None),
        ("no code, ``` inline", ANY, None),
        ("```a`b\nx\n```\ny\n```", ANY, "y\n"),  # an info string holds no backtick, so the second fence opens
        ("````md\n```\nx\n```\n````\n", ANY, "```\nx\n```\n"),
        ("```\nopen to the end", ANY, "open to the end"),
        ("```\nx\n~~~\n``\n``` y\n  ```  \nz", ANY, "x\n~~~\n``\n``` y\n"),
        ("  ```\n  a\n    b\n c\n  ```\n", ANY, "a\n  b\nc\n"),
        ("    ```\nx\n", ANY, None),
        ("```python\r\nx = 1\r\n```\r\n", ANY, "x = 1\r\n"),
        ("```\n```\nrest", ANY, ""),
        ("```js\n1\n```\n```JavaScript\n2\n```", "javascript", "1\n"),
        ("~~~ a`b\nx\n~~~", ANY, "x\n"),
        ("```\nx\u2028```\n```", ANY, "x\u2028```\n"),
    ],
)
def test_the_block_by_commonmark(text: str, language: str, code: str | None) -> None:
    for pieces in (None, 1, 2, 3):
        assert extract(text, language, pieces) == (code is not None, code or "")


LINES = st.lists(st.sampled_from(["```", "``", "~~~", "````", "  ```py", "x", "", " y", "``` z"]), max_size=8)


@settings(max_examples=150, deadline=None)
@given(LINES, st.sampled_from(["\n", "\r\n"]), st.integers(1, 5))
def test_pieces_make_no_difference(lines: list[str], end: str, pieces: int) -> None:
    text = end.join(lines)
    assert extract(text, ANY, pieces) == extract(text)


def test_what_cannot_close_the_block_is_shown_at_once() -> None:
    block = FencedBlock(ANY)
    assert [block.push(part) for part in ("```", "py\n", "a", "b", "\n", "`", "`x", "\n`", "``")] == [
        "", "", "a", "b", "\n", "", "``x", "\n", "",
    ]  # fmt: skip
    assert block.finish() == ""


OPTIONS = {"-q": False, "--quiet": False, "-m": True, "--stop": True}


@pytest.mark.parametrize(
    ("given_", "result"),
    [
        ("-x hello", "--extract=any hello"),
        ("-x", "--extract=any"),
        ("--extract python hello", "--extract=python hello"),
        ("hello -x", "hello --extract=any"),
        ("-qx py hello", "-q --extract=py hello"),
        ("-xpython hello", "-xpython hello"),
        ("--extract=zig hello", "--extract=zig hello"),
        ("-m -x hello", "-m -x hello"),
        ("--stop --extract -x hi", "--stop --extract --extract=any hi"),
        ("-- -x py", "-- -x py"),
        ("-mx hello", "-mx hello"),
        ("-", "-"),
    ],
)
def test_where_a_language_may_stand(given_: str, result: str) -> None:
    assert attach_language(given_.split(), OPTIONS) == result.split()


@pytest.fixture
def run(scripted_infer: Infer) -> Infer:
    """run(*arguments, text=…) on a model that answers with the text."""

    def call(*arguments: str, text: str = ANSWER) -> tuple[int, str, str]:
        return scripted_infer("run", "--raw", *arguments, script={"text": text})

    return call


def test_run_prints_only_the_code(run: Infer, tmp_path: Path) -> None:
    assert run("-x", "hi") == (0, "print(1)\n\n", "")
    assert run("-x", "sh", "--no-stream", "hi") == (0, "ls `x`\n", "")
    path = tmp_path / "code"
    assert run("--extract", "-o", str(path), "hi") == (0, "", "")
    assert path.read_text() == "print(1)\n\n"
    assert run("-x", "hi", text="just words") == (
        1, "", "infer: error: the answer holds no fenced code block: ask for one, or drop --extract\n",
    )  # fmt: skip
    code, _, err = run("-x", "rust", "-o", str(path), "hi")
    assert (code, "no fenced rust code block" in err) == (1, True)
    assert path.read_text() == "print(1)\n\n"
    assert run("-x", "--json", "hi")[0] == 2


def test_a_variable_asks_for_it_and_a_flag_overrides_it(run: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_EXTRACT", "any")
    assert run("hi")[1] == "print(1)\n\n"
    assert run("--json", "hi")[1].startswith('{"text"')


@pytest.mark.parametrize(
    ("given_", "result"),
    [
        (["temp", "-1", "-q"], ["-q", "--", "temp", "-1"]),
        (["-m", "-1", "-.5e3"], ["-m", "-1", "--", "-.5e3"]),
        (["-qm", "-1", "-2"], ["-qm", "-1", "--", "-2"]),
        (["-mx", "-2", "--stop=a", "--stop", "-3"], ["-mx", "--stop=a", "--stop", "-3", "--", "-2"]),
        (["- one\n- two", "-q"], ["-q", "--", "- one\n- two"]),
        (["---\ntitle: x\n---\n"], ["--", "---\ntitle: x\n---\n"]),
        (["-", "-q"], ["-", "-q"]),
        (["a", "-q", "--", "-1"], ["a", "-q", "--", "-1"]),
        (["-2", "--", "-q"], ["--", "-2", "-q"]),
        (["--nope", "-1"], ["--nope", "--", "-1"]),
        (["-12x", "--tempo=-1"], ["-12x", "--tempo=-1"]),
        (["-m"], ["-m"]),
    ],
)
def test_a_number_is_no_option(given_: list[str], result: list[str]) -> None:
    assert values_last(given_, OPTIONS) == result
