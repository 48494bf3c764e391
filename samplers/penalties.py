"""Penalties for tokens a request has already seen.

- Repetition (Keskar et al. 2019, CTRL, https://arxiv.org/abs/1909.05858, section 4.1; the paper divides any
  logit, which rewards repeating a negative one): a positive logit is divided by the penalty, any other is
  multiplied by it, once per distinct token of prompt and answer.
- Frequency and presence (https://platform.openai.com/docs/api-reference/completions/create): logit −
  count × frequency − (count > 0) × presence, where count is how often the token occurs in the answer. Applied
  after the repetition penalty.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infer.samplers.edits import LogitEdit, bounded
from infer.samplers.params import SamplingParams
from infer.samplers.ranking import FloatArray, IntArray


class TokenCounts:
    """The distinct tokens of a request and how often each occurs in its answer. O(1) per new token.

    Penalizes like a fresh `TokenCounts(prompt_ids, output_ids)` of the same history.
    """

    def __init__(self, prompt_ids: Iterable[int] = (), output_ids: Iterable[int] = ()) -> None:
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_ids))}
        self._prompt_size = len(self._slots)
        self._ids = np.fromiter(self._slots, dtype=np.int64, count=self._prompt_size)
        self._counts = np.zeros(self._prompt_size, dtype=np.int64)
        for token in output_ids:
            self.append(token)

    @property
    def ids(self) -> IntArray:
        """int64 [n]: the prompt's distinct tokens first, then the answer's others."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> IntArray:
        """int64 [n]: occurrences in the answer."""
        return self._counts[: len(self._slots)]

    @property
    def seen(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool [n]: occurs in prompt or answer; false only for tokens that `remove` took out again."""
        seen: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.counts > 0
        seen[: self._prompt_size] = True
        return seen

    def append(self, token_id: int) -> None:
        """Count one more token of the answer."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = max(64, slot)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int64)])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def remove(self, token_id: int) -> None:
        """Take back one `append` (a rejected draft). Raises ValueError if the answer lacks the token."""
        slot = self._slots.get(token_id)
        if slot is None or self._counts[slot] == 0:
            raise ValueError(f"token {token_id} is not in the answer")
        self._counts[slot] -= 1


def active(params: SamplingParams) -> bool:
    """True when some penalty is not off."""
    return params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def penalties(params: SamplingParams, counts: TokenCounts) -> LogitEdit | None:
    """The edit for the history in `counts`, or None when that is empty."""
    if not len(counts.ids):
        return None
    occurrences, seen = counts.counts, counts.seen
    subtracted = occurrences * params.frequency_penalty + (occurrences > 0) * params.presence_penalty

    def change(values: FloatArray, which: IntArray) -> FloatArray:
        repeated = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
        repeated = np.where(seen[which], bounded(repeated, values), values)
        return bounded(repeated - subtracted[which], values)

    return LogitEdit(counts.ids, change)
