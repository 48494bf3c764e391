"""Attention by torch matrix products over the gathered cache, one sequence at a time. Any device, not exact."""

from __future__ import annotations

import torch

from infer.runtime.attention.base import AttentionBackend, TensorBatch
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.tensors import KVTensors
from infer.runtime.kvcache.window import first_visible

QUERIES = 64  # at a time: the scores of 512 against a long context would be the largest tensor of a step


class DenseAttention(AttentionBackend):
    name = "torch"
    exact = False

    def forward(
        self, q: torch.Tensor, cache: KVTensors, batch: TensorBatch, layer: int,
        *, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = q.new_empty((*q.shape[:2], cache.values[layer].shape[3]))
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        for index, length in enumerate(lengths):
            first, last = starts[index], starts[index + 1]
            begin = first_visible(length - (last - first), window) * BLOCK_SIZE
            table = batch.block_tables[index, begin // BLOCK_SIZE : -(-length // BLOCK_SIZE)].long()
            keys, values = (part.to(q.dtype) for part in cache.gather(layer, table, length - begin))
            for start in range(first, last, QUERIES):
                stop = min(start + QUERIES, last)
                end = length - (last - stop)  # positions that the last of these queries sees
                visible = keys[..., : end - begin], values[:, : end - begin]
                scores = _scores(q[start:stop], visible[0], scale, softcap)
                if stop - start > 1 or window:
                    scores.masked_fill_(
                        _hidden(range(end - (stop - start), end), range(begin, end), window, q.device),
                        float("-inf"),
                    )
                out[start:stop] = _mixed(scores, visible[1], sinks)
        return out


def _scores(q: torch.Tensor, keys: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """q [rows, heads, head_dim], keys [kv_heads, head_dim, length] → [kv_heads, heads / kv_heads, rows, length]; the
    heads that share keys go through one product."""
    rows, heads, _ = q.shape
    kv_heads = keys.shape[0]
    scores = torch.bmm(q.transpose(0, 1).reshape(kv_heads, heads // kv_heads * rows, -1), keys).mul_(scale)
    if softcap:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    return scores.view(kv_heads, -1, rows, keys.shape[2])


def _hidden(queries: range, keys: range, window: int, device: torch.device) -> torch.Tensor:
    """bool [queries, keys]: the positions a query does not see."""
    query_at = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key_at = torch.arange(keys.start, keys.stop, device=device)
    hidden = key_at > query_at
    return hidden | (key_at <= query_at - window) if window else hidden


def _mixed(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """softmax(scores) v: [rows, heads, value_dim]."""
    kv_heads, group, rows, length = scores.shape
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length].reshape(kv_heads, group * rows, length)
    return torch.bmm(weights, values).view(kv_heads * group, rows, -1).transpose(0, 1)
