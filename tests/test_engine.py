"""The engine on tiny random models: the same bytes in every company, at every chunk size, after every history."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.errors import ContextLengthError, NumericalError, UsageError
from infer.runtime.generation import TextStream, generate
from infer.runtime.loader import LoadedModel
from infer.runtime.request import FinishReason, Request
from infer.samplers.logit_rows import Logits
from infer.samplers.params import SamplingParams

Load = Callable[..., LoadedModel]


@pytest.fixture
def load(tiny_llama: Callable[..., Path], open_model: Load) -> Load:
    """Loads the tiny model with the exact kernel and the given engine settings."""

    def load_tiny(*, arch: str = "llama", **settings: object) -> LoadedModel:
        return open_model(tiny_llama(arch=arch, quant="Q8_0"), **{"kernel": "reference", **settings})

    return load_tiny


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(300), k=length))


def _sampling(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 7, "max_tokens": 12, "logprobs": 3, "ignore_eos": True,
                             **changes})  # fmt: skip


def _run(
    model: LoadedModel, requests: dict[str, tuple[tuple[int, ...], SamplingParams]]
) -> dict[str, list[tuple]]:
    """Each request's (id, logprob, alternatives), driven together to the end."""
    for name, (prompt, sampling) in requests.items():
        model.engine.add(Request(name, prompt, sampling))
    found: dict[str, list[tuple]] = {name: [] for name in requests}
    while model.engine.has_unfinished():
        for output in model.engine.step():
            found[output.request_id] += [(p.token_id, p.logprob, p.top) for p in output.logprobs]
    return found


def _alone(model: LoadedModel, prompt: tuple[int, ...], sampling: SamplingParams) -> list[tuple]:
    return _run(model, {"alone": (prompt, sampling)})["alone"]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_chunk_size_changes_no_bit(load: Load, arch: str) -> None:
    prompt = _prompt(1, 150)
    answers = [
        _alone(load(arch=arch, prefill_chunk=chunk, prefix_cache=False), prompt, _sampling())
        for chunk in (0, 1, 7, 64)
    ]
    assert len(answers[0]) == 12
    assert answers.count(answers[0]) == len(answers)


def test_company_changes_no_bit(load: Load) -> None:
    prompts = {str(i): (_prompt(i, 5 + 23 * i), _sampling(seed=i, max_tokens=4 + i)) for i in range(6)}
    alone = load(prefix_cache=False)
    expected = {name: _alone(alone, *request) for name, request in prompts.items()}
    assert _run(load(prefill_chunk=40), prompts) == expected


def test_a_prefix_cache_hit_changes_no_bit(load: Load) -> None:
    base = _prompt(3, 3 * BLOCK_SIZE + 5)
    model, cold = load(kv_blocks=64), load(prefix_cache=False)
    for cut in (len(base), 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1, 10):
        for tail in ((), (5,), (9, 9)):
            prompt = base[:cut] + tail
            assert _alone(model, prompt, _sampling()) == _alone(cold, prompt, _sampling())
    assert model.engine.cached_tokens("alone") == 10
    _alone(model, base, _sampling())
    assert model.engine.cached_tokens("alone") == len(base) - 1


def test_the_decoded_part_of_an_answer_is_found_again(load: Load) -> None:
    model = load()
    prompt = _prompt(4, 60)
    answer = _alone(model, prompt, _sampling(max_tokens=20))
    longer = prompt + tuple(token for token, _, _ in answer)
    assert _alone(model, longer, _sampling()) == _alone(load(prefix_cache=False), longer, _sampling())
    assert model.engine.cached_tokens("alone") == len(longer) - 1


def test_preemption_changes_no_bit_and_loses_no_block(load: Load) -> None:
    prompts = {str(i): (_prompt(i, 100 + i), _sampling(seed=i, max_tokens=50)) for i in range(4)}
    roomy = load(ctx=256, prefix_cache=False)
    expected = {name: _alone(roomy, *request) for name, request in prompts.items()}
    for prefix_cache in (True, False):
        tight = load(ctx=256, kv_blocks=5, prefill_chunk=64, prefix_cache=prefix_cache)
        assert _run(tight, prompts) == expected
        pool = tight.engine._scheduler._pool
        pool.check()
        assert pool.available == pool.size


