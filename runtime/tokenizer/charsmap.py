"""SentencePiece's compiled normalization rules, checked before the library follows the offsets in them.

Layout: trie size in bytes (u32, little-endian), the trie (u32 units, little-endian), then the replacements as
UTF-8 strings, each ended by NUL. The trie is a double array (https://github.com/s-yata/darts-clone): a unit is
bits 0–7 label, bit 8 "a key ends here", bit 9 and bits 10–30 offset, bit 31 "this is a value". The children of
the unit at `i` with offset `o` are at `i ^ o ^ byte`, with the byte as label; the value is at `i ^ o`.
"""

from __future__ import annotations

from infer.runtime.errors import TokenizerError

_BLOCK = 256  # units; the array is made of whole blocks, so a child lies where its parent's offset leads
_MAX_KEY = 256  # bytes; the longest in use have some 20
_MAX_REPLACEMENT = 256  # bytes; U+FDFA becomes 33, more would let a text grow without bounds


def check_charsmap(data: bytes, where: str) -> None:
    """Follows every path of the trie. where: for messages.

    Raises TokenizerError where one leaves the array, never ends, or leads to no replacement.
    """
    import numpy as np

    size = int.from_bytes(data[:4], "little")
    if size == 0 or size % (4 * _BLOCK) or len(data) <= 4 + size:
        raise _error(where, f"its trie has {size} bytes of {len(data)} in all")
    replacements = data[4 + size :]
    try:
        replacements.decode()
    except UnicodeDecodeError:
        raise _error(where, "its replacements are not UTF-8") from None
    if replacements[-1] or max(map(len, replacements.split(b"\0"))) > _MAX_REPLACEMENT:
        raise _error(where, f"a replacement has no end within {_MAX_REPLACEMENT} bytes")
    starts = (np.frombuffer(replacements, np.uint8) & 0xC0) != 0x80

    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    positions = np.arange(len(units))
    bases = positions ^ ((units >> 10 & 0x1FFFFF) << (units >> 6 & 8))
    parents = positions ^ (units & 0xFF)  # a unit with a label is the child of the unit with this base
    is_node = units >> 31 == 0
    nodes = positions[:1]
    for _ in range(_MAX_KEY):
        reached = bases[nodes]
        if reached.max() >= len(units):
            raise _error(where, "an offset leads out of its trie")
        values = units[reached[units[nodes] >> 8 & 1 == 1]] & 0x7FFFFFFF
        if values.size and (values.max() >= len(replacements) or not starts[values].all()):
            raise _error(where, "a key has no replacement")
        is_base = np.zeros(len(units), np.bool_)
        is_base[reached] = True
        nodes = positions[is_base[parents] & is_node]
        if not nodes.size:
            return
    raise _error(where, f"a key has more than {_MAX_KEY} bytes")


def _error(where: str, reason: str) -> TokenizerError:
    return TokenizerError(f"{where}: the normalization rules are damaged: {reason}; use another file")
