"""From a path to something that answers: checkpoint, tokenizer, weights, cache and engine, put together."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from infer.quant.kernels.base import WeightKernel, create_kernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.native import available as native_available
from infer.quant.kernels.status import cpu_kernel
from infer.runtime.assembly import build_engine, plan_cache
from infer.runtime.checkpoint.base import Checkpoint
from infer.runtime.checkpoint.metadata import get_float, get_int
from infer.runtime.config import EngineConfig, ModelConfig
from infer.runtime.device import available_cores, resolve_device
from infer.runtime.engine import Engine
from infer.runtime.errors import ModelError, UsageError
from infer.runtime.heap import keep_much
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.models.base import WeightLoader
from infer.runtime.models.registry import resolve_model
from infer.runtime.preload import Preload
from infer.runtime.store.files import human_size
from infer.runtime.store.fingerprint import fingerprint

if TYPE_CHECKING:
    from infer.runtime.tokenizer.base import Tokenizer
    from infer.runtime.tokenizer.chat_template import ChatTemplate

log = logging.getLogger(__name__)

#: general.sampling.* of GGUF → SamplingParams field
_SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repeat_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class LoadedModel:
    """Everything a command needs to run prompts. load_s: seconds since the file was opened, what is imported meanwhile
    included."""

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
    chat_template: str | Literal[False] | None = None,
    pre: str | None = None,
    memo_dir: Path,
    on_progress: Callable[[int, int], None] | None = None,
    preload: Preload | None = None,
) -> LoadedModel:
    """chat_template, pre: as Preload has them.

    preload: begun with the same arguments before this was imported; it is closed. memo_dir: where content
    hashes are remembered. on_progress(done, total) counts bytes of weights. Raises ModelError and its kin.
    """
    with closing(preload or Preload(path, config, chat_template=chat_template, pre=pre)) as opened:
        checkpoint, text, started = opened.checkpoint, opened.text, opened.started
        furthest = 0

        def progress(done: int, total: int) -> None:
            if text.done():
                text.result()  # what is wrong with the vocabulary need not wait for the weights
            nonlocal furthest
            furthest = max(done, furthest)
            if on_progress is not None:
                on_progress(furthest, total)

        family, model_config = resolve_model(checkpoint)
        device = resolve_device(config.device)
        threads = config.threads or available_cores()
        kernel = _create_kernel(config, device, threads)
        ctx, warnings = _context(config, model_config)
        kv_type, blocks = plan_cache(config, model_config, ctx, device)
        if kernel.name == "native":
            ready = opened.weights(threads, progress)
        else:
            opened.stop()
            ready = {}
        loader = WeightLoader(checkpoint, kernel, config, progress, threads, ready)
        try:
            model = family(model_config, loader, ctx)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            raise ModelError(
                f"{path}: the weights do not fit the memory of {device}; use --device cpu"
            ) from None
        loader.finish()
        tokenizer, template = text.result()
        if loader.expanded:
            warnings += (_expansion(loader.expanded),)
        files = checkpoint.files
        engine = build_engine(
            model,
            kernel,
            config,
            PagedKVCache(model_config, blocks, kv_type, device),
            ctx=ctx,
            path=path,
            weights_hash=lambda: fingerprint(files, memo_dir),
            torch_version=loader.torch_version,
        )
        quantization = quantization_mix(checkpoint)
        defaults = _sampling_defaults(checkpoint.metadata)
        if config.quant and not _has_float_matrix(checkpoint):
            warnings += (
                f"--quant {config.quant} rounds float weights, and this file has none: it runs as stored",
            )
    del opened, checkpoint, loader, ready  # and with them the vocabulary's strings
    keep_much()
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
        kernel=_kernel_line(kernel, config),
        exact=kernel.exact,
        load_s=time.perf_counter() - started,
        warnings=tokenizer.warnings + warnings,
        _fingerprint=lambda: fingerprint(files, memo_dir),
    )


def quantization_mix(checkpoint: Checkpoint) -> str:
    """The tensor types by their share of bytes, largest first: "Q4_K 68 % + Q6_K 32 %"."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.type] += tensor.nbytes
    total = sizes.total()
    shares = [(name, size / total) for name, size in sizes.most_common() if size / total >= 0.01]
    return " + ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in shares)


def _expansion(types: Mapping[str, tuple[int, int]]) -> str:
    """types: bytes in the file and in memory."""
    stored, held = (human_size(sum(sizes)) for sizes in zip(*types.values(), strict=True))
    less = "; --quant int8 or int4 takes less" if "F8_E4M3" in types else ""
    return f"{', '.join(types)} weights are unpacked on load: {held} in memory instead of {stored}{less}"


def _has_float_matrix(checkpoint: Checkpoint) -> bool:
    return any(
        tensor.type in ("F32", "F16", "BF16", "F8_E4M3") and len(tensor.shape) > 1
        for tensor in checkpoint.tensors.values()
    )


def _create_kernel(config: EngineConfig, device: Device, threads: int) -> WeightKernel:
    name = config.kernel
    if name == "auto":
        name = "native" if device.type == "cpu" and native_available() else "torch"
    if config.isa is not None and name != "native":
        raise UsageError(
            f"--isa {config.isa} is for the native kernel, and {name} is in use: drop one of them"
        )
    try:
        return create_kernel(name, device, threads, config.isa)
    except (ValueError, OSError) as error:
        raise UsageError(f"--kernel {name}: {error}") from None


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether CUDA raised it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _kernel_line(kernel: WeightKernel, config: EngineConfig) -> str:
    """The kernel in use; where torch had to stand in for the native one, why."""
    if kernel.name == "torch" and config.kernel == "auto" and kernel.device.type == "cpu":
        return cpu_kernel()
    return kernel.description


def _context(config: EngineConfig, model: ModelConfig) -> tuple[int, tuple[str, ...]]:
    if config.ctx is None:
        return model.context_length, ()
    if config.ctx <= model.context_length:
        return config.ctx, ()
    if model.rope.scaling == "dynamic":
        raise UsageError(
            f"--ctx {config.ctx} is past the {model.context_length} positions the model was made for, where its "
            "dynamic rope scaling turns every token by the length of the text: no position could be reused; "
            f"give --ctx {model.context_length} or less"
        )
    warning = f"--ctx {config.ctx} is past the {model.context_length} positions the model was made for"
    return config.ctx, (warning,)


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
