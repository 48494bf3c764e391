"""The disk cache under a whole engine: whatever it holds, the answer and its logits are those of a run without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infer.quant.kernels import native
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

Tiny = Callable[..., Path]
Answer = list[tuple[int, float]]
KERNELS = ["reference", *(["native"] if native.available() else [])]


@pytest.fixture
def run(tiny_llama: Tiny, tmp_path: Path) -> Iterator[Callable[..., tuple[Answer, int]]]:
    """One process's worth: loads, answers one prompt, closes. Gives the answer and how many tokens were cached."""
    folder = tmp_path / "prefix"

    def once(prompt: tuple[int, ...], *, cached: bool = True, quant: str = "Q8_0", temperature: float = 0.8,
             count: int = 6, **settings: object) -> tuple[Answer, int]:  # fmt: skip
        shared = {"prefix_cache": cached, "cache_dir": folder if cached else None}
        defaults = {"device": "cpu", "threads": 1, "kernel": KERNELS[-1], "ctx": 512}
        config = EngineConfig(**{**defaults, **shared, **settings})
        model = load_model(tiny_llama(quant=quant), config, memo_dir=tmp_path)
        try:
            return _answer(model, prompt, temperature, count), model.engine.cached_tokens("a")
        finally:
            model.close()

    yield once


def _answer(model: LoadedModel, prompt: tuple[int, ...], temperature: float = 0.8, count: int = 6) -> Answer:
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=count, ignore_eos=True, logprobs=0)
    model.engine.add(Request("a", prompt, sampling))
    found: Answer = []
    while model.engine.has_unfinished():
        found += [(p.token_id, p.logprob) for output in model.engine.step() for p in output.logprobs]
    return found


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(300), k=length))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_relation_of_two_prompts_gives_the_cold_answer(run: Callable, kernel: str) -> None:
    base = _prompt(1, 2 * BLOCK_SIZE + 20)
    first, cached = run(base, kernel=kernel)
    assert cached == 0
    related = {
        "the same": (base, len(base) - 1),
        "one more": ((*base, 9), len(base)),
        "one less": (base[:-1], len(base) - 2),
        "64": (base[:BLOCK_SIZE], None),
        "128": (base[: 2 * BLOCK_SIZE], None),
        "129": (base[: 2 * BLOCK_SIZE + 1], 2 * BLOCK_SIZE),
        "diverging within a block": ((*base[:100], 7, 7, 7), BLOCK_SIZE),
        "diverging at once": ((base[0] ^ 1, *base[1:]), 0),
        "after the answer": ((*base, *(token for token, _ in first), 3), len(base) + len(first) - 1),
    }
    for name, (prompt, expected) in related.items():
        warm, cached = run(prompt, kernel=kernel)
        assert warm == run(prompt, kernel=kernel, cached=False)[0], name
        if expected is not None and name != "one less":
            assert cached == expected, name


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"ctx": 300}, {"threads": 2}, {"prefill_chunk": 7}])
def test_settings_that_change_no_key_or_value_still_hit(run: Callable, change: dict[str, object]) -> None:
    prompt = _prompt(2, 150)
    run(prompt)
    warm, cached = run(prompt, **change)
    assert cached == 149
    assert warm == run(prompt, cached=False, **change)[0]


@pytest.mark.parametrize("change", [{"quant": "Q4_0"}, {"kv_type": "int8"}, {"kv_type": "f32"}])
def test_settings_that_change_a_key_or_value_miss(run: Callable, change: dict[str, object]) -> None:
    prompt = _prompt(3, 150)
    run(prompt)
    warm, cached = run(prompt, **change)
    assert cached == 0
    assert warm == run(prompt, cached=False, **change)[0]
    again, cached = run(prompt, **change)
    assert (again, cached) == (warm, 149)


def test_a_short_prompt_hits_too(run: Callable) -> None:
    prompt = _prompt(4, 12)
    cold, _ = run(prompt)
    warm, cached = run(prompt)
    assert (warm, cached) == (cold, 11)


def test_read_only_stores_nothing(run: Callable, tmp_path: Path) -> None:
    prompt = _prompt(5, 100)
    run(prompt, cache_read_only=True)
    assert run(prompt)[1] == 0
    assert run(prompt, cache_read_only=True)[1] == 99


def test_damage_is_a_miss_and_the_answer_stays(run: Callable, tmp_path: Path) -> None:
    prompt = _prompt(6, 150)
    cold, _ = run(prompt)
    files = sorted(
        path for path in (tmp_path / "prefix").rglob("*") if path.is_file() and path.stat().st_size > 10_000
    )
    assert len(files) >= 2
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if number % 2:
            data[len(data) // 2] ^= 4
        else:
            del data[len(data) // 3 :]
        path.write_bytes(data)
    warm, cached = run(prompt)
    assert warm == cold
    assert cached < 149
    assert run(prompt) == (cold, 149)


def test_a_small_pool_takes_what_fits(run: Callable) -> None:
    prompt = _prompt(7, 250)
    cold, _ = run(prompt)
    warm, cached = run(prompt, ctx=256, kv_blocks=4)
    assert warm == cold
    assert 0 < cached <= 249


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_change_no_answer(run: Callable, seed: int) -> None:
    rng = random.Random(seed)
    base = _prompt(8, 200)
    for _ in range(6):
        cut = rng.randrange(1, 200)
        prompt = base[:cut] + tuple(rng.randrange(300) for _ in range(rng.choice((0, 1, 40, 64))))
        count = rng.randrange(1, 70)
        assert run(prompt, count=count)[0] == run(prompt, count=count, cached=False)[0]
