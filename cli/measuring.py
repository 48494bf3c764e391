"""What the commands that measure have in common."""

from __future__ import annotations

import dataclasses

from infer.cli.options import EngineOptions
from infer.cli.render import Notes
from infer.runtime.config import EngineConfig

_DISK = ("cache_dir", "cache_limit", "cache_read_only")


def without_disk_cache(engine: EngineConfig, options: EngineOptions, notes: Notes) -> EngineConfig:
    """The engine without its disk cache, which would spare what is to be measured; a note when a flag asked for it."""
    given = [options.origins[name] for name in _DISK if options.origins.get(name, "").startswith("--")]
    if given:
        notes.note(f"{', '.join(given)}: a measurement uses no disk cache")
    return dataclasses.replace(engine, cache_dir=None)
