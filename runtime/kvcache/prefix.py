"""Finds computed KV blocks again by the tokens they hold. In memory, full blocks only, torch-free.

A block's key is SHA-256 over its parent's key and its ids as little-endian 64-bit integers, so equal keys mean equal
text from the first token on: the same positions, and by the first invariant the same K and V.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Ids

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.block_pool import BlockPool

ROOT = b""


def block_key(parent: bytes, ids: Ids[int]) -> bytes:
    """Key of a block of ids whose left neighbour has the key `parent` (ROOT for the first)."""
    return hashlib.sha256(parent + struct.pack(f"<{len(ids)}q", *ids)).digest()


class PrefixCache:
    """Maps keys to blocks of a pool; forgets a block when the pool gives it out again."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match(self, ids: Ids[int]) -> list[int]:
        """Blocks of the longest known prefix of whole blocks that leaves at least one id over; each is now held
        by the caller."""
        held: list[int] = []
        key = ROOT
        for start in range(0, len(ids) - BLOCK_SIZE, BLOCK_SIZE):
            key = block_key(key, ids[start : start + BLOCK_SIZE])
            block = self._blocks.get(key)
            if block is None:
                break
            self._pool.hold(block)
            held.append(block)
        return held

    def insert(self, block: int, parent: int | None, ids: Ids[int]) -> None:
        """Remember a full, computed block. parent: the block to its left, None for the first.

        Nothing happens when the parent is unknown or the same text is already known in another block.
        """
        parent_key = ROOT if parent is None else self._keys.get(parent)
        if parent_key is None or block in self._keys:
            return
        key = block_key(parent_key, ids)
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]
