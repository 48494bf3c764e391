"""One value of a TOML text set or removed; comments, order and every other line stay as they are.

There is no parser here: `tomllib` says where each statement ends (the shortest run of lines that it accepts), and
whether the edited text means what it should.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")
# What JSON leaves as it is, but TOML (DEL), terminals or programs that read lines do not.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
Path = tuple[str, ...]


@dataclass(frozen=True)
class _Statement:
    """Lines start … end - 1. table: the header in force. path: of the value, None for headers, comments and blanks."""

    start: int
    end: int
    table: Path
    path: Path | None


def edited(text: str, path: Path, value: object | None) -> str:
    """The text with `value` (text, number, truth value, list of these) at `path`; None removes it.

    Raises ValueError where that takes more than changing a line, such as inside an inline table.
    """
    lines = text.split("\n")
    statements = list(_statements(lines))
    found = next((item for item in statements if item.path == path), None)
    if found is not None:
        rest = [] if value is None else [_replaced(lines[found.start : found.end], path[-1], value)]
        lines[found.start : found.end] = rest
    elif value is not None:
        end = "\r" if lines[0].endswith("\r") else ""
        _insert(lines, statements, path, f"{_key(path[-1])} = {literal(value)}{end}")
    result = "\n".join(lines)
    if not result.endswith("\n"):
        result += "\n"
    if _loads(result) != _expected(tomllib.loads(text), path, value):
        raise ValueError("this needs an editor")
    return result


def _statements(lines: Sequence[str]) -> Iterator[_Statement]:
    table: Path = ()
    start = 0
    while start < len(lines):
        end, parsed = next(
            (end, parsed)
            for end in range(start + 1, len(lines) + 1)
            if (parsed := _loads("\n".join(lines[start:end]))) is not None
        )
        path = _only_path(parsed)
        if lines[start].lstrip(" \t").startswith("["):
            table, path = path, ()
        yield _Statement(start, end, table, table + path if path else None)
        start = end


def _loads(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text + "\n")  # a line of a file with CRLF ends in CR
    except tomllib.TOMLDecodeError:
        return None


def _only_path(parsed: dict[str, Any]) -> Path:
    """The keys of tables with one key each, down to a value or a table that has more or none."""
    path: list[str] = []
    node: Any = parsed
    while isinstance(node, dict) and len(node) == 1:
        ((key, node),) = node.items()
        path.append(key)
    return tuple(path)


def _replaced(lines: Sequence[str], name: str, value: object) -> str:
    """A statement with another value: its key as it is written, and the comment behind it."""
    text = "\n".join(lines)
    parsed = _loads(text)
    ends = [at for at, letter in enumerate(text) if letter == "=" and _loads(f"{text[:at]}= 0") is not None]
    comments = [at for at, letter in enumerate(text) if letter == "#" and _loads(text[:at]) == parsed]
    before = text[: comments[0]] if comments else text
    tail = text[len(before.rstrip()) :] if comments else "\r" if text.endswith("\r") else ""
    head = text[: ends[0]].rstrip() if ends else _key(name)
    return f"{head} = {literal(value)}{tail}"


def _insert(lines: list[str], statements: Sequence[_Statement], path: Path, line: str) -> None:
    """Behind the last value of the table; where there is no such table, at the end of the text under a new header."""
    table = path[:-1]
    last = [item for item in statements if item.table == table and (item.path is not None or table)]
    last = [item for item in last if item.path is not None or lines[item.start].lstrip().startswith("[")]
    if last:
        lines.insert(last[-1].end, line)
    elif table:
        while lines and not lines[-1].strip():
            lines.pop()
        header = f"[{'.'.join(map(_key, table))}]"
        lines += [*([""] if lines else []), header, line, ""]
    else:
        headers = [item.start for item in statements if lines[item.start].lstrip().startswith("[")]
        at = headers[0] if headers else len(lines) - (not lines[-1])
        while headers and at and lines[at - 1].lstrip().startswith("#"):
            at -= 1  # a comment right above a header belongs to it
        lines[at:at] = [line, ""] if headers else [line]


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else literal(name)


def literal(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL
        return json.dumps(value, ensure_ascii=False).translate(_ESCAPES)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return repr(value)


def _expected(table: dict[str, Any], path: Path, value: object | None) -> dict[str, Any]:
    node = table
    for name in path[:-1]:
        node = node.get(name, {}) if value is None else node.setdefault(name, {})
    if value is None:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value
    return table
