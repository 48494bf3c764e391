"""Storing entries: killed, refused, hindered at every call, and bounded in time and memory."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_faults import MODULES, NEW, OLD, CountingOs, Gate, check_after, join_writers
from disk_store import (
    BLOCK,
    PER_TOKEN,
    check_chain,
    files_in,
    ids_of,
    load,
    offer_prompt,
    open_store,
    save,
)

from infer.runtime.kvcache.disk import publish, write_queue, writer

SUPPORT = Path(__file__).parent / "support"


def script(*arguments: str, **options: Any) -> str:
    command = [sys.executable, str(SUPPORT / "disk_faults.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_every_call() -> None:
    match = re.search(r"each of (\d+) calls", script("calls"))
    assert match is not None
    assert int(match[1]) > 100


def test_killed_at_random_moments() -> None:
    match = re.search(r"(\d+) of 50 runs died", script("random", "50"))
    assert match is not None
    assert int(match[1]) > 0  # how many depends on the machine


@pytest.mark.parametrize(
    ("code", "onwards"),
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, True), (errno.EMFILE, False)],
)
def test_errors_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, onwards: bool
) -> None:
    def refuse(_: str) -> None:
        raise OSError(code, os.strerror(code))

    number = 0
    while True:
        number += 1
        root = tmp_path / str(number)
        save(root, [OLD])
        before = files_in(root)
        counting = CountingOs(number, refuse, onwards=onwards)
        lines: list[str] = []
        with monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "os", counting)
            store = open_store(root, lines.append)
            check_chain(store.find(NEW), NEW)
            check_chain(store.find(OLD), OLD)
            offer_prompt(store, NEW)
            assert store.flush(10)
            store.close()
        assert len(lines) <= 1
        assert set(before) <= set(files_in(root))
        check_after(root)
        if counting.count < number:
            break
    assert number > 50


def test_full_disk_is_one_warning_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, [OLD])
    lines: list[str] = []
    store = open_store(tmp_path, lines.append)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(publish.os, "write", full)
    offer_prompt(store, NEW)
    offer_prompt(store, ids_of(3, 100))
    store.flush(10)
    monkeypatch.undo()
    assert len(lines) == 1
    assert "No space left" in lines[0]
    assert str(tmp_path) in lines[0]
    assert not store.needs(b"anything", 1)
    assert store.find(OLD).tokens == len(OLD) - 1
    assert store.stats.dropped_entries == 5
    store.close()
    assert files_in(tmp_path, "tmp-*") == []


def test_file_size_limit(tmp_path: Path) -> None:
    """`ulimit -f` sends a signal whose default action kills."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from disk_store import *\n"
        "lines = []\n"
        "store = open_store(Path(sys.argv[1]), lines.append)\n"
        "offer_prompt(store, ids_of(2, 500)); store.flush(10); store.close()\n"
        "print(len(lines), *lines)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache"), *sys.path],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 ")
    assert "File too large" in done.stdout
    assert files_in(tmp_path / "cache", "*") == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    save(tmp_path, [NEW])
    assert load(tmp_path, NEW).tokens == len(NEW) - 1
    assert files_in(tmp_path, "tmp-*") == []


def test_file_systems_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    save(tmp_path, [NEW])
    shard = files_in(tmp_path)[0].parent
    fresh, old = shard / "tmp-fresh", shard / "tmp-old"
    for path in (fresh, old):
        path.touch(0o600)
    os.utime(old, (1, 1))
    save(tmp_path, [ids_of(3, 100)])
    assert fresh.exists()
    assert not old.exists()
    assert load(tmp_path, NEW).tokens == len(NEW) - 1


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:1000])))
    save(tmp_path, [NEW])
    assert load(tmp_path, NEW).tokens == len(NEW) - 1


