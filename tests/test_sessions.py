"""The files behind `--session`: what they hold, who may read them, and what no failure may do to them."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.runtime.errors import SessionError, UsageError
from infer.runtime.store import sessions
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.sessions import Message, Session, SessionStore, check_name

# Appends turns to a session until it is killed; each turn is 200 kB, and says which it is.
WRITER = """
import sys
from pathlib import Path
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.sessions import Message, Session, SessionStore
store = SessionStore(DataDirs.from_home(Path(sys.argv[1])))
with store.locked("s"):
    session = store.read("s") or Session("s", "m", "then")
    print("ready", flush=True)
    while True:
        number = str(len(session.turns))
        session = store.append(session, Message("user", number), Message("assistant", number * 200_000))
"""


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(DataDirs.from_home(tmp_path))


def add(store: SessionStore, name: str, *texts: str, system: str | None = None) -> Session:
    """A session with a turn for each text."""
    with store.locked(name):
        session = store.read(name) or Session(name, "model", "2020-01-01T00:00:00Z", system)
        for text in texts:
            answer = Message("assistant", text.upper(), "later", "model", "stop")
            session = store.append(session, Message("user", text, "now"), answer)
    return session


def test_what_is_written_is_plain_json_lines(store: SessionStore) -> None:
    add(store, "s", "grüße\n\u2028", system="Be kind.")
    lines = store.path("s").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert [json.loads(line) for line in lines] == [
        {"infer_session": 1, "model": "model", "created": "2020-01-01T00:00:00Z", "system": "Be kind."},
        {"role": "user", "content": "grüße\n\u2028", "time": "now"},
        {
            "role": "assistant",
            "content": "GRÜSSE\n\u2028",
            "time": "later",
            "model": "model",
            "finish": "stop",
        },
    ]
    assert "grüße" in lines[1]


def test_reading_gives_what_was_written(store: SessionStore) -> None:
    assert store.read("s") is None
    written = add(store, "s", "a", "b")
    assert store.read("s") == written
    assert [(q.content, a.content) for q, a in written.turns] == [("a", "A"), ("b", "B")]
    assert add(store, "s", "c").turns[2][0].content == "c"


def test_lines_that_are_there_stay_byte_for_byte(store: SessionStore) -> None:
    add(store, "s", "a")
    path = store.path("s")
    edited = path.read_bytes().replace(b'"role": "user"', b'"note":1,  "role":"user"').rstrip(b"\n")
    path.write_bytes(edited)
    add(store, "s", "b")
    assert path.read_bytes().startswith(edited + b"\n{")
    assert [q.content for q, _ in store.read("s").turns] == ["a", "b"]  # type: ignore[union-attr]


def test_only_the_user_can_read_them(store: SessionStore) -> None:
    old = os.umask(0)
    try:
        add(store, "s", "a")
    finally:
        os.umask(old)
    assert stat.S_IMODE(store.path("s").stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(store.folder.parent.stat().st_mode) == 0o700
    assert [path.name for path in store.folder.iterdir()] == ["s.jsonl"]


def test_a_folder_that_others_can_write_is_refused(store: SessionStore) -> None:
    add(store, "s", "a")
    store.folder.chmod(0o770)
    with pytest.raises(SessionError, match="chmod 700"):
        add(store, "s", "b")


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "_", "9", "x" * 100, "a..b"])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".a",
        "-a",
        "../x",
        "a/b",
        "/a",
        "a\\b",
        "a b",
        "a\n",
        "a\0",
        "é",
        "x" * 101,
        "~",
        "a:b",
        "\udcff",
    ],
)
def test_names_that_are_refused(name: str, store: SessionStore) -> None:
    for use in (check_name, store.read, store.path, store.remove):
        with pytest.raises(UsageError, match="no name for a session"):
            use(name)


def test_rename(store: SessionStore) -> None:
    add(store, "old", "a")
    add(store, "taken", "b")
    before = store.path("old").read_bytes()
    assert not store.rename("none", "new")
    with pytest.raises(SessionError, match="there is a session taken already"):
        store.rename("old", "taken")
    with pytest.raises(UsageError):
        store.rename("old", "../new")
    with store.locked("old"), pytest.raises(SessionError, match="in use"):
        store.rename("old", "new")
    assert store.rename("old", "new")
    assert store.rename("new", "new")
    assert store.path("new").read_bytes() == before
    assert [file.name for file in store.files()] == ["taken", "new"]


TEXT = st.text(
    st.characters(codec="utf-8") | st.sampled_from('\n\r\0\x1b\x7f\x85\u2028\u2029\ufeff\ufffd"\\'),
    max_size=40,
)


@given(
    system=st.none() | TEXT,
    turns=st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=4),
    kept=st.integers(0, 4),
    later=st.none() | TEXT,
)
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    system: str | None,
    turns: list[tuple[str, str, str]],
    kept: int,
    later: str | None,
) -> None:
    """Written turn by turn, cut short, and under another system message."""
    store = SessionStore(DataDirs.from_home(tmp_path_factory.mktemp("any")))
    with store.locked("s"):
        session = Session("s", "model", "then", system)
        for question, answer, thinking in turns:
            said = Message("assistant", answer, "later", "model", "stop", thinking)
            session = store.append(session, Message("user", question, "now"), said)
        if turns:
            assert store.read("s") == session
        lines = session.data.splitlines()
        cut = store.write(session, session.messages[: 2 * kept], later)
        assert store.read("s") == cut
        assert (cut.system, cut.messages) == (later, session.messages[: 2 * kept])
        assert cut.data.splitlines()[1:] == lines[1 : 1 + len(cut.messages)]


HEADER = b'{"infer_session": 1, "model": "m", "created": "t", "system": null}\n'
QUESTION = b'{"role": "user", "content": "q"}\n'
ANSWER = b'{"role": "assistant", "content": "a"}\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1: the header is missing"),
        (b"\n\n", "line 1: the header is missing"),
        (QUESTION, "line 1: not the header"),
        (b"garbage", "line 1: not a JSON object"),
        (b"[]\n", "line 1: not a JSON object"),
        (b"\xff\xfe", "line 1: not a JSON object in UTF-8"),
        (HEADER.replace(b"1", b"2", 1), "line 1: written by a newer version"),
        (HEADER.replace(b"1", b"true", 1), "line 1: not the header"),
        (HEADER.replace(b'"m"', b"7"), "line 1: model is missing or no text"),
        (HEADER.replace(b"null", b"[]"), "line 1: system is missing or no text"),
        (HEADER + ANSWER, "line 2: the role must be user"),
        (HEADER + QUESTION + QUESTION, "line 3: the role must be assistant"),
        (HEADER + QUESTION, "line 2: the question has no answer"),
        (HEADER + QUESTION + ANSWER + b"\n" + QUESTION, "line 5: the question has no answer"),
        (HEADER + QUESTION + ANSWER[:-5], "line 3: not a JSON object"),
        (HEADER + QUESTION + b"\0" * 40, "line 3: not a JSON object"),
        (HEADER + QUESTION.replace(b'"q"', b"null"), "line 2: content is missing"),
        (HEADER + QUESTION.replace(b"q", b"\\ud800"), "line 2: content holds half of a surrogate"),
        (HEADER + QUESTION.replace(b'"q"', b'"q", "time": 5'), "line 2: time is missing or no text"),
        (HEADER + b"[" * 200_000, "line 2: not a JSON object"),
        (HEADER + b'{"role": ' + b"9" * 5000 + b"}", "line 2: not a JSON object"),
    ],
)
def test_a_damaged_file_is_named_with_its_line_and_left_alone(
    store: SessionStore, data: bytes, message: str
) -> None:
    add(store, "s", "a")
    store.path("s").write_bytes(data)
    with pytest.raises(SessionError, match=message) as caught:
        store.read("s")
    assert str(store.path("s")) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.path("s").read_bytes() == data


def test_what_is_no_file_is_refused(store: SessionStore, tmp_path: Path) -> None:
    add(store, "real", "a")
    store.path("link").symlink_to(store.path("real"))
    os.mkfifo(store.path("pipe"))
    store.path("folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(SessionError, match=r"cannot be read|is not a file"):
            store.read(name)
    assert [file.name for file in store.files()] == ["real"]


def test_a_huge_file_is_refused(store: SessionStore) -> None:
    add(store, "s", "a")
    os.truncate(store.path("s"), 1 << 40)
    with pytest.raises(SessionError, match="larger than"):
        store.read("s")


def test_the_list_begins_with_the_one_used_last(store: SessionStore) -> None:
    assert store.files() == []
    for name in ("b", "a", "c"):
        add(store, name, "x")
        time.sleep(0.02)
    add(store, "b", "y")
    (store.folder / "not a name.jsonl").touch()
    (store.folder / "other.txt").touch()
    assert [file.name for file in store.files()] == ["b", "c", "a"]
    assert store.files()[0].size == store.path("b").stat().st_size


def test_remove(store: SessionStore) -> None:
    assert not store.remove("s")
    add(store, "s", "a")
    assert store.remove("s")
    assert list(store.folder.iterdir()) == []


def test_one_process_at_a_time(store: SessionStore) -> None:
    with store.locked("s"):
        for action in (lambda: add(store, "s", "x"), lambda: add(store, "s")):
            with pytest.raises(SessionError, match="session s is in use by another process"):
                action()
        add(store, "other", "x")
    add(store, "s", "x")
    with store.locked("s"), pytest.raises(SessionError, match="in use"):
        store.remove("s")


def test_a_change_made_meanwhile_is_not_overwritten(store: SessionStore) -> None:
    session = add(store, "s", "a")
    path = store.path("s")
    changed = path.read_bytes().replace(b'"A"', b'"B"')
    path.write_bytes(changed)
    with pytest.raises(SessionError, match="was changed meanwhile"):
        store.append(session, Message("user", "x"), Message("assistant", "y"))
    assert path.read_bytes() == changed
    path.unlink()
    with pytest.raises(SessionError, match="was changed meanwhile"):
        store.append(session, Message("user", "x"), Message("assistant", "y"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["os.fsync", "os.open", "pathlib.Path.replace"])
def test_a_failed_write_leaves_the_old_content(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    session = add(store, "s", "a")
    before = store.path("s").read_bytes()

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(SessionError, match="this turn cannot be kept") as caught:
            store.append(session, Message("user", "x"), Message("assistant", "y"))
    assert os.strerror(number) in str(caught.value)
    assert store.path("s").read_bytes() == before
    assert [path.name for path in store.folder.iterdir()] == ["s.jsonl"]


def test_a_write_that_is_cut_short_by_the_system(store: SessionStore, tmp_path: Path) -> None:
    add(store, "s", "a")
    before = store.path("s").read_bytes()
    code = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + WRITER
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert "this turn cannot be kept: File too large" in done.stderr
    assert store.path("s").read_bytes() == before
    assert [path.name for path in store.folder.iterdir()] == ["s.jsonl"]


def test_content_is_on_disk_before_the_name_is(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", noted("replace", Path.replace))
    monkeypatch.setattr(sessions, "sync_folder", noted("folder", sessions.sync_folder))
    add(store, "s", "a")
    assert calls == ["fsync", "replace", "folder", "fsync"]


def test_a_killed_process_leaves_whole_turns(store: SessionStore, tmp_path: Path) -> None:
    """SIGKILL at random moments of the loop that appends: the file always holds the old or the new content."""
    chance = random.Random(4)
    turns = 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(chance.random() * 0.06)
            process.send_signal(signal.SIGKILL)
        session = store.read("s")
        found = [] if session is None else session.turns
        assert len(found) >= turns
        turns = len(found)
        assert all(a.content == q.content * 200_000 for q, a in found)
        assert [q.content for q, _ in found] == [str(number) for number in range(turns)]
        if turns > 40:
            store.remove("s")
            turns = 0
    assert {path.suffix for path in store.folder.iterdir()} <= {".jsonl", ".tmp", ".lock"}
    add(store, "s", "x")
    assert not (store.folder / ".s.jsonl.tmp").exists()
