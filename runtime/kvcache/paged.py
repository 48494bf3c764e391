"""The tensors behind the block ids: K and V of every layer, 64 positions a block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from infer.quant.kernels.arena import huge_pages
from infer.runtime.config import BLOCK_SIZE, ModelConfig

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

KV_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "int8": torch.int8}


class PagedKVCache:
    """A block is one run of `block_bytes` bytes that holds all layers, so that it is copied, stored and read back
    whole. Per layer, as views into it:

        keys[layer]    [blocks, kv_heads, head_dim, 64]   transposed: neighbouring positions are adjacent
        values[layer]  [blocks, kv_heads, 64, head_dim]

    With int8, value = code * scale, one float32 scale per head and position (largest magnitude / 127):

        key_scales[layer], value_scales[layer]   [blocks, kv_heads, 64]; empty lists for other types

    Latent attention stores no values: values[layer] is the first latent_dim dimensions of keys[layer] under another
    view, value_scales[layer] is key_scales[layer], and neither takes memory.

    A slot is block * 64 + offset. On the CPU untouched blocks cost no memory: the system commits pages when written.
    """

    def __init__(self, config: ModelConfig, blocks: int, kv_type: str, device: torch.device) -> None:
        self.blocks = blocks
        self.kv_type = kv_type
        self.dtype = KV_TYPES[kv_type]
        heads, dim, latent = config.head_count_kv, config.head_dim, config.latent_dim
        self.latent = latent > 0
        scale_bytes = 4 if kv_type == "int8" else 0
        self.bytes_per_token = config.kv_bytes_per_token(self.dtype.itemsize)
        self.bytes_per_token += config.block_count * heads * scale_bytes * (1 if latent else 2)
        self.block_bytes = self.bytes_per_token * BLOCK_SIZE
        size = blocks * self.block_bytes
        if device.type == "cpu":
            whole = torch.frombuffer(huge_pages(size), dtype=torch.uint8)
        else:
            whole = torch.empty(size, dtype=torch.uint8, device=device)
        self._storage = whole[:size].view(blocks, self.block_bytes)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.key_scales: list[torch.Tensor] = []
        self.value_scales: list[torch.Tensor] = []
        # of each array in a block: bytes of a number, how many groups of 64 positions, numbers of a position in a group
        self._arrays: list[tuple[int, int, int]] = []
        offset = 0

        def take(dtype: torch.dtype, axis: int, *shape: int) -> torch.Tensor:
            """axis: of the positions."""
            nonlocal offset
            size = math.prod(shape) * dtype.itemsize
            part = self._storage[:, offset : offset + size].view(dtype)
            offset += size
            self._arrays.append((dtype.itemsize, math.prod(shape[:axis]), math.prod(shape[axis + 1 :])))
            return part.view(blocks, *shape)

        for _ in range(config.block_count):
            self.keys.append(take(self.dtype, 2, heads, dim, BLOCK_SIZE))
            if latent:
                self.values.append(self.keys[-1][:, :, :latent].transpose(2, 3))
            else:
                self.values.append(take(self.dtype, 1, heads, BLOCK_SIZE, dim))
            if scale_bytes:
                self.key_scales.append(take(torch.float32, 1, heads, BLOCK_SIZE))
                scales = self.key_scales[-1] if latent else take(torch.float32, 1, heads, BLOCK_SIZE)
                self.value_scales.append(scales)

    @property
    def on_cpu(self) -> bool:
        return self._storage.device.type == "cpu"

    def block(self, block: int) -> Bytes:
        """uint8 [block_bytes]: a block itself, of a cache on the CPU."""
        return self._storage[block].numpy()

    def copy(self, source: int, target: int) -> None:
        """Make block `target` hold what block `source` holds."""
        self._storage[target] = self._storage[source]

    def read(self, block: int, tokens: int) -> Bytes:
        """The first `tokens` positions of a block, uint8 [tokens * bytes_per_token], copied: per layer K, V (and their
        scales) in the order above, each cut to those positions."""
        data = self._storage[block].cpu().numpy()
        if tokens == BLOCK_SIZE:
            return data.copy()
        return np.concatenate([part.ravel().view(np.uint8) for part in self._beginnings(data, tokens)])

    def write(self, block: int, tokens: int, payload: Bytes) -> None:
        """Put what `read` gave into a block. Raises ValueError when the size does not fit."""
        if payload.nbytes != tokens * self.bytes_per_token:
            raise ValueError(f"{payload.nbytes} bytes are not {tokens} tokens of {self.bytes_per_token}")
        data = payload
        if tokens < BLOCK_SIZE:
            data = self._storage[block].cpu().numpy()  # on the CPU the block itself
            offset = 0
            for part in self._beginnings(data, tokens):
                part[...] = payload[offset : offset + part.nbytes].view(part.dtype).reshape(part.shape)
                offset += part.nbytes
        if tokens == BLOCK_SIZE or not self.on_cpu:
            self._storage[block].copy_(torch.from_numpy(data))

    def _beginnings(self, block: Bytes, tokens: int) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Views [groups, tokens, numbers of a position] of the first positions of each array, as unsigned integers."""
        offset = 0
        for itemsize, groups, numbers in self._arrays:
            size = itemsize * groups * BLOCK_SIZE * numbers
            array = block[offset : offset + size].view(f"u{itemsize}").reshape(groups, BLOCK_SIZE, numbers)
            offset += size
            yield array[:, :tokens]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Write k and v [T, kv_heads, head_dim] to slots int64 [T]; v is None for latent attention."""
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        if self.key_scales:
            k, self.key_scales[layer][block, :, offset] = _quantize(k)
        self.keys[layer][block, :, :, offset] = k.to(self.dtype)
        if v is None:
            return
        if self.key_scales:
            v, self.value_scales[layer][block, :, offset] = _quantize(v)
        self.values[layer][block, :, offset] = v.to(self.dtype)

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
