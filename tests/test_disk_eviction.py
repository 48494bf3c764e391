"""The disk cache stays within its limit, and gives up what was least useful, leaves before their parents."""

from __future__ import annotations

import fcntl
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from disk_store import (
    bytes_in,
    check_chain,
    entry_of,
    files_in,
    ids_of,
    load,
    offer_prompt,
    open_store,
    save,
)

from infer.runtime.kvcache.disk import eviction
from infer.runtime.kvcache.disk.format import parse_entry_name

PER_ENTRY = 8192  # a full entry of 4,256 bytes


def parents_present(root: Path) -> bool:
    """Whether every entry's chain up to its first block is there."""
    names = [parse_entry_name(path.name) for path in files_in(root)]
    known = {name[2][:32] for name in names if name is not None}
    orphans = {name[0] for name in names if name is not None and name[0] not in known}
    return len(orphans) <= 1  # the root key


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_never_above_the_limit(tmp_path: Path) -> None:
    limit = 40 * PER_ENTRY
    store = open_store(tmp_path, limit_bytes=limit)
    for seed in range(30):
        ids = ids_of(seed, 64 * (1 + seed % 7) + seed)
        offer_prompt(store, ids)
        assert store.flush(10)
        assert bytes_in(tmp_path) <= limit
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) <= limit
        assert parents_present(tmp_path)
        chain = store.find(ids)  # what was stored last is there
        check_chain(chain, ids)
        assert chain.tokens == len(ids) - 1
    store.close()
    assert len(files_in(tmp_path)) > 20


def test_chain_longer_than_the_limit_keeps_its_beginning(tmp_path: Path) -> None:
    ids = ids_of(1, 64 * 30)
    save(tmp_path, [ids], limit_bytes=12 * PER_ENTRY)
    tokens = load(tmp_path, ids).tokens
    assert 8 * 64 <= tokens <= 12 * 64
    assert len(files_in(tmp_path)) == tokens // 64


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    prompts = [ids_of(seed, 64) for seed in range(10)]
    save(tmp_path, prompts)
    for place, path in enumerate(files_in(tmp_path)):
        age(path, 1000 + place)
    used = prompts[3]
    load(tmp_path, used)  # a hit makes an entry recent again
    save(tmp_path, [ids_of(20, 64)], limit_bytes=10 * PER_ENTRY)
    kept = [ids for ids in prompts if load(tmp_path, ids, read_only=True).tokens]
    assert used in kept
    assert 5 < len(kept) < 10
    assert load(tmp_path, ids_of(20, 64)).tokens == 63


def test_parents_stay_while_they_have_children(tmp_path: Path) -> None:
    """Even if they have not been used for longer than anything else."""
    ids = ids_of(1, 64 * 5)
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids)
    for seed in range(2, 8):
        offer_prompt(store, ids_of(seed, 64))
    store.flush(10)
    store.close()
    for path in files_in(tmp_path):
        age(path, 100)
    for place, key in enumerate(keys):
        age(entry_of(tmp_path, key), 10_000 - place)
    save(tmp_path, [ids_of(30, 64)], limit_bytes=10 * PER_ENTRY)
    left = load(tmp_path, ids, read_only=True).tokens
    assert left in (64, 128, 192, 256)  # shortened from its end, the beginning is there
    assert left == 64 * sum(any(key.hex() in path.name for path in files_in(tmp_path)) for key in keys)


@pytest.mark.parametrize("jump", [10 * 365 * 86400, -10 * 365 * 86400])
def test_clocks_that_jump(tmp_path: Path, jump: float) -> None:
    """Entries from a wrong future or past neither break the limit nor outlive everything."""
    save(tmp_path, [ids_of(seed, 64) for seed in range(8)])
    jumped = files_in(tmp_path)
    for path in jumped:
        then = time.time() + jump
        os.utime(path, (then, then))
    save(tmp_path, [ids_of(seed, 64) for seed in range(20, 40)], limit_bytes=10 * PER_ENTRY)
    assert not set(jumped) & set(files_in(tmp_path))
    assert bytes_in(tmp_path) <= 10 * PER_ENTRY
    assert load(tmp_path, ids_of(39, 64)).tokens == 63


