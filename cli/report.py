"""The same facts about one answer twice: the object of `--json`, and the lines of `--stats`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from infer.runtime.store.files import human_size

if TYPE_CHECKING:
    from infer.runtime.generation import Generation
    from infer.runtime.loader import LoadedModel
    from infer.runtime.request import TokenLogprob
    from infer.runtime.tokenizer.base import Tokenizer


def report_object(
    model: LoadedModel, generation: Generation, seed: int, *, thinking: bool = True
) -> dict[str, object]:
    """What `--json` prints. `logprobs` is there only if it was asked for, `thinking` only if there is any to show."""
    reason = generation.finish_reason
    report: dict[str, object] = {
        "text": generation.text,
        "ids": list(generation.ids),
        "finish_reason": None if reason is None else str(reason),
        "stop_reason": generation.stop_reason,
        "usage": generation.stats.usage(),
        "cache": generation.stats.cache(),
        "timings": generation.stats.timings(),
        "model": model_object(model),
        "seed": seed,
        "device": model.device,
        "exact": model.exact,
    }
    if generation.thinking and thinking:
        report["thinking"] = generation.thinking
    if generation.logprobs:
        report["logprobs"] = [logprob_object(item, model.tokenizer) for item in generation.logprobs]
    return report


def model_object(model: LoadedModel) -> dict[str, object]:
    """Which model it was. The fingerprint may cost a pass over the file."""
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "architecture": model.config.architecture,
        "quantization": model.quantization,
    }


def logprob_object(item: TokenLogprob, tokenizer: Tokenizer) -> dict[str, object]:
    """`{"id", "token", "logprob", "top": […]}`; null for an impossible token, since JSON has no -inf."""

    def entry(token: int, logprob: float) -> dict[str, object]:
        finite = math.isfinite(logprob)
        return {"id": token, "token": tokenizer.piece(token), "logprob": logprob if finite else None}

    return {**entry(item.token_id, item.logprob), "top": [entry(*pair) for pair in item.top]}


def stats_lines(model: LoadedModel, generation: Generation, seed: int) -> list[str]:
    """`--stats`: one fact a line, name first."""
    stats, stop = generation.stats, generation.stop_reason
    computed = stats.prompt_tokens - stats.cached_tokens
    facts = {
        "model": f"{model.name} ({model.config.architecture}, {model.quantization})",
        "prompt": f"{stats.prompt_tokens} tokens, {stats.cached_tokens} cached",
        "cache": f"{stats.cached_memory_tokens} tokens from memory, {stats.cached_disk_tokens} from disk "
        f"({human_size(stats.loaded_bytes)} in {stats.loaded_s:.3f} s), {stats.saved_s:.2f} s saved",
        "answer": f"{stats.completion_tokens} tokens",
        "finish": f"{generation.finish_reason}" + ("" if stop is None else f" ({stop})"),
        "load": f"{stats.load_s:.2f} s",
        "tokenize": f"{stats.tokenize_s:.3f} s",
        "prefill": f"{stats.prefill_s:.2f} s, {_rate(computed, stats.prefill_s)}",
        "first token": f"{stats.ttft_s:.2f} s",
        "decode": f"{stats.decode_s:.2f} s, {_rate(stats.completion_tokens - 1, stats.decode_s)}",
        "device": f"{model.device}, kernel {model.kernel}, exact: {str(model.exact).lower()}",
        "seed": str(seed),
    }
    return [f"{name + ':':<13}{value}" for name, value in facts.items()]


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tok/s" if tokens > 0 and seconds > 0 else "- tok/s"


def peak_memory() -> int | None:
    """Peak resident memory of this process in bytes; None where the platform does not say."""
    try:
        import resource
    except ImportError:
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
