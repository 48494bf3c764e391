"""Moves blocks between the prefix cache in memory and the store on disk.

Blocks found on disk become kept blocks of the pool before their sequence is admitted, so that the scheduler knows one
cache only. Blocks that a step completed are offered to the store, and so is the shorter block at the end of a prompt
and of an answer.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.errors import InferError
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.disk.reader import Payload
from infer.runtime.kvcache.disk.store import Chain, PrefixStore
from infer.runtime.kvcache.disk.write_queue import PendingEntry
from infer.runtime.kvcache.keys import block_key
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.kvcache.prefix import PrefixCache, PrefixMatch
from infer.runtime.kvcache.window import blocks_behind, first_visible
from infer.runtime.request import Sequence

STORE_WAIT_S = 10.0  # time to hash some 10 GB of weights; after it, what is given back is not stored


@dataclass
class PrefillRate:
    """Seconds of prefill per token: an estimate at first, then the latest measured over a chunk of some length."""

    token_s: float

    def measured(self, tokens: int, seconds: float) -> None:
        if tokens >= BLOCK_SIZE:
            self.token_s = seconds / tokens


@dataclass
class _Progress:
    """What was offered of a sequence. table: its block table then; one that gave its blocks back gets another.

    keys: the root's and those of the full blocks. end_offered: whether the shorter block that ends the prompt was.
    """

    table: list[int] | None = None
    keys: list[bytes] = field(default_factory=list)
    end_offered: bool = False

    def is_current(self, seq: Sequence) -> bool:
        """Whether nothing was completed since, nor given up to be computed again."""
        if self.table is not seq.block_table or (seq.num_computed >= seq.num_prompt and not self.end_offered):
            return False
        return len(self.keys) - 1 == seq.num_computed // BLOCK_SIZE


class DiskTier:
    """One engine's link to a store.

    store: may still be on its way (the weights are hashed the first time); until it is there nothing is found, and what
    was computed meanwhile is offered when its sequence ends. window: positions behind which no layer looks, 0 for all;
    the first sequence that is to give blocks back waits for the store.

    Full blocks of a cache on the CPU are lent to the store as they are. Nobody writes to a full block before the pool
    gives it out again, and then it is taken back. With a window that is soon: then copies are offered, as of all blocks
    that are not full.
    """

    def __init__(
        self,
        store: Future[PrefixStore],
        pool: BlockPool,
        prefix: PrefixCache,
        cache: PagedKVCache,
        rate: PrefillRate,
        window: int = 0,
    ) -> None:
        self._window = window
        self._patience_s = STORE_WAIT_S
        self._pending = store
        self._pool = pool
        self._prefix = prefix
        self._cache = cache
        self._rate = rate
        self._active: dict[int, _Progress] = {}
        self._lent: dict[int, PendingEntry] = {}
        pool.on_allocate.append(self._take_back)

    def restore(self, seq: Sequence) -> None:
        """Bring what the store has of a new sequence's prompt into the memory cache. Notes in seq what that took."""
        self._active[id(seq)] = _Progress()
        store = self._store()
        if store is None:
            return
        self._tell(store)
        ids = seq.reusable_ids
        known = self._prefix.match(ids)
        held, start = known.blocks[known.first :], len(known.blocks) * BLOCK_SIZE
        if known.partial is not None:
            self._pool.release(known.partial[0], keep=True)
        fresh: list[int] = []  # blocks of nobody else yet, read into as they are: a copy less

        def memory(count: int) -> list[Payload]:
            while len(fresh) < count and (block := self._pool.allocate()) is not None:
                fresh.append(block)
            return [self._cache.block(block) for block in fresh]

        chain = store.find(
            ids,
            len(known.blocks),
            prefill_token_s=self._rate.token_s,
            last_blocks=blocks_behind(self._window),
            memory=memory if self._cache.on_cpu else None,
        )
        in_memory = start + (0 if known.partial is None else known.partial[1])
        if start + chain.tokens > in_memory:
            started = time.perf_counter()
            self._promote(chain, ids, known, held, fresh)
            seq.restored_tokens = start + chain.tokens - in_memory
            seq.loaded_bytes = chain.nbytes
            seq.loaded_s = chain.seconds + time.perf_counter() - started
        for block in fresh:
            self._pool.release(block, keep=False)
        for block in reversed(held):
            self._pool.release(block, keep=block in self._prefix)

    def save(self, seq: Sequence) -> None:
        """Offer the blocks of a sequence that are complete by now, and the end of its prompt once that is computed."""
        progress = self._active.setdefault(id(seq), _Progress())
        if progress.is_current(seq):
            return
        if self._patience_s and first_visible(seq.num_computed, self._window):
            wait([self._pending], self._patience_s)
            self._patience_s = 0.0
        store = self._store()
        if store is None or not seq.block_table:
            return
        self._tell(store)
        full = seq.num_computed // BLOCK_SIZE
        # where it is computed anew, some of what was offered may have been taken back
        if progress.table is not seq.block_table:
            progress = self._active[id(seq)] = _Progress(seq.block_table, [store.root])
        keys = progress.keys
        for index in range(len(keys) - 1, full):
            keys.append(self._offer(store, seq, keys[-1], index, BLOCK_SIZE))
        if seq.num_computed >= seq.num_prompt and not progress.end_offered:
            index, length = divmod(seq.num_prompt, BLOCK_SIZE)
            if length and len(keys) == index + 1:
                self._offer(store, seq, keys[index], index, length)
            progress.end_offered = True

    def finish(self, seq: Sequence) -> None:
        """Offer the end of a sequence that gives its blocks back now."""
        store = self._store()
        if store is not None and seq.block_table:
            self.save(seq)
            keys = self._active[id(seq)].keys
            index, length = divmod(seq.num_computed, BLOCK_SIZE)
            if length and len(keys) == index + 1:
                self._offer(store, seq, keys[index], index, length)
        self._active.pop(id(seq), None)
        if store is not None:
            self._tell(store)

    def close(self, timeout: float = 1.0) -> None:
        """Finish writing within `timeout` seconds, drop the rest, and let go of the blocks."""
        if not self._pending.cancel():
            with suppress(TimeoutError, OSError, ValueError, InferError):
                self._pending.result(timeout).close(timeout)
        for block in list(self._lent):
            self._take_back(block)
        with suppress(ValueError):
            self._pool.on_allocate.remove(self._take_back)

    def _store(self) -> PrefixStore | None:
        if not self._pending.done() or self._pending.exception() is not None:
            return None
        store = self._pending.result()
        return store if store.enabled else None

    def _tell(self, store: PrefixStore) -> None:
        """On CUDA storing is in nobody's way."""
        store.set_busy(self._cache.on_cpu and bool(self._active))

    def _promote(
        self, chain: Chain, ids: list[int], known: PrefixMatch, held: list[int], fresh: list[int]
    ) -> None:
        """Put a verified chain into blocks, those in `fresh` that it was read into or others, which join those held by
        the caller, and let go of those that what comes after the chain does not see."""
        start = len(known.blocks) * BLOCK_SIZE
        first = first_visible(start + chain.tokens, self._window)
        while held and first > len(known.blocks) - len(held):
            self._pool.release(held.pop(0), keep=True)
        parent = known.keys[-1]
        for _ in range(chain.passed):
            parent = block_key(parent, ids[start : start + BLOCK_SIZE])
            start += BLOCK_SIZE
        for entry in chain.entries:
            if fresh and entry.tokens == BLOCK_SIZE:
                block: int | None = fresh.pop(0)
            elif (block := self._pool.allocate()) is not None:
                self._cache.write(block, entry.tokens, entry.payload)
            if block is None:
                return
            parent = self._prefix.insert(block, parent, ids[start : start + entry.tokens])
            held.append(block)
            start += entry.tokens

    def _offer(self, store: PrefixStore, seq: Sequence, parent: bytes, index: int, length: int) -> bytes:
        ids = seq.token_ids[index * BLOCK_SIZE : index * BLOCK_SIZE + length]
        key = store.key(parent, ids)
        if index < seq.first_block:
            return key
        block = seq.block_table[index]
        if length == BLOCK_SIZE and self._cache.on_cpu and not self._window:
            if store.needs(key, 0):
                entry = store.lend(parent, ids, self._cache.block(block))
                if entry is not None:
                    self._lent[block] = entry
        elif store.needs(key, length):
            store.offer(parent, ids, self._cache.read(block, length))
        return key

    def _take_back(self, block: int) -> None:
        entry = self._lent.pop(block, None)
        if entry is not None:
            self._pending.result().revoke(entry)