def test_impossible_times(tmp_path: Path) -> None:
    save(tmp_path, [ids_of(seed, 64) for seed in range(8)])
    for path, then in zip(files_in(tmp_path), [0, -1, 1, 2**33, 2**31, 10**9, 0, 2**32], strict=True):
        os.utime(path, (then, then))
    save(tmp_path, [ids_of(50, 64)], limit_bytes=5 * PER_ENTRY)
    assert load(tmp_path, ids_of(50, 64)).tokens == 63


def test_entry_larger_than_the_limit(tmp_path: Path) -> None:
    ids = ids_of(1, 64)
    save(tmp_path, [ids])
    lines: list[str] = []
    store = open_store(tmp_path, lines.append, limit_bytes=8000)
    offer_prompt(store, ids_of(2, 64))
    offer_prompt(store, ids_of(3, 64))
    store.flush(10)
    assert store.stats.written_entries == 0
    assert store.find(ids).tokens == 63  # nothing was evicted for what cannot fit
    store.close()
    assert len(lines) == 1
    assert "--cache-limit" in lines[0]


def fake_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    real = os.fstatvfs

    def fstatvfs(descriptor: int) -> os.statvfs_result:
        status = list(real(descriptor))
        status[1], status[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(status)

    monkeypatch.setattr(eviction.os, "fstatvfs", fstatvfs)


def test_free_space_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(1, 64)
    save(tmp_path, [ids])
    fake_free(monkeypatch, 10**6)
    lines: list[str] = []
    store = open_store(tmp_path, lines.append, free_floor_bytes=10**7)
    offer_prompt(store, ids_of(2, 200))
    store.flush(10)
    assert store.find(ids_of(2, 200)).tokens == 0
    store.close()
    assert len(lines) == 1
    assert "nearly full" in lines[0]
    assert files_in(tmp_path, "tmp-*") == []


def test_floor_is_met_by_evicting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, [ids_of(seed, 64) for seed in range(20)])
    fake_free(monkeypatch, 10**6 + 4096)
    save(tmp_path, [ids_of(50, 64)], free_floor_bytes=10**6)
    monkeypatch.undo()
    assert load(tmp_path, ids_of(50, 64)).tokens == 63
    assert len(files_in(tmp_path)) == 20  # one for one


def test_default_limit_is_a_tenth_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_free(monkeypatch, 20 * PER_ENTRY * 10)
    lines: list[str] = []
    store = open_store(tmp_path, lines.append, limit_bytes=None)
    for seed in range(60):
        offer_prompt(store, ids_of(seed, 64))
    store.flush(10)
    store.close()
    assert lines == []
    assert 15 < len(files_in(tmp_path)) <= 30


def test_temporaries_count_and_those_of_the_dead_go(tmp_path: Path) -> None:
    save(tmp_path, [ids_of(1, 64)])
    shard = files_in(tmp_path)[0].parent
    dead, alive = shard / "tmp-dead", shard / "tmp-alive"
    for path in (dead, alive):
        path.touch(0o600)
        os.truncate(path, 6 * PER_ENTRY)
    with alive.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(tmp_path, [ids_of(seed, 64) for seed in range(2, 20)], limit_bytes=12 * PER_ENTRY)
        assert alive.exists()
        assert not dead.exists()
        assert bytes_in(tmp_path) <= 12 * PER_ENTRY
        assert 2 <= len(files_in(tmp_path)) <= 6
    load(tmp_path, ids_of(19, 64))
    assert not alive.exists()


def test_temporaries_go_although_nothing_is_written(tmp_path: Path) -> None:
    ids = ids_of(1, 100)
    save(tmp_path, [ids])
    (files_in(tmp_path)[0].parent / "tmp-dead").touch(0o600)
    save(tmp_path, [ids])
    assert files_in(tmp_path, "tmp-*") == []


