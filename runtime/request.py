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
    """One prompt as token ids (never text), never empty. stop_ids end the answer unless ignore_eos.

    score_from: the prompt position from which each token's log-probability is wanted (the first token has none,
    since nothing precedes it); None for no scores.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    score_from: int | None = None


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
    prompt_logprobs: log-probabilities under the raw logits of the prompt tokens that this step scored; those of
    successive steps are of successive tokens, from max(1, score_from) to the end of the prompt.
    """

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()


@dataclass
class Sequence:
    """Mutable state of a request inside the engine.

    token_ids = prompt + decoded; num_computed of them have their K and V in the cache. next_scored is the
    prompt position whose score is reported next, and stays when the sequence is preempted.
    block_table holds pool block ids in order of position; those before first_block are out of every window and given
    back: they are read no more and mean nothing. block_keys: the root key and the keys of full blocks, as far as the
    prefix cache needs them. num_cached counts prompt tokens taken from the
    prefix cache instead of being computed when it was first admitted, restored_tokens those of them that had to be
    loaded (loaded_bytes in loaded_s seconds).
    """

    request: Request
    token_ids: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    num_cached: int = 0
    restored_tokens: int = 0
    loaded_bytes: int = 0
    loaded_s: float = 0.0
    admitted: bool = False
    block_table: list[int] = field(default_factory=list)
    first_block: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    next_scored: int = 0

    def __post_init__(self) -> None:
        start = self.request.score_from
        self.next_scored = self.num_prompt if start is None else max(1, start)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_decoded(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def completes(self, count: int) -> bool:
        """Whether `count` more tokens computed reach the last one, so that the next can be sampled."""
        return self.num_computed + count == len(self.token_ids)

    def scored(self, count: int) -> range:
        """Prompt positions to report that `count` more tokens computed allow to score: the logits at position
        i - 1 score the token at i."""
        end = min(self.num_computed + count + 1, self.num_prompt)
        return range(max(self.num_computed + 1, self.next_scored), end)

    @property
    def reusable_ids(self) -> list[int]:
        """The ids to look up in a prefix cache, which leaves the last of them to be computed: all, or as long as
        scores are missing, those before the next one to score."""
        return self.token_ids if self.next_scored >= self.num_prompt else self.token_ids[: self.next_scored]
