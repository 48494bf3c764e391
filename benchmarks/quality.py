"""What quantized arithmetic costs in quality: mean KL divergence from the same weights computed in float32.

Over the windows and scored positions of `infer perplexity`, the model under test (a kernel, its KV cache) is
compared with kernel `float32`, which dequantizes every weight and rounds nothing but floats: perplexity of both, mean
KL(float32 || test) in nats, and how often both like the same token best. What the quantization of the weights has
lost is in both; what shows is what the kernel's arithmetic adds.

With --llama-bin the same is asked of llama.cpp: the weights, dequantized into an F32 file, give the base of
`llama-perplexity --kl-divergence`, the file itself is the test. llama.cpp stores its base in 16 bits a probability,
so its figures have a small floor of their own.

    python benchmarks/quality.py -m model.gguf -f text.txt --chunks 8 [--llama-bin DIR]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch

from infer.runtime.batch import build_batch
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.errors import InferError
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.perplexity import Window, cut_windows, scored_from
from infer.runtime.request import Request, Sequence
from infer.samplers.params import SamplingParams

CHUNK = 512  # prompt tokens computed at a time


@dataclass
class Divergence:
    """Sums over the scored positions. All in nats."""

    kl: list[float] = field(default_factory=list)
    same_top: int = 0
    reference_nll: float = 0.0
    test_nll: float = 0.0

    def add(self, reference: torch.Tensor, test: torch.Tensor, tokens: torch.Tensor) -> None:
        """reference, test: logits float32 [rows, vocab]; tokens int64 [rows]: what really came."""
        p, q = torch.log_softmax(reference.double(), dim=1), torch.log_softmax(test.double(), dim=1)
        self.kl += (p.exp() * (p - q)).sum(dim=1).tolist()
        self.same_top += int((reference.argmax(dim=1) == test.argmax(dim=1)).sum())
        self.reference_nll -= float(p.gather(1, tokens[:, None]).sum())
        self.test_nll -= float(q.gather(1, tokens[:, None]).sum())

    def line(self, name: str) -> str:
        count, kl = len(self.kl), np.array(self.kl)
        return (
            f"| {name} | {np.exp(self.reference_nll / count):.4f} | {np.exp(self.test_nll / count):.4f} "
            f"| {kl.mean():.6f} ± {kl.std() / np.sqrt(count):.6f} | {self.same_top / count:.2%} |"
        )


def scored_logits(model: LoadedModel, window: Window) -> Iterator[tuple[torch.Tensor, range]]:
    """(logits [rows, vocab], the positions whose tokens they score), chunk by chunk."""
    request = Request("quality", window, SamplingParams(max_tokens=0), score_from=scored_from(window))
    seq = Sequence(request, list(window), block_table=list(range(-(-len(window) // BLOCK_SIZE))))
    while seq.num_computed < len(window):
        count = min(CHUNK, len(window) - seq.num_computed)
        scored = seq.scored(count)
        logits = torch.as_tensor(model.engine.runner.forward(build_batch([(seq, count)])))
        if scored:
            yield logits[: len(scored)], scored
        seq.num_computed += count


def compare(reference: LoadedModel, test: LoadedModel, windows: list[Window]) -> Divergence:
    found = Divergence()
    for window in windows:
        pairs = zip(scored_logits(reference, window), scored_logits(test, window), strict=True)
        for (expected, scored), (given, _) in pairs:
            tokens = torch.tensor([window[position] for position in scored])
            for start in range(0, len(scored), 64):  # float64 of a whole chunk would be gigabytes
                part = slice(start, start + 64)
                found.add(expected[part], given[part], tokens[part])
    return found


def write_float32(source: Path, target: Path) -> None:
    """The same model with every tensor dequantized to F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = entry.types[0]
        inner = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.write_tensor_data(values.reshape([int(size) for size in reversed(tensor.shape)]))
    writer.close()


def llama_perplexity(options: argparse.Namespace, model: Path, base: Path, *rest: str) -> str:
    """Everything llama-perplexity says. Ends this program when it fails."""
    command = [str(options.llama_bin / "llama-perplexity"), "-m", str(model), "-f", str(options.file)]
    command += ["-c", str(options.ctx), "-b", str(options.ctx), "--chunks", str(options.chunks)]
    command += ["-t", str(options.threads), "-ngl", "0", "--kl-divergence-base", str(base), *rest]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        sys.exit(f"llama-perplexity: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout + done.stderr


def llama_line(options: argparse.Namespace) -> str:
    """llama.cpp's figures for the same question, as a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        dense, base = Path(folder) / "float32.gguf", Path(folder) / "base"
        write_float32(options.model, dense)
        llama_perplexity(options, dense, base, "-ctk", "f32", "-ctv", "f32")
        text = llama_perplexity(options, options.model, base, "--kl-divergence")
    return parse_divergence(text)


def parse_divergence(text: str) -> str:
    """The row of the table that llama-perplexity's summary makes. Ends this program when it has none."""

    def number(label: str) -> tuple[str, str]:
        found = re.search(rf"{label}\s*:\s*([-\d.e]+)\s*±\s*([-\d.e]+)", text)
        if found is None:
            sys.exit(f"llama-perplexity printed no line {label!r}")
        return found[1], found[2]

    (reference, _), (test, _) = number(r"Mean PPL\(base\)"), number(r"Mean PPL\(Q\)")
    mean, error = number("Mean +KLD")
    same, _ = number("Same top p")
    return (
        f"| llama.cpp | {float(reference):.4f} | {float(test):.4f} | {mean} ± {error} | {float(same):.2f}% |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("-f", "--file", type=Path, required=True, help="a text of at least two windows")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernel", default="auto", help="the kernel under test")
    parser.add_argument("--kv-type", default="auto", help="of the test; the reference has f32")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-perplexity, to ask it too")
    options = parser.parse_args()

    common = {"device": "cpu", "threads": options.threads, "ctx": options.ctx, "prefix_cache": False}
    with tempfile.TemporaryDirectory() as memo:
        try:
            exact = EngineConfig(**common, kernel="float32", kv_type="f32")
            reference = load_model(options.model, exact, memo_dir=Path(memo))
            under_test = EngineConfig(**common, kernel=options.kernel, kv_type=options.kv_type)
            test = load_model(options.model, under_test, memo_dir=Path(memo))
            text = options.file.read_text(encoding="utf-8")
            windows = cut_windows(test.tokenizer, text, options.ctx, options.chunks)
        except (InferError, OSError) as error:
            sys.exit(str(error))
        found = compare(reference, test, windows)
        print("| arithmetic | perplexity in float32 | perplexity | KL divergence, nats | same best token |")
        print("|---|---:|---:|---:|---:|")
        print(found.line(f"infer, kernel {test.kernel}, KV {options.kv_type}"), flush=True)
        reference.close()
        test.close()
    if options.llama_bin:
        print(llama_line(options))
    print(
        f"\n{options.model.name}: {len(found.kl)} positions in {len(windows)} windows of {options.ctx} tokens."
    )


if __name__ == "__main__":
    main()
