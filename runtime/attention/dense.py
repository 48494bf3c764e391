"""Attention by torch matrix products over the gathered cache, one sequence at a time. Any device, not exact."""

from __future__ import annotations

import torch

from infer.runtime.attention.base import AttentionBackend
from infer.runtime.batch import ForwardBatch
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.kvcache.window import first_visible


class DenseAttention(AttentionBackend):
    name = "torch"
    exact = False

    def forward(
        self, q: torch.Tensor, cache: PagedKVCache, batch: ForwardBatch, layer: int,
        *, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = q.new_empty((*q.shape[:2], cache.values[layer].shape[3]))
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        for index, length in enumerate(lengths):
            first, last = starts[index], starts[index + 1]
            rows = last - first
            begin = first_visible(length - rows, window) * BLOCK_SIZE
            table = batch.block_tables[index, begin // BLOCK_SIZE : -(-length // BLOCK_SIZE)].long()
            keys, values = cache.gather(layer, table, length - begin)
            kv_heads, group = keys.shape[0], q.shape[1] // keys.shape[0]
            # [kv_heads, group * rows, head_dim]: the heads that share keys go through one product
            query = q[first:last].transpose(0, 1).reshape(kv_heads, group * rows, -1)
            scores = torch.bmm(query, keys.to(query.dtype)) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.view(kv_heads, group, rows, length - begin)
            if rows > 1 or window:
                query_at = torch.arange(length - rows, length, device=q.device).unsqueeze(1)
                key_at = torch.arange(begin, length, device=q.device)
                hidden = key_at > query_at
                if window:
                    hidden |= key_at <= query_at - window
                scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None:
                sink = sinks.view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : length - begin]
            weights = weights.reshape(kv_heads, group * rows, length - begin)
            mixed = torch.bmm(weights, values.to(weights.dtype))
            out[first:last] = mixed.view(kv_heads * group, rows, -1).transpose(0, 1)
        return out
