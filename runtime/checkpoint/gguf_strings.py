"""Strings of a GGUF array found many at a time with numpy: vocabularies have hundreds of thousands.

A string is its length, uint64 little-endian, then its bytes, so that where one begins is known when the one before it
is. But lengths are mostly below 256: wherever seven zero bytes follow a byte, a length may be. If every guess is where
the guess before it ends, all are right, since the first one is.
"""

from __future__ import annotations

import numpy as np

# bytes looked at: enough for the cost of a call into numpy not to count, few when all was in vain
WINDOW = 1 << 17
_PREFIX = np.arange(8)


def leading_strings(data: bytes, pos: int, count: int) -> tuple[bytes, list[int], int]:
    """Of `count` strings from `pos` on, those at the beginning that can be found this way, perhaps none: their texts
    one after the other, the length of each, and where the next string begins."""
    size = min(WINDOW, len(data) - pos)
    if size < 16:
        return b"", [], pos
    window = np.frombuffer(data, dtype=np.uint8, count=size, offset=pos)
    zero = window == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    guesses = np.flatnonzero(four[:-3] & four[3:])[: count + 1] - 1
    if len(guesses) < 2 or guesses[0] != 0:
        return b"", [], pos
    lengths = window[guesses].astype(np.intp)
    right = guesses[1:] == guesses[:-1] + 8 + lengths[:-1]
    found = min(count, len(right) if right.all() else int(right.argmin()))
    if not found:
        return b"", [], pos
    guesses, lengths = guesses[:found], lengths[:found]
    end = int(guesses[-1] + 8 + lengths[-1])
    is_text = np.ones(end, dtype=np.bool_)
    is_text[guesses[:, np.newaxis] + _PREFIX] = False
    return window[:end][is_text].tobytes(), lengths.tolist(), pos + end
