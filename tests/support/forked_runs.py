"""Whole runs of `infer run` with a real model, as forks of a process that has made all the imports already."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import cached_property
from itertools import count
from pathlib import Path

from disk_store import files_in
from tiny_models import CORPUS, TinyOptions, write_tiny

from infer.cli.main import invoke
from infer.cli.main import main as infer

OLD, NEW = CORPUS[:150], CORPUS[:250] + CORPUS[400:600]
TIMEOUT_S = 120


class Runs:
    """Runs of one model in a scratch folder."""

    def __init__(self, base: Path, model: TinyOptions) -> None:
        self.base = base
        self._numbers = count()
        self.model = write_tiny(base / "tiny.gguf", model)
        common = "--threads 1 --raw --no-stdin --temp 0 --ignore-eos -n 8"
        self._command = ["run", "-m", str(self.model), *common.split()]
        os.environ.update(INFER_HOME=str(base / "home"), INFER_DEBUG="1")
        invoke([*self._command, "--no-cache", "-o", str(base / "first"), NEW])
        self.cold = self.answer(None, NEW)
        if not self.cold:
            raise AssertionError("the model has nothing to say")

    def start(self, root: Path | None, prompt: str, limit: str | None = None,
              before: Callable[[], None] = lambda: None) -> tuple[int, Path]:  # fmt: skip
        """A fork that answers `prompt` with the cache in `root`: its id, and where its stdout goes (stderr beside it).

        before: done in the fork, before the command."""
        cache = ["--no-cache"] if root is None else ["--cache-dir", str(root)]
        cache += [] if limit is None else ["--cache-limit", limit]
        out = self.base / f"out{next(self._numbers)}"
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                for descriptor, path in enumerate((os.devnull, str(out), f"{out}.err")):
                    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                    os.dup2(opened, descriptor)
                    os.close(opened)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                sys.argv = ["infer", *self._command, *cache, prompt]
                before()
                try:
                    infer()
                except SystemExit as end:
                    status = int(end.code or 0)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        return pid, out

    def finish(self, pid: int, out: Path) -> tuple[int, bytes, str]:
        """Wait status, stdout and stderr of a run."""
        deadline = time.monotonic() + TIMEOUT_S
        ended, status = os.waitpid(pid, os.WNOHANG)
        while not ended:
            time.sleep(0.002)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                raise AssertionError("a run hangs")
            ended, status = os.waitpid(pid, os.WNOHANG)
        errors = Path(f"{out}.err")
        found = out.read_bytes(), errors.read_text(errors="replace")
        out.unlink()
        errors.unlink()
        return status, *found

    def answer(self, root: Path | None, prompt: str, limit: str | None = None) -> bytes:
        """What an unhindered run says. Raises AssertionError when it says anything else than the answer."""
        status, out, err = self.finish(*self.start(root, prompt, limit))
        if status or err:
            raise AssertionError(f"status {status}: {err}")
        return out

    @cached_property
    def filled(self) -> Path:
        """A cache folder with the entries of OLD and a temporary that was abandoned. Not to be changed."""
        root = self.base / "filled"
        self.answer(root, OLD)
        (files_in(root)[0].parent / "tmp-0123456789abcdef01234567").write_bytes(b"x" * 5000)
        return root

    def scratch(self, before: Path | None = None) -> Path:
        """A cache folder of its own: a copy, or a name where nothing is yet."""
        root = self.base / f"root{next(self._numbers)}"
        if before is not None:
            shutil.copytree(before, root)
        return root
