"""What the disk tier did in this run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StoreStats:
    """Counters. dropped: entries that were offered and not stored, for whatever reason. damaged: entries removed
    because they were not what their name says."""

    loaded_entries: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    loaded_seconds: float = 0.0
    written_entries: int = 0
    written_bytes: int = 0
    dropped_entries: int = 0
    damaged_entries: int = 0
