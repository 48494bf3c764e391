"""Whole runs of `infer run` beside each other on one cache folder, and one after another with a changed model file.

    python tests/support/run_together.py

Prints a line for each of its checks, or raises.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk_store import bytes_in, files_in
from forked_runs import NEW, Runs
from tiny_models import CORPUS, TinyOptions, write_tiny

from infer.runtime.kvcache.disk import admin, eviction, publish


def eight_runs_of_one_cold_prompt(runs: Runs) -> None:
    alone, shared = runs.scratch(), runs.scratch()
    runs.answer(alone, NEW)
    expect(runs, [(runs.start(shared, NEW), runs.cold) for _ in range(8)])
    same([path.name for path in files_in(shared)], [path.name for path in files_in(alone)])
    same({path.stat().st_nlink for path in files_in(shared)}, {1})
    check(shared)


def readers_during_eviction(runs: Runs) -> None:
    prompts = [CORPUS[start : start + 220] for start in range(0, 300, 30)]
    cold = {prompt: runs.answer(None, prompt) for prompt in prompts}
    unbounded, root = runs.scratch(), runs.scratch()
    for prompt in prompts:
        runs.answer(unbounded, prompt)
    limit = admin.info(unbounded, None).nbytes // 2
    for first in range(len(prompts)):
        chosen = [prompts[(first + 3 * place) % len(prompts)] for place in range(4)]
        expect(runs, [(runs.start(root, prompt, f"{limit}B"), cold[prompt]) for prompt in chosen])
        if bytes_in(root) > limit:
            raise AssertionError(f"{bytes_in(root)} bytes are above the limit of {limit}")
    check(root)


def a_stopped_run_blocks_nobody(runs: Runs) -> None:
    """Stopped with a temporary half written, and while it makes room."""

    def stop_first(owner: Any, name: str) -> Callable[[], None]:
        def patch() -> None:
            real = getattr(owner, name)

            def stopped(*arguments: Any) -> Any:
                os.kill(os.getpid(), signal.SIGSTOP)
                setattr(owner, name, real)
                return real(*arguments)

            setattr(owner, name, stopped)

        return patch

    full = runs.scratch()
    for start in range(0, 300, 30):
        runs.answer(full, CORPUS[start : start + 100])
    limit = f"{admin.info(full, None).nbytes}B"
    for root, limited, where in (
        (runs.scratch(), None, (publish.Temporary, "write")),
        (full, limit, (eviction.Quota, "_make_room")),
    ):
        stopped = runs.start(root, NEW, limited, stop_first(*where))
        _, status = os.waitpid(stopped[0], os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise AssertionError(f"never came to {where}")
        expect(runs, [(runs.start(root, NEW, limited), runs.cold) for _ in range(3)])
        os.kill(stopped[0], signal.SIGCONT)
        expect(runs, [(stopped, runs.cold)])
        same(runs.answer(root, NEW, limited), runs.cold)
        check(root)


def another_model_in_the_same_place(runs: Runs) -> None:
    """Of the same name, size and time: its entries are others, and the old ones wait for the old weights."""
    root, kept = runs.scratch(), runs.base / "kept.gguf"
    shutil.copy2(runs.model, kept)
    runs.answer(root, NEW)
    before, status = files_in(root), runs.model.stat()
    other = write_tiny(runs.base / "other.gguf", TinyOptions(quant="Q8_0", seed=1)).read_bytes()
    same(len(other), status.st_size)
    for content, answers in ((other, "another"), (kept.read_bytes(), "the first")):
        runs.model.write_bytes(content)
        os.utime(runs.model, ns=(status.st_atime_ns, status.st_mtime_ns))
        cold = runs.answer(None, NEW)
        if (cold == runs.cold) != (answers == "the first"):
            raise AssertionError(f"not {answers} answer: {cold!r}")
        same(runs.answer(root, NEW), cold)
        same(len(files_in(root)), 2 * len(before))
    check(root)


def expect(runs: Runs, running: list[tuple[tuple[int, Path], bytes]]) -> None:
    for (pid, out), answer in running:
        same(runs.finish(pid, out), (0, answer, ""))


def same(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{found} instead of {expected}")


def check(root: Path) -> None:
    report = admin.verify(root)
    same((report.damaged, report.unreadable, files_in(root, "tmp-*")), ((), (), []))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), TinyOptions(quant="Q8_0"))
        for scene in (
            eight_runs_of_one_cold_prompt,
            readers_during_eviction,
            a_stopped_run_blocks_nobody,
            another_model_in_the_same_place,
        ):
            scene(runs)
            print(scene.__name__.replace("_", " "), flush=True)


if __name__ == "__main__":
    main()
