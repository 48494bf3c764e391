"""Markdown on a terminal: colours around a text, and never another character."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.cli.render import sanitize
from infer.cli.repl.markdown import MarkdownStyle

SGR = re.compile(r"\x1b\[([0-9;]*)m")
CODES = {"1": "bold", "2": "dim", "3": "italic", "33": "yellow", "35": "magenta", "36": "cyan"}
WORDS = [
    "*", "**", "***", "_", "__", "`", "``", "```", "~~~", "\n", "\n\n", "# ", "#", "> ", "- ", "1. ", "  ", "a", "b c",
    "[bold]", "[/]", "[link=x]", "&amp;", "<b>", "\\", "|", "\t", "é", "日本", "\u200b", "\ufffd", "]", "[",
]  # fmt: skip


def dress(*pieces: str) -> str:
    style = MarkdownStyle()
    return "".join(style.push(piece) for piece in pieces)


def styles(text: str) -> list[tuple[str, str]]:
    """(style, characters) of a whole text, neighbours joined."""
    found: list[tuple[str, str]] = []
    style = ""
    for index, part in enumerate(SGR.split(dress(text))):
        if index % 2:
            style = " ".join(CODES[code] for code in part.split(";")) if part not in ("", "0") else ""
        elif part and found and found[-1][0] == style:
            found[-1] = (style, found[-1][1] + part)
        elif part:
            found.append((style, part))
    return found


@given(st.lists(st.sampled_from(WORDS), max_size=40), st.data())
def test_every_character_stays_however_the_text_is_cut(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    style = MarkdownStyle()
    for piece in pieces:
        assert SGR.sub("", style.push(piece)) == piece
    assert style_of_each(dress(*pieces)) == style_of_each(dress(text))


@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    shown = dress(sanitize(text))
    assert SGR.sub("", shown) == sanitize(text)
    assert shown.count("\x1b") == len(SGR.findall(shown))


def style_of_each(shown: str) -> list[tuple[str, str]]:
    found, style = [], ""
    for index, part in enumerate(SGR.split(shown)):
        if index % 2:
            style = part
        else:
            found += [(style, character) for character in part]
    return [(("" if style == "0" else style), character) for style, character in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", [("", "plain")]),
        ("a **b** c", [("", "a "), ("dim", "**"), ("bold", "b"), ("dim", "**"), ("", " c")]),
        ("*a* b", [("yellow", "*"), ("italic", "a"), ("dim", "*"), ("", " b")]),
        ("2*3*4 a_b_c 5 * 6", [("", "2"), ("dim", "*"), ("", "3"), ("dim", "*"), ("", "4 a"), ("dim", "_"),
                               ("", "b"), ("dim", "_"), ("", "c 5 "), ("dim", "*"), ("", " 6")]),
        ("# Title\ntext", [("bold magenta", "# Title"), ("", "\ntext")]),
        ("- one\n12. two", [("yellow", "-"), ("", " one\n12"), ("yellow", "."), ("", " two")]),
        ("> said", [("dim", ">"), ("italic", " said")]),
        ("`a*b` c", [("dim", "`"), ("cyan", "a"), ("dim", "*"), ("cyan", "b"), ("dim", "`"), ("", " c")]),
        ("```py\n# x *y*\n```\n*z", [("dim", "```py"), ("", "\n"), ("cyan", "# x *y*"), ("", "\n"), ("cyan", "```"),
                                    ("", "\n"), ("yellow", "*"), ("italic", "z")]),
    ],
)  # fmt: skip
def test_styles(text: str, expected: list[tuple[str, str]]) -> None:
    assert styles(text) == expected


@pytest.mark.parametrize("text", ["a **open", "`open", "*open", "# open", "> open"])
def test_what_is_not_closed_ends_with_its_line(text: str) -> None:
    assert styles(text + "\nnext")[-1] == ("", "\nnext")


def test_a_long_line_takes_time_in_proportion() -> None:
    style = MarkdownStyle()
    for _ in range(200):
        piece = " " * 500 + "*`_" * 500
        assert SGR.sub("", style.push(piece)) == piece
