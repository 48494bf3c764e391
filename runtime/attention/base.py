"""The interface of attention in torch over the paged cache."""

from __future__ import annotations

import abc
from dataclasses import dataclass, fields

import torch

from infer.runtime.batch import ForwardBatch
from infer.runtime.kvcache.tensors import KVTensors


@dataclass(frozen=True)
class TensorBatch:
    """A ForwardBatch as tensors."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    output_rows: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, batch: ForwardBatch) -> TensorBatch:
        arrays = (torch.from_numpy(getattr(batch, field.name)) for field in fields(cls))
        return cls(*(array.to(device, non_blocking=True) for array in arrays))


class AttentionBackend(abc.ABC):
    """exact: a row's result has the same bits whatever else is in the batch and however the prompt was cut."""

    name: str
    exact: bool

    @abc.abstractmethod
    def forward(
        self, q: torch.Tensor, cache: KVTensors, batch: TensorBatch, layer: int,
        *, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """q float32 [T, heads, head_dim] → float32 [T, heads, dimensions of a value].

        Row t of a sequence at position p sees positions max(0, p - window + 1) … p (window 0: from 0 on) as the cache
        holds them, its own included. Head h reads key-value head h * kv_heads // heads. sinks: float32 [heads], a score
        of each head that takes part in the softmax and has no value (gpt-oss).
        """
