"""Top-k: keep the k most probable tokens (Fan et al. 2018, https://arxiv.org/abs/1805.04833).

Exactly k remain: among equal logits at the border the lower ids.
"""

from __future__ import annotations

from infer.samplers.candidates import Candidates
from infer.samplers.ranking import FloatArray, IntArray


def top_k(candidates: Candidates, values: FloatArray | IntArray) -> Candidates:
    """Keep the first values[g] ≥ 1 tokens of row g."""
    return candidates.cut(values.astype("int64"))
