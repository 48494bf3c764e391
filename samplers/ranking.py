"""Rank tokens by logit, highest first, equal logits by ascending id, through one 64-bit integer per token.

A float32 read as a signed integer orders like the float once the lower 31 bits of negative numbers are
flipped. The key is the complement of that integer in the high half and the id in the low half: ascending keys
are the ranking, no two keys are equal, and any sort or selection algorithm gives the same answer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

FLIP = 0x7FFFFFFF
_ID_MASK = 0xFFFFFFFF
# Strided lanes for the threshold of `_at_least`: at 2048 lanes both the maxima and the second look are cheap
# (measured at vocabularies of 49,152 and 151,936), and 512 leading tokens rarely share one.
_LANES = 2048
_LANE_WIDTH = 512


def pack(values: Float32Array, ids: IntArray) -> IntArray:
    """Keys of `values` (float32 [n], no NaN) and their `ids` (int64 [n], below 2**32)."""
    bits = (values + np.float32(0)).view(np.int32)  # −0.0 + 0.0 is +0.0: equal floats get equal high halves
    keys: IntArray = np.left_shift(~(bits ^ ((bits >> 31) & FLIP)), 32, dtype=np.int64)
    keys |= ids
    return keys


def unpack(keys: IntArray) -> tuple[IntArray, Float32Array]:
    """Ids (int64) and values (float32), of the shape of `keys`."""
    ordered = (~(keys >> 32)).astype(np.int32)
    return keys & _ID_MASK, (ordered ^ ((ordered >> 31) & FLIP)).view(np.float32)


def leading(row: Float32Array, width: int) -> IntArray:
    """Sorted keys of the `width` highest-ranked tokens of `row` (float32 [V]); width ≤ V."""
    if width >= len(row):
        return np.sort(pack(row, np.arange(len(row))))
    ids = _at_least(row, width)
    return np.sort(pack(row[ids], ids))[:width]


def _at_least(row: Float32Array, width: int) -> IntArray:
    """Ids of every token that can be among the `width` highest, and few others.

    With width ≤ 512: the width-th largest of the lanes' maxima is a lower bound of the width-th largest
    value, since every maximum is a value. Only lanes that reach it can hold a leader.
    """
    size = len(row) // _LANES * _LANES
    if width > _LANE_WIDTH or size < 4 * _LANES:
        bound = np.partition(row, len(row) - width)[len(row) - width]
        return np.flatnonzero(row >= bound)
    lanes = row[:size].reshape(-1, _LANES)
    maxima = lanes.max(axis=0)
    bound = np.partition(maxima, _LANES - width)[_LANES - width]
    columns = np.flatnonzero(maxima >= bound)
    found = np.flatnonzero(lanes.take(columns, axis=1) >= bound)
    rest = np.flatnonzero(row[size:] >= bound) + size
    ids: IntArray = np.concatenate([found // len(columns) * _LANES + columns[found % len(columns)], rest])
    return ids
