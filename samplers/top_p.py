"""Top-p, nucleus sampling (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).

Keep the smallest set of most probable tokens whose probability is at least p, and so at least one token. The
probabilities are those among the tokens that earlier filters left.
"""

from __future__ import annotations

from infer.samplers.candidates import Candidates
from infer.samplers.ranking import FloatArray


def top_p(candidates: Candidates, values: FloatArray) -> Candidates:
    """Keep a mass of values[g] (0 to 1) in row g."""
    below = candidates.ranking.cumulative < (values * candidates.mass)[:, None]
    return candidates.cut(below.sum(axis=1) + 1)
