"""Kills and system-call errors in the middle of storing, and what the next run makes of it.

    python tests/support/disk_faults.py calls               die at the N-th call into `os`, for every N
    python tests/support/disk_faults.py random [COUNT]      die at COUNT random moments (500)
    python tests/support/disk_faults.py strace [ERROR …]    inject errors and kills with strace, for every N-th call

After each: every published entry is whole, a reader gets the exact payload or a miss, and the next run leaves no
temporary behind. Prints one line and exits with 0, or raises.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_store import check_chain, files_in, ids_of, load, offer_prompt, open_store, save

from infer.runtime.kvcache.disk import admin, eviction, folder, label, publish, reader, writer

MODULES = (eviction, folder, label, publish, reader, writer)
CALLS = {
    *("open", "close", "read", "readv", "pread", "write", "ftruncate", "dup", "fstat", "stat", "fstatvfs"),
    *("link", "unlink", "rename", "mkdir", "fchmod", "scandir", "listdir", "utime"),
}
# With strace: calls on the model's folder and names in it, and calls on any descriptor.
FOLDER_CALLS = ("openat", "newfstatat", "linkat", "unlinkat", "getdents64", "utimensat")
PLAIN_CALLS = ("readv", "pread64", "write", "ftruncate", "fcntl", "flock", "fstatfs", "close")
OLD, NEW, LONG = ids_of(1, 70), ids_of(2, 150), ids_of(3, 2000)


class CountingOs:
    """The module `os`, with something done before the N-th call of interest and, if asked, every later one."""

    def __init__(self, number: int, act: Callable[[str], None], *, onwards: bool = False) -> None:
        self.count = 0
        self.act = act
        self._number = number
        self._onwards = onwards

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.wrapped(name, real) if name in CALLS else real

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A call that counts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            due = self.count == self._number or (self._onwards and self.count > self._number)
            if name == "close":
                real(*args)  # a close that fails has closed nevertheless
            if due:
                self.act(name)
            return None if name == "close" else real(*args, **kwargs)

        return call


class Gate:
    """Holds the writer at its next entry until opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = os.write

        def write(descriptor: int, data: Any) -> int:
            self.reached.set()
            self._open.wait(20)
            return real(descriptor, data)

        patch.setattr(publish.os, "write", write)

    def open(self) -> None:
        self._open.set()


def join_writers() -> None:
    """Wait for threads that outlived their store, 30 s in all."""
    deadline = time.monotonic() + 30
    for thread in threading.enumerate():
        if thread.name == "kv-writer":
            thread.join(max(0.0, deadline - time.monotonic()))


def check_after(root: Path, new: list[int] = NEW) -> None:
    """The state a crash left behind does no harm, and the next run puts it right."""
    report = admin.verify(root)
    if report.damaged or report.unreadable:
        raise AssertionError(f"published: {report}")
    if load(root, OLD).tokens != len(OLD) - 1:
        raise AssertionError("a valid entry was lost")
    load(root, new)
    save(root, [new])
    if load(root, new).tokens != len(new) - 1:
        raise AssertionError("the next run did not store what was missing")
    left = files_in(root, "tmp-*")
    if left:
        raise AssertionError(f"temporaries left: {left}")


def in_child(act: Callable[[], None]) -> int:
    """Run in a fork; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def die(_: str = "") -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_every_call(base: Path) -> int:
    """How many calls there were to die at."""
    for number in range(1, 10_000):
        root = base / str(number)
        save(root, [OLD])

        def run(root: Path = root, number: int = number) -> None:
            counting = CountingOs(number, die)
            for module in MODULES:
                module.os = counting  # type: ignore[attr-defined]
            store = open_store(root)
            store.find(NEW)
            offer_prompt(store, NEW)
            store.flush(30)
            store.close()

        status = in_child(run)
        check_after(root)
        shutil.rmtree(root)
        if not os.WIFSIGNALED(status):
            return number - 1
    raise AssertionError("no end of calls")


def kill_at_random(base: Path, count: int) -> int:
    """How many of the runs died before they were done."""
    rng = random.Random(count)
    killed = 0
    started = time.perf_counter()
    save(base / "whole", [LONG])
    whole_s = time.perf_counter() - started
    for number in range(count):
        root = base / str(number)
        save(root, [OLD])
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            try:
                save(root, [LONG])
            finally:
                os._exit(0)
        time.sleep(3 * rng.random() * whole_s)
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        check_after(root, LONG)
        shutil.rmtree(root)
        if time.perf_counter() - started > 30:
            raise AssertionError("a run took too long")
    return killed


def strace(base: Path, errors: list[str]) -> int:
    """How many injections there were. strace counts calls per thread, so each number is met by every thread."""
    injections = 0
    for call in FOLDER_CALLS + PLAIN_CALLS:
        for number in range(1, _calls_of_a_thread(base / "dry", call, base / "log") + 1):
            for fault in [*(f"error={error}" for error in errors), "signal=SIGKILL"]:
                root = base / f"{call}-{number}-{fault}"
                save(root, [OLD])
                inject = [
                    "-o",
                    os.devnull,
                    *_watching(root, call),
                    "-e",
                    f"inject={call}:{fault}:when={number}",
                ]
                _run_traced(inject, root)
                check_after(root)
                shutil.rmtree(root)
                injections += 1
    return injections


def _calls_of_a_thread(root: Path, call: str, log: Path) -> int:
    """Most calls by one of the threads; of those on descriptors, what the start of Python adds is left out."""
    save(root, [OLD])
    _run_traced(["-o", str(log), *_watching(root, call)], root)
    threads = re.findall(rf"^(\d+) +{call}\(", log.read_text(), re.MULTILINE)
    shutil.rmtree(root)
    main = threads[0] if threads and call in PLAIN_CALLS else None
    return max((count for thread, count in Counter(threads).items() if thread != main), default=len(threads))


def _watching(root: Path, call: str) -> list[str]:
    paths = [f"-P{folder}" for folder in root.glob("kv-v1/*/")] if call in FOLDER_CALLS else []
    return [*paths, "-e", f"trace={call}"]


def _run_traced(options: list[str], root: Path) -> None:
    """Whatever becomes of the run, more than one warning or a hang are wrong."""
    command = ["strace", "-f", "-qq", *options, sys.executable, __file__, "one", str(root)]
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, timeout=60, check=False)
    if b"warned twice" in done.stderr:
        raise AssertionError(done.stderr)


def store_once(root: Path) -> None:
    """What strace watches."""
    lines: list[str] = []
    store = open_store(root, lines.append)
    check_chain(store.find(OLD), OLD)
    check_chain(store.find(NEW), NEW)
    offer_prompt(store, NEW)
    store.flush(30)
    store.close()
    if len(lines) > 1:
        raise AssertionError(f"warned twice: {lines}")


def main() -> None:
    mode = sys.argv[1]
    if mode == "one":
        store_once(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder_name:
        base = Path(folder_name)
        if mode == "calls":
            print(f"died at each of {kill_at_every_call(base)} calls")
        elif mode == "random":
            count = int(sys.argv[2]) if len(sys.argv) > 2 else 500
            print(f"{kill_at_random(base, count)} of {count} runs died")
        else:
            print(f"{strace(base, sys.argv[2:] or ['ENOSPC', 'EIO', 'EMFILE'])} injections")


if __name__ == "__main__":
    main()
