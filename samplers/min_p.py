"""Min-p (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082).

Keep the tokens whose probability is at least min_p times that of the most probable one.
"""

from __future__ import annotations

from infer.samplers.candidates import Candidates
from infer.samplers.ranking import FloatArray


def min_p(candidates: Candidates, values: FloatArray) -> Candidates:
    """Keep weights of at least values[g] (0 to 1) in row g; the first token's weight is 1."""
    passing = (candidates.ranking.weights >= values[:, None]).sum(axis=1)
    # When all that is loaded passes, the next token may pass as well: ask for it.
    return candidates.cut(passing + (passing >= candidates.count))
