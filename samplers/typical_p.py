"""Locally typical sampling (Meister et al. 2022, https://arxiv.org/abs/2202.00666).

A token is typical when its information, −log p, is close to the entropy of the distribution. Keep the
smallest set of most typical tokens whose probability is at least the threshold, and so at least one token.
Equally typical tokens go by rank: higher probability, then lower id. The most probable token may be dropped.
"""

from __future__ import annotations

import numpy as np

from infer.samplers.candidates import Candidates
from infer.samplers.ranking import FloatArray


def typical_p(candidates: Candidates, values: FloatArray) -> Candidates:
    """Keep a typical mass of values[g] (above 0, at most 1) in row g. Needs every remaining token loaded."""
    mass, present = candidates.mass[:, None], candidates.present
    information = np.where(present, np.log(mass) - candidates.ranking.scaled, np.inf)
    probability = np.where(present, candidates.ranking.weights / mass, 0.0)
    terms = np.where(probability > 0, probability * information, 0.0)
    entropy = terms.cumsum(axis=1)[:, -1:]  # a running sum: trailing zeros change nothing
    order = np.argsort(np.abs(information - entropy), axis=1, kind="stable")
    reached = np.take_along_axis(probability, order, axis=1).cumsum(axis=1)
    size = (reached < values[:, None]).sum(axis=1)
    kept = np.zeros_like(present)
    np.put_along_axis(kept, order, np.arange(order.shape[1]) <= size[:, None], axis=1)
    return candidates.keep(kept)
