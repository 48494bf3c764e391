"""The tensors behind the block ids: K and V of every layer, 64 positions a block."""

from __future__ import annotations

import torch

from infer.runtime.config import BLOCK_SIZE, ModelConfig

KV_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "int8": torch.int8}


class PagedKVCache:
    """Per layer:

        keys[layer]    [blocks, kv_heads, head_dim, 64]   transposed: neighbouring positions are adjacent
        values[layer]  [blocks, kv_heads, 64, head_dim]

    With int8, value = code * scale, one float32 scale per head and position (largest magnitude / 127):

        key_scales[layer], value_scales[layer]   [blocks, kv_heads, 64]; empty lists for other types

    A slot is block * 64 + offset. On the CPU untouched blocks cost no memory: the system commits pages when written.
    """

    def __init__(self, config: ModelConfig, blocks: int, kv_type: str, device: torch.device) -> None:
        self.blocks = blocks
        self.kv_type = kv_type
        self.dtype = KV_TYPES[kv_type]
        heads, dim = config.head_count_kv, config.head_dim
        key_shape = (blocks, heads, dim, BLOCK_SIZE)
        value_shape = (blocks, heads, BLOCK_SIZE, dim)
        layers = range(config.block_count)
        self.keys = [torch.empty(key_shape, dtype=self.dtype, device=device) for _ in layers]
        self.values = [torch.empty(value_shape, dtype=self.dtype, device=device) for _ in layers]

        scaled = layers if kv_type == "int8" else range(0)
        scale_shape = (blocks, heads, BLOCK_SIZE)
        self.key_scales = [torch.empty(scale_shape, dtype=torch.float32, device=device) for _ in scaled]
        self.value_scales = [torch.empty(scale_shape, dtype=torch.float32, device=device) for _ in scaled]

    def copy(self, source: int, target: int) -> None:
        """Make block `target` hold what block `source` holds."""
        for tensor in (*self.keys, *self.values, *self.key_scales, *self.value_scales):
            tensor[target] = tensor[source]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots int64 [T]."""
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        if self.key_scales:
            k, self.key_scales[layer][block, :, offset] = _quantize(k)
            v, self.value_scales[layer][block, :, offset] = _quantize(v)
        self.keys[layer][block, :, :, offset] = k.to(self.dtype)
        self.values[layer][block, :, offset] = v.to(self.dtype)

    def gather(self, layer: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [kv_heads, head_dim, length] and V [kv_heads, length, head_dim] of the blocks in table, int64 [n]."""
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
