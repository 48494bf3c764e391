"""`infer ls`: the catalog, what of it is here, and what else lies in the store and the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from infer.cli import render
from infer.cli.config import data_dirs
from infer.cli.options import JsonOptions, takes
from infer.runtime.store.files import human_size
from infer.runtime.store.paths import DataDirs


@dataclass(frozen=True, kw_only=True)
class _Row:
    """size and partial_bytes (left by an interrupted download) in bytes; path is null unless pulled."""

    name: str
    size: int
    pulled: bool = True
    partial_bytes: int = 0
    path: str | None
    architecture: str | None = None
    quantization: str | None = None
    license: str | None = None
    source: str | None = None
    default: bool = False
    description: str = ""


@takes(JsonOptions)
def ls(options: JsonOptions) -> None:
    """List the catalog, what of it is here, and other models on this machine.

    Examples:
      infer ls
      infer ls --json | jq -r '.models[] | select(.pulled).name'
    """
    dirs = data_dirs()
    rows = _rows(dirs)
    if options.json:
        render.emit(json.dumps({"store": str(dirs.models), "models": [asdict(row) for row in rows]}))
        return
    for line in _table(rows):
        render.emit(line)


def _table(rows: Sequence[_Row]) -> list[str]:
    """Aligned columns by hand: importing rich for a table adds 0.08 s to the 0.26 s of this command."""
    lines = [("NAME", "SIZE", "TYPE", "HERE", "ABOUT")]
    for row in rows:
        partial = f"{100 * row.partial_bytes // row.size} %" if row.partial_bytes else "-"
        about = row.description + (" (default)" if row.default else "")
        here = "yes" if row.pulled else partial
        lines.append((render.one_line(row.name), human_size(row.size), row.quantization or "", here, about))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return [
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {kind:<{widths[2]}}  {here:<{widths[3]}}  {about}"
        for name, size, kind, here, about in lines
    ]


def _rows(dirs: DataDirs) -> list[_Row]:
    from infer.runtime.store import catalog, hub
    from infer.runtime.store.local import list_models
    from infer.runtime.store.pull import describe_source, partial_bytes

    stored = {model.name: model for model in list_models(dirs)}
    rows = []
    for entry in catalog.CATALOG:
        model = stored.pop(entry.name, None)
        rows.append(
            _Row(
                name=entry.name,
                size=entry.size,
                pulled=model is not None,
                partial_bytes=0 if model else partial_bytes(entry, dirs),
                path=str(model.path) if model else None,
                architecture=entry.architecture,
                quantization=entry.quantization,
                license=entry.license,
                source=" | ".join(describe_source(source) for source in entry.sources),
                default=entry.name == catalog.DEFAULT_MODEL,
                description=entry.description,
            )
        )
    for model in stored.values():
        rows.append(
            _Row(
                name=model.name,
                size=model.size,
                path=str(model.path),
                architecture=model.architecture or None,
                license=model.license or None,
                source=model.source or None,
                description=f"a {model.architecture or 'checkpoint'} folder in the store"
                if model.path.is_dir()
                else "a file in the store",
            )
        )
    for name, path, size in hub.cached_files():
        rows.append(
            _Row(
                name=str(name),
                size=size,
                path=str(path),
                source=f"{hub.PREFIX}{name.repo}",
                description="in the hub's cache",
            )
        )
    return rows
