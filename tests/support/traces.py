"""What an engine computes for a prompt, bit by bit: logits, tokens, K and V."""

from __future__ import annotations

from typing import Any

import torch
from logits import as_tensor

from infer.runtime.batch import ForwardBatch, output_rows
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.loader import LoadedModel
from infer.runtime.request import Request, Sequence
from infer.samplers.logit_rows import Logits
from infer.samplers.params import SamplingParams


class Trace:
    """Everything a request computed: its logits at each decoded position, its tokens, its K and V.

    Equal to another one where all of that is, K and V over the positions that both have: a cache gives no blocks that
    are behind every window.
    """

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.tokens: list[int] = []
        self.first = 0  #: the first position that K and V are known of
        self._parts: list[list[torch.Tensor]] = []

    def add_kv(self, cache: PagedKVCache, seq: Sequence, count: int) -> None:
        """Read what a step wrote for `count` tokens of seq, and with the first step what it found."""
        start = seq.num_computed
        if not self._parts:
            start = self.first = seq.first_block * BLOCK_SIZE
        block = start // BLOCK_SIZE
        table, skipped = torch.tensor(seq.block_table[block:]), start - block * BLOCK_SIZE
        found = []
        for layer in range(len(cache.layers)):
            keys, values = cache.tensors.gather(layer, table, seq.num_computed + count - block * BLOCK_SIZE)
            found += [keys[:, :, skipped:].transpose(1, 2).clone(), values[:, skipped:].clone()]
        self._parts.append(found)

    def kv(self, first: int) -> list[torch.Tensor]:
        """K and V of each layer in turn, [kv_heads, positions from `first` on, dim]."""
        whole = [torch.cat(parts, dim=1) for parts in zip(*self._parts, strict=True)]
        return [part[:, first - self.first :] for part in whole]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trace)
        first = max(self.first, other.first)
        pairs = [(self.logits, other.logits), (self.kv(first), other.kv(first))]
        return self.tokens == other.tokens and all(
            len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]


def traced(model: LoadedModel, prompts: dict[str, tuple[int, ...]], count: int = 5) -> dict[str, Trace]:
    """Runs the prompts together and records what each of them computed."""
    engine = model.engine
    runner, scheduler = engine._runner, engine._scheduler
    traces = {name: Trace() for name in prompts}
    forward, schedule = runner.forward, scheduler.schedule
    scheduled: list[tuple[Sequence, int]] = []

    def watched_schedule() -> Any:
        plan = schedule()
        scheduled[:] = plan.scheduled
        return plan

    def watched_forward(batch: ForwardBatch) -> Logits:
        logits = forward(batch)
        for rows in output_rows(scheduled):
            if rows.last is not None:
                traces[rows.seq.request.request_id].logits.append(as_tensor(logits[rows.last]))
        for seq, computed in scheduled:
            traces[seq.request.request_id].add_kv(runner.cache, seq, computed)
        return logits

    runner.forward, scheduler.schedule = watched_forward, watched_schedule
    try:
        for name, prompt in prompts.items():
            sampling = SamplingParams(temperature=0.8, seed=11, max_tokens=count, ignore_eos=True)
            engine.add(Request(name, prompt, sampling))
        while engine.has_unfinished():
            for output in engine.step():
                traces[output.request_id].tokens += output.new_ids
    finally:
        del runner.forward, scheduler.schedule
    return traces
