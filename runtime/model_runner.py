"""Owns the memory: model, operations, KV cache. One batch in, logits out."""

from __future__ import annotations

from infer.runtime.batch import ForwardBatch
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.models.base import Model
from infer.runtime.models.ops import Ops
from infer.samplers.logit_rows import Logits


class ModelRunner:
    def __init__(self, model: Model, ops: Ops, cache: PagedKVCache) -> None:
        self.model = model
        self.cache = cache
        self._ops = ops

    def close(self) -> None:
        """Free the weights and the cache."""
        del self.model, self.cache, self._ops

    def forward(self, batch: ForwardBatch) -> Logits:
        """float32 [R, vocab]: the logits of the batch's output rows, valid until the next call."""
        return self._ops.run(self.model, batch)