def test_offers_never_wait_and_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = open_store(tmp_path, queue_bytes=3 * BLOCK * PER_TOKEN)
    ids = ids_of(1, 640)
    started = time.perf_counter()
    keys = offer_prompt(store, ids)
    assert time.perf_counter() - started < 2
    assert gate.reached.wait(5)
    assert store.stats.dropped_entries == 7
    assert not store.needs(b"new", 64)
    gate.open()
    assert store.flush(10)
    # a block whose parent was dropped could never be found, so it is not stored either
    store.offer(keys[5], ids[384:448], bytes(BLOCK * PER_TOKEN))
    store.close()
    assert len(files_in(tmp_path)) == 3
    assert load(tmp_path, ids).tokens == 192
    save(tmp_path, [ids])
    assert load(tmp_path, ids).tokens == 639


def test_close_is_bounded_and_what_is_left_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    store = open_store(tmp_path)
    offer_prompt(store, NEW)
    assert gate.reached.wait(5)
    started = time.perf_counter()
    store.close(0.2)
    assert time.perf_counter() - started < 1
    store.close()
    gate.open()
    join_writers()
    monkeypatch.undo()
    assert files_in(tmp_path, "tmp-*") == []
    load(tmp_path, NEW)
    save(tmp_path, [NEW])
    assert load(tmp_path, NEW).tokens == len(NEW) - 1


def test_close_finishes_what_is_waiting(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    offer_prompt(store, NEW)
    store.close(10)
    assert load(tmp_path, NEW).tokens == len(NEW) - 1


def test_cleared_meanwhile(tmp_path: Path) -> None:
    """Another process empties the cache while this one uses it."""
    from infer.runtime.kvcache.disk import admin

    store = open_store(tmp_path)
    offer_prompt(store, OLD)
    store.flush(10)
    assert admin.clear(tmp_path).complete
    assert store.find(OLD).tokens == 0
    offer_prompt(store, NEW)
    store.flush(10)
    assert store.find(NEW).tokens == len(NEW) - 1
    store.close()


def test_written_files_are_never_written_again(tmp_path: Path) -> None:
    save(tmp_path, [NEW])
    before = {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in files_in(tmp_path)}
    save(tmp_path, [NEW])
    assert {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in files_in(tmp_path)} == before


# The pace while somebody computes


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the writer asks to wait: every entry takes 2 ms of this clock, and nothing is waited for."""
    clock, asked = itertools.count(), []

    class Resting(threading.Condition):
        def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
            if timeout is not None and threading.current_thread().name == "kv-writer":
                asked.append(0.0 if predicate() else timeout)
                return True
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(write_queue.threading, "Condition", Resting)
    monkeypatch.setattr(writer.time, "thread_time", lambda: 0.002 * next(clock))
    return asked


def test_a_small_share_of_a_core_while_somebody_computes(tmp_path: Path, rests: list[float]) -> None:
    store = open_store(tmp_path)
    store.set_busy(True)
    offer_prompt(store, ids_of(3, 640))
    for _ in range(2000):
        if len(rests) == 10:
            break
        time.sleep(0.01)
    assert rests == pytest.approx([0.398] * 10)
    store.set_busy(False)
    offer_prompt(store, ids_of(4, 640))
    store.close(20)
    assert rests[10:] == [0.0] * 10


@pytest.mark.parametrize("end", ["idle", "flush", "close"])
def test_what_waits_for_the_pace_is_written_at_once_when_nobody_computes_or_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    hours = itertools.count()
    monkeypatch.setattr(writer.time, "thread_time", lambda: 3600.0 * next(hours))
    store = open_store(tmp_path)
    store.set_busy(True)
    offer_prompt(store, NEW)
    for _ in range(2000):
        if store.stats.written_entries:
            break
        time.sleep(0.01)
    offer_prompt(store, OLD)
    assert store.stats.written_entries == 1
    if end == "flush":
        assert store.flush(60)
    if end == "idle":
        store.set_busy(False)
        for _ in range(2000):
            if store.stats.written_entries == 5:
                break
            time.sleep(0.01)
    if end != "close":
        assert store.stats.written_entries == 5
    store.close(60)
    for ids in (NEW, OLD):
        assert load(tmp_path, ids).tokens == len(ids) - 1
