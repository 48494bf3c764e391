"""Byte pair encoding of one text: neighbours are joined, the best pair of all first, until no pair is left.

Source: Sennrich et al. 2016 (arXiv 1508.07909). A heap holds the pairs; those that have become something else since are
passed over when their turn comes, so that n symbols take O(n log n).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeVar

Text = TypeVar("Text", str, bytes)
K = TypeVar("K")
V = TypeVar("V")

_REMEMBERED = 1 << 14  # entries of a memo
_SHORT = 64  # characters or bytes; what is longer comes once

#: (cost, id of the token that it makes); of equal costs the leftmost pair comes first
Pair = tuple[float, int]


def merge(symbols: list[Text], pair_of: Callable[[Text, Text], Pair | None]) -> list[Text]:
    """What the symbols become; joined they are the same text. The list is used up.

    pair_of: of two neighbours, None where they do not join.
    """
    count = len(symbols)
    after, before = list(range(1, count + 1)), list(range(-1, count - 1))
    pairs = [pair_of(left, right) for left, right in pairwise(symbols)] + [None]
    waiting = [(pair[0], place, pair) for place, pair in enumerate(pairs) if pair is not None]
    heapify(waiting)
    while waiting:
        _, place, pair = heappop(waiting)
        if pairs[place] != pair:
            continue
        gone = after[place]
        symbols[place] += symbols[gone]
        after[place] = after[gone]
        pairs[place] = pairs[gone] = None
        if before[place] >= 0:
            pairs[before[place]] = pair_of(symbols[before[place]], symbols[place])
        if after[place] < count:
            before[after[place]] = place
            pairs[place] = pair_of(symbols[place], symbols[after[place]])
        for changed in (before[place], place):
            if changed >= 0 and (new := pairs[changed]) is not None:
                heappush(waiting, (new[0], changed, new))
    merged, place = [], 0
    while place < count:
        merged.append(symbols[place])
        place = after[place]
    return merged


def remember(memo: dict[K, V], key: K, value: V, size: int) -> V:
    """Keep what was found for a text of `size` in a memo of bounded memory."""
    if size <= _SHORT:
        if len(memo) >= _REMEMBERED:
            memo.clear()
        memo[key] = value
    return value
