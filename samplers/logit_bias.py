"""Logit bias: add a number to the logits of chosen tokens.

As in OpenAI's `logit_bias`, except that the number is unlimited: a finite bias is added as it is (−100 and
100 are large, no more), −infinity bans the token, and +infinity is the limit of a growing bias: only the
tokens that have it remain, with the probabilities they had among themselves.
Source: https://platform.openai.com/docs/api-reference/completions/create (logit_bias).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from infer.samplers.edits import LogitEdit, bounded
from infer.samplers.ranking import FloatArray, IntArray


def logit_bias(bias: Mapping[int, float], vocab_size: int) -> LogitEdit | None:
    """The edit for `bias` (id → bias), or None when it is empty. Raises ValueError for ids ≥ vocab_size."""
    outside = [token for token in bias if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"logit_bias names token {outside[0]}, but the vocabulary has {vocab_size} tokens")
    if not bias:
        return None
    ids = np.array(sorted(bias), dtype=np.int64)
    amounts = np.array([bias[int(token)] for token in ids], dtype=np.float64)
    forced = np.isposinf(amounts)
    if forced.any():
        return LogitEdit(ids[forced], lambda values, which: values, exclusive=True)
    banned = np.isneginf(amounts)

    def change(values: FloatArray, which: IntArray) -> FloatArray:
        return np.where(banned[which], -np.inf, bounded(values + amounts[which], values))

    return LogitEdit(ids, change)
