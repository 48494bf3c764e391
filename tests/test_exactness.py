"""The native path: the same logits, K and V, bit for bit, however the work is cut up and whoever does it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from traces import traced

from infer.quant.kernels import native
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library was not built here")

Tiny = Callable[..., Path]
Open = Callable[..., LoadedModel]
MODELS = {
    "Q4_0": {}, "Q4_1": {"tied": True}, "Q5_0": {"arch": "qwen2"}, "Q5_1": {}, "Q8_0": {"kv_heads": 1}, "F16": {},
    "BF16": {"arch": "qwen2"}, "F32": {}, "Q4_K": {}, "Q5_K": {"arch": "qwen2"}, "Q6_K": {"tied": True},
}  # fmt: skip


@pytest.fixture
def open_native(tmp_path: Path) -> Iterator[Open]:
    opened: list[LoadedModel] = []

    def open_model(path: Path, **settings: object) -> LoadedModel:
        config = EngineConfig(**{"device": "cpu", "threads": 1, "kernel": "native", "ctx": 512, "prefix_cache": False,
                                 **settings})  # fmt: skip
        opened.append(load_model(path, config, memo_dir=tmp_path))
        return opened[-1]

    yield open_model
    for model in opened:
        model.close()


def _prompt(seed: int, length: int, vocab: int = 300) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(vocab), k=length))


@pytest.mark.parametrize("kind", MODELS)
def test_chunks_threads_and_company_change_no_bit(tiny_llama: Tiny, open_native: Open, kind: str) -> None:
    path = tiny_llama(quant=kind, **MODELS[kind])
    prompt = _prompt(1, 150)
    expected = traced(open_native(path, prefill_chunk=512), {"a": prompt})["a"]
    assert len(expected.logits) == 5
    assert len(expected.kv(0)) == 4
    assert expected.kv(0)[0].shape[1] == 154
    for chunk in (1, 7, 64):
        assert traced(open_native(path, prefill_chunk=chunk), {"a": prompt})["a"] == expected
    assert traced(open_native(path, threads=2), {"a": prompt})["a"] == expected
    others = {str(i): _prompt(50 + i, 3 + 11 * i) for i in range(16)}
    crowd = open_native(path, kv_blocks=80, threads=2, prefill_chunk=200)
    for size in (1, 2, 7, 16):
        company = dict(list(others.items())[:size])
        assert traced(crowd, {**company, "a": prompt})["a"] == expected


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32", "int8"])
def test_every_kv_type_is_exact(tiny_llama: Tiny, open_native: Open, kv_type: str) -> None:
    path, prompt = tiny_llama(quant="Q4_0"), _prompt(2, 140)
    expected = traced(open_native(path, kv_type=kv_type), {"a": prompt})["a"]
    for chunk in (1, 64):
        assert traced(open_native(path, kv_type=kv_type, prefill_chunk=chunk), {"a": prompt})["a"] == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16"])
def test_every_instruction_set_gives_the_same_bits(tiny_llama: Tiny, open_native: Open, kind: str) -> None:
    path, prompt = tiny_llama(quant=kind), _prompt(3, 100)
    library = native.load()
    used = library.infer_isa().decode()
    try:
        traces = [traced(open_native(path, isa=isa), {"a": prompt})["a"] for isa in native.offered(library)]
    finally:
        native.load(used)
    assert len(traces) >= 1
    assert all(trace == traces[0] for trace in traces)


def test_a_prefix_hit_brings_back_the_same_bits(tiny_llama: Tiny, open_native: Open) -> None:
    path = tiny_llama(quant="Q4_1")
    cold, warm = open_native(path), open_native(path, prefix_cache=True)
    base = _prompt(4, 3 * BLOCK_SIZE + 9)
    traced(warm, {"first": base})
    for cut in (len(base), 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 100):
        prompt = (*base[:cut], 7)
        assert traced(warm, {"a": prompt})["a"] == traced(cold, {"a": prompt})["a"]
    assert warm.engine.cached_tokens("a") == 100


def test_native_agrees_with_the_reference(tiny_llama: Tiny, open_native: Open) -> None:
    for kind in ("Q4_K", "Q8_0", "F32"):
        path, prompt = tiny_llama(quant=kind), _prompt(5, 70)
        found = traced(open_native(path, kv_type="f32"), {"a": prompt}, 1)["a"].logits[0]
        wanted = traced(open_native(path, kernel="reference", kv_type="f32"), {"a": prompt}, 1)["a"].logits[0]
        assert (found - wanted).abs().max() <= 2e-3 * (wanted.max() - wanted.min())


def test_two_engines_in_one_process_do_not_disturb_each_other(tiny_llama: Tiny, open_native: Open) -> None:
    one, two = (
        open_native(tiny_llama(quant="Q4_0"), threads=2),
        open_native(tiny_llama(quant="Q8_0"), threads=2),
    )
    prompt = _prompt(6, 40)
    expected = [traced(one, {"a": prompt})["a"], traced(two, {"a": prompt})["a"]]
    sampling = SamplingParams(temperature=0.8, seed=11, max_tokens=5, ignore_eos=True)
    for model in (one, two):
        model.engine.add(Request("a", prompt, sampling))
    tokens: list[list[int]] = [[], []]
    while one.engine.has_unfinished() or two.engine.has_unfinished():
        for index, model in enumerate((one, two)):
            tokens[index] += [token for output in model.engine.step() for token in output.new_ids]
    assert tokens == [trace.tokens for trace in expected]


@pytest.mark.model
def test_smollm2_is_exact(smollm2_path: Path, open_native: Open) -> None:
    prompt = _prompt(7, 600, 40000)
    settings = {"ctx": 1024, "threads": 2}
    expected = traced(open_native(smollm2_path, prefill_chunk=512, **settings), {"a": prompt}, 8)["a"]
    for chunk in (7, 64):
        found = traced(open_native(smollm2_path, prefill_chunk=chunk, **settings), {"a": prompt}, 8)["a"]
        assert found == expected
    short = _prompt(8, 40, 40000)
    alone = traced(open_native(smollm2_path, prefill_chunk=1, ctx=1024), {"s": short}, 4)["s"]
    crowd = open_native(smollm2_path, kv_blocks=64, **settings)
    others = {str(i): _prompt(20 + i, 30 + 9 * i, 40000) for i in range(16)}
    assert traced(crowd, {**others, "s": short}, 4)["s"] == alone
