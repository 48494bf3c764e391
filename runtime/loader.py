"""From a path to something that answers: checkpoint, tokenizer, weights, cache and engine, put together."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from infer.quant.kernels.base import WeightKernel, create_kernel
from infer.quant.kernels.native import available as native_available
from infer.runtime.attention.factory import create_attention
from infer.runtime.checkpoint.base import Checkpoint
from infer.runtime.checkpoint.metadata import get_float, get_int
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.config import BLOCK_SIZE, EngineConfig, ModelConfig
from infer.runtime.device import available_cores, available_memory, resolve_device
from infer.runtime.engine import Engine
from infer.runtime.errors import ModelError, UsageError
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.kvcache.prefix import PrefixCache
from infer.runtime.model_runner import ModelRunner
from infer.runtime.models.base import Model, WeightLoader
from infer.runtime.models.ops import Ops
from infer.runtime.models.registry import resolve_model
from infer.runtime.models.torch_ops import TorchOps
from infer.runtime.scheduler import Scheduler
from infer.runtime.store.fingerprint import fingerprint
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.chat_template import ChatTemplate
from infer.runtime.tokenizer.load import load_chat_template, load_tokenizer

log = logging.getLogger(__name__)

#: general.sampling.* of GGUF → SamplingParams field
_SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repeat_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class LoadedModel:
    """Everything a command needs to run prompts. load_s: seconds from the first byte to ready."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    config: ModelConfig
    sampling_defaults: Mapping[str, float | int]
    name: str
    quantization: str
    device: str
    kernel: str
    exact: bool
    load_s: float
    warnings: tuple[str, ...]
    _fingerprint: Callable[[], str]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file's bytes, remembered between runs; the first time costs a pass over the file."""
        return self._fingerprint()

    def close(self) -> None:
        """Free weights and cache."""
        self.engine.close()


def load_model(
    path: Path,
    config: EngineConfig,
    *,
    chat_template: str | None = None,
    pre: str | None = None,
    memo_dir: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """chat_template: a built-in name or a template file. pre: pre-tokenizer to use instead of the file's.

    memo_dir: where content hashes are remembered. on_progress(done, total) counts bytes of weights.
    Raises ModelError and its kin.
    """
    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.metadata, pre=pre)
        template = load_chat_template(checkpoint.metadata, tokenizer, chat_template)
        family, model_config = resolve_model(checkpoint)
        device = resolve_device(config.device)
        threads = config.threads or available_cores()
        torch.set_num_threads(threads)
        kernel = _create_kernel(config, device, threads)
        ctx, warnings = _context(config, model_config)
        kv_type, blocks = _plan_cache(config, model_config, ctx, device)
        loader = WeightLoader(checkpoint, kernel, config, on_progress or (lambda done, total: None))
        try:
            model = family(model_config, loader, ctx)
        except torch.OutOfMemoryError:
            raise ModelError(
                f"{path}: the weights do not fit the memory of {device}; use --device cpu"
            ) from None
        loader.finish()
        engine, exact = _build_engine(
            model, kernel, config, PagedKVCache(model_config, blocks, kv_type, device), ctx
        )
        quantization = quantization_mix(checkpoint)
        defaults = _sampling_defaults(checkpoint.metadata)
    if tokenizer.vocab_size != model_config.vocab_size:
        warnings += (
            f"the vocabulary has {tokenizer.vocab_size} tokens, the model's table {model_config.vocab_size}",
        )
    return LoadedModel(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=template,
        config=model_config,
        sampling_defaults=defaults,
        name=model_config.name or path.stem,
        quantization=quantization,
        device=str(device),
        kernel=kernel.name,
        exact=exact,
        load_s=time.perf_counter() - started,
        warnings=tokenizer.warnings + warnings,
        _fingerprint=lambda: fingerprint([path], memo_dir),
    )


def quantization_mix(checkpoint: Checkpoint) -> str:
    """The tensor types by their share of bytes, largest first: "Q4_K 68 % + Q6_K 32 %"."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.type] += tensor.nbytes
    total = sizes.total()
    shares = [(name, size / total) for name, size in sizes.most_common() if size / total >= 0.01]
    return " + ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in shares)


def _create_kernel(config: EngineConfig, device: torch.device, threads: int) -> WeightKernel:
    name = config.kernel
    if name == "auto":
        name = "native" if device.type == "cpu" and native_available() else "torch"
    try:
        return create_kernel(name, device, threads, config.isa)
    except (ValueError, OSError) as error:
        raise UsageError(f"--kernel {name}: {error}") from None


def _context(config: EngineConfig, model: ModelConfig) -> tuple[int, tuple[str, ...]]:
    if config.ctx is None:
        return model.context_length, ()
    if config.ctx <= model.context_length:
        return config.ctx, ()
    warning = f"--ctx {config.ctx} is past the {model.context_length} positions the model was made for"
    return config.ctx, (warning,)


def _plan_cache(config: EngineConfig, shape: ModelConfig, ctx: int, device: torch.device) -> tuple[str, int]:
    """KV type and number of blocks. Raises UsageError when they cannot hold one context or do not fit the memory."""
    kv_type = config.kv_type if config.kv_type != "auto" else "f16" if device.type == "cpu" else "bf16"
    blocks = config.kv_blocks or -(-ctx // BLOCK_SIZE)
    if blocks * BLOCK_SIZE < ctx:
        raise UsageError(
            f"{blocks} KV blocks hold {blocks * BLOCK_SIZE} tokens, less than a context of {ctx}"
        )
    needed = blocks * BLOCK_SIZE * shape.kv_bytes_per_token({"f32": 4, "int8": 1}.get(kv_type, 2))
    free = available_memory(device)
    if needed > free:
        raise UsageError(
            f"a context of {ctx} tokens needs {needed / 1e9:.1f} GB for keys and values, "
            f"{free / 1e9:.1f} GB are free on {device}; use a smaller --ctx"
        )
    return kv_type, blocks


def _build_engine(
    model: Model, kernel: WeightKernel, config: EngineConfig, cache: PagedKVCache, ctx: int
) -> tuple[Engine, bool]:
    pool = BlockPool(cache.blocks)
    prefix = PrefixCache(pool) if config.prefix_cache else None
    scheduler = Scheduler(pool, prefix, budget=config.prefill_chunk, max_sequences=config.max_sequences)
    runner = ModelRunner(model, _create_ops(kernel, cache), cache)
    engine = Engine(runner, scheduler, ctx=ctx, vocab_size=model.config.vocab_size)
    return engine, kernel.exact


def _create_ops(kernel: WeightKernel, cache: PagedKVCache) -> Ops:
    """Exact kernels come with exact operations around them."""
    if kernel.name == "native":
        from infer.quant.kernels.native import NativeKernel
        from infer.runtime.models.native_ops import NativeOps

        if isinstance(kernel, NativeKernel):
            return NativeOps(kernel, cache)
    return TorchOps(kernel, create_attention("reference" if kernel.exact else "torch"), cache)


def _sampling_defaults(metadata: Mapping[str, object]) -> dict[str, float | int]:
    """The file's own generation settings (`general.sampling.*`)."""
    found: dict[str, float | int] = {}
    for key, field in _SAMPLING.items():
        value = get_float(metadata, f"general.sampling.{key}", default=None)
        if value is not None:
            found[field] = value
    top_k = get_int(metadata, "general.sampling.top_k", default=None)
    if top_k is not None:
        found["top_k"] = top_k
    return found
