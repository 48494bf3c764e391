"""The state between dense logits and the draw: the leading tokens of some rows, and how many of them remain.

Top-k, top-p and min-p each keep a prefix of the ranking, so a filter only lowers a count. Sums run over the
ranking from the top, one addition after another (`cumsum`), so that they are the same however many columns
are loaded and whichever rows share the arrays; only the mass of the whole vocabulary, needed before anything
is cut, comes from the dense logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from infer.samplers.logit_rows import LogitRows
from infer.samplers.ranking import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ranking:
    """ids (int64) and logits (float64), [G, C], highest first, equal logits by ascending id.

    A banned or dropped token has −infinity and comes last. temperature: float64 [G].
    """

    source: LogitRows
    rows: Sequence[int]
    ids: IntArray
    logits: FloatArray
    temperature: FloatArray

    @cached_property
    def scaled(self) -> FloatArray:
        """float64 [G, C]: (logit − highest logit) / temperature, at most 0."""
        return (self.logits - self.logits[:, :1]) / self.temperature[:, None]

    @cached_property
    def weights(self) -> FloatArray:
        """float64 [G, C]: probabilities up to a factor, 1 for the first."""
        return np.exp(self.scaled)

    @cached_property
    def cumulative(self) -> FloatArray:
        """float64 [G, C]: running sums of the weights."""
        return self.weights.cumsum(axis=1)

    @cached_property
    def vocabulary_mass(self) -> FloatArray:
        """float64 [G]: the sum of all weights of the vocabulary, loaded or not."""
        return self.source.mass(self.rows, self.logits[:, 0], self.temperature)


@dataclass(frozen=True)
class Candidates:
    """The first count[g] ≥ 1 tokens of each row g remain.

    uncut: nothing was filtered yet, so every token that is not banned remains, loaded or not.
    complete: bool [G], every token that remains is loaded; always true once something was filtered.
    short: bool [G], the answer needs tokens that are not loaded: start again with more of them.
    """

    ranking: Ranking
    count: IntArray
    uncut: bool
    complete: BoolArray
    short: BoolArray

    @classmethod
    def load(cls, source: LogitRows, rows: Sequence[int], width: int) -> Candidates:
        """The `width` leading tokens of `rows`. A count is 0 when every token of its row is banned."""
        ids, logits = source.leading(rows, width)
        loaded = ids.shape[1]
        count = (logits > -np.inf).sum(axis=1)
        return cls(
            Ranking(source, rows, ids, logits.astype(np.float64), np.ones(len(rows))),
            count,
            uncut=True,
            complete=(count < loaded) | (loaded == source.vocab_size),
            short=np.zeros(len(rows), dtype=np.bool_),
        )

    @property
    def mass(self) -> FloatArray:
        """float64 [G]: the sum of the weights that remain."""
        if self.uncut:
            return self.ranking.vocabulary_mass
        return self.ranking.cumulative[np.arange(len(self.count)), self.count - 1]

    @property
    def present(self) -> BoolArray:
        """bool [G, C]: loaded and remaining."""
        return np.arange(self.ranking.ids.shape[1]) < self.count[:, None]

    def cut(self, count: IntArray) -> Candidates:
        """Keep the first count[g] ≥ 1; a count above what is loaded asks for the tokens behind, if any."""
        kept = np.minimum(count, self.count)
        if not self.uncut:
            return Candidates(self.ranking, kept, False, self.complete, self.short)
        short = self.short | ~self.complete & (count > self.count)
        return Candidates(self.ranking, kept, False, np.ones_like(self.complete), short)

    def keep(self, kept: BoolArray) -> Candidates:
        """Keep the tokens in `kept` (bool [G, C]), at least one a row. Needs every remaining token loaded."""
        kept = kept & self.present
        order = np.argsort(~kept, axis=1, kind="stable")
        logits = np.where(kept, self.ranking.logits, -np.inf)
        ranking = replace(
            self.ranking,
            ids=np.take_along_axis(self.ranking.ids, order, axis=1),
            logits=np.take_along_axis(logits, order, axis=1),
        )
        return replace(
            self,
            ranking=ranking,
            count=kept.sum(axis=1),
            uncut=False,
            complete=np.ones_like(self.complete),
            short=self.short | ~self.complete,
        )
