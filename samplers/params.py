"""What a request asks of the sampler. Torch-free, immutable, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Default order. `greedy` is where temperature 0 stops; `draw` always comes last and is not listed.
DEFAULT_ORDER = ("logit_bias", "penalties", "temperature", "top_k", "typical_p", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    temperature 0, top_k 1 and top_p 0 each mean greedy; top_k 0 or at least the vocabulary means off, as do
    top_p 1, min_p 0, typical_p 1, repeat_penalty 1 and presence/frequency penalties of 0.
    repeat_penalty looks at prompt and answer, presence and frequency penalties at the answer alone.
    seed: 0 ≤ seed < 2**64; the draw at a position depends on (seed, position) and nothing else.
    max_tokens None: until the context is full. logprobs: how many alternatives to report, None for no report.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    order: tuple[str, ...] = DEFAULT_ORDER
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming the field and the accepted range."""
        checks = (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "a finite number ≥ 0"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "an integer ≥ 0"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1"),
            (
                "repeat_penalty",
                self.repeat_penalty > 0 and math.isfinite(self.repeat_penalty),
                "a finite number > 0",
            ),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            (
                "seed",
                isinstance(self.seed, int) and 0 <= self.seed < 2**64,
                "an integer between 0 and 2^64-1",
            ),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "an integer ≥ 0"),
            ("stop", all(self.stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "between 0 and 100"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)!r}")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0 or math.isnan(bias):
                raise ValueError(f"logit_bias needs token ids ≥ 0 and numbers, not {token}={bias}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        unknown = [name for name in self.order if name not in DEFAULT_ORDER]
        if unknown or len(set(self.order)) != len(self.order):
            raise ValueError(
                f"samplers must be distinct names out of {', '.join(DEFAULT_ORDER)}; got {self.order}"
            )

    @property
    def greedy(self) -> bool:
        """True when no draw happens."""
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0
