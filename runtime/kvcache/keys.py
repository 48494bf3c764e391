"""Keys of KV blocks: a SHA-256 chain, so that equal keys mean equal text from the first token on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

KEY_BYTES = 32


def root_key(version: int, fingerprint: bytes) -> bytes:
    """Parent of every first block: SHA-256("infer-kv" ‖ version u32 ‖ fingerprint), little-endian."""
    return hashlib.sha256(b"infer-kv" + struct.pack("<I", version) + fingerprint).digest()


def block_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """SHA-256(parent's key ‖ ids as u64 ‖ their count as u32), little-endian. ids must be 0 … 2^64 - 1."""
    return hashlib.sha256(parent + struct.pack(f"<{len(ids)}QI", *ids, len(ids))).digest()


def prefix_keys(parent: bytes, ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """(n, block_key(parent, ids[:n])) for n = 1 … len(ids), at the cost of one pass."""
    running = hashlib.sha256(parent)
    for count, token in enumerate(ids, 1):
        running.update(struct.pack("<Q", token))
        key = running.copy()
        key.update(struct.pack("<I", count))
        yield count, key.digest()
