"""Foreign text on a terminal is literal, whatever it holds and however it is cut."""

from __future__ import annotations

import io
import sys
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.cli import render
from infer.cli.render import Notes, TerminalText, one_line, sanitize

# Every character, surrogates included, with those that matter made likely.
TEXT = st.text(st.one_of(st.characters(), st.sampled_from("\x1b\x9b\r\n\t\x00\x07\x7f[]\ud800")), max_size=60)


def harmful(text: str) -> set[str]:
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cs")} - {"\n", "\t"}


@given(TEXT, st.lists(st.integers(0, 60), max_size=8))
def test_any_cut_gives_the_same_text(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    terminal = TerminalText()
    shown = "".join(terminal.push(text[a:b]) for a, b in pairwise(edges))
    assert shown + terminal.finish() == sanitize(text)


@given(TEXT)
def test_nothing_executable_is_left(text: str) -> None:
    assert not harmful(sanitize(text))
    assert not harmful(one_line(text))
    assert "\n" not in one_line(text)
    sanitize(text).encode("utf-8")
    assert sanitize(sanitize(text)) == sanitize(text)


@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=60))
def test_printable_text_is_unchanged(text: str) -> None:
    assert sanitize(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[/INST] [bold]x[/bold]", "[/INST] [bold]x[/bold]"),
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x9b31m", "\ufffd31m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\r\nb\rc", "a\nb␍c"),
        ("\tkept\n", "\tkept\n"),
        ("del\x7f", "del␡"),
        ("\ud83d", "\ufffd"),
    ],
)
def test_sanitize(text: str, shown: str) -> None:
    assert sanitize(text) == shown


def test_messages_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    render.say("infer: error: a\nb\x1b[2J\u2028c")
    assert capsys.readouterr().err == "infer: error: a b␛[2J c\n"


def test_notes(capsys: pytest.CaptureFixture[str]) -> None:
    for notes in (Notes(), Notes(quiet=True), Notes(verbose=True)):
        notes.warning("w")
        notes.note("n")
        notes.detail("d")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["infer: warning: w", "infer: note: n", "infer: warning: w", "infer: note: n", "infer: d"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "term", "no_color", "styled"),
    [
        (True, "xterm-256color", "", True),
        (True, "xterm-256color", "1", False),
        (True, "dumb", "", False),
        (True, "", "", False),
        (False, "xterm-256color", "", False),
    ],
)
def test_ansi_only_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str, no_color: str, styled: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console = render.console()
    console.print("[red]literal[/red] :smile:", style="bold red")
    assert ("\x1b" in stream.getvalue()) is styled
    assert "[red]literal[/red] :smile:" in stream.getvalue()


@pytest.mark.parametrize(("term", "drawn"), [("xterm", True), ("dumb", False)])
def test_progress_waits_and_cleans_up(monkeypatch: pytest.MonkeyPatch, term: str, drawn: bool) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with render.progress("loading") as update:
        update(1, 10)
    assert stream.getvalue() == ""
    with pytest.raises(KeyboardInterrupt), render.progress("loading", after_s=0.0) as update:
        update(5, 10)
        raise KeyboardInterrupt
    assert bool(stream.getvalue()) is drawn
    if drawn:
        assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_a_closed_stderr_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        render.say("nobody hears this")
        assert not render.animated()
