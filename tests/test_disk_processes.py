"""Several processes on one cache folder: writing the same, evicting under readers, stopped, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from disk_store import bytes_in, files_in, ids_of, load, open_store, save

from infer.runtime.kvcache.disk import admin

_CODE = """
import sys; sys.path[:0] = sys.argv[4:]
import time
from pathlib import Path
from disk_store import *
root, action, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
seeds = [int(seed) for seed in sys.stdin.readline().split()]
if action == "write":
    store = open_store(root, limit_bytes=limit)
    for seed in seeds:
        offer_prompt(store, ids_of(seed, 700))
    assert store.flush(30)
    print(store.stats.written_entries)
elif action == "read":
    store, hits, until = open_store(root, limit_bytes=limit), 0, time.monotonic() + 1.5
    while time.monotonic() < until:
        for seed in seeds:
            ids = ids_of(seed, 700)
            chain = store.find(ids)
            check_chain(chain, ids)
            hits += chain.tokens > 0
    assert store.stats.damaged_entries == 0
    print(hits)
else:
    import fcntl
    lock = (root / "kv-v1" / "lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(60)
store.close()
"""


def start(root: Path, action: str, limit: int = 1 << 30) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CODE, str(root), action, str(limit), *sys.path]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str], seeds: list[int]) -> None:
    assert process.stdin is not None
    process.stdin.write(" ".join(map(str, seeds)) + "\n")
    process.stdin.flush()


def result(process: subprocess.Popen[str]) -> int:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return int(out)


def test_eight_writers_of_one_prefix(tmp_path: Path) -> None:
    writers = [start(tmp_path, "write") for _ in range(8)]
    for process in writers:
        go(process, [1])
    written = [result(process) for process in writers]
    assert sum(written) >= 11
    assert len(files_in(tmp_path)) == 11  # one file per block
    assert files_in(tmp_path, "tmp-*") == []
    assert all(path.stat().st_nlink == 1 for path in files_in(tmp_path))
    assert load(tmp_path, ids_of(1, 700)).tokens == 699
    assert admin.verify(tmp_path).checked == 11


def test_readers_during_eviction_and_the_limit(tmp_path: Path) -> None:
    limit = 60 * 8192
    processes = [start(tmp_path, "write", limit) for _ in range(3)] + [
        start(tmp_path, "read", limit) for _ in range(2)
    ]
    for place, process in enumerate(processes):
        go(process, list(range(10 * place, 10 * place + 12)) if place < 3 else list(range(36)))
    while any(process.poll() is None for process in processes[:3]):
        assert bytes_in(tmp_path) <= limit
        time.sleep(0.01)
    for process in processes:
        result(process)
    assert bytes_in(tmp_path) <= limit
    assert admin.verify(tmp_path).damaged == ()
    assert files_in(tmp_path, "tmp-*") == []


def test_a_stopped_process_blocks_nobody(tmp_path: Path) -> None:
    save(tmp_path, [ids_of(seed, 64) for seed in range(10)])
    holder = start(tmp_path, "lock")
    try:
        go(holder, [])
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        os.kill(holder.pid, signal.SIGSTOP)
        started = time.perf_counter()
        store = open_store(tmp_path, limit_bytes=10 * 8192)
        assert store.find(ids_of(3, 64)).tokens == 63
        for seed in range(20, 25):
            ids = ids_of(seed, 64)
            store.offer(store.root, ids, bytes(64 * 64))
        assert store.flush(5)
        store.close()
        assert store.stats.dropped_entries == 5
        assert time.perf_counter() - started < 5
    finally:
        holder.kill()
        holder.communicate()
    save(tmp_path, [ids_of(30, 64)], limit_bytes=10 * 8192)
    assert load(tmp_path, ids_of(30, 64)).tokens == 63


def test_a_stopped_writers_temporary_stays_and_counts(tmp_path: Path) -> None:
    """Until its process is gone."""
    save(tmp_path, [ids_of(1, 64)])
    shard = files_in(tmp_path)[0].parent
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'xb'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('ready', flush=True); time.sleep(60)"
    )
    temporary = shard / "tmp-stopped"
    with subprocess.Popen([sys.executable, "-c", code, str(temporary)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        save(tmp_path, [ids_of(2, 64)])
        assert temporary.exists()
        process.kill()
    save(tmp_path, [ids_of(3, 64)])
    assert not temporary.exists()
