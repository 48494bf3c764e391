"""Temperature: divide the logits. Below 1 sharper, above 1 flatter; 0 is greedy and never comes here."""

from __future__ import annotations

from dataclasses import replace

from infer.samplers.candidates import Candidates
from infer.samplers.ranking import FloatArray


def temperature(candidates: Candidates, values: FloatArray) -> Candidates:
    """Divide row g's logits by values[g] > 0. Filters that ran before saw untempered probabilities."""
    ranking = candidates.ranking
    return replace(candidates, ranking=replace(ranking, temperature=ranking.temperature * values))
