"""What writing the disk prefix cache costs an engine that goes on computing, in one process.

Rounds alternate between storing and not storing, of one engine whose store takes nothing in the latter: two engines
would differ by where their weights lie in memory. Every round computes new prompts of random tokens: one after which
the store is given time to finish, and two back to back, of which the second is measured, while the first still waits
to be written. Ratios are storing / without, of neighbouring rounds; run it on a quiet machine.

    python benchmarks/storing.py -m model.gguf [--tokens 2000] [--decode 64] [--runs 9]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.kvcache.disk.store import PrefixStore
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

WARM_UP = 64  # tokens


class Timing(NamedTuple):
    """Seconds of a prompt up to its first token, and of each token after that."""

    prefill_s: float
    token_s: float


class Round(NamedTuple):
    """written_s: from the end of the prompt that is alone until all of its full blocks are in the store."""

    alone: Timing
    back_to_back: Timing
    written_s: float


def answer(model: LoadedModel, seed: int, tokens: int, decode: int) -> Timing:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(model.config.vocab_size) for _ in range(tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=decode, ignore_eos=True)
    started = first = time.perf_counter()
    model.engine.add(Request(str(seed), prompt, sampling))
    count = 0
    while model.engine.has_unfinished():
        count += sum(len(output.new_ids) for output in model.engine.step())
        if count == 1 and first == started:
            first = time.perf_counter()
    return Timing(first - started, (time.perf_counter() - first) / (decode - 1))


def full_blocks(options: argparse.Namespace) -> int:
    return int((options.tokens + options.decode - 1) // BLOCK_SIZE)


def wait_for(folder: Path, blocks: int) -> float:
    """Seconds until the store holds so many full blocks. Raises TimeoutError after a minute."""
    started = time.perf_counter()
    while len(list(folder.glob(f"*/*/*-{BLOCK_SIZE}-*.kv"))) < blocks:
        if time.perf_counter() - started > 60:
            raise TimeoutError(f"the store does not come to {blocks} blocks")
        time.sleep(0.002)
    return time.perf_counter() - started


def measure(model: LoadedModel, folder: Path, options: argparse.Namespace, seed: int, before: int) -> Round:
    """before: full blocks in the store, which each of the three prompts adds to. A round without storing adds none."""
    storing, each = before >= 0, full_blocks(options)
    alone = answer(model, seed, options.tokens, options.decode)
    written_s = wait_for(folder, before + each) if storing else 0.0
    answer(model, seed + 1, options.tokens, options.decode)
    back_to_back = answer(model, seed + 2, options.tokens, options.decode)
    if storing:
        wait_for(folder, before + 3 * each)
    return Round(alone, back_to_back, written_s)


def without_storing() -> AbstractContextManager[object]:
    return mock.patch.object(PrefixStore, "needs", lambda *_: False)


def report(name: str, values: Iterable[float]) -> None:
    found = sorted(values)
    spread = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    print(
        f"{name:40} median {statistics.median(found):9.3f}   {found[0]:.3f} … {found[-1]:.3f}"
        f"   mean {statistics.fmean(found):.3f} ± {spread:.3f}"
    )


def compare(name: str, without: Iterable[Timing], storing: Iterable[Timing]) -> None:
    pairs = list(zip(without, storing, strict=True))
    for place, what in enumerate(("prefill", "per token")):
        report(f"{name}, {what}: ms without", (1e3 * old[place] for old, _ in pairs))
        report(f"{name}, {what}: storing / without", (new[place] / old[place] for old, new in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds in which the store opens")
    options = parser.parse_args()
    without: list[Round] = []
    storing: list[Round] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "cache")
        config = EngineConfig(cache_dir=folder, ctx=2 * (options.tokens + options.decode))
        model = load_model(options.m, config, memo_dir=Path(scratch))
        time.sleep(options.pause)
        answer(model, 0, WARM_UP, 4)
        before = WARM_UP // BLOCK_SIZE
        wait_for(folder, before)
        for run in range(options.runs):
            for store in (False, True) if run % 2 else (True, False):
                seed = 1 + 6 * run + 3 * store
                if store:
                    storing.append(measure(model, folder, options, seed, before))
                    before += 3 * full_blocks(options)
                else:
                    with without_storing():
                        without.append(measure(model, folder, options, seed, -1))
        model.close()
    compare("alone", (found.alone for found in without), (found.alone for found in storing))
    compare(
        "back to back", (found.back_to_back for found in without), (found.back_to_back for found in storing)
    )
    report("all written after, ms", (1e3 * found.written_s for found in storing))


if __name__ == "__main__":
    main()
