"""`infer cache`: what the disk cache holds of earlier prompts. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli import render, session
from infer.cli.config import data_dirs
from infer.cli.options import CacheOptions, JsonOptions, NoteOptions, complete_model, takes
from infer.runtime.errors import InferError, UsageError
from infer.runtime.store.files import human_size

if TYPE_CHECKING:
    from infer.runtime.kvcache.disk.admin import DamagedEntry, ModelUsage, Removal, Verification
    from infer.runtime.kvcache.identity import Label


@dataclass(frozen=True, kw_only=True)
class CacheCommandOptions(JsonOptions, CacheOptions, NoteOptions):
    """Every flag of `infer cache`, but for those of one command."""


# No setting like the -m of other commands: INFER_MODEL must not decide what is deleted.
_Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="Only this model: a name or path, or the beginning of a fingerprint of `infer cache ls`.",
        autocompletion=complete_model,
    ),
]
_SHORTEST = 6  # digits that are taken for the beginning of a fingerprint
_Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]


@dataclass(frozen=True)
class _Stored:
    """One fingerprint of the store, and what its label says."""

    usage: ModelUsage
    label: Label

    def row(self) -> dict[str, Any]:
        """For JSON. last_used: UTC, ISO 8601, null where the clock was off."""
        return {
            "name": self.label.name or None,
            "path": self.label.path or None,
            "fingerprint": self.usage.folder,
            "entries": self.usage.entries,
            "tokens": self.usage.tokens,
            "bytes": self.usage.nbytes,
            "last_used": _utc(self.usage.used_ns),
            "parts": dict(self.label.parts),
        }


@takes(CacheCommandOptions)
def ls(options: CacheCommandOptions, model: _Model = None) -> None:
    """List what is stored, per model and way of computing, the one used last first."""
    root = session.cache_dir(options)
    stored = _stored(root, model)
    if options.json:
        render.emit(json.dumps({"folder": str(root), "models": [item.row() for item in stored]}))
        return
    lines = [("MODEL", "ENTRIES", "TOKENS", "SIZE", "LAST USED", "FINGERPRINT")]
    for item in stored:
        usage = item.usage
        size, used = human_size(usage.nbytes), render.local_time(usage.used_ns / 1e9)
        numbers = (str(usage.entries), str(usage.tokens), size)
        lines.append((item.label.name or "?", *numbers, used, usage.folder[:12]))
    for line in render.columns(lines, right=(1, 2, 3)):
        render.emit(line)


@takes(CacheCommandOptions)
def info(options: CacheCommandOptions, model: _Model = None) -> None:
    """Show where the cache lies, its limit and use; with -m also everything that a model's entries depend on."""
    from infer.runtime.kvcache.disk import admin

    root, limit = session.cache_dir(options), session.cache_limit(options)
    facts = admin.info(root, limit)
    stored = _stored(root, model) if model is not None else []
    if options.json:
        report: dict[str, Any] = {
            "folder": str(root),
            "limit": facts.limit,
            "limit_is_default": limit is None,
            "bytes": facts.nbytes,
            "entries": facts.entries,
            "tokens": facts.tokens,
            "fingerprints": facts.models,
            "temporaries": facts.temporaries,
            "free": facts.free,
        }
        if model is not None:
            report["models"] = [item.row() for item in stored]
        render.emit(json.dumps(report))
        return
    why = " (default: 10 % of the free disk, at most 20 GB)" if limit is None else ""
    lines = {
        "folder": str(root),
        "limit": human_size(facts.limit) + why if facts.limit else "0: the disk cache is off",
        "used": f"{human_size(facts.nbytes)} by {facts.entries} entries of {facts.tokens} tokens, "
        f"{facts.models} fingerprints",
        "free disk": human_size(facts.free),
    }
    if facts.temporaries:
        lines["temporary"] = f"{facts.temporaries} files being written, or left by a killed process"
    _emit_facts(lines)
    for item in stored:
        render.emit("")
        name = f"{item.label.name} ({item.label.path})" if item.label.path else item.label.name or "?"
        _emit_facts({"model": name, "fingerprint": item.usage.folder, **_flat(item.label.parts)})
    if model is not None and not stored:
        render.emit(f"nothing is stored of {model}")


@takes(CacheCommandOptions)
def verify(options: CacheCommandOptions, model: _Model = None, yes: _Yes = False) -> None:
    """Read every entry and compare it with its checksums; damaged ones are removed on request.

    Ends with 1 when damaged entries stay, or entries could not be read.
    """
    from infer.runtime.kvcache.disk import admin

    root = session.cache_dir(options)
    found: list[Verification] = []
    with render.progress("checking", enabled=not options.quiet) as bar:
        for folder in _folders(root, model):
            found.append(admin.verify(root, folder, bar))
    damaged = [entry for part in found for entry in part.damaged]
    unreadable = [path for part in found for path in part.unreadable]
    checked, size = sum(part.checked for part in found), sum(part.nbytes for part in found)
    if not options.json:
        render.emit(f"checked {checked} entries, {human_size(size)}: {len(damaged)} damaged")
        for entry in damaged:
            render.emit(f"{entry.path}: {entry.reason}")
        for path in unreadable:
            render.emit(f"{path}: cannot be read")
    removed = _remove_damaged(root, damaged, options, yes)
    if options.json:
        report = {
            "folder": str(root),
            "checked": checked,
            "bytes": size,
            "damaged": [{"path": entry.path, "reason": entry.reason} for entry in damaged],
            "unreadable": unreadable,
            "removed": removed,
        }
        render.emit(json.dumps(report))
    if removed < len(damaged) or unreadable:
        raise typer.Exit(1)


