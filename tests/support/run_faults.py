"""Whole runs of `infer run`, killed or hindered in whatever they do to the prompt cache, and the run after each.

    python tests/support/run_faults.py random [COUNT]              killed at COUNT random moments (500)
    python tests/support/run_faults.py calls [STEP] [FAULT …]      a fault at the N-th call into `os`, for every N
    python tests/support/run_faults.py strace [FAULT …]            at the N-th system call on the cache's folders

A FAULT is KILL, an error such as EIO, or EIO+: that error at every later call too; all of them by default. After each:
the answer of a hindered run, and of the run after it, is the one of a run without a cache; `infer cache verify` finds
nothing; no entry that was there before is lost; no temporary is left.

Imports take longer than everything else, so every run is a fork of this process, which has made one run itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from disk_faults import MODULES, CountingOs
from disk_store import files_in
from forked_runs import NEW, TIMEOUT_S, Runs
from tiny_models import CORPUS, TinyOptions

from infer.runtime.kvcache.disk import admin, publish

ERRORS = ("EIO", "ENOSPC", "EACCES", "EMFILE", "ENOMEM", "EINTR", "EIO+", "ENOSPC+", "EMFILE+")
SYSTEM_CALLS = {
    "openat": ("EIO", "ENOSPC", "EACCES", "EMFILE", "ENOMEM", "EINTR"),
    "newfstatat": ("EIO", "EACCES", "ENOMEM"),
    "linkat": ("EIO", "ENOSPC", "EACCES", "EPERM", "ENOMEM"),
    "unlinkat": ("EIO", "EACCES", "ENOMEM"),
    "mkdirat": ("EIO", "ENOSPC", "EACCES", "ENOMEM"),
    "mkdir": ("EIO", "ENOSPC", "EACCES", "ENOMEM"),
    "getdents64": ("EIO", "ENOMEM"),
    "utimensat": ("EIO", "EACCES"),
    "close": ("EIO", "EINTR"),
    "readv": ("EIO", "EINTR"),
    "flock": ("EINTR", "ENOLCK"),
}


@dataclass(frozen=True)
class Case:
    """What a hindered run starts from. before: a cache folder to copy. limit: of the run; with one, entries may go.
    links: whether the file system has them (for `calls`)."""

    name: str
    before: Path | None = None
    limit: str | None = None
    links: bool = True


def check_after(runs: Runs, case: Case, root: Path) -> None:
    """The state that a run left behind does no harm, and the next run puts it right. Removes the folder."""
    if root.exists():
        report = admin.verify(root)
        if report.damaged or report.unreadable:
            raise AssertionError(f"published: {report}")
    if case.before is not None and case.limit is None:
        lost = {path.name for path in files_in(case.before)} - {path.name for path in files_in(root)}
        if lost:
            raise AssertionError(f"valid entries were lost: {lost}")
    if runs.answer(root, NEW, case.limit) != runs.cold:
        raise AssertionError("the next run answers something else")
    left = files_in(root, "tmp-*")
    if left or admin.verify(root).damaged:
        raise AssertionError(f"the next run left {left}")
    shutil.rmtree(root)


def random_kills(runs: Runs, number: int) -> str:
    """SIGKILL at random moments from the first entry being written to the end of the run."""
    rng = random.Random(number)
    case = Case("filled", runs.filled)
    root = runs.scratch(case.before)
    _, whole_s = _store_phase(runs, case, root, None)
    whole = len(files_in(root))
    killed = unfinished = 0
    for _ in range(number):
        root = runs.scratch(case.before)
        killed += _store_phase(runs, case, root, rng.random() * whole_s)[0]
        unfinished += len(files_in(root)) < whole
        check_after(runs, case, root)
    return f"{killed} of {number} runs died, {unfinished} of them before all of their entries were stored"


def _store_phase(runs: Runs, case: Case, root: Path, kill_after: float | None) -> tuple[bool, float]:
    """Whether a run was killed that many seconds after it began to store, and how long it went on after that."""
    reader, writer = os.pipe()

    def announce() -> None:
        create = publish.Temporary.__init__

        def announced(self: publish.Temporary, *arguments: Any) -> None:
            os.write(writer, b".")
            create(self, *arguments)

        publish.Temporary.__init__ = announced  # type: ignore[method-assign]

    pid, out = runs.start(root, NEW, case.limit, announce)
    os.close(writer)
    select.select([reader], [], [], TIMEOUT_S)
    began = time.monotonic()
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status, _, err = runs.finish(pid, out)
    os.close(reader)
    if err:
        raise AssertionError(err)
    return os.WIFSIGNALED(status), time.monotonic() - began


def _cases(runs: Runs) -> list[Case]:
    filled = runs.filled
    full = runs.base / "full"
    for start in range(0, 300, 30):
        runs.answer(full, CORPUS[start : start + 100])
    used = admin.info(full, None).nbytes
    return [
        Case("empty"),
        Case("filled", filled),
        Case("full", full, f"{used // 1000}kB"),
        Case("no links", filled, links=False),
    ]


def _faults(names: list[str]) -> Iterator[tuple[str, Callable[[str], None], bool]]:
    """(name, what to do at the call, at every later one too)."""
    for name in names or ["KILL", *ERRORS]:
        code = name.rstrip("+")

        def act(_: str, code: str = code) -> None:
            if code == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, code)
            raise OSError(number, os.strerror(number))

        yield name, act, name.endswith("+")


def at_every_call(runs: Runs, names: list[str], step: int = 1) -> str:
    """A fault at the N-th call for N = 1, 1 + step, …, in every case."""
    total = 0
    for case in _cases(runs):
        for name, act, onwards in _faults(names):
            for number in count(1, step):
                root = runs.scratch(case.before)
                reader, writer = os.pipe()
                shim = CountingOs(number, act, onwards=onwards)
                pid, out = runs.start(root, NEW, case.limit, partial(_hinder, shim, writer, case))
                os.close(writer)
                what = f"{case.name}, {name} at call {number}"
                status = _check_hindered(runs, pid, out, what)
                reached = bool(status) or bool(os.read(reader, 1))
                os.close(reader)
                check_after(runs, case, root)
                if not reached:
                    print(f"{case.name}: {name}, {(number - 1) // step} of {number - 1} calls", flush=True)
                    total += (number - 1) // step
                    break
    return f"{total} faults"


def _hinder(shim: CountingOs, reached: int, case: Case) -> None:
    """Every call of the disk tier into `os`, and its locks, go through the shim, which tells when its number came."""
    act, lock = shim.act, fcntl.flock

    def told(name: str) -> None:
        os.write(reached, b".")
        act(name)

    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    shim.act = told
    if not case.links:
        shim.link = no_link
    for module in MODULES:
        module.os = shim  # type: ignore[attr-defined]
    fcntl.flock = shim.wrapped("flock", lock)


def _check_hindered(runs: Runs, pid: int, out: Path, what: str) -> int:
    """Wait status of a run that was killed, or gave the right answer with one warning at most."""
    status, answer, err = runs.finish(pid, out)
    if os.WIFSIGNALED(status):
        if not runs.cold.startswith(answer):
            raise AssertionError(f"{what}: a part of another answer")
    elif status or answer != runs.cold or len(err.splitlines()) > 1 or "rror" in err.partition(":")[2][:8]:
        raise AssertionError(f"{what}: status {status}, stderr {err!r}, answer {answer!r} for {runs.cold!r}")
    return status


def with_strace(runs: Runs, names: list[str]) -> str:
    """Faults injected by strace into system calls that name the cache's folders or what was in them before the run."""
    total = 0
    for case in _cases(runs)[:3]:
        for call, errors in SYSTEM_CALLS.items():
            chosen = [name for name in ("KILL", *errors) if not names or name in names]
            most = _most_calls(runs, case, call)
            for number in range(1, most + 1):
                for name in chosen:
                    fault = "signal=SIGKILL" if name == "KILL" else f"error={name}"
                    root = runs.scratch(case.before)
                    pid, out = _start_traced(
                        runs, case, root, call, f"inject={call}:{fault}:when={number}", None
                    )
                    _check_hindered(runs, pid, out, f"{case.name}, {name} at {call} {number}")
                    check_after(runs, case, root)
                    total += 1
            print(f"{case.name}: {call}, {most} calls, {', '.join(chosen)}", flush=True)
    return f"{total} injections"


