"""The log of answers: one SQLite file, with full-text search where the library has FTS5.

Table `exchanges`, one row for each answer; `search` indexes its texts. A log made by a library without FTS5 is indexed
by the first one that has it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from infer.runtime.errors import LogError
from infer.runtime.store.paths import DataDirs

if TYPE_CHECKING:
    import sqlite3

FILE_NAME = "log.sqlite3"
VERSION = 1
_BUSY_S = 2.0  # to wait for another process that is writing
_SEARCHED = ("prompt", "answer")
_TERM = re.compile(r'"([^"]+)"|(\S+)')


@dataclass(frozen=True)
class Exchange:
    """A question and its answer. time: UTC, ISO 8601. command: run or chat. model: its name. system, session: "" for
    none. finish: why the answer ended. Token counts are those of `--stats`."""

    time: str
    command: str
    model: str
    system: str
    prompt: str
    answer: str
    finish: str
    session: str
    prompt_tokens: int
    completion_tokens: int
    seed: str


_COLUMNS = tuple(field.name for field in fields(Exchange))


class AnswerLog:
    """The log of one user, which need not exist. Methods raise LogError."""

    def __init__(self, dirs: DataDirs) -> None:
        self.path = dirs.state / FILE_NAME

    def add(self, exchange: Exchange) -> None:
        """Append an answer. The file is made, for this user alone."""
        values = [getattr(exchange, name) for name in _COLUMNS]
        with self._open(create=True) as database, database:
            searchable = _make_tables(database)
            marks = ", ".join("?" * len(_COLUMNS))
            row = database.execute(
                f"INSERT INTO exchanges ({', '.join(_COLUMNS)}) VALUES ({marks})", values
            ).lastrowid
            if searchable:
                database.execute(
                    "INSERT INTO search (rowid, prompt, answer) VALUES (?, ?, ?)",
                    (row, exchange.prompt, exchange.answer),
                )

    def find(self, query: str = "", *, limit: int = 20) -> list[Exchange]:
        """The latest answers whose prompt or text holds every word of the query, newest first; "…" is a phrase."""
        if not self.path.exists():
            return []
        terms = [phrase or word for phrase, word in _TERM.findall(query)]
        with self._open(create=False) as database:
            if not _version(database):  # made, but never written
                return []
            indexed = all(any(letter.isalnum() for letter in term) for term in terms) and _index(database)
            where, values = _condition(terms, indexed=indexed)
            rows = database.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM exchanges {where} ORDER BY id DESC LIMIT ?",
                [*values, limit],
            ).fetchall()
        return [Exchange(*row) for row in rows]

    @contextmanager
    def _open(self, *, create: bool) -> Iterator[sqlite3.Connection]:
        try:
            import sqlite3
        except ImportError as error:  # a Python built without it
            raise LogError(f"the log needs Python's sqlite3: {error}") from None
        try:
            if create:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                os.close(os.open(self.path, flags, 0o600))
            if not stat.S_ISREG(self.path.lstat().st_mode):
                raise LogError(f"{self.path}: is not a file; move it away")
            with closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as database:
                version = _version(database)
                if version > VERSION:
                    raise LogError(f"{self.path}: written by a newer version of infer (format {version})")
                yield database
        except (sqlite3.Error, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LogError(f"{self.path}: the log cannot be used: {reason}") from None


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _make_tables(database: sqlite3.Connection) -> bool:
    """Whether there is an index to keep."""
    import sqlite3

    columns = ", ".join(f"{name} {'INTEGER' if name.endswith('_tokens') else 'TEXT'}" for name in _COLUMNS)
    database.execute(f"CREATE TABLE IF NOT EXISTS exchanges (id INTEGER PRIMARY KEY, {columns})")
    database.execute(f"PRAGMA user_version = {VERSION}")
    try:
        database.execute(f"CREATE VIRTUAL TABLE IF NOT EXISTS search USING fts5({', '.join(_SEARCHED)})")
        database.execute("SELECT rowid FROM search LIMIT 0")
    except sqlite3.OperationalError:  # no such module
        return False
    return True


def _index(database: sqlite3.Connection) -> bool:
    """Bring the index up to date, and say whether there is one."""
    import sqlite3

    missing = "FROM exchanges WHERE id NOT IN (SELECT rowid FROM search)"
    try:
        if database.execute(f"SELECT 1 {missing} LIMIT 1").fetchone():
            with database:
                database.execute(
                    f"INSERT INTO search (rowid, prompt, answer) SELECT id, prompt, answer {missing}"
                )
    except sqlite3.OperationalError:  # no index, or none that can be brought up to date
        return False
    return True


def _condition(terms: list[str], *, indexed: bool) -> tuple[str, list[str]]:
    if not terms:
        return "", []
    if indexed:
        quoted = ['"' + term.replace('"', '""') + '"' for term in terms]
        return "WHERE id IN (SELECT rowid FROM search WHERE search MATCH ?)", [" AND ".join(quoted)]
    either = " OR ".join(f"{name} LIKE ? ESCAPE '\\'" for name in _SEARCHED)
    patterns = ["%" + re.sub(r"([\\%_])", r"\\\1", term) + "%" for term in terms]
    return f"WHERE {' AND '.join(f'({either})' for _ in terms)}", [
        pattern for pattern in patterns for _ in _SEARCHED
    ]
