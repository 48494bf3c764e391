"""A prompt on its way through the engine: what was asked, how far it is, what came out. Torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from infer.samplers.params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-turn token, or a stop string found above the engine
    LENGTH = "length"  # max_tokens reached or context full
    CANCELLED = "cancelled"


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # no blocks held: new or preempted
    RUNNING = enum.auto()  # holds blocks
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Request:
    """One prompt as token ids (never text), never empty. stop_ids end the answer unless ignore_eos."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenLogprob:
    """log-probability of the chosen token under the raw logits, and the `logprobs` most likely (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What one engine step brought for one request.

    new_ids: tokens decoded in this step (0 or 1; more with speculation), the end-of-turn token included.
    stop_reason: the token id that ended it, when finish_reason is STOP.
    """

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Sequence:
    """Mutable state of a request inside the engine.

    token_ids = prompt + decoded; num_computed of them have their K and V in the cache.
    block_table holds pool block ids in order of position; num_cached counts prompt tokens taken from the
    prefix cache instead of being computed when it was first admitted.
    """

    request: Request
    token_ids: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    admitted: bool = False
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_decoded(self) -> int:
        return len(self.token_ids) - self.num_prompt
