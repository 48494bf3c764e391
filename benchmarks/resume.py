"""What the disk cache saves and costs: the same long prompt cold, stored and resumed, each in a new process.

Runs alternate (cold without the cache, cold while storing, resumed), medians are printed. With --llama-bin the same is
asked of llama.cpp's `llama-completion --prompt-cache`, wall time of the whole process.

    python benchmarks/resume.py -m model.gguf [--tokens 2000] [--runs 5] [--llama-bin DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INFER = [sys.executable, "-c", "from infer.cli.start import main; main()"]
SENTENCE = (
    "the river runs past old mills and quiet fields while people walk home under tall trees "
    "at dusk and nobody speaks of the long dry summer"
)


def prompt_of(model: str, tokens: int) -> str:
    """A text of that many tokens, within one."""
    low, high = 1, 4 * tokens
    while low < high:
        middle = (low + high + 1) // 2
        text = text_of(middle)
        command = [*INFER, "tokenize", "-m", model, "--raw", "-"]
        out = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        low, high = (middle, high) if len(out.stdout.split()) <= tokens else (low, middle - 1)
    return text_of(low)


def text_of(words: int) -> str:
    """Lines that repeat, numbered, so that no two places are alike."""
    source = SENTENCE.split()
    plain = (f"{source[i % len(source)]}{i // len(source) if i % 7 == 0 else ''}" for i in range(words))
    return " ".join(plain)


def answer(model: str, prompt: Path, cache: Path | None, count: int) -> dict[str, object]:
    flags = ["--no-cache"] if cache is None else ["--cache-dir", str(cache)]
    command = [
        *INFER,
        "run",
        "-m",
        model,
        "--raw",
        "--no-stdin",
        "--temp",
        "0",
        "-n",
        str(count),
        "--ignore-eos",
        "--json",
    ]
    started = time.perf_counter()
    out = subprocess.run([*command, *flags, "-f", str(prompt)], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(out.stdout)
    found["wall_s"] = time.perf_counter() - started
    return found


def llama(folder: Path, model: str, prompt: Path, cache: Path) -> float:
    command = [folder / "llama-completion", "-m", model, "-f", prompt, "-n", "1", "-t", "2", "-c", "4096", "-no-cnv",
               "--prompt-cache", cache, "--temp", "0"]  # fmt: skip
    started = time.perf_counter()
    subprocess.run(list(map(str, command)), capture_output=True, check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--llama-bin", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}

    def note(name: str, value: object) -> None:
        rows.setdefault(name, []).append(float(str(value)))

    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder, "prompt.txt")
        prompt.write_text(prompt_of(options.m, options.tokens))
        texts = set()
        for run in range(options.runs):
            cache = Path(folder, f"cache{run}")
            cold = answer(options.m, prompt, None, options.decode)
            stored = answer(options.m, prompt, cache, options.decode)
            resumed = answer(options.m, prompt, cache, options.decode)
            texts |= {str(found["text"]) for found in (cold, stored, resumed)}
            for name, found in (("cold", cold), ("stored", stored), ("resumed", resumed)):
                timings = found["timings"]
                note(f"{name}: first token s", timings["ttft_s"])
                note(f"{name}: per token ms", timings["tpot_s"] * 1000)
                note(f"{name}: process s", found["wall_s"])
            note("resumed / cold, first token", resumed["timings"]["ttft_s"] / cold["timings"]["ttft_s"])
            note("stored / cold, first token", stored["timings"]["ttft_s"] / cold["timings"]["ttft_s"])
            note("stored / cold, per token", stored["timings"]["tpot_s"] / cold["timings"]["tpot_s"])
            used = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
            note("bytes stored / token", used / (resumed["usage"]["prompt_tokens"] + options.decode))
            one = answer(options.m, prompt, cache, 1)
            note("resumed, 1 token: process s", one["wall_s"])
            if options.llama_bin is not None:
                state = Path(folder, f"llama{run}")
                note("llama.cpp cold: process s", llama(options.llama_bin, options.m, prompt, state))
                note("llama.cpp resumed: process s", llama(options.llama_bin, options.m, prompt, state))
                state.unlink(missing_ok=True)
            shutil.rmtree(cache)
        print(
            f"{cold['usage']['prompt_tokens']} tokens, {options.runs} runs; all answers equal: {len(texts) == 1}"
        )
        for name, values in rows.items():
            print(
                f"{name:52} median {statistics.median(values):9.4f}   {min(values):9.4f} … {max(values):9.4f}"
            )


if __name__ == "__main__":
    main()
