"""Models whose every layer has a sliding window: blocks behind it are given back, and nothing else changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disk_store import files_in

from infer.quant.kernels import native
from infer.runtime import assembly, loader
from infer.runtime.assembly import plan_cache
from infer.runtime.config import BLOCK_SIZE, EngineConfig, ModelConfig, RopeConfig
from infer.runtime.errors import UsageError
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.prefix import ROOT, PrefixCache
from infer.runtime.kvcache.window import blocks_behind, blocks_held, first_visible
from infer.runtime.loader import LoadedModel
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

Load = Callable[..., LoadedModel]
Answer = list[tuple[int, float]]
KERNELS = ["reference", *(["native"] if native.available() else [])]
WINDOW, CHUNK, CTX = 100, 48, 1024
HELD = blocks_held(WINDOW, CHUNK, CTX)


@pytest.fixture
def load(tiny_llama: Callable[..., Path], open_model: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a tiny model with windows; frees=False makes an engine that keeps every block."""
    # Of so small a model every block is computed faster than it is read; here all are to be read.
    monkeypatch.setattr(assembly, "ASSUMED_RATE", {"cpu": 1e-9})
    monkeypatch.setattr(assembly.PrefillRate, "measured", lambda self, tokens, seconds: None)

    def load_tiny(window: int = WINDOW, *, frees: bool = True, **settings: object) -> LoadedModel:
        metadata = {"llama.attention.sliding_window": window}
        path = tiny_llama(quant="Q8_0", ctx=CTX, metadata=metadata)
        defaults = {"kernel": KERNELS[-1], "prefill_chunk": CHUNK}
        with monkeypatch.context() as patch:
            if not frees:
                patch.setattr(ModelConfig, "cache_window", 0)
            return open_model(path, **{**defaults, **settings})

    return load_tiny


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(300), k=length))


def _sampling(count: int = 8, seed: int = 3) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=count, ignore_eos=True, logprobs=0)


def _answers(model: LoadedModel, requests: dict[str, tuple[tuple[int, ...], int]]) -> dict[str, Answer]:
    """Each request's tokens with their log-probabilities. Blocks in use and blocks held are checked at every step."""
    scheduler, engine = model.engine._scheduler, model.engine
    for name, (prompt, count) in requests.items():
        engine.add(Request(name, prompt, _sampling(count)))
    found: dict[str, Answer] = {name: [] for name in requests}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] += [(p.token_id, p.logprob) for p in output.logprobs]
        scheduler._pool.check()
        if scheduler._window:
            most = blocks_held(scheduler._window, scheduler._budget, engine.ctx)
            assert all(len(seq.block_table) - seq.first_block <= most for seq in scheduler.running)
    return found


def _answer(model: LoadedModel, prompt: tuple[int, ...], count: int = 8) -> Answer:
    return _answers(model, {"a": (prompt, count)})["a"]


def _poison(model: LoadedModel) -> None:
    """Every block that becomes free holds NaN from then on."""
    pool, cache = model.engine._scheduler._pool, model.engine.runner.cache
    release = pool.release

    def poisoning(block: int, *, keep: bool) -> None:
        release(block, keep=keep)
        if block in pool._free:
            for part in (*cache.tensors.keys, *cache.tensors.values):
                part[block] = float("nan")

    pool.release = poisoning  # type: ignore[method-assign]


def test_what_a_window_sees() -> None:
    for window in (1, 2, 63, 64, 65, 66, 128, 129, 300):
        for position in range(500):
            seen = range(max(0, position - window + 1), position + 1)
            assert first_visible(position, window) == seen[0] // BLOCK_SIZE
        for blocks in range(1, 12):
            missing = blocks - first_visible(blocks * BLOCK_SIZE, window)
            assert min(blocks, blocks_behind(window)) == max(1, missing)
        for step in (1, 17, 64, 100):
            most = max((p + step - 1) // BLOCK_SIZE - first_visible(p, window) + 1 for p in range(500))
            assert blocks_held(window, step, 4096) == most
    assert (first_visible(900, 0), blocks_behind(0), blocks_held(0, 64, 900)) == (0, None, 15)
    assert blocks_held(100, 0, 900) == blocks_held(4096, 512, 900) == 15


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [1, 64, WINDOW, 200])
def test_giving_blocks_back_changes_no_bit(load: Load, kernel: str, window: int) -> None:
    prompt = _prompt(1, 330)
    expected = _answer(load(window, frees=False, kernel=kernel, prefix_cache=False), prompt)
    for chunk in (0, 1, 50, 64):
        model = load(window, kernel=kernel, prefill_chunk=chunk, prefix_cache=False)
        _poison(model)
        assert _answer(model, prompt) == expected
        assert model.engine._scheduler._pool.size == blocks_held(window, chunk, CTX)