def _most_calls(runs: Runs, case: Case, call: str) -> int:
    """Of one thread: strace counts them one by one, so that each number is met by every thread."""
    log, root = runs.base / "log", runs.scratch(case.before)
    runs.finish(*_start_traced(runs, case, root, call, f"trace={call}", log))
    lines = re.findall(rf"^(\d+) +{call}\(", log.read_text(), re.MULTILINE)
    shutil.rmtree(root)
    return max((lines.count(thread) for thread in set(lines)), default=0)


def _start_traced(
    runs: Runs, case: Case, root: Path, call: str, expression: str, log: Path | None
) -> tuple[int, Path]:
    """A run that waits until strace watches it."""
    names = {path.relative_to(runs.filled) for path in runs.filled.rglob("*")}
    names |= {path.relative_to(root) for path in root.rglob("*")}
    watched = [root, *(root / name for name in names)]
    pid, out = runs.start(root, NEW, case.limit, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    os.waitpid(pid, os.WUNTRACED)
    options = ["-o", os.devnull if log is None else str(log), *(f"-P{path}" for path in watched)]
    tracer = subprocess.Popen(
        ["strace", "-f", *options, "-e", f"trace={call}", "-e", expression, "-p", str(pid)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert tracer.stderr is not None
    if "attached" not in (line := tracer.stderr.readline()):
        raise AssertionError(line)
    os.kill(pid, signal.SIGCONT)
    return pid, out


def main() -> None:
    mode, arguments = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        if mode == "random":
            number = int(arguments[0]) if arguments else 500
            print(random_kills(Runs(base, TinyOptions(layers=8, kv_heads=8, heads=8, head_dim=64)), number))
            return
        runs = Runs(base, TinyOptions(quant="Q8_0"))
        if mode == "calls":
            step = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 1
            print(at_every_call(runs, arguments, step))
        else:
            print(with_strace(runs, arguments))


if __name__ == "__main__":
    main()
