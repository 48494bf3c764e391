"""The log of answers: what is kept and found, and that no state of the file changes an answer."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Infer

from infer.runtime.errors import LogError
from infer.runtime.store import log as log_module
from infer.runtime.store.log import AnswerLog, Exchange
from infer.runtime.store.paths import DataDirs

ITEM = Exchange(
    "2026-01-01T00:00:00Z", "run", "tiny", "", "What is a carriage return?", "It is \\r, 100 % so.",
    "stop", "", 7, 5, "1",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> AnswerLog:
    return AnswerLog(DataDirs.from_home(tmp_path / "home"))


@pytest.fixture
def call(scripted_infer: Infer) -> Infer:
    """call(command, …) on a model that answers "Hello there."."""
    return scripted_infer


def fill(store: AnswerLog) -> None:
    store.add(ITEM)
    store.add(replace(ITEM, prompt="naïve Größe", answer="one_two a.b"))
    store.add(replace(ITEM, prompt="The return of the carriage", answer='say "hi" C++'))


QUERIES = [
    ("", [2, 1, 0]), ("carriage return", [2, 0]), ('"carriage return"', [0]), ("GRÖSSE", []), ("größe", [1]),
    ("nothing", []), ("C++", [2]), ("++", [2]), ("%", [0]), ("a.b", [1]), ('"', [2]), ("AND", []), ("NEAR(x", []),
    ("one_two", [1]), ("100", [0]),
]  # fmt: skip


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("query", "expected"), QUERIES)
def test_search(
    store: AnswerLog, monkeypatch: pytest.MonkeyPatch, query: str, expected: list[int], indexed: bool
) -> None:
    fill(store)
    if not indexed:
        monkeypatch.setattr(log_module, "_index", lambda database: False)
        if query == "größe":  # LIKE folds ASCII only
            query = "Größe"
    prompts = [item.prompt for item in reversed(store.find())]
    assert [prompts.index(item.prompt) for item in store.find(query)] == expected
    assert store.find(query, limit=1) == store.find(query)[:1]


def test_a_log_made_without_fts5_is_indexed_later(store: AnswerLog, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tables = log_module._make_tables
    monkeypatch.setattr(log_module, "_make_tables", lambda database: make_tables(database) and False)
    fill(store)
    with closing(sqlite3.connect(store.path)) as database:
        assert database.execute("SELECT count(*) FROM search").fetchone() == (0,)
    assert [item.prompt for item in store.find("größe")] == ["naïve Größe"]
    monkeypatch.undo()
    store.add(ITEM)
    assert len(store.find("carriage")) == 3


def test_the_file_is_for_its_owner_alone(store: AnswerLog) -> None:
    old = os.umask(0)
    try:
        store.add(ITEM)
    finally:
        os.umask(old)
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    assert store.find() == [ITEM]


def test_nothing_is_kept_until_it_is_asked_for(call: Infer, store: AnswerLog) -> None:
    assert call("run", "--raw", "hi") == (0, "Hello there.", "")
    assert not store.path.exists()
    assert call("log") == (0, "", "")
    assert call("run", "--raw", "--log", "hi")[0] == 0
    assert len(store.find()) == 1
    assert call("log", "on")[::2] == (0, f"infer: the log is on: {store.path}\n")
    call("run", "--raw", "one more")
    call("run", "--raw", "--no-log", "secret")
    assert call("log", "off", "-q") == (0, "", "")
    call("run", "--raw", "off again")
    assert [item.prompt for item in store.find()] == ["one more", "hi"]
    code, _, err = call("log", "\udcff")
    assert (code, err) == (2, "infer: error: the query is not UTF-8 text (character 1): re-encode it\n")
    assert call("log", "path") == (0, f"{store.path}\n", "")


def test_what_is_kept_and_shown(call: Infer, store: AnswerLog) -> None:
    call("run", "--raw", "--log", "--seed", str(2**64 - 1), "line\n" * 9)
    item = store.find()[0]
    assert (item.command, item.model, item.answer, item.finish) == ("run", "scripted", "Hello there.", "stop")
    assert (item.completion_tokens, item.seed) == (13, str(2**64 - 1))
    code, out, _ = call("log", "hello")
    assert code == 0
    assert out.splitlines()[0] == f"{item.time}  run  scripted"
    assert out.splitlines()[1:] == ["> line"] * 6 + ["> … 4 lines more", "Hello there."]
    found = json.loads(call("log", "--json")[1])
    assert (found["log"], [row["answer"] for row in found["exchanges"]]) == (
        str(store.path),
        ["Hello there."],
    )
    assert call("log", "-n", "0")[0] == 2
    call("run", "--raw", "--log", "again", script={"fail_after": 5})
    assert [row.finish for row in store.find()] == ["cancelled", "stop"]
    assert store.find()[0].answer == "Hello"


def broken_files(store: AnswerLog) -> dict[str, Callable[[], object]]:
    store.path.parent.mkdir(parents=True, exist_ok=True)

    def newer() -> None:
        with closing(sqlite3.connect(store.path)) as database:
            database.execute("PRAGMA user_version = 99")

    return {
        "folder": store.path.mkdir,
        "fifo": lambda: os.mkfifo(store.path),
        "garbage": lambda: store.path.write_bytes(b"no database at all" * 99),
        "link": lambda: store.path.symlink_to("/dev/full"),
        "newer": newer,
    }


@pytest.mark.parametrize("kind", ["folder", "fifo", "garbage", "link", "newer"])
def test_a_broken_log_is_one_warning(call: Infer, store: AnswerLog, kind: str) -> None:
    broken_files(store)[kind]()
    code, out, err = call("run", "--raw", "--log", "hi")
    assert (code, out, err.count("\n")) == (0, "Hello there.", 1)
    assert err.startswith("infer: warning: ")
    assert str(store.path) in err
    code, out, err = call("log", "x")
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_a_locked_or_full_log_is_one_warning(
    call: Infer, store: AnswerLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_BUSY_S", 0.05)
    store.add(ITEM)
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        code, out, err = call("run", "--raw", "--log", "hi")
    assert (code, out) == (0, "Hello there.")
    assert err == (
        f"infer: warning: {store.path}: the log cannot be used: database is locked; this answer is not in the log\n"
    )

    def full(database: sqlite3.Connection) -> bool:
        database.execute("PRAGMA max_page_count = 1")
        return True

    monkeypatch.setattr(log_module, "_make_tables", full)
    code, out, err = call("run", "--raw", "--log", "hi", script={"text": "x" * 20_000, "ctx": 1 << 16})
    assert out == "x" * 20_000
    assert (code, err.count("\n")) == (0, 1)
    assert "full" in err


def test_a_read_only_log_can_be_searched(store: AnswerLog) -> None:
    fill(store)
    store.path.chmod(0o400)
    store.path.parent.chmod(0o500)
    try:
        assert len(store.find("carriage")) == 2
        if os.geteuid():
            with pytest.raises(LogError):
                store.add(ITEM)
    finally:
        store.path.parent.chmod(0o700)
