"""The draw: a counter-based uniform number and the inverse of the cumulative distribution.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
https://doi.org/10.1145/2063384.2063405) is a function of a key and a counter, with no state in between. The
key is the seed and the counter the position, so a token's draw depends on nothing else.
"""

from __future__ import annotations

import numpy as np

from infer.samplers.candidates import BoolArray, Candidates
from infer.samplers.ranking import FloatArray, IntArray

_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32. All words are 32 bits, least significant word of a number first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A multiple of 2**-53 in [0, 1) for a seed and a position, each from 0 to 2**64 − 1."""
    low, high, _, _ = philox4x32((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def draw(candidates: Candidates, uniforms: FloatArray) -> tuple[IntArray, BoolArray]:
    """Per row g the token at which the running probability first exceeds uniforms[g]: ids (int64 [G]).

    Also bool [G], `candidates.short` or true where the token lies behind those that are loaded.
    """
    cumulative = candidates.ranking.cumulative
    rows = np.arange(len(cumulative))
    target = (uniforms * candidates.mass)[:, None]
    # Rounding may put the target on or, uncut, above the last sum: take the last token that added to it.
    final = cumulative[rows, candidates.count - 1][:, None]
    index = (cumulative <= target).sum(axis=1)
    last = (cumulative < final).sum(axis=1)
    short = candidates.short | ~candidates.complete & (index >= candidates.count)
    return candidates.ranking.ids[rows, np.minimum(index, last)], short