def test_random_arrivals_cancellations_and_preemptions_keep_the_pool_sound(load: Load) -> None:
    rng = random.Random(5)
    model, cold = load(ctx=128, kv_blocks=3, prefill_chunk=50), load(ctx=128, prefix_cache=False)
    pool = model.engine._scheduler._pool
    running: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    got: dict[str, list[tuple]] = {}
    checked = 0
    for round_ in range(120):
        if rng.random() < 0.3 and len(running) < 5:
            name = str(round_)
            running[name] = (_prompt(rng.randrange(3), rng.randrange(1, 110)), _sampling(max_tokens=8))
            got[name] = []
            model.engine.add(Request(name, *running[name]))
        if running and rng.random() < 0.05:
            name = rng.choice(sorted(running))
            model.engine.cancel(name)
            del running[name]
        for output in model.engine.step():
            got[output.request_id] += [(p.token_id, p.logprob, p.top) for p in output.logprobs]
            if output.finish_reason is not None:
                assert got[output.request_id] == _alone(cold, *running.pop(output.request_id))
                checked += 1
        pool.check()
    assert checked > 10


def test_seeds_decide_and_repeat(load: Load) -> None:
    model = load()
    prompt = _prompt(6, 20)
    hot = [[t for t, _, _ in _alone(model, prompt, _sampling(temperature=3.0, seed=s))] for s in (1, 2, 1)]
    assert hot[0] == hot[2] != hot[1]


def test_ends_of_an_answer(load: Load) -> None:
    model = load(ctx=64)
    prompt = _prompt(7, 60)
    free = [t for t, _, _ in _alone(model, prompt, _sampling(max_tokens=3))]
    model.engine.add(Request("stop", prompt, _sampling(ignore_eos=False), frozenset({free[1]})))
    outputs = []
    while model.engine.has_unfinished():
        outputs += model.engine.step()
    first = free.index(free[1])
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, free[1])
    assert [t for o in outputs for t in o.new_ids] == free[: first + 1]
    filled = _alone(model, prompt, _sampling(max_tokens=None))
    assert len(filled) == 64 - 60 + 1  # the last token needs no place of its own
    assert _alone(model, prompt, _sampling(max_tokens=0)) == []


def test_bad_requests_are_refused_with_the_numbers(load: Load) -> None:
    engine = load(ctx=64).engine
    with pytest.raises(ContextLengthError, match=r"65 tokens .* holds 64"):
        engine.add(Request("long", _prompt(1, 65), _sampling()))
    with pytest.raises(UsageError, match="no tokens"):
        engine.add(Request("empty", (), _sampling()))
    with pytest.raises(UsageError, match="outside the vocabulary"):
        engine.add(Request("range", (10**6,), _sampling()))
    with pytest.raises(UsageError, match="vocabulary"):
        engine.add(Request("bias", (1,), _sampling(logit_bias={10**6: 1.0})))
    engine.add(Request("twice", (1,), _sampling()))
    with pytest.raises(UsageError, match="already running"):
        engine.add(Request("twice", (1,), _sampling()))
    engine.cancel("twice")
    engine.cancel("never seen")
    assert not engine.has_unfinished()


def test_nan_logits_name_the_position_and_drop_the_request(load: Load) -> None:
    model = load()
    weight = model.engine._runner.model.output_norm.weight
    weight.fill_(float("nan"))
    model.engine.add(Request("nan", _prompt(1, 9), _sampling()))
    with pytest.raises(NumericalError, match="position 8 "):
        model.engine.step()
    assert not model.engine.has_unfinished()


