"""Normalization rules written by hand: a trie, then the replacements it leads to."""

from __future__ import annotations

import struct


def units(*changes: tuple[int, int], replacements: bytes = b"x\0") -> bytes:
    """A trie of one block whose root leads to the block's last 256 units, with some units set."""
    trie = [0x80000000] * 256
    trie[0] = 128 << 10
    for position, unit in changes:
        trie[position] = unit
    return struct.pack("<I256I", 1024, *trie) + replacements
