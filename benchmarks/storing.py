"""What writing the disk prefix cache costs an engine that goes on computing, in one process.

Rounds alternate between an engine without the cache and one that stores into a fresh folder, each loaded anew. Every
round computes the same three prompts of random tokens: one after which the store is given time to finish, and two back
to back, of which the second is measured, while the first still waits to be written. Then the engine is closed, which
writes what is left. Ratios are storing / without, of the same prompt in one round; run it on a quiet machine.

    python benchmarks/storing.py -m model.gguf [--tokens 2000] [--decode 64] [--runs 9]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

WARM_UP = 64  # tokens


class Timing(NamedTuple):
    """Seconds of a prompt up to its first token, and of each token after that."""

    prefill_s: float
    token_s: float


class Round(NamedTuple):
    """closing_s: what `close` took. stored: the fraction of the full blocks that is in the store then."""

    alone: Timing
    back_to_back: Timing
    closing_s: float
    stored: float


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


def measure(options: argparse.Namespace, seed: int, *, storing: bool) -> Round:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "cache") if storing else None
        ctx = 2 * (options.tokens + options.decode)
        config = EngineConfig(prefix_cache=storing, cache_dir=folder, ctx=ctx)
        model = load_model(options.m, config, memo_dir=options.memo)
        answer(model, seed, WARM_UP, 4)
        time.sleep(options.pause)
        alone = answer(model, seed + 1, options.tokens, options.decode)
        time.sleep(options.pause)
        answer(model, seed + 2, options.tokens, options.decode)
        back_to_back = answer(model, seed + 3, options.tokens, options.decode)
        started = time.perf_counter()
        model.close()
        closing_s = time.perf_counter() - started
        stored = 0 if folder is None else len(list(folder.glob(f"*/*/*-{BLOCK_SIZE}-*.kv")))
    computed = (WARM_UP + 3) // BLOCK_SIZE + 3 * ((options.tokens + options.decode - 1) // BLOCK_SIZE)
    return Round(alone, back_to_back, closing_s, stored / computed)


def report(name: str, values: Iterable[float]) -> None:
    found = sorted(values)
    print(f"{name:40} median {statistics.median(found):9.3f}   {found[0]:.3f} … {found[-1]:.3f}")


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
    parser.add_argument("--pause", type=float, default=1.0, help="seconds in which the store finishes")
    options = parser.parse_args()
    rounds: dict[bool, list[Round]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as memo:
        options.memo = Path(memo)
        for run in range(options.runs):
            for storing in (False, True) if run % 2 else (True, False):
                rounds[storing].append(measure(options, 4 * run, storing=storing))
    without, stored = rounds[False], rounds[True]
    compare("alone", (found.alone for found in without), (found.alone for found in stored))
    compare(
        "back to back", (found.back_to_back for found in without), (found.back_to_back for found in stored)
    )
    report("close: ms without", (1e3 * found.closing_s for found in without))
    report("close: ms storing", (1e3 * found.closing_s for found in stored))
    report("full blocks stored / computed", (found.stored for found in stored))


if __name__ == "__main__":
    main()
