"""Real model files against an independent implementation: the same windows of a text through `transformers` in float32.

The reference reads the file with transformers' own GGUF reader: `gguf` dequantizes, the configuration and the layout of
the weights are what transformers makes of them; nothing of this project takes part but the tokenizer. Over the windows
and scored positions of `infer perplexity`, two of this project's paths are compared with it: the default one, whose
activations and KV cache are quantized, and kernel `float32`, which rounds nothing but floats and shows by its distance
whether the same model is computed at all. Perplexity of both and their ratio, mean KL(transformers || infer) in nats,
how often both like the same token best.

One model is in memory at a time: 4 bytes a weight, and of the reference's logits 4 · vocabulary · ctx / 2 a window.

    python benchmarks/real_models.py -m smollm2.gguf -m gemma3.gguf [-f text.txt] [--ctx 1024] [--chunks 2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from quality import Divergence, scored_logits

from infer.runtime.config import EngineConfig
from infer.runtime.errors import InferError
from infer.runtime.loader import load_model
from infer.runtime.perplexity import Window, cut_windows, scored_from
from infer.runtime.tokenizer.base import Tokenizer

LICENSE = Path(__file__).parent.parent / "LICENSE"  # the same text on every machine
PATHS = {"native": "auto", "float32": "f32"}  # kernel → type of its KV cache
SLICE = 64  # positions compared at a time: float64 of a whole window would be gigabytes


def reference_logits(path: Path, windows: list[Window]) -> list[torch.Tensor]:
    """What transformers computes for the scored tokens: logits float32 [scored, vocab] of each window."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([window]), logits_to_keep=len(window) - scored_from(window) + 1).logits[0, :-1]
            for window in windows
        ]


def compare(
    path: Path, config: EngineConfig, windows: list[Window], expected: list[torch.Tensor]
) -> Divergence:
    found = Divergence()
    with tempfile.TemporaryDirectory() as memo:
        model = load_model(path, config, memo_dir=Path(memo))
        for window, reference in zip(windows, expected, strict=True):
            given = torch.cat([logits.clone() for logits, _ in scored_logits(model, window)])
            tokens = torch.tensor(window[scored_from(window) :])
            for rows in zip(*(rows.split(SLICE) for rows in (reference, given, tokens)), strict=True):
                found.add(*rows)
        model.close()
    return found


def line(model: str, kernel: str, found: Divergence) -> str:
    count, kl = len(found.kl), np.array(found.kl)
    given, reference = np.exp(found.test_nll / count), np.exp(found.reference_nll / count)
    return (
        f"| {model} | {kernel} | {reference:.4f} | {given:.4f} | {given / reference:.5f} "
        f"| {kl.mean():.2e} ± {kl.std() / np.sqrt(count):.1e} | {found.same_top / count:.2%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m", "--model", type=Path, action="append", required=True, help="GGUF file; repeatable"
    )
    parser.add_argument(
        "-f", "--file", type=Path, default=LICENSE, help="a text; this project's license if not given"
    )
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--chunks", type=int, default=2, help="most windows (default: 2)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    print(
        "| model | kernel | perplexity, transformers | infer | ratio | KL divergence, nats | same best token |"
    )
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    try:
        text = options.file.read_text(encoding="utf-8")
        for path in options.model:
            windows = cut_windows(tokenizer_of(path), text, options.ctx, options.chunks)
            expected = reference_logits(path, windows)
            for kernel, kv_type in PATHS.items():
                config = EngineConfig(
                    device="cpu", threads=options.threads, ctx=options.ctx, prefix_cache=False, kernel=kernel,
                    kv_type=kv_type,
                )  # fmt: skip
                print(line(path.name, kernel, compare(path, config, windows, expected)), flush=True)
    except (InferError, OSError) as error:
        sys.exit(str(error))
    print(
        f"\n{options.file.name}, at most {options.chunks} windows of {options.ctx} tokens, second halves scored."
    )


def tokenizer_of(path: Path) -> Tokenizer:
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.tokenizer.load import load_tokenizer

    with open_checkpoint(path) as checkpoint:
        return load_tokenizer(checkpoint.metadata)


if __name__ == "__main__":
    main()
