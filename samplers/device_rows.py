"""The logits of a step in an accelerator's memory.

All rows are worked on at once, with operations whose result does not depend on how many rows there are: element-wise
maths, selection over distinct integers, sums of integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infer.samplers import ranking
from infer.samplers.logit_rows import HostRows, LogitRows, not_logits
from infer.samplers.ranking import FLIP, Float32Array, FloatArray, IntArray


def tensor_rows(logits: torch.Tensor) -> LogitRows:
    """`logit_rows` of a tensor."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.shape[1] == 0:
        raise ValueError(not_logits(logits))
    logits = logits.detach().contiguous()
    return DeviceRows(logits) if logits.device.type == "cuda" else HostRows(list(logits.cpu().numpy()))


def pack_tensor(values: torch.Tensor) -> torch.Tensor:
    """Keys (int64 [..., V]) of float32 logits [..., V], on their device; the id is the last index."""
    bits = (values + 0.0).view(torch.int32)
    high = (~(bits ^ ((bits >> 31) & FLIP))).to(torch.int64)
    return (high << 32) | torch.arange(values.shape[-1], device=values.device)


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
        keys = pack_tensor(self._select(rows))
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
