"""Markdown as it streams: styles around a text, of which every character stays, in its place.

Nothing is laid out anew, so what a terminal shows is what a pipe gets, the first character shows when it comes, and a
resize, a narrow window or a multiplexer can break nothing. Marks are dim, what they mark is styled. Where Markdown
itself would have to look ahead, the guess costs a colour and never a character.
"""

from __future__ import annotations

import re

from infer.cli.render import ansi

_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}")
_ITEM = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])")
_QUOTE = re.compile(r" {0,3}>")
_MARK = "dim"


_HEAD = 64  # characters of a line that can say what it is


class MarkdownStyle:
    """Dresses sanitized text in pieces; without its escape sequences the result is the text."""

    def __init__(self) -> None:
        self._line = ""  # the beginning of the current line
        self._last = " "  # the character before the next one, and the one before a run of marks
        self._before = " "
        self._run = ""  # marks of one kind that the line ends with so far
        self._fence = ""  # what opened the code block that is open
        self._code = 0  # backticks that opened the code span that is open
        self._flags: set[str] = set()

    def push(self, text: str) -> str:
        """More text, styled."""
        pieces: list[tuple[str, list[str]]] = []
        for character in text:
            style = self._style(character)
            if not pieces or pieces[-1][0] != style:
                pieces.append((style, []))
            pieces[-1][1].append(character)
        return "".join(ansi(style, "".join(run)) if style else "".join(run) for style, run in pieces)

    def _style(self, character: str) -> str:
        """The style of the next character, which is then part of the line."""
        if character == "\n":
            self._end_line()
            return ""
        if len(self._line) <= _HEAD:
            self._line += character
        last, self._last = self._last, character
        if self._fence:
            return "cyan"
        if len(self._line) <= _HEAD and _FENCE.match(self._line):
            return _MARK
        if self._run and character != self._run[0]:
            self._close_run(character)
        if character in "*_`":
            if not self._run:
                self._before = last
            self._run += character
            return "yellow" if character == "*" and _ITEM.fullmatch(self._line) else _MARK
        if self._code:
            return "cyan"
        if len(self._line) <= _HEAD:
            if _HEADING.fullmatch(self._line):
                self._flags |= {"bold", "magenta"}
            elif _QUOTE.fullmatch(self._line):
                self._flags.add("italic")
                return _MARK
            elif _ITEM.fullmatch(self._line):
                return "yellow"
        return " ".join(sorted(self._flags))

    def _close_run(self, after: str) -> None:
        """A run of marks is complete: what it opens or closes, given the characters on both sides."""
        run, before, self._run = self._run, self._before, ""
        if run[0] == "`":
            if self._code in (0, len(run)):
                self._code = 0 if self._code else len(run)
            return
        if self._code or (before.isalnum() and after.isalnum()):
            return
        for flag, wanted in (("bold", len(run) >= 2), ("italic", len(run) in (1, 3))):
            if wanted and flag in self._flags and not before.isspace():
                self._flags.discard(flag)
            elif wanted and not after.isspace() and not before.isalnum():
                self._flags.add(flag)

    def _end_line(self) -> None:
        line, body = self._line, self._line.strip()
        if self._fence:
            if len(body) >= len(self._fence) and not body.strip(self._fence[0]):
                self._fence = ""
        elif found := _FENCE.match(line):
            self._fence = found[1]
        self._line, self._run, self._last, self._code = "", "", " ", 0
        self._flags.clear()
