"""K and V of a paged cache as tensors, for those who compute with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.kvcache.paged import BlockArray, PagedKVCache

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "int8": torch.int8}


class KVTensors:
    """Views into a cache's memory, of each layer:

    keys[layer]    [blocks, kv_heads, head_dim, 64]
    values[layer]  [blocks, kv_heads, 64, head_dim]; with latent attention a view of the keys
    key_scales[layer], value_scales[layer]   float32 [blocks, kv_heads, 64]; empty lists but for int8
    """

    def __init__(self, cache: PagedKVCache, storage: Any) -> None:
        """storage: uint8 [blocks, block_bytes], array or tensor."""
        self._storage = storage if isinstance(storage, torch.Tensor) else torch.from_numpy(storage)
        self._dtype = DTYPES[cache.kv_type]

        def view(part: BlockArray, dtype: torch.dtype) -> torch.Tensor:
            stored = self._storage[:, part.offset : part.offset + part.nbytes]
            return stored.view(dtype).view(cache.blocks, *part.shape)

        self.keys = [view(layer.keys, self._dtype) for layer in cache.layers]
        self.values = [
            view(layer.values, self._dtype)
            if layer.values is not None
            else keys[:, :, : cache.value_dim].transpose(2, 3)
            for layer, keys in zip(cache.layers, self.keys, strict=True)
        ]
        scales = [
            (layer.key_scales, layer.value_scales or layer.key_scales)
            for layer in cache.layers
            if layer.key_scales is not None
        ]
        self.key_scales = [view(key, torch.float32) for key, _ in scales]
        self.value_scales = [view(value, torch.float32) for _, value in scales if value is not None]

    def put(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite a block with uint8 [block_bytes]."""
        self._storage[block].copy_(torch.from_numpy(data))

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots int64 [T]; v is None for latent attention."""
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        if self.key_scales:
            k, self.key_scales[layer][block, :, offset] = _quantize(k)
        self.keys[layer][block, :, :, offset] = k.to(self._dtype)
        if v is None:
            return
        if self.key_scales:
            v, self.value_scales[layer][block, :, offset] = _quantize(v)
        self.values[layer][block, :, offset] = v.to(self._dtype)

    def gather(self, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [kv_heads, head_dim, length] and V [kv_heads, length, head_dim or latent_dim] of the blocks in table, int64
        [n]."""
        keys, values = self.keys[layer][table], self.values[layer][table]
        if self.key_scales:
            keys = keys * self.key_scales[layer][table].unsqueeze(2)
            values = values * self.value_scales[layer][table].unsqueeze(3)
        keys = keys.permute(1, 2, 0, 3).flatten(2)[:, :, :length]
        return keys, values.transpose(0, 1).flatten(1, 2)[:, :length]


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [T, heads, dim] to codes of the same shape and scales [T, heads]."""
    scale = x.abs().amax(dim=-1) / 127
    codes = torch.round(x / torch.where(scale > 0, scale, 1.0).unsqueeze(-1))
    return codes, scale
