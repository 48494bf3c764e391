"""Log-probabilities to report: log-softmax of the model's own logits, before bias and everything after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infer.samplers.logit_rows import LogitRows


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms. top: the most probable tokens as (id, logprob), equal ones by ascending id."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(
    source: LogitRows, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """For each of `rows` its token's log-probability and those of its tops[i] most probable tokens."""
    ids, leading = source.leading(rows, max(1, *tops))
    logits = leading.astype(np.float64)  # numpy 1 subtracts a float64 from an array of float32 in float32
    maxima = logits[:, 0]
    norm = maxima + np.log(source.mass(rows, maxima, np.ones(len(rows))))
    chosen = source.take(rows, [np.array([token], dtype=np.int64) for token in tokens])
    reports = []
    for index, top in enumerate(tops):
        best = zip(ids[index, :top].tolist(), (logits[index, :top] - norm[index]).tolist(), strict=True)
        reports.append(TokenLogprobs(float(chosen[index][0] - norm[index]), tuple(best)))
    return reports
