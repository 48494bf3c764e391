"""The memory behind the block ids: K and V of every layer, 64 positions a block. Imports no torch for the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infer.quant.kernels.arena import huge_pages
from infer.quant.kernels.device import Device
from infer.runtime.config import BLOCK_SIZE, ModelConfig

if TYPE_CHECKING:
    from infer.runtime.kvcache.tensors import KVTensors

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: bytes of a number
KV_TYPES = {"f16": 2, "bf16": 2, "f32": 4, "int8": 1}


@dataclass(frozen=True)
class BlockArray:
    """An array of a block, row after row. offset: bytes into the block; itemsize: bytes of a number; axis: of the
    positions."""

    offset: int
    itemsize: int
    shape: tuple[int, ...]
    axis: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class LayerArrays:
    """Where a block holds a layer. values: None for latent attention; scales: None but for int8."""

    keys: BlockArray
    values: BlockArray | None
    key_scales: BlockArray | None
    value_scales: BlockArray | None

    def __iter__(self) -> Iterator[BlockArray]:
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return (part for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


class PagedKVCache:
    """A block is one run of `block_bytes` bytes that holds all layers, so that it is copied, stored and read back
    whole. In it, layer after layer:

        keys     [kv_heads, head_dim, 64]   transposed: neighbouring positions are adjacent
        values   [kv_heads, 64, head_dim]

    With int8, value = code * scale, one float32 scale per head and position (largest magnitude / 127):

        key_scales, value_scales   [kv_heads, 64]

    Latent attention stores no values: the first latent_dim dimensions of a key are its value, with the key's scale.

    A slot is block * 64 + offset. On the CPU untouched blocks cost no memory: the system commits pages when written.
    """

    def __init__(self, config: ModelConfig, blocks: int, kv_type: str, device: Device) -> None:
        """Raises OSError when the system has no such address space."""
        self.blocks = blocks
        self.kv_type = kv_type
        self.device = device
        self.kv_heads, self.head_dim = config.head_count_kv, config.head_dim
        self.value_dim = config.latent_dim or config.head_dim
        self.layers = list(_layers(config, kv_type))
        self.block_bytes = sum(layer.nbytes for layer in self.layers)
        self.bytes_per_token = self.block_bytes // BLOCK_SIZE
        self._storage = _storage(blocks, self.block_bytes, device)  # uint8 [blocks, block_bytes]

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def address(self) -> int:
        """Where block 0 of a cache on the CPU lies."""
        found: int = self._storage.ctypes.data
        return found

    @cached_property
    def tensors(self) -> KVTensors:
        """K and V as torch sees them: the same memory."""
        from infer.runtime.kvcache.tensors import KVTensors

        return KVTensors(self, self._storage)

    def block(self, block: int) -> Bytes:
        """uint8 [block_bytes]: a block itself, of a cache on the CPU, else a copy."""
        found: Bytes = self._storage[block] if self.on_cpu else self._storage[block].cpu().numpy()
        return found

    def copy(self, source: int, target: int) -> None:
        """Make block `target` hold what block `source` holds."""
        self._storage[target] = self._storage[source]

    def read(self, block: int, tokens: int) -> Bytes:
        """The first `tokens` positions of a block, uint8 [tokens * bytes_per_token], copied: per layer K, V (and their
        scales) in the order above, each cut to those positions."""
        data = self.block(block)
        if tokens == BLOCK_SIZE:
            return data.copy()
        return np.concatenate([part.ravel().view(np.uint8) for part in self._beginnings(data, tokens)])

    def write(self, block: int, tokens: int, payload: Bytes) -> None:
        """Put what `read` gave into a block. Raises ValueError when the size does not fit."""
        if payload.nbytes != tokens * self.bytes_per_token:
            raise ValueError(f"{payload.nbytes} bytes are not {tokens} tokens of {self.bytes_per_token}")
        data = payload
        if tokens < BLOCK_SIZE:
            data = self.block(block)
            offset = 0
            for part in self._beginnings(data, tokens):
                part[...] = payload[offset : offset + part.nbytes].view(part.dtype).reshape(part.shape)
                offset += part.nbytes
        if not self.on_cpu:
            self.tensors.put(block, data)
        elif tokens == BLOCK_SIZE:
            self._storage[block] = data

    def _beginnings(self, block: Bytes, tokens: int) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Views [groups, tokens, numbers of a position] of the first positions of each array, as unsigned integers."""
        for part in (part for layer in self.layers for part in layer):
            numbers = block[part.offset : part.offset + part.nbytes].view(f"u{part.itemsize}")
            groups = math.prod(part.shape[: part.axis])
            yield numbers.reshape(groups, BLOCK_SIZE, -1)[:, :tokens]


def block_bytes(config: ModelConfig, kv_type: str) -> int:
    """Bytes of 64 positions of all layers."""
    return sum(layer.nbytes for layer in _layers(config, kv_type))


def _layers(config: ModelConfig, kv_type: str) -> Iterator[LayerArrays]:
    heads, dim, scaled = config.head_count_kv, config.head_dim, kv_type == "int8"
    offset = 0

    def take(itemsize: int, axis: int, *shape: int) -> BlockArray:
        nonlocal offset
        part = BlockArray(offset, itemsize, shape, axis)
        offset += part.nbytes
        return part

    for _ in range(config.block_count):
        keys = take(KV_TYPES[kv_type], 2, heads, dim, BLOCK_SIZE)
        values = None if config.latent else take(KV_TYPES[kv_type], 1, heads, BLOCK_SIZE, dim)
        key_scales = take(4, 1, heads, BLOCK_SIZE) if scaled else None
        value_scales = take(4, 1, heads, BLOCK_SIZE) if scaled and values is not None else None
        yield LayerArrays(keys, values, key_scales, value_scales)


def _storage(blocks: int, block_bytes: int, device: Device) -> Any:
    """uint8 [blocks, block_bytes]: an array on the CPU, else a tensor."""
    size = blocks * block_bytes
    if device.type == "cpu":
        return np.frombuffer(huge_pages(size), dtype=np.uint8)[:size].reshape(blocks, block_bytes)
    import torch

    return torch.empty((blocks, block_bytes), dtype=torch.uint8, device=str(device))
