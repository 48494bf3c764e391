"""From the options to a loaded model: where it is, getting it here, loading it (with a bar if that is slow).

What takes long to import is imported inside `open_model`, once everything the flags can get wrong has been checked.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from infer.cli import config
from infer.cli.options import CacheOptions, EngineOptions, SourceOptions
from infer.cli.pull import reported
from infer.cli.render import Notes, one_line, progress
from infer.cli.size import parse_size
from infer.runtime.config import EngineConfig
from infer.runtime.errors import UsageError

if TYPE_CHECKING:
    from infer.runtime.loader import LoadedModel

_OPTION = {"prefix_cache": "no_cache"}


def engine_config(options: EngineOptions) -> EngineConfig:
    """Raises UsageError naming the flag, variable or key of a value out of range."""
    limit = cache_limit(options)
    on_disk = not options.no_cache and limit != 0
    try:
        return EngineConfig(
            device=options.device,
            threads=options.threads,
            ctx=options.ctx,
            kv_type=options.kv_type,
            prefill_chunk=options.prefill_chunk,
            quant=options.quant,
            kernel=options.kernel,
            isa=options.isa,
            prefix_cache=not options.no_cache,
            cache_dir=cache_dir(options) if on_disk else None,
            cache_limit=limit if on_disk else None,
            cache_read_only=options.cache_read_only,
        )
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        raise UsageError(f"{options.origin(_OPTION.get(field, field))} {rest}") from None


def cache_dir(options: CacheOptions) -> Path:
    """Folder of the disk cache, which need not exist. Raises UsageError for an empty name."""
    if options.cache_dir is None:
        return config.data_dirs().cache / "prefix"
    if not options.cache_dir or "\0" in options.cache_dir:
        raise UsageError(f"{options.origin('cache_dir')} must be a folder, not {options.cache_dir!r}")
    return Path(os.path.expanduser(options.cache_dir)).absolute()


def cache_limit(options: CacheOptions) -> int | None:
    """Bytes the disk cache may take, 0 for none at all, None for the default. Raises UsageError."""
    if options.cache_limit is None:
        return None
    return parse_size(options.cache_limit, options.origin("cache_limit"))


def locate(options: SourceOptions, notes: Notes) -> Path:
    """Path of the model that -m, INFER_MODEL or the config file names, else of the catalog's default.

    A catalog or hub model that is not on this machine is downloaded, which is said. Raises ModelError.
    """
    from infer.runtime.store.pull import ensure_local
    from infer.runtime.store.resolve import resolve

    dirs = config.data_dirs()
    source = resolve(options.model, dirs)
    with reported(quiet=notes.quiet) as pull_options:
        path = ensure_local(source, dirs, pull_options)
    notes.detail(f"model {path}")
    return path


@contextmanager
def open_model(
    path: Path,
    engine: EngineConfig,
    *,
    chat_template: str | Literal[False] | None,
    pre: str | None,
    notes: Notes,
    bar: bool = True,
) -> Iterator[LoadedModel]:
    """Load a model, say its warnings, close it at the end. chat_template: as Preload has it. bar: show one if it takes
    long. Raises ModelError."""
    from infer.runtime.preload import Preload

    showing = progress(f"loading {path.name}", enabled=bar and not notes.quiet)
    try:
        with (
            showing as update,
            closing(Preload(path, engine, chat_template=chat_template, pre=pre)) as preload,
        ):
            from infer.runtime.loader import load_model

            model = load_model(
                path,
                engine,
                chat_template=chat_template,
                pre=pre,
                memo_dir=config.data_dirs().cache,
                on_progress=update,
                preload=preload,
            )
    finally:
        if not gc.isenabled():  # `start` turned it off; what a chat loads later is collected as it comes
            gc.freeze()
            gc.enable()
    try:
        for warning in model.warnings:
            notes.warning(warning)
        yield model
    finally:
        model.close()


class _NotesHandler(logging.Handler):
    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.DEBUG if notes.verbose else logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        text = one_line(record.getMessage())
        if record.levelno >= logging.WARNING:
            self._notes.warning(text)
        else:
            self._notes.detail(text)


@contextmanager
def logging_to(notes: Notes) -> Iterator[None]:
    """The `infer` loggers speak through notes while the block runs; Python warnings only when verbose."""
    import warnings

    handler = _NotesHandler(notes)
    logger = logging.getLogger("infer")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    try:
        with warnings.catch_warnings():
            if notes.verbose:
                warnings.showwarning = lambda message, category, *_: notes.detail(
                    f"{category.__name__}: {message}"
                )
            else:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