def test_torch_attention_reads_no_block_that_was_given_back(load: Load) -> None:
    prompt = _prompt(2, 300)
    model = load(kernel="torch", prefix_cache=False)
    _poison(model)
    expected = _answer(load(kernel="torch", frees=False, prefix_cache=False), prompt)
    for (token, logprob), (wanted, other) in zip(_answer(model, prompt), expected, strict=True):
        assert (token, logprob) == (wanted, pytest.approx(other, abs=1e-3))


def test_a_full_context_in_few_blocks(load: Load) -> None:
    prompt = _prompt(3, CTX - 40)
    model = load()
    assert model.engine._scheduler._pool.size == HELD == 4
    assert _answer(model, prompt, 40) == _answer(load(frees=False, prefix_cache=False), prompt, 40)


def test_company_and_preemption_change_no_bit(load: Load) -> None:
    requests = {str(i): (_prompt(i, 90 + 60 * i), 10 + 20 * i) for i in range(5)}
    cold = load(frees=False, prefix_cache=False, kv_blocks=64)
    expected = {name: _answer(cold, *request) for name, request in requests.items()}
    for prefix_cache in (True, False):
        for blocks in (HELD, HELD + 2, 40):
            model = load(kv_blocks=blocks, prefix_cache=prefix_cache)
            assert _answers(model, requests) == expected
            pool = model.engine._scheduler._pool
            assert pool.available == pool.size


@pytest.mark.parametrize("blocks", [HELD, 2 * HELD, 64])
def test_prefixes_are_found_where_the_window_has_passed(load: Load, blocks: int) -> None:
    """Also after prompts that go back: diverging within the window, before it, at the first token."""
    model, cold = load(kv_blocks=blocks), load(frees=False, prefix_cache=False)
    base = _prompt(4, 500)
    answer = _answer(model, base)
    assert answer == _answer(cold, base)
    longer = (*base, *(token for token, _ in answer), 5)
    assert _answer(model, longer) == _answer(cold, longer)
    assert model.engine.cached_tokens("a") == len(longer) - 2
    rng = random.Random(blocks)
    for cut in (499, 450, 420, 300, 129, 64, 0, *(rng.randrange(500) for _ in range(6))):
        prompt = base[:cut] + _prompt(cut, 30)
        assert _answer(model, prompt) == _answer(cold, prompt)
        assert model.engine.cached_tokens("a") >= cut - cut % BLOCK_SIZE or blocks < 64
        assert _answer(model, base) == answer
    model.engine._scheduler._pool.check()


def test_random_histories(load: Load) -> None:
    rng = random.Random(6)
    model, cold = load(kv_blocks=HELD + 3), load(frees=False, prefix_cache=False)
    for _ in range(12):
        requests = {
            str(i): (_prompt(rng.randrange(2), rng.randrange(1, 400)), rng.randrange(1, 90)) for i in range(3)
        }
        expected = {name: _answer(cold, *request) for name, request in requests.items()}
        assert _answers(model, requests) == expected


def test_blocks_are_found_as_far_as_the_window_needs_them() -> None:
    pool = BlockPool(10)
    cache = PrefixCache(pool, window=WINDOW)
    ids = list(_prompt(7, 10 * BLOCK_SIZE))
    key = ROOT
    for start in range(0, len(ids), BLOCK_SIZE):
        block = pool.allocate()
        assert block is not None
        key = cache.insert(block, key, ids[start : start + BLOCK_SIZE])
    for block in (0, 1, 5, *(b for b in range(10) if b not in (0, 1, 5))):
        pool.release(block, keep=True)
    gone = [pool.allocate() for _ in range(3)]
    assert gone == [0, 1, 5]
    for blocks, count in ((2, 0), (3, 0), (4, 4), (5, 5), (6, 5), (7, 5), (8, 8)):
        found = cache.match(ids[: blocks * BLOCK_SIZE + 1])
        assert found.blocks[found.first :] == list(range(max(0, count - 2), count)), blocks
        for block in found.blocks[found.first :]:
            pool.release(block, keep=True)


