"""Owns the tensors: model, operations, KV cache. One batch in, logits out."""

from __future__ import annotations

import torch

from infer.runtime.batch import ForwardBatch
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.models.base import Model
from infer.runtime.models.torch_ops import TorchOps


class ModelRunner:
    def __init__(self, model: Model, ops: TorchOps, cache: PagedKVCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self._ops = ops
        self._device = device

    def close(self) -> None:
        """Free the weights and the cache."""
        del self.model, self.cache, self._ops

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 [R, vocab]: the logits of the batch's output rows."""
        self._ops.batch = batch if self._device.type == "cpu" else batch.to(self._device)
        logits: torch.Tensor = self.model.forward(self._ops)
        return logits.float()
