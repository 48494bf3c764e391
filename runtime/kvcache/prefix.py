"""Finds computed KV blocks again by the tokens they hold. In memory, torch-free.

A block's key covers its parent's key and its ids, so equal keys mean equal text from the first token on: the same
positions, and by the first invariant the same K and V. Whole blocks are shared. Of a block that begins with the
wanted tokens and goes on differently, or that was never filled, the common part can be copied.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence as Ids
from typing import NamedTuple

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.keys import block_key
from infer.runtime.kvcache.window import blocks_behind

ROOT = b""
SIBLINGS = 32  # blocks with one parent that are compared token by token, latest first


class PrefixMatch(NamedTuple):
    """blocks: whole ones, shared; those before `first` are outside the window of what comes next, and mean nothing.
    keys: ROOT and theirs. partial: (block, tokens) whose first tokens continue them, to be copied."""

    first: int
    blocks: list[int]
    keys: list[bytes]
    partial: tuple[int, int] | None


class PrefixCache:
    """Maps keys to blocks of a pool; forgets a block when the pool gives it out again.

    window: of a model that needs no more than these positions of what it goes on from, 0 for all.
    """

    def __init__(self, pool: BlockPool, window: int = 0) -> None:
        self._pool = pool
        self._behind = blocks_behind(window)
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._parents: dict[int, bytes] = {}
        self._children: defaultdict[bytes, OrderedDict[int, tuple[int, ...]]] = defaultdict(OrderedDict)
        pool.on_allocate.append(self._forget)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match(self, ids: Ids[int]) -> PrefixMatch:
        """The longest known prefix that leaves at least one id over; its blocks from `first` on are now held by the
        caller."""
        keys = [ROOT]
        count = first = unbroken = 0
        for start in range(0, len(ids) - BLOCK_SIZE, BLOCK_SIZE):
            keys.append(block_key(keys[-1], ids[start : start + BLOCK_SIZE]))
            unbroken = unbroken + 1 if keys[-1] in self._blocks else 0
            length = len(keys) - 1
            needed = length if self._behind is None else min(length, self._behind)
            if unbroken >= needed:
                count, first = length, length - needed
            elif self._behind is None:
                break
        del keys[count + 1 :]
        blocks = [0] * first + [self._blocks[key] for key in keys[first + 1 :]]
        for block in blocks[first:]:
            self._pool.hold(block)
        start = count * BLOCK_SIZE
        partial = self._longest(keys[-1], ids[start : start + BLOCK_SIZE][: len(ids) - 1 - start])
        if partial is not None:
            self._pool.hold(partial[0])
        return PrefixMatch(first, blocks, keys, partial)

    def insert(self, block: int, parent: bytes, ids: Ids[int]) -> bytes:
        """Remember a computed block of 1 to 64 ids; its key. parent: key of the block to its left, ROOT for the first.

        Where the same text is known in another block, that one stays.
        """
        key = block_key(parent, ids)
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key
            self._parents[block] = parent
            self._children[parent][block] = tuple(ids)
        return key

    def _longest(self, parent: bytes, ids: Ids[int]) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        known = self._children.get(parent)
        if known is None or not ids:
            return None
        for block, theirs in list(reversed(known.items()))[:SIBLINGS]:
            common = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), None)
            length = min(len(ids), len(theirs)) if common is None else common
            if length > (best[1] if best else 0):
                best = (block, length)
        return best

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is None:
            return
        del self._blocks[key]
        parent = self._parents.pop(block)
        del self._children[parent][block]
        if not self._children[parent]:
            del self._children[parent]
