"""The logits of a step over the whole vocabulary, on the host or on a device.

Everything that costs O(vocabulary) is here; what follows works on a few candidates per row on the host. The
host walks row by row with numpy, whose reductions are several times faster than torch's at this size (argmax
of 49,152: 4 µs to 99 µs) and see one contiguous row whatever the batch is. The device's is in `device_rows`,
imported with torch when there are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import numpy as np

from infer.samplers import ranking
from infer.samplers.ranking import Float32Array, FloatArray, IntArray

if TYPE_CHECKING:
    import torch

Logits: TypeAlias = Union[Float32Array, "torch.Tensor"]


class LogitRows(Protocol):
    """Rows of float32 logits. Row arguments index the call's rows; results are numpy arrays on the host."""

    @property
    def vocab_size(self) -> int: ...

    def first_invalid(self) -> int | None:
        """The first row holding NaN or ±infinity."""

    def argmax(self, rows: Sequence[int]) -> IntArray:
        """int64 [len(rows)]: the highest logit's id, the lowest id among equals."""

    def leading(self, rows: Sequence[int], width: int) -> tuple[IntArray, Float32Array]:
        """Ids and logits [len(rows), min(width, V)] by rank (see `ranking`)."""

    def mass(self, rows: Sequence[int], maxima: FloatArray, temperatures: FloatArray) -> FloatArray:
        """float64 [len(rows)]: Σ exp((logit − maximum) / temperature) over the vocabulary."""

    def copied(self, rows: Sequence[int]) -> LogitRows:
        """The same rows, of which `rows` may be changed without changing these."""

    def take(self, rows: Sequence[int], ids: Sequence[IntArray]) -> list[FloatArray]:
        """Per row the logits (float64 [n]) of its ids (int64 [n])."""

    def put(self, rows: Sequence[int], ids: Sequence[IntArray], values: Sequence[FloatArray]) -> None:
        """Store per row the values (float64 [n], rounded to float32) of its distinct ids (int64 [n])."""

    def ban(self, rows: Sequence[int]) -> None:
        """Fill rows with −infinity."""


def logit_rows(logits: Logits) -> LogitRows:
    """View logits (float32 [S, V]) where they are, or, on a device that may lack float64, a copy on the host.

    Raises ValueError for another shape or type.
    """
    if not isinstance(logits, np.ndarray):
        from infer.samplers.device_rows import tensor_rows

        return tensor_rows(logits)
    if logits.ndim != 2 or logits.dtype != np.float32 or logits.shape[1] == 0:
        raise ValueError(not_logits(logits))
    return HostRows(list(np.ascontiguousarray(logits)))


def not_logits(given: Logits) -> str:
    return f"logits must be float32 [rows, vocabulary], not {given.dtype} {list(given.shape)}"


class HostRows:
    """Rows in host memory, each a contiguous float32 [V] array."""

    def __init__(self, rows: list[Float32Array]) -> None:
        self._rows = rows

    @property
    def vocab_size(self) -> int:
        return len(self._rows[0])

    def first_invalid(self) -> int | None:
        for index, row in enumerate(self._rows):  # min and max pass NaN on
            if not (math.isfinite(row.min()) and math.isfinite(row.max())):
                return index
        return None

    def argmax(self, rows: Sequence[int]) -> IntArray:
        return np.array([self._rows[row].argmax() for row in rows], dtype=np.int64)

    def leading(self, rows: Sequence[int], width: int) -> tuple[IntArray, Float32Array]:
        width = min(width, self.vocab_size)
        return ranking.unpack(np.stack([ranking.leading(self._rows[row], width) for row in rows]))

    def mass(self, rows: Sequence[int], maxima: FloatArray, temperatures: FloatArray) -> FloatArray:
        sums, weights = np.empty(len(rows)), np.empty(self.vocab_size)
        for index, row in enumerate(rows):
            np.subtract(self._rows[row], maxima[index], out=weights, dtype=np.float64)
            weights /= temperatures[index]
            sums[index] = np.exp(weights, out=weights).sum()
        return sums

    def copied(self, rows: Sequence[int]) -> HostRows:
        changed = set(rows)
        return HostRows([row.copy() if index in changed else row for index, row in enumerate(self._rows)])

    def take(self, rows: Sequence[int], ids: Sequence[IntArray]) -> list[FloatArray]:
        return [self._rows[row][chosen].astype(np.float64) for row, chosen in zip(rows, ids, strict=True)]

    def put(self, rows: Sequence[int], ids: Sequence[IntArray], values: Sequence[FloatArray]) -> None:
        for row, chosen, new in zip(rows, ids, values, strict=True):
            self._rows[row][chosen] = new

    def ban(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row].fill(-np.inf)
