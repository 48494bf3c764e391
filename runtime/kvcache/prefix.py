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

ROOT = b""
SIBLINGS = 32  # blocks with one parent that are compared token by token, latest first


class PrefixMatch(NamedTuple):
    """blocks: whole ones, shared. partial: (block, tokens) whose first tokens continue them, to be copied."""

    blocks: list[int]
    partial: tuple[int, int] | None


class PrefixCache:
    """Maps keys to blocks of a pool; forgets a block when the pool gives it out again."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._parents: dict[int, bytes] = {}
        self._children: defaultdict[bytes, OrderedDict[int, tuple[int, ...]]] = defaultdict(OrderedDict)
        pool.on_evict = self._forget

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match(self, ids: Ids[int]) -> PrefixMatch:
        """The longest known prefix that leaves at least one id over; all its blocks are now held by the caller."""
        held: list[int] = []
        key = ROOT
        for start in range(0, len(ids) - BLOCK_SIZE, BLOCK_SIZE):
            child = block_key(key, ids[start : start + BLOCK_SIZE])
            block = self._blocks.get(child)
            if block is None:
                break
            self._pool.hold(block)
            held.append(block)
            key = child
        start = len(held) * BLOCK_SIZE
        partial = self._longest(key, ids[start : start + BLOCK_SIZE][: len(ids) - 1 - start])
        if partial is not None:
            self._pool.hold(partial[0])
        return PrefixMatch(held, partial)

    def insert(self, block: int, parent: int | None, ids: Ids[int]) -> None:
        """Remember a computed block of 1 to 64 ids. parent: the block to its left, None for the first.

        Nothing happens when the parent is unknown or the same text is already known in another block.
        """
        parent_key = ROOT if parent is None else self._keys.get(parent)
        if parent_key is None or block in self._keys:
            return
        key = block_key(parent_key, ids)
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key
            self._parents[block] = parent_key
            self._children[parent_key][block] = tuple(ids)

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
