"""One request's samplers, composed once, and one step of sampling for many requests.

Order of `SamplingParams.order`, by default logit bias → penalties → (greedy stops here) → temperature → top-k
→ typical → top-p → min-p; the draw comes last. A sampler that is off, or not in the order, costs nothing.
Greedy takes the highest logit after bias and penalties, wherever the order has them.

Bias and penalties at the head of the order change the dense logits (float32, computed in float64). The rest
of the chain sees each row's leading tokens only, as many as its parameters can need; in the rare case that
the answer lies behind them, the row runs again over its whole vocabulary. Every sum is formed so that the
result is the same, bit for bit, for any number of loaded tokens and in any company of other rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from infer.samplers import penalties as penalty
from infer.samplers.candidates import Candidates, Ranking
from infer.samplers.draw import draw, uniform
from infer.samplers.edits import LogitEdit
from infer.samplers.errors import InvalidLogitsError, NoTokenLeftError
from infer.samplers.logit_bias import logit_bias
from infer.samplers.logit_rows import LogitRows, Logits, logit_rows
from infer.samplers.logprobs import TokenLogprobs, logprobs
from infer.samplers.min_p import min_p
from infer.samplers.params import SamplingParams
from infer.samplers.penalties import TokenCounts, penalties
from infer.samplers.ranking import FloatArray, IntArray
from infer.samplers.temperature import temperature
from infer.samplers.top_k import top_k
from infer.samplers.top_p import top_p
from infer.samplers.typical_p import typical_p

#: Samplers over candidates, by their name in `order`, which is also the field their values come from.
_FILTERS: dict[str, Callable[[Candidates, FloatArray], Candidates]] = {
    "temperature": temperature,
    "top_k": top_k,
    "typical_p": typical_p,
    "top_p": top_p,
    "min_p": min_p,
}
_EDITS = ("logit_bias", "penalties")

# Leading tokens to load when the parameters do not say how many are enough: covers top-p 0.95 of most steps.
_PREFIX = 256
# How much more to load when they were not enough, and how many candidates to hold at once (2 MB an array).
_WIDEN = 16
_CHUNK = 2**18


class SamplerChain:
    """What a request needs to be sampled: its parameters, composed, and counts of the tokens it has seen.

    head, tail: names of the active samplers, in order. The head edits dense logits, the tail works on
    candidates. width: how many leading tokens the tail is likely to need.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
    ) -> None:
        """Raise ValueError for a logit_bias or history id outside 0 … vocab_size − 1."""
        self.params = params
        self.vocab_size = vocab_size
        self._bias = logit_bias(params.logit_bias, vocab_size) if "logit_bias" in params.order else None
        self._penalized = penalty.active(params) and "penalties" in params.order
        self._counts = TokenCounts()
        self.restart(prompt_ids, output_ids)
        active = [name for name in params.order if self._active(name)]
        if params.greedy:
            active = [name for name in active if name in _EDITS]
        split = next((i for i, name in enumerate(active) if name not in _EDITS), len(active))
        self.head, self.tail = tuple(active[:split]), tuple(active[split:])
        self.width = min(vocab_size, _width(self.tail, params.top_k, vocab_size))

    def restart(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Count a history from scratch, as after preemption."""
        if not self._penalized:
            return
        for ids in (prompt_ids, output_ids):
            if len(ids) and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                raise ValueError(f"a token id is outside the vocabulary of {self.vocab_size} tokens")
        # Only the repetition penalty looks at the prompt.
        self._counts = TokenCounts(prompt_ids if self.params.repeat_penalty != 1 else (), output_ids)

    def append(self, token_id: int) -> None:
        """Note one more token of the answer. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        if self._penalized:
            self._counts.append(token_id)

    def remove(self, token_id: int) -> None:
        """Take back one `append`, as for a draft that was rejected."""
        if self._penalized:
            self._counts.remove(token_id)

    def edit(self, name: str) -> LogitEdit | None:
        """The edit that `logit_bias` or `penalties` makes at this step, None for none."""
        return self._bias if name == "logit_bias" else penalties(self.params, self._counts)

    def _active(self, name: str) -> bool:
        params = self.params
        return {
            "logit_bias": self._bias is not None,
            "penalties": self._penalized,
            "temperature": params.temperature != 1,
            "top_k": 0 < params.top_k < self.vocab_size,
            "typical_p": params.typical_p < 1,
            "top_p": params.top_p < 1,
            "min_p": params.min_p > 0,
        }[name]


class SampleRow(NamedTuple):
    """One row of a step. position: of the token to sample, counted from the start of the sequence."""

    chain: SamplerChain
    position: int


@dataclass(frozen=True)
class SampleResult:
    """One entry per row. logprobs: None where the request's `SamplingParams.logprobs` is None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Logits, rows: Sequence[SampleRow]) -> SampleResult:
    """One token for each row. Changes neither logits nor chains: `chain.append` a token once it is accepted.

    logits: float32 [len(rows), vocabulary] on any device, finite. A row's token depends on its logits, its
    chain and its position, and on nothing else.
    Raises InvalidLogitsError, NoTokenLeftError, and ValueError when shapes do not fit.
    """
    if not rows:
        return SampleResult([], [])
    raw = _checked(logits, rows)
    tokens = np.zeros(len(rows), dtype=np.int64)
    with np.errstate(all="ignore"):  # infinities and underflow are part of the arithmetic, see each sampler
        edited = _edited(raw, rows)
        greedy = [index for index, row in enumerate(rows) if row.chain.params.greedy]
        if greedy:
            tokens[greedy] = _greedy(edited, rows, greedy)
        for members, width in _groups(rows):
            uniforms = np.array([uniform(rows[i].chain.params.seed, rows[i].position) for i in members])
            tokens[members] = _draw(edited, rows, members, width, uniforms)
        return SampleResult(tokens.tolist(), _reports(raw, rows, tokens.tolist()))


def distribution(logits: Logits, rows: Sequence[SampleRow]) -> list[tuple[IntArray, FloatArray]]:
    """Per row what `sample` draws from: ids (int64 [n]) and probabilities (float64 [n]), most probable first.

    A greedy row has one id. Same arguments and errors as `sample`; works on the whole vocabulary.
    """
    if not rows:
        return []
    raw = _checked(logits, rows)
    result: dict[int, tuple[IntArray, FloatArray]] = {}
    with np.errstate(all="ignore"):
        edited = _edited(raw, rows)
        for index, row in enumerate(rows):
            if row.chain.params.greedy:
                result[index] = _greedy(edited, rows, [index]), np.ones(1)
                continue
            candidates = _candidates(edited, rows, [index], raw.vocab_size)
            count = int(candidates.count[0])
            probabilities = candidates.ranking.weights[0, :count] / candidates.mass[0]
            result[index] = candidates.ranking.ids[0, :count], probabilities
    return [result[index] for index in range(len(rows))]


def _checked(logits: Logits, rows: Sequence[SampleRow]) -> LogitRows:
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"{len(rows)} rows to sample, but logits of shape {list(logits.shape)}")
    source = logit_rows(logits)
    for row in rows:
        if row.chain.vocab_size != source.vocab_size:
            raise ValueError(f"a chain for {row.chain.vocab_size} tokens met {source.vocab_size} logits")
        if not 0 <= row.position < 2**64:
            raise ValueError(f"position {row.position} is not between 0 and 2^64-1")
    with np.errstate(all="ignore"):
        invalid = source.first_invalid()
    if invalid is not None:
        raise InvalidLogitsError(invalid)
    return source


def _edited(raw: LogitRows, rows: Sequence[SampleRow]) -> LogitRows:
    """The logits after each chain's head; `raw` itself when no chain has one."""
    changed = [index for index, row in enumerate(rows) if row.chain.head]
    if not changed:
        return raw
    edited = raw.copied(changed)
    for depth in range(len(_EDITS)):
        members, edits = [], []
        for index in changed:
            head = rows[index].chain.head
            edit = rows[index].chain.edit(head[depth]) if depth < len(head) else None
            if edit is not None:
                members.append(index)
                edits.append(edit)
        if not members:
            continue
        ids = [edit.ids for edit in edits]
        before = edited.take(members, ids)
        after = [e.change(values, np.arange(len(e.ids))) for e, values in zip(edits, before, strict=True)]
        exclusive = [index for index, edit in zip(members, edits, strict=True) if edit.exclusive]
        if exclusive:
            edited.ban(exclusive)
        edited.put(members, ids, after)
    return edited


def _greedy(source: LogitRows, rows: Sequence[SampleRow], members: list[int]) -> IntArray:
    tokens = source.argmax(members)
    biased = [i for i, index in enumerate(members) if "logit_bias" in rows[index].chain.head]
    values = source.take([members[i] for i in biased], [tokens[i : i + 1] for i in biased]) if biased else []
    for i, value in zip(biased, values, strict=True):
        if np.isneginf(value[0]):
            raise NoTokenLeftError(members[i])
    return tokens


def _groups(rows: Sequence[SampleRow]) -> Iterable[tuple[list[int], int]]:
    """The rows that draw, grouped by chain and by magnitude of width, each group with its largest width."""
    groups: defaultdict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
    for index, (chain, _) in enumerate(rows):
        if not chain.params.greedy:
            groups[chain.tail, chain.width.bit_length()].append(index)
    for group in groups.values():
        width = max(rows[index].chain.width for index in group)
        for members in _chunks(group, width):
            yield members, width


def _chunks(members: list[int], width: int) -> Iterable[list[int]]:
    """`members` in runs whose candidates stay within a cache: rows gain nothing from company beyond that."""
    size = max(1, _CHUNK // width)
    return (members[start : start + size] for start in range(0, len(members), size))


def _draw(
    source: LogitRows, rows: Sequence[SampleRow], members: list[int], width: int, uniforms: FloatArray
) -> IntArray:
    """One token for each of `members`, loading more for those whose answer lies behind the leading tokens."""
    tokens, short = draw(_candidates(source, rows, members, width), uniforms)
    if short.any():
        wider = min(_WIDEN * width, source.vocab_size)
        for again in _chunks(np.flatnonzero(short).tolist(), wider):
            tokens[again] = _draw(source, rows, [members[i] for i in again], wider, uniforms[again])
    return tokens


def _candidates(source: LogitRows, rows: Sequence[SampleRow], members: list[int], width: int) -> Candidates:
    """Run the tails of rows that have the same one."""
    chains = [rows[index].chain for index in members]
    candidates = Candidates.load(source, members, width)
    _require_token(candidates, members)
    for name in chains[0].tail:
        if name in _EDITS:
            candidates = _edit_candidates(candidates, [chain.edit(name) for chain in chains])
            _require_token(candidates, members)
        else:
            values = np.array([getattr(chain.params, name) for chain in chains], dtype=np.float64)
            candidates = _FILTERS[name](candidates, values)
    return candidates


def _require_token(candidates: Candidates, members: list[int]) -> None:
    if not candidates.count.all():
        raise NoTokenLeftError(members[int(candidates.count.argmin())])


def _edit_candidates(candidates: Candidates, edits: Sequence[LogitEdit | None]) -> Candidates:
    """Edits that the order puts behind temperature or a filter: what was filtered out stays out.

    Needs every remaining token loaded. They see logits divided by the temperature, if that came before.
    """
    ranking, present = candidates.ranking, candidates.present
    limit = np.finfo(np.float64).max
    tempered = np.clip(ranking.logits / ranking.temperature[:, None], -limit, limit)
    logits = np.where(present, tempered, -np.inf)
    for row, edit in enumerate(edits):
        if edit is None:
            continue
        sorter = np.argsort(edit.ids, kind="stable")
        place = np.searchsorted(edit.ids, ranking.ids[row], sorter=sorter)
        which = sorter[np.minimum(place, len(sorter) - 1)]
        named = (edit.ids[which] == ranking.ids[row]) & present[row]
        changed = edit.change(logits[row, named], which[named])
        if edit.exclusive:
            logits[row] = -np.inf
        logits[row, named] = changed
    order = np.lexsort((ranking.ids, -logits), axis=1)
    ids, logits = np.take_along_axis(ranking.ids, order, axis=1), np.take_along_axis(logits, order, axis=1)
    return replace(
        candidates,
        ranking=Ranking(ranking.source, ranking.rows, ids, logits, np.ones(len(edits))),
        count=(logits > -np.inf).sum(axis=1),
        uncut=False,
        complete=np.ones_like(candidates.complete),
        short=candidates.short | ~candidates.complete,
    )


def _width(tail: Sequence[str], k: int, vocab_size: int) -> int:
    """How many leading tokens the tail needs, as far as its parameters tell; too few cost a second run."""
    filtered = False
    for name in tail:
        if name == "top_k":
            return max(k, _PREFIX) if filtered else k
        if name in ("top_p", "min_p"):
            filtered = True
        elif name != "temperature" and not filtered:
            return vocab_size
    return _PREFIX


def _reports(raw: LogitRows, rows: Sequence[SampleRow], tokens: list[int]) -> list[TokenLogprobs | None]:
    reports: list[TokenLogprobs | None] = [None] * len(rows)
    tops = {i: row.chain.params.logprobs for i, row in enumerate(rows)}
    wanted = {i: top for i, top in tops.items() if top is not None}
    if wanted:
        members = list(wanted)
        found = logprobs(raw, members, [tokens[i] for i in members], list(wanted.values()))
        for index, report in zip(members, found, strict=True):
            reports[index] = report
    return reports