def test_only_the_last_position_gets_logits(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(prefill_chunk=16)
    shapes: list[tuple[int, ...]] = []
    forward = model.engine._runner.forward

    def watched(batch: object) -> Logits:
        logits = forward(batch)
        shapes.append(logits.shape)
        return logits

    monkeypatch.setattr(model.engine._runner, "forward", watched)
    _alone(model, _prompt(8, 40), _sampling(max_tokens=2))
    assert [shape[0] for shape in shapes] == [0, 0, 1, 1]


@pytest.mark.parametrize("kernel", ["torch", "float32"])
def test_fast_kernels_agree_with_the_exact_one(load: Load, kernel: str) -> None:
    prompt = _prompt(9, 100)
    exact = _alone(load(kernel="reference"), prompt, _sampling(temperature=0, max_tokens=1))
    fast = _alone(load(kernel=kernel), prompt, _sampling(temperature=0, max_tokens=1))
    assert fast[0][1] == pytest.approx(exact[0][1], abs=0.1)


def test_stop_strings_cut_where_they_first_appear(load: Load) -> None:
    model = load()
    prompt = list(_prompt(10, 12))
    sampling = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True)
    free = generate(model.engine, model.tokenizer, prompt, sampling).text
    assert len(free) > 12
    stops = sorted({free[i:j] for i in range(len(free)) for j in range(i + 1, min(i + 6, len(free)) + 1)})
    pieces = [(s,) for s in stops[:: max(1, len(stops) // 25)]]
    pairs = [(a[0], b[0]) for a, b in zip(pieces, pieces[3:], strict=False)]
    for stop in pieces + pairs[::3]:
        cut = min(i for i in (free.find(s) for s in stop) if i >= 0)
        changed = SamplingParams(temperature=1.2, seed=3, max_tokens=24, ignore_eos=True, stop=stop)
        result = generate(model.engine, model.tokenizer, prompt, changed)
        assert result.text == free[:cut]
        assert result.finish_reason is FinishReason.STOP
        assert result.stop_reason in stop
    assert not model.engine.has_unfinished()


def test_deltas_add_up_to_the_decoding_for_every_length(load: Load) -> None:
    model = load()
    prompt = _prompt(11, 12)
    for count in range(12):
        sampling = SamplingParams(temperature=1.5, seed=1, max_tokens=count, ignore_eos=True)
        stream = TextStream(model.engine, model.tokenizer, Request("s", prompt, sampling))
        deltas = list(stream)
        assert all(deltas)
        assert "".join(deltas) == stream.generation.text == model.tokenizer.decode(stream.generation.ids)
        assert len(stream.generation.ids) == count


def test_a_cancelled_stream_keeps_its_text_and_frees_its_blocks(load: Load) -> None:
    model = load()
    stream = TextStream(
        model.engine, model.tokenizer, Request("c", _prompt(12, 30), _sampling(max_tokens=40))
    )
    seen = next(stream) + next(stream)
    rest = stream.cancel()
    assert stream.generation.text == seen + rest
    assert stream.generation.finish_reason is FinishReason.CANCELLED
    assert stream.cancel() == ""
    assert list(stream) == []
    assert model.engine._scheduler._pool.available == model.engine._scheduler._pool.size


@pytest.mark.parametrize("length", [BLOCK_SIZE + 40, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
def test_copying_a_block_never_takes_the_room_the_sequence_needs(load: Load, length: int) -> None:
    model, cold = load(ctx=3 * BLOCK_SIZE), load(prefix_cache=False)
    first = _prompt(13, 3 * BLOCK_SIZE)
    _alone(model, first, _sampling(max_tokens=1))
    for cut in (BLOCK_SIZE + 39, BLOCK_SIZE - 1, 2 * BLOCK_SIZE - 1):
        prompt = (first[:cut] + _prompt(cut, 3 * BLOCK_SIZE))[:length]
        assert _alone(model, prompt, _sampling(max_tokens=1)) == _alone(cold, prompt, _sampling(max_tokens=1))
