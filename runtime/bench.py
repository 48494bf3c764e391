"""Speed of a loaded model through `Engine.step()`: prefill and decode, and the memory that decoding reads.

The figures mean what llama-bench's `pp`, `tg` and `-d` mean: random token ids, one sequence, a context of `depth`
tokens that is there before the clock starts, a warm-up before the first repetition.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from infer.quant.kernels.weight import PackedWeight
from infer.runtime.engine import Engine
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.models.base import Model
from infer.runtime.models.layers import MoE
from infer.runtime.models.ops import AttentionSpec
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

_WARM_UP_DECODE = 16  # tokens


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """prefill: prompt tokens behind the depth, 0 to leave it out. decode: tokens decoded one at a time, 0 likewise.
    depth: tokens already in the context."""

    prefill: int = 512
    decode: int = 128
    depth: int = 0
    repetitions: int = 3

    def __post_init__(self) -> None:
        """Raise ValueError naming the field and what it accepts."""
        for name, least in (("prefill", 0), ("decode", 0), ("depth", 0), ("repetitions", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not self.prefill and not self.decode:
            raise ValueError("prefill must be at least 1 when nothing is decoded, not 0")

    @property
    def ctx(self) -> int:
        """Tokens of context that the measurement needs."""
        return max(self.depth + self.prefill, max(1, self.depth) + self.decode)


@dataclass(frozen=True)
class Rates:
    """Tokens per second, one for each repetition."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class MemoryRead:
    """Bytes that decoding one token reads, the mean over the tokens decoded."""

    weights: int
    kv: float

    @property
    def total(self) -> float:
        return self.weights + self.kv


class Bench:
    """Measures one engine, which must do nothing else meanwhile.

    The engine needs a context of `config.ctx` and, where there is a depth, its prefix cache: the context's whole blocks
    are computed once and found again by each repetition. Prompts behind it differ, so that nothing else is found.
    """

    def __init__(self, engine: Engine, config: BenchConfig, *, seed: int = 0) -> None:
        self._engine = engine
        self._config = config
        self._rng = random.Random(seed)
        self._depth_ids = self._random_ids(config.depth)
        self._count = 0

    def prefill(self, report: Callable[[float], None] = lambda rate: None) -> Rates:
        """Prompt tokens computed a second, up to and including the first token of the answer. report: hears each."""
        self._fill()
        self._prefill_rate()
        return self._repeat(self._prefill_rate, report)

    def decode(self, report: Callable[[float], None] = lambda rate: None) -> Rates:
        """Tokens a second after the first, one at a time, greedily. report: hears each."""
        self._fill()
        self._decode_rate(min(_WARM_UP_DECODE, self._config.decode))
        return self._repeat(lambda: self._decode_rate(self._config.decode), report)

    def memory_read(self) -> MemoryRead:
        runner = self._engine.runner
        first = max(1, self._config.depth) + 1
        contexts = range(first, first + self._config.decode)
        kv = sum(kv_bytes(runner.model, runner.cache, context) for context in contexts)
        return MemoryRead(weight_bytes(runner.model), kv / max(1, len(contexts)))

    def _repeat(self, measure: Callable[[], float], report: Callable[[float], None]) -> Rates:
        rates = []
        for _ in range(self._config.repetitions):
            rates.append(measure())
            report(rates[-1])
        return Rates(tuple(rates))

    def _random_ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._engine.vocab_size) for _ in range(count))

    def _fill(self) -> None:
        if self._config.depth:
            self._run(self._depth_ids, 0)

    def _prefill_rate(self) -> float:
        prompt = self._depth_ids + self._random_ids(self._config.prefill)
        (finished,), started, cached = self._run(prompt, 1)
        return (len(prompt) - cached) / (finished - started)

    def _decode_rate(self, count: int) -> float:
        times, _, _ = self._run(self._depth_ids or self._random_ids(1), count + 1)
        return count / (times[-1] - times[0])

    def _run(self, prompt: tuple[int, ...], count: int) -> tuple[list[float], float, int]:
        """When each of `count` tokens was there and when the clock started, in seconds, and the cached tokens."""
        self._count += 1
        name = f"bench-{self._count}"
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        times: list[float] = []
        started = time.perf_counter()
        self._engine.add(Request(name, prompt, sampling))
        try:
            while self._engine.has_unfinished():
                for output in self._engine.step():
                    times += [time.perf_counter()] * len(output.new_ids)
        finally:
            self._engine.cancel(name)
        return times, started, self._engine.cached_tokens(name)


def weight_bytes(model: Model) -> int:
    """Bytes of the matrices that one decoded token reads: every one, but of experts those that it goes to, and of a
    table that only embeds a single row."""
    table = getattr(model, "embedding", None)
    rest = {name: value for name, value in vars(model).items() if name != "embedding"}
    weights = {id(weight): weight for weight in _find(rest, PackedWeight)}
    total: int = sum(weight.nbytes for weight in weights.values())
    if isinstance(table, PackedWeight) and id(table) not in weights:
        total += table.nbytes // table.shape[0]
    for moe in _find(rest, MoE):
        experts = sum(weight.nbytes for weight in _find(moe.experts, PackedWeight))
        total -= experts - experts * moe.router.rule.used // moe.router.rule.experts
    return total


def kv_bytes(model: Model, cache: PagedKVCache, context: int) -> int:
    """Bytes of K and V, scales included, that one token reads when `context` positions are in the cache, itself
    included. Layers with a window read no more than it."""
    specs = {spec.layer: spec for spec in _find(vars(model), AttentionSpec)}
    positions = sum(min(context, spec.window) if spec.window else context for spec in specs.values())
    return positions * (cache.bytes_per_token // len(cache.layers))


def _find(value: object, kind: type) -> Iterator[Any]:
    """Instances of a class inside containers and dataclasses."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find(item, kind)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find(item, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _find(getattr(value, field.name), kind)
