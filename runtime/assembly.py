"""Puts an engine together: cache, block pool, scheduler, operations, and the disk tier when there is to be one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import numpy as np

from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.native import NativeKernel
from infer.quant.kernels.native_abi import library_path
from infer.runtime.config import EngineConfig, ModelConfig
from infer.runtime.device import available_memory
from infer.runtime.engine import Engine
from infer.runtime.errors import InferError, UsageError
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.disk.store import PrefixStore, StoreConfig
from infer.runtime.kvcache.identity import KVIdentity
from infer.runtime.kvcache.paged import PagedKVCache, block_bytes
from infer.runtime.kvcache.prefix import PrefixCache
from infer.runtime.kvcache.tier import DiskTier, PrefillRate
from infer.runtime.kvcache.window import blocks_held
from infer.runtime.model_runner import ModelRunner
from infer.runtime.models.base import Model
from infer.runtime.models.ops import Ops
from infer.runtime.scheduler import Scheduler

log = logging.getLogger(__name__)

# What a good kernel reaches, in operations per second: only decides, before anything was measured, whether reading a
# block is worth it, and errs on the side of computing.
ASSUMED_RATE = {"cpu": 1e12, "cuda": 1e14}
OPEN_WAIT_S = 0.25  # enough where the hash is known, and for hashing a small file


def plan_cache(config: EngineConfig, shape: ModelConfig, ctx: int, device: Device) -> tuple[str, int]:
    """KV type and number of blocks. Raises UsageError when they cannot hold one context or do not fit the memory."""
    kv_type = config.kv_type if config.kv_type != "auto" else "f16" if device.type == "cpu" else "bf16"
    least = blocks_held(shape.cache_window, config.prefill_chunk, ctx)
    blocks = config.kv_blocks or least
    if blocks < least:
        raise UsageError(f"{blocks} KV blocks are too few: a context of {ctx} tokens needs {least}")
    needed = blocks * block_bytes(shape, kv_type)
    free = available_memory(device)
    if needed > free:
        raise UsageError(
            f"a context of {ctx} tokens needs {needed / 1e9:.1f} GB for keys and values, "
            f"{free / 1e9:.1f} GB are free on {device}; use a smaller --ctx"
        )
    return kv_type, blocks


def build_engine(
    model: Model,
    kernel: WeightKernel,
    config: EngineConfig,
    cache: PagedKVCache,
    *,
    ctx: int,
    path: Path,
    weights_hash: Callable[[], str],
    torch_version: str,
) -> Engine:
    """path: of the model, to label its part of the disk cache. weights_hash: may take a pass over the file.
    torch_version: of the torch that had to do with the weights, if any."""
    pool = BlockPool(cache.blocks)
    shape = model.config
    window = shape.cache_window
    prefix = PrefixCache(pool, window) if config.prefix_cache else None
    rate = PrefillRate(2 * _parameters(shape) / ASSUMED_RATE[kernel.device.type])
    tier = None
    if prefix is not None and config.cache_dir is not None:
        store = _open_store(
            config,
            cache,
            lambda: kv_identity(weights_hash(), shape, kernel, cache, config.quant, torch_version),
            shape.name or path.stem,
            path,
        )
        tier = DiskTier(store, pool, prefix, cache, rate, window)
    scheduler = Scheduler(
        pool,
        prefix,
        budget=config.prefill_chunk,
        max_sequences=config.max_sequences,
        window=window,
        restore=tier.restore if tier is not None else lambda _: None,
    )
    runner = ModelRunner(model, create_ops(kernel, cache), cache)
    return Engine(runner, scheduler, ctx=ctx, vocab_size=shape.vocab_size, rate=rate, tier=tier)


def create_ops(kernel: WeightKernel, cache: PagedKVCache) -> Ops:
    """Exact kernels come with exact operations around them."""
    if isinstance(kernel, NativeKernel):
        from infer.runtime.models.native_ops import NativeOps

        return NativeOps(kernel, cache)
    from infer.quant.kernels.tensor_kernel import TensorKernel
    from infer.runtime.attention.factory import create_attention
    from infer.runtime.models.torch_ops import TorchOps

    if not isinstance(kernel, TensorKernel):
        raise TypeError(f"no operations for {type(kernel).__name__}")
    return TorchOps(kernel, create_attention("reference" if kernel.exact else "torch"), cache)


def kv_identity(
    weights: str,
    shape: ModelConfig,
    kernel: WeightKernel,
    cache: PagedKVCache,
    quant: str | None,
    torch_version: str,
) -> KVIdentity:
    """Everything that decides a K or V. The native library counts by its own bytes; torch decodes and rounds weights
    that it cannot read, and numpy makes the rope tables."""
    version = str(kernel.version)
    if isinstance(kernel, NativeKernel):
        with library_path().open("rb") as library:
            version += "-" + hashlib.file_digest(library, "sha256").hexdigest()[:16]
    return KVIdentity(
        weights=weights,
        architecture=shape.architecture,
        rope=asdict(shape.rope),
        layout=shape.kv_layout,
        quantization=quant or "as stored",
        kv_type=cache.kv_type,
        kernel=kernel.name,
        kernel_version=version,
        torch=torch_version,
        numpy=np.__version__,
    )


def _open_store(
    config: EngineConfig, cache: PagedKVCache, identify: Callable[[], KVIdentity], name: str, path: Path
) -> Future[PrefixStore]:
    """Opens the store beside the first steps: hashing the weights takes a while when they were never seen before."""
    future: Future[PrefixStore] = Future()

    def work() -> None:
        try:
            identity = identify()
            root = config.cache_dir
            if root is None:
                raise ValueError("no folder")
            settings = StoreConfig(
                root=root, limit_bytes=config.cache_limit, read_only=config.cache_read_only
            )
            store = PrefixStore(
                settings,
                identity.fingerprint(),
                cache.bytes_per_token,
                log.warning,
                label=identity.label(name, str(path)),
            )
            future.set_result(store)
        except (InferError, OSError, ValueError) as error:
            log.warning("the prompt cache is off: %s", error)
            future.set_exception(error)

    thread = Thread(target=work, name="kv-store-open", daemon=True)
    thread.start()
    thread.join(timeout=OPEN_WAIT_S)
    return future


def _parameters(shape: ModelConfig) -> int:
    """Weights that multiply each token, roughly."""
    attention = 2 * shape.head_dim * (shape.head_count + shape.head_count_kv)
    moe = shape.moe
    mlp = 3 * (shape.feed_forward_length if moe is None else moe.used * moe.inner + moe.shared)
    return shape.block_count * shape.embedding_length * (attention + mlp)