@pytest.fixture
def run(load: Load, tmp_path: Path) -> Callable[..., tuple[Answer, int]]:
    """One process's worth with the disk cache: the answer and how many tokens were cached."""

    def once(prompt: tuple[int, ...], *, waits: bool = True) -> tuple[Answer, int]:
        model = load(cache_dir=tmp_path / "prefix")
        if waits:
            model.engine._tier._pending.result(30)
        answer = _answer(model, prompt)
        model.engine._tier.close(30)
        return answer, model.engine.cached_tokens("a")

    return once


def test_a_resume_where_the_window_has_passed(run: Callable, load: Load, tmp_path: Path) -> None:
    cold = load(frees=False, prefix_cache=False)
    base = _prompt(8, 600)
    answer, cached = run(base)
    assert (answer, cached) == (_answer(cold, base), 0)
    # every full block, the end of the prompt and that of the answer
    assert len(files_in(tmp_path / "prefix")) == 9 + 2
    assert run(base) == (answer, 599)
    longer = (*base, *(token for token, _ in answer), 5)
    assert run(longer) == (_answer(cold, longer), 607)
    for cut in (590, 450, 320, 130, 64, 10):
        prompt = base[:cut] + _prompt(cut, 70)
        answer, cached = run(prompt)
        assert answer == _answer(cold, prompt)
        assert cached >= cut - cut % BLOCK_SIZE


def test_the_whole_chain_is_verified(run: Callable, load: Load, tmp_path: Path) -> None:
    """A block that no window sees any more is damaged: what comes after it is not believed either."""
    base = _prompt(9, 600)
    answer, _ = run(base)
    before = {path: path.read_bytes() for path in files_in(tmp_path / "prefix")}
    for place, (path, data) in enumerate(before.items()):
        path.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
        found, cached = run(base)
        assert found == answer
        assert cached < 599 or place in _ends(before)
        assert run(base) == (answer, 599)


def _ends(files: dict[Path, bytes]) -> list[int]:
    """Those that are no full block."""
    return [place for place, path in enumerate(files) if f"-{BLOCK_SIZE}-" not in path.name]


def test_memory_and_disk_together(run: Callable, load: Load, tmp_path: Path) -> None:
    """A prefix that is in memory up to somewhere, and on disk further on."""
    base, cold = _prompt(10, 700), load(frees=False, prefix_cache=False)
    run(base)
    for known in (100, 300, 640):
        model = load(cache_dir=tmp_path / "prefix", cache_read_only=True)
        model.engine._tier._pending.result(30)
        for length in (known, 700, 500):
            assert _answer(model, base[:length]) == _answer(cold, base[:length])
            assert model.engine.cached_tokens("a") >= length - 1 - (length - 1) % BLOCK_SIZE
        model.engine._scheduler._pool.check()


def test_nothing_is_given_back_unsaved_before_the_store_is_there(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loader.fingerprint

    def slow(*arguments: object) -> str:
        time.sleep(0.8)
        return real(*arguments)  # type: ignore[arg-type]

    base = _prompt(11, 600)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "fingerprint", slow)
        answer, _ = run(base, waits=False)
    assert run(base) == (answer, 599)


def test_blocks_that_a_context_needs() -> None:
    def planned(windows: tuple[int, ...], **settings: object) -> int:
        rope = RopeConfig(dim=8)
        shape = ModelConfig(
            architecture="llama", vocab_size=9, context_length=32768, embedding_length=32, block_count=2,
            feed_forward_length=32, head_count=4, head_count_kv=2, head_dim=8, norm_eps=1e-5, rope=rope,
            windows=windows,
        )  # fmt: skip
        return plan_cache(EngineConfig(**settings), shape, 32768, torch.device("cpu"))[1]

    assert planned((4096, 4096)) == 73
    assert planned((4096, 1024)) == 73
    assert planned((4096, 0)) == planned(()) == planned((4096, 4096), prefill_chunk=0) == 512
    with pytest.raises(UsageError, match="72 KV blocks are too few: a context of 32768 tokens needs 73"):
        planned((4096, 4096), kv_blocks=72)
