"""Chooses, step by step, which sequences compute how many tokens, and sees to it that they have blocks. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.prefix import PrefixCache
from infer.runtime.kvcache.window import first_visible
from infer.runtime.request import FinishReason, Sequence, SequenceStatus


@dataclass(frozen=True)
class SchedulerOutput:
    """scheduled: (sequence, tokens to compute from num_computed on), each at least 1.

    copies: (source block, target block), in order, to be made before anything is computed, also when there is nothing.
    """

    scheduled: list[tuple[Sequence, int]]
    copies: list[tuple[int, int]]


class Scheduler:
    """First come, first served, under a token budget per step.

    Sequences that decode come first (one token each), then prompts in order of arrival, the last of them cut to
    the budget. Blocks that no window reaches any more go back before a step. When blocks run out, the youngest running
    sequence gives all of its back and waits to be recomputed; the pool must hold what one sequence of full context
    needs (`window.blocks_held`), so the oldest always gets on.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache | None,
        *,
        budget: int,
        max_sequences: int,
        window: int = 0,
        restore: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        """budget: tokens per step, 0 for no bound. window: positions behind which no layer looks, 0 for all.
        restore: may add to the prefix cache what a new sequence needs."""
        self._pool = pool
        self._prefix = prefix
        self._budget = budget
        self._max_sequences = max_sequences
        self._window = window
        self._restore = restore
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._copies: list[tuple[int, int]] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> SchedulerOutput:
        """The next step's work; empty when nothing is left to do."""
        self._release_copied()
        for seq in self.running:
            self._release_passed(seq)
        scheduled: dict[int, tuple[Sequence, int]] = {}
        left = self._budget or (1 << 62)
        decoding = [s for s in self.running if len(s.token_ids) - s.num_computed == 1]
        prefilling = [s for s in self.running if len(s.token_ids) - s.num_computed > 1]
        for seq in decoding + prefilling:
            if seq.status is not SequenceStatus.RUNNING or left < 1:
                continue
            count = min(left, len(seq.token_ids) - seq.num_computed)
            if self._reserve(seq, count, scheduled):
                scheduled[id(seq)] = (seq, count)
                left -= count
        while self.waiting and left > 0 and len(self.running) < self._max_sequences:
            seq = self.waiting[0]
            if not self._admit(seq):
                break
            count = min(left, len(seq.token_ids) - seq.num_computed)
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
            if not self._reserve(seq, count, scheduled):
                break
            scheduled[id(seq)] = (seq, count)
            left -= count
        return SchedulerOutput(list(scheduled.values()), self._copies)

    def computed(self, seq: Sequence, count: int) -> None:
        """Record that a step computed `count` more tokens; full blocks become findable."""
        before, seq.num_computed = seq.num_computed, seq.num_computed + count
        for index in range(before // BLOCK_SIZE, seq.num_computed // BLOCK_SIZE):
            self._remember(seq, index)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Take a sequence out, in whatever state it is; its full blocks stay findable until their room is needed."""
        if seq.status is SequenceStatus.FINISHED:
            return
        self._give_back(seq)
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def _admit(self, seq: Sequence) -> bool:
        """Take what the prefix cache has; True when there is room for at least one token more."""
        if self._prefix is not None and not seq.block_table:
            if not seq.admitted:
                self._restore(seq)
            found = self._prefix.match(seq.reusable_ids)
            seq.first_block, seq.block_table, seq.block_keys, partial = found
            seq.num_computed = len(seq.block_table) * BLOCK_SIZE
            if partial is not None:
                self._copy(seq, *partial)
            if not seq.admitted:
                seq.admitted, seq.num_cached = True, seq.num_computed
        if self._missing(seq, 1) > self._pool.available:
            self._give_back(seq)
            return False
        return True

    def _copy(self, seq: Sequence, source: int, length: int) -> None:
        """Continue seq with the first positions of a block that the caller holds until the copy is made.

        Not where seq would lack the room that the source takes meanwhile: it would give way to itself for ever.
        """
        end = len(seq.token_ids)
        if self._window and self._budget:
            end = min(end, seq.num_computed + length + self._budget)
        needed = -(-end // BLOCK_SIZE) - len(seq.block_table)
        target = self._pool.allocate() if needed <= self._pool.available else None
        if target is None:
            self._pool.release(source, keep=True)
            return
        self._copies.append((source, target))
        seq.block_table.append(target)
        seq.num_computed += length

    def _release_copied(self) -> None:
        for source, _ in self._copies:
            self._release(source)
        self._copies = []

    def _release_passed(self, seq: Sequence) -> None:
        """Give back the blocks that are behind every window; they stay findable like others."""
        first = first_visible(seq.num_computed, self._window)
        for block in seq.block_table[seq.first_block : first]:
            self._release(block)
        seq.first_block = max(seq.first_block, first)

    def _release(self, block: int) -> None:
        self._pool.release(block, keep=self._prefix is not None and block in self._prefix)

    def _remember(self, seq: Sequence, index: int) -> None:
        """Make the computed part of a block of seq findable."""
        if self._prefix is None:
            return
        ids = seq.token_ids[index * BLOCK_SIZE : min((index + 1) * BLOCK_SIZE, seq.num_computed)]
        key = self._prefix.insert(seq.block_table[index], seq.block_keys[index], ids)
        if len(ids) == BLOCK_SIZE:
            seq.block_keys.append(key)

    def _missing(self, seq: Sequence, count: int) -> int:
        return -(-(seq.num_computed + count) // BLOCK_SIZE) - len(seq.block_table)

    def _reserve(self, seq: Sequence, count: int, scheduled: dict[int, tuple[Sequence, int]]) -> bool:
        """Blocks for `count` more tokens, at the cost of younger sequences; False when seq itself had to give way."""
        while self._missing(seq, count) > self._pool.available:
            victim = self.running[-1]
            scheduled.pop(id(victim), None)
            self._preempt(victim)
            if victim is seq:
                return False
        for _ in range(self._missing(seq, count)):
            block = self._pool.allocate()
            if block is None:
                raise RuntimeError("the block pool gave less than it promised")
            seq.block_table.append(block)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._give_back(seq)
        self.running.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)

    def _give_back(self, seq: Sequence) -> None:
        if seq.num_computed % BLOCK_SIZE:
            self._remember(seq, seq.num_computed // BLOCK_SIZE)
        # the last block first, so that of one chain the tail is evicted before the head
        for block in reversed(seq.block_table[seq.first_block :]):
            self._release(block)
        seq.block_table, seq.block_keys = [], []
        seq.first_block = seq.num_computed = 0
