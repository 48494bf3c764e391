"""The logits of a step over the whole vocabulary, on the host or on a device.

Everything that costs O(vocabulary) is here; what follows works on a few candidates per row on the host. The
host walks row by row with numpy, whose reductions are several times faster than torch's at this size (argmax
of 49,152: 4 µs to 99 µs) and see one contiguous row whatever the batch is. The device works on all rows at
once with operations whose result does not depend on how many rows there are: element-wise maths, selection
over distinct integers, sums of integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from infer.samplers import ranking
from infer.samplers.ranking import Float32Array, FloatArray, IntArray


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


def logit_rows(logits: torch.Tensor) -> LogitRows:
    """View logits (float32 [S, V]) where they are, or, on a device that may lack float64, a copy on the host.

    Raises ValueError for another shape or type.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(
            f"logits must be float32 [rows, vocabulary], not {logits.dtype} {list(logits.shape)}"
        )
    logits = logits.detach().contiguous()
    return DeviceRows(logits) if logits.device.type == "cuda" else HostRows(list(logits.cpu().numpy()))


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


class DeviceRows:
    """Rows in an accelerator's memory: one float32 tensor [S, V]. Also runs on a CPU tensor."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    @property
    def vocab_size(self) -> int:
        return self._logits.shape[1]

    def first_invalid(self) -> int | None:
        finite = torch.isfinite(self._logits).all(dim=1).cpu().numpy()
        return None if finite.all() else int(finite.argmin())

    def argmax(self, rows: Sequence[int]) -> IntArray:
        found: IntArray = self._select(rows).argmax(dim=1).cpu().numpy()
        return found

    def leading(self, rows: Sequence[int], width: int) -> tuple[IntArray, Float32Array]:
        keys = ranking.pack_tensor(self._select(rows))
        if width >= self.vocab_size:
            keys = keys.sort(dim=1).values
        else:
            keys = keys.topk(width, dim=1, largest=False, sorted=True).values
        return ranking.unpack(keys.cpu().numpy())

    def mass(self, rows: Sequence[int], maxima: FloatArray, temperatures: FloatArray) -> FloatArray:
        device = self._logits.device
        shift = torch.from_numpy(maxima[:, None]).to(device)
        scale = torch.from_numpy(temperatures[:, None]).to(device)
        weights = ((self._select(rows).to(torch.float64) - shift) / scale).exp()
        # Fixed point, each weight ≤ 1 and the sum below 2**62: integer sums do not depend on their order,
        # which on a device changes with the number of rows.
        unit = 2.0 ** (62 - self.vocab_size.bit_length())
        sums = (weights * unit).round().to(torch.int64).sum(dim=1).cpu().numpy()
        return np.asarray(sums / unit, dtype=np.float64)

    def copied(self, rows: Sequence[int]) -> DeviceRows:
        return DeviceRows(self._logits.clone() if rows else self._logits)

    def take(self, rows: Sequence[int], ids: Sequence[IntArray]) -> list[FloatArray]:
        values = self._logits[self._index(rows, ids)].to(torch.float64).cpu().numpy()
        return np.split(values, np.cumsum([len(chosen) for chosen in ids])[:-1])

    def put(self, rows: Sequence[int], ids: Sequence[IntArray], values: Sequence[FloatArray]) -> None:
        stored = torch.from_numpy(np.concatenate(values).astype(np.float32))
        self._logits[self._index(rows, ids)] = stored.to(self._logits.device)

    def ban(self, rows: Sequence[int]) -> None:
        self._logits[torch.tensor(rows, device=self._logits.device)] = -torch.inf

    def _select(self, rows: Sequence[int]) -> torch.Tensor:
        if list(rows) == list(range(len(self._logits))):
            return self._logits
        return self._logits[torch.tensor(rows, device=self._logits.device)]

    def _index(self, rows: Sequence[int], ids: Sequence[IntArray]) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = [len(chosen) for chosen in ids]
        index = torch.from_numpy(np.stack([np.repeat(rows, lengths), np.concatenate(ids)]))
        row_index, id_index = index.to(self._logits.device)
        return row_index, id_index