def test_lock_held_elsewhere_drops_and_never_waits(tmp_path: Path) -> None:
    save(tmp_path, [ids_of(seed, 64) for seed in range(10)])
    before = files_in(tmp_path)
    lock = tmp_path / "kv-v1" / "lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store = open_store(tmp_path, limit_bytes=10 * PER_ENTRY)
        started = time.perf_counter()
        offer_prompt(store, ids_of(20, 128))
        assert time.perf_counter() - started < 1
        assert store.flush(5)
        assert store.stats.dropped_entries == 2
        assert files_in(tmp_path) == before
        store.close()
        save(tmp_path, [ids_of(21, 64)])  # far from its limit nobody needs the lock
    save(tmp_path, [ids_of(20, 128)], limit_bytes=10 * PER_ENTRY)
    assert load(tmp_path, ids_of(20, 128)).tokens == 127


def test_foreign_files_and_versions_stay(tmp_path: Path) -> None:
    save(tmp_path, [ids_of(1, 64)])
    (entry,) = files_in(tmp_path)
    foreign = [
        tmp_path / "kv-v2" / "00" / "entry.kv",
        tmp_path / "notes.txt",
        tmp_path / "kv-v1" / "README",
        tmp_path / "kv-v1" / "not a model" / entry.name,
        entry.parent / "something.kv",
        entry.parent / (entry.name + ".bak"),
        entry.parent / "xyz" / entry.name,
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100_000))
    save(tmp_path, [ids_of(seed, 64) for seed in range(2, 20)], limit_bytes=5 * PER_ENTRY)
    assert not entry.exists()
    assert all(path.exists() for path in foreign)


def test_files_that_cannot_be_removed_keep_their_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids_of(1, 128))
    store.flush(10)
    store.close()
    for path in files_in(tmp_path):
        age(path, 100)
    fixed = entry_of(tmp_path, keys[1])
    real = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        if str(path).endswith(fixed.name):
            raise PermissionError(1, "Operation not permitted")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    save(tmp_path, [ids_of(seed, 64) for seed in range(2, 12)], limit_bytes=6 * PER_ENTRY)
    monkeypatch.undo()
    assert load(tmp_path, ids_of(1, 128)).tokens == 127
    assert len(files_in(tmp_path)) <= 6


def test_number_of_entries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MAX_ENTRIES", 10)
    save(tmp_path, [ids_of(seed, 64) for seed in range(25)], limit_bytes=1 << 20)
    assert len(files_in(tmp_path)) <= 10
    assert load(tmp_path, ids_of(24, 64)).tokens == 63


def test_orders_of_many_trees(tmp_path: Path) -> None:
    """Against a slow model: remove the leaf used longest ago until the target is met."""
    rng = random.Random(4)
    store = open_store(tmp_path)
    texts: list[list[int]] = []
    for seed in range(25):
        base = rng.choice(texts)[: 64 * rng.randrange(4)] if texts else []
        texts.append(base + ids_of(seed, 64 * rng.randrange(1, 4)))
        offer_prompt(store, texts[-1])
    store.flush(10)
    store.close()
    for path in files_in(tmp_path):
        age(path, rng.randrange(10, 10**6))
    version = os.open(tmp_path / "kv-v1", os.O_RDONLY)
    usage = eviction.scan(version, collect=False)
    target = usage.total // 3
    left = {entry.short: entry for entry in usage.entries}
    total, expected = usage.total, []
    while total > target:
        parents = {entry.parent for entry in left.values()}
        victim = min(
            (entry for entry in left.values() if entry.short not in parents), key=lambda e: e.used_ns
        )
        total -= left.pop(victim.short).size
        expected.append(victim.path)
    assert [entry.path for entry in eviction.evict(version, usage, target)] == expected
    assert usage.total == total
    assert {entry.path for entry in eviction.scan(version, collect=False).entries} == {
        e.path for e in left.values()
    }
    os.close(version)


def test_writes_of_one_grant_are_not_scanned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = 0
    real = eviction.scan

    def counting(version: int, *, collect: bool) -> eviction.Usage:
        nonlocal scans
        scans += 1
        return real(version, collect=collect)

    monkeypatch.setattr(eviction, "scan", counting)
    save(tmp_path, [ids_of(1, 64 * 100)])
    assert scans == 1
    assert len(files_in(tmp_path)) == 100
