"""`--extract`: the first fenced code block of a text that arrives in pieces, by CommonMark's rules (spec 0.31, 4.5)."""

from __future__ import annotations

import re

ANY = "any"
_SAME = (
    {"py", "python", "python3"},
    {"sh", "bash", "shell", "zsh", "console"},
    {"js", "javascript"},
    {"ts", "typescript"},
    {"yml", "yaml"},
    {"md", "markdown"},
    {"rs", "rust"},
    {"rb", "ruby"},
    {"c++", "cpp"},
    {"c#", "csharp"},
    {"make", "makefile"},
)
_OPENING = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)([^\r\n]*)")
_MAY_CLOSE = re.compile(r" {0,3}(`*|~*)[ \t\r]*")


class FencedBlock:
    """`push` gives what of the block can be told from what has come so far: nothing before its fence opens, and of
    a line that may turn out to be the closing fence only once it has not.

    language: of the block, `ANY` for the first one. A block that the text leaves open ends with the text.
    """

    def __init__(self, language: str) -> None:
        self._wanted = next((names for names in _SAME if language.casefold() in names), {language.casefold()})
        self._line = ""  # what of the current line is held back
        self._shown = False  # whether some of the current line went out
        self._fence = ""  # of the block we are in
        self._indent = 0
        self._taken = False  # whether that block is the wanted one
        self.found = False
        self._over = False

    def push(self, piece: str) -> str:
        return "".join(self._push(part) for part in re.findall(r"[^\n]*\n|[^\n]+", piece))

    def finish(self) -> str:
        """What was held back when the text ended."""
        return "" if self._over else self._end_line()

    def _push(self, part: str) -> str:
        if self._over:
            return ""
        self._line += part
        if self._line.endswith("\n"):
            return self._end_line()
        if self._taken and (self._shown or not _MAY_CLOSE.fullmatch(self._line)):
            return self._show()
        return ""

    def _end_line(self) -> str:
        line, self._line, shown, self._shown = self._line, "", self._shown, False
        if not self._fence:
            self._open(line)
            return ""
        if not shown and self._closes(line):
            self._over, self._fence = self._taken, ""
            return ""
        if not self._taken:
            return ""
        self._line, self._shown = line, shown
        text = self._show()
        self._shown = False
        return text

    def _show(self) -> str:
        line, self._line = self._line, ""
        if not self._shown:  # as many spaces as stand before the opening fence go
            cut = len(line) - len(line.lstrip(" "))
            line = line[min(cut, self._indent) :]
        self._shown = True
        return line

    def _open(self, line: str) -> None:
        match = _OPENING.match(line)
        if match is None or (match[2][0] == "`" and "`" in match[3] + match[4]):
            return
        self._indent, self._fence = len(match[1]), match[2]
        self._taken = self._wanted == {ANY} or match[3].casefold() in self._wanted
        self.found |= self._taken

    def _closes(self, line: str) -> bool:
        stripped = line.strip(" \t\r\n")
        return (
            bool(_MAY_CLOSE.fullmatch(line.rstrip("\n")))
            and len(stripped) >= len(self._fence)
            and stripped.startswith(self._fence[0])
        )
