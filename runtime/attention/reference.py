"""Attention one row and one block at a time, with online softmax over blocks of 64 absolute positions.

Slow and exact: every operation on a row has a shape that depends on its position alone. The oracle in tests.
"""

from __future__ import annotations

import torch

from infer.runtime.attention.base import AttentionBackend, TensorBatch
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.tensors import KVTensors


class ReferenceAttention(AttentionBackend):
    name = "reference"
    exact = True

    def forward(
        self, q: torch.Tensor, cache: KVTensors, batch: TensorBatch, layer: int,
        *, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = q.new_empty((*q.shape[:2], cache.values[layer].shape[3]))
        starts, positions = batch.query_start.tolist(), batch.positions.tolist()
        for index in range(len(starts) - 1):
            table = batch.block_tables[index].tolist()
            for row in range(starts[index], starts[index + 1]):
                out[row] = _row(q[row], cache, table, layer, positions[row], scale, window, softcap, sinks)
        return out


def _row(
    q: torch.Tensor, cache: KVTensors, table: list[int], layer: int, position: int,
    scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    heads, dim = q.shape
    kv_heads = cache.keys[layer].shape[1]
    query = q.view(kv_heads, heads // kv_heads, dim)
    top = query.new_full((*query.shape[:2], 1), float("-inf"))
    total = query.new_zeros((*query.shape[:2], 1))
    mixed = query.new_zeros((*query.shape[:2], cache.values[layer].shape[3]))
    first = max(0, position - window + 1) if window else 0
    for block in range(first // BLOCK_SIZE, position // BLOCK_SIZE + 1):
        base = block * BLOCK_SIZE
        low, high = max(first - base, 0), min(position - base + 1, BLOCK_SIZE)
        keys, values = cache.gather(layer, torch.tensor([table[block]]), high)
        keys, values = keys[:, :, low:].float(), values[:, low:].float()
        scores = torch.bmm(query, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        peak = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - peak)
        shrink = torch.exp(top - peak)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * shrink + torch.bmm(weights, values)
        top = peak
    if sinks is not None:
        total = total + torch.exp(sinks.view(total.shape) - top)
    return (mixed / total).view(heads, -1)