@takes(CacheCommandOptions)
def prune(options: CacheCommandOptions) -> None:
    """Bring the cache below its limit now, the least recently used first.

    Leftovers of killed processes go too.
    """
    from infer.runtime.kvcache.disk import admin

    root, limit = session.cache_dir(options), session.cache_limit(options)
    if limit == 0:
        raise UsageError(
            f"{options.origin('cache_limit')} 0 turns the disk cache off: `infer cache clear` empties it"
        )
    removal = admin.prune(root, admin.info(root, limit).limit)
    _report(root, [removal], options)


@takes(CacheCommandOptions)
def clear(options: CacheCommandOptions, model: _Model = None, yes: _Yes = False) -> None:
    """Delete everything that is stored, or what is stored of one model.

    Every entry can be computed again.
    """
    from infer.runtime.kvcache.disk import admin

    root = session.cache_dir(options)
    stored = _stored(root, model)
    count, size = sum(item.usage.entries for item in stored), sum(item.usage.nbytes for item in stored)
    what = f"{count} entries ({human_size(size)}) of the disk cache {root}"
    if stored and not yes and not render.confirm_deletion("cache clear", what):
        return
    folders = [None] if model is None else [item.usage.folder for item in stored]
    _report(root, [admin.clear(root, folder) for folder in folders], options)


def _remove_damaged(
    root: Path, damaged: Sequence[DamagedEntry], options: CacheCommandOptions, yes: bool
) -> int:
    """Remove them if the user says so, with -y or when asked; how many are gone."""
    from infer.runtime.kvcache.disk import admin

    if not damaged:
        return 0
    if not yes and (options.json or not render.can_ask()):
        render.say(f"{len(damaged)} damaged entries stay: give -y to remove them")
        return 0
    if not yes and not render.confirm_deletion("cache verify", f"{len(damaged)} damaged entries"):
        return 0
    removal = admin.remove_damaged(root, damaged)
    if not options.quiet:
        render.say(f"removed {removal.entries} entries, {human_size(removal.nbytes)}")
    return len(damaged) if removal.complete else removal.entries


def _report(root: Path, removals: Sequence[Removal], options: CacheCommandOptions) -> None:
    """Say what was removed. Ends with 1 where not everything could be."""
    entries, size = sum(part.entries for part in removals), sum(part.nbytes for part in removals)
    complete = all(part.complete for part in removals)
    if options.json:
        render.emit(
            json.dumps({"folder": str(root), "removed": entries, "bytes": size, "complete": complete})
        )
    elif not options.quiet:
        render.say(f"removed {entries} entries, {human_size(size)}")
    if not complete:
        render.say(
            "infer: error: less was removed than should be: another process is making room, or a permission is "
            "missing; try again"
        )
        raise typer.Exit(1)


def _emit_facts(facts: Mapping[str, str]) -> None:
    width = max(map(len, facts)) + 3
    for name, value in facts.items():
        render.emit(f"{name + ':':<{width}}{value}")


def _flat(parts: Mapping[str, object]) -> dict[str, str]:
    """The parts of a fingerprint as lines; of parts that have parts, `rope` for one, a line each."""
    lines: dict[str, str] = {}
    for name, value in parts.items():
        if isinstance(value, dict):
            lines.update({f"{name} {key}": str(part) for key, part in value.items()})
        else:
            lines[name] = "-" if value in ("", None) else str(value)
    return lines


def _utc(nanoseconds: int) -> str | None:
    try:
        return datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return None


def _folders(root: Path, model: str | None) -> list[str | None]:
    """The folders to look at, None for all of them."""
    return [None] if model is None else [item.usage.folder for item in _stored(root, model)]


def _stored(root: Path, model: str | None) -> list[_Stored]:
    """What is stored, of one model where one is named. Raises CacheFolderError, and ModelNotFoundError for a model
    that is neither stored nor known."""
    from infer.runtime.kvcache.disk import admin
    from infer.runtime.kvcache.identity import parse_label

    stored = [_Stored(usage, parse_label(usage.label)) for usage in admin.list_models(root)]
    if model is None:
        return stored
    by_name = [item for item in stored if _is_called(item, model)]
    path = _path_of(model, known=bool(by_name))
    if path is None:
        return by_name
    weights = _weights_of(path)
    return [
        item for item in stored if item in by_name or path == item.label.path or weights == item.label.weights
    ]


def _is_called(item: _Stored, model: str) -> bool:
    is_digits = len(model) >= _SHORTEST and set(model) <= set("0123456789abcdef")
    return item.label.name.casefold() == model.casefold() or (
        is_digits and item.usage.folder.startswith(model)
    )


def _path_of(model: str, *, known: bool) -> str | None:
    """Where the model lies, if it is on this machine. Raises ModelNotFoundError for an unknown name, unless the
    store knows it."""
    from infer.runtime.store.pull import PullOptions, ensure_local
    from infer.runtime.store.resolve import resolve

    dirs = data_dirs()
    try:
        source = resolve(model, dirs)
    except InferError:
        if known:
            return None
        raise
    try:
        return str(ensure_local(source, dirs, PullOptions(offline=True)).absolute())
    except InferError:  # known, but not downloaded (any more)
        return None


def _weights_of(path: str) -> str:
    """The content hash of a model's files: remembered, or computed with a bar. "" where it cannot be read."""
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.store.fingerprint import fingerprint

    try:
        with render.progress("hashing") as bar:
            with open_checkpoint(Path(path)) as checkpoint:
                tensors = checkpoint.tensors.values()
                files = list(dict.fromkeys([Path(path), *(tensor.file for tensor in tensors)]))
            return fingerprint(files, data_dirs().cache, progress=lambda done, total, _: bar(done, total))
    except InferError:
        return ""
