"""`infer pull`: a model from the catalog or a hub repository onto this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from infer.cli import render
from infer.cli.config import data_dirs
from infer.cli.options import NoteOptions, complete_model, takes
from infer.cli.output import write_path
from infer.runtime.store.files import human_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from infer.runtime.store.pull import PullOptions


@takes(NoteOptions)
def pull(
    options: NoteOptions,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A catalog name or hf:org/repo[:file].", autocompletion=complete_model
        ),
    ],
) -> None:
    """Download a model and print its path.

    Examples:
      infer pull qwen2.5-coder-1.5b-instruct
      infer pull hf:bartowski/SmolLM2-360M-Instruct-GGUF
      ls -l "$(infer pull -q smollm2-135m-instruct)"
    """
    from infer.runtime.store.pull import ensure_local
    from infer.runtime.store.resolve import CatalogModel, resolve

    dirs = data_dirs()
    source = resolve(name, dirs)
    with reported(quiet=options.quiet, refresh=True) as pull_options:
        path = ensure_local(source, dirs, pull_options)
    if isinstance(source, CatalogModel) and not options.quiet:
        render.say(f"{source.entry.name}: license {source.entry.license}")
    write_path(path)


@contextmanager
def reported(*, quiet: bool = False, offline: bool = False, refresh: bool = False) -> Iterator[PullOptions]:
    """Options for `runtime.store` that report on stderr: a bar on a terminal, else one line per download.

    The bar is removed however the block ends.
    """
    from infer.runtime.store.files import ignore_notice, ignore_progress
    from infer.runtime.store.pull import PullOptions

    if quiet:
        yield PullOptions(ignore_progress, ignore_notice, offline=offline, refresh=refresh)
        return
    report = _Report(animated=render.animated())
    try:
        yield PullOptions(report.progress, report.notify, offline=offline, refresh=refresh)
    finally:
        report.close()


class _Report:
    """Progress of one or more transfers, possibly from several threads."""

    def __init__(self, *, animated: bool) -> None:
        self._animated = animated
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()

    def progress(self, done: int, total: int, label: str) -> None:
        with self._lock:
            if self._animated:
                self._draw(done, total, label)
            elif label not in self._said:
                self._said.add(label)
                render.say(f"{label}: {human_size(total)}")

    def _draw(self, done: int, total: int, label: str) -> None:
        if self._bar is None:
            self._bar = _bar()
            self._bar.start()
        if label not in self._tasks:
            self._tasks[label] = self._bar.add_task(render.one_line(label), total=total)
        self._bar.update(self._tasks[label], completed=done, total=total)

    def notify(self, line: str) -> None:
        if self._bar is None:
            render.say(line)
        else:
            self._bar.console.print(render.one_line(line), markup=False, highlight=False)

    def close(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


def _bar() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=render.err_console(), transient=True)
