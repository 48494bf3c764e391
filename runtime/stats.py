"""What a generation measured: the four steps of one inference, in seconds and tokens. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheUse:
    """Prompt tokens that were not computed, those of them read from disk, what that took and what all of it saved."""

    tokens: int = 0
    disk_tokens: int = 0
    loaded_bytes: int = 0
    loaded_s: float = 0.0
    saved_s: float = 0.0


@dataclass
class GenerationStats:
    """Times in seconds of wall clock; ttft_s runs from the first prompt token's arrival to the first answer token.

    cached_tokens is what came from memory and disk together. loaded_bytes and loaded_s: what was read from disk and
    how long it took. saved_s: the time that computing the cached tokens would have taken, less loaded_s.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    load_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    cached_memory_tokens: int = 0
    cached_disk_tokens: int = 0
    loaded_bytes: int = 0
    loaded_s: float = 0.0
    saved_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds per decoded token after the first."""
        return self.decode_s / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def timings(self) -> dict[str, float]:
        names = ("load_s", "tokenize_s", "prefill_s", "ttft_s", "decode_s", "tpot_s")
        return {name: round(float(getattr(self, name)), 6) for name in names}

    def add_cache_use(self, use: CacheUse) -> None:
        self.cached_tokens, self.cached_disk_tokens = use.tokens, use.disk_tokens
        self.cached_memory_tokens = use.tokens - use.disk_tokens
        self.loaded_bytes, self.loaded_s, self.saved_s = use.loaded_bytes, use.loaded_s, use.saved_s

    def cache(self) -> dict[str, int | float]:
        """Where the cached tokens came from, what loading them took and what that saved."""
        return {
            "memory_tokens": self.cached_memory_tokens,
            "disk_tokens": self.cached_disk_tokens,
            "loaded_bytes": self.loaded_bytes,
            "loaded_s": round(float(self.loaded_s), 6),
            "saved_s": round(float(self.saved_s), 6),
        }
