"""Log-probabilities of given tokens: log-softmax of the model's own logits, the same bits in every company."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.samplers.errors import InvalidLogitsError
from infer.samplers.logit_rows import Logits, logit_rows

# Logits widened to float64 at a time on a device: 32 MiB.
_SLICE = 1 << 22


def token_logprobs(logits: Logits, tokens: Sequence[int]) -> list[float]:
    """Natural logarithm of the probability that row i, of logits float32 [len(tokens), vocab], gives tokens[i].

    Sums are taken in float64, row by row, in slices that bound the memory. Raises InvalidLogitsError with the row
    that holds NaN or infinity.
    """
    found: list[float] = []
    step = max(1, _SLICE // logits.shape[1])
    for start in range(0, len(tokens), step):
        source = logit_rows(logits[start : start + step])
        chosen = [np.array([token], dtype=np.int64) for token in tokens[start : start + step]]
        rows = range(len(chosen))
        with np.errstate(all="ignore"):  # tiny weights may underflow
            invalid = source.first_invalid()
            if invalid is not None:
                raise InvalidLogitsError(start + invalid)
            tops = [np.array([token], dtype=np.int64) for token in source.argmax(rows)]
            maxima = np.concatenate(source.take(rows, tops))
            norms = maxima + np.log(source.mass(rows, maxima, np.ones(len(rows))))
            found += (np.concatenate(source.take(rows, chosen)) - norms).tolist()
    return found
