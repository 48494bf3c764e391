"""The samplers against slow float64 references, transformers, and their own invariants."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from infer.samplers import chain as chain_module
from infer.samplers.chain import SamplerChain, SampleRow, distribution, sample
from infer.samplers.device_rows import DeviceRows
from infer.samplers.draw import uniform
from infer.samplers.errors import InvalidLogitsError, NoTokenLeftError
from infer.samplers.logit_rows import HostRows, logit_rows
from infer.samplers.params import DEFAULT_ORDER, SamplingParams

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PROMPT, OUTPUT = (1, 2, 3, 3), (0, 2, 2, 5)


def off(**values: object) -> SamplingParams:
    return dataclasses.replace(OFF, **values)


def one(logits: np.ndarray, params: SamplingParams, position: int = 0, prompt=(), output=()) -> int:
    chain = SamplerChain(params, len(logits), prompt, output)
    return sample(torch.from_numpy(logits[None]), [SampleRow(chain, position)]).token_ids[0]


def exact(logits: np.ndarray, params: SamplingParams, prompt=(), output=()) -> dict[int, float]:
    """What the package says it draws from, id → probability, in its order."""
    chain = SamplerChain(params, len(logits), prompt, output)
    ((ids, probabilities),) = distribution(torch.from_numpy(logits[None]), [SampleRow(chain, 0)])
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def reference(logits: Sequence[float], params: SamplingParams, prompt=(), output=()) -> dict[int, float]:
    """The same by the definitions, one token at a time, in float64."""
    kept = {token: float(value) for token, value in enumerate(logits)}

    def probabilities() -> dict[int, float]:
        top = max(kept.values())
        weights = {token: math.exp(value - top) for token, value in kept.items()}
        total = math.fsum(weights.values())
        return {token: weight / total for token, weight in weights.items()}

    def prefix(order: list[int], p: dict[int, float], mass: float) -> list[int]:
        chosen: list[int] = []
        for token in order:
            chosen.append(token)
            if math.fsum(p[t] for t in chosen) >= mass:
                break
        return chosen

    for name in params.order:
        p = probabilities()
        order = sorted(kept, key=lambda token: (-kept[token], token))
        keep = order
        if name == "logit_bias":
            forced = [t for t, b in params.logit_bias.items() if b == math.inf]
            if forced:
                keep = [t for t in order if t in forced]
            else:
                for token in [t for t in order if t in params.logit_bias]:
                    kept[token] += params.logit_bias[token]
                keep = [t for t in order if kept[t] != -math.inf]
        elif name == "penalties":
            for token in order:
                value = kept[token]
                if token in prompt or token in output:
                    value = value / params.repeat_penalty if value > 0 else value * params.repeat_penalty
                count = output.count(token)
                kept[token] = value - count * params.frequency_penalty - (count > 0) * params.presence_penalty
        elif name == "temperature":
            for token in order:
                kept[token] /= params.temperature
        elif name == "top_k" and params.top_k:
            keep = order[: params.top_k]
        elif name == "top_p" and params.top_p < 1:
            keep = prefix(order, p, params.top_p)
        elif name == "min_p":
            keep = [t for t in order if p[t] >= params.min_p * max(p.values())]
        elif name == "typical_p" and params.typical_p < 1:
            entropy = -math.fsum(q * math.log(q) for q in p.values() if q)
            typical = sorted(order, key=lambda t: abs(-math.log(p[t]) - entropy) if p[t] else math.inf)
            keep = prefix(typical, p, params.typical_p)
        kept = {token: kept[token] for token in keep}
    result = probabilities()
    return {t: result[t] for t in sorted(kept, key=lambda t: (-kept[t], t))}


def assert_same(got: dict[int, float], want: dict[int, float]) -> None:
    """Equal kept sets, order and probabilities. Order is free where probabilities are equal to 12 digits."""
    assert set(got) == set(want)
    assert list(got.values()) == pytest.approx(list(want.values()), rel=1e-9, abs=1e-300)
    assert [got[t] for t in want] == pytest.approx(list(want.values()), rel=1e-9, abs=1e-300)


def random_logits(seed: int, size: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


SINGLE = [
    {"temperature": 0.5},
    {"temperature": 7.0},
    {"temperature": 1e-320},
    {"temperature": 1e300},
    {"top_k": 5},
    {"top_k": 10**9},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1e-12},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"frequency_penalty": -2.0, "presence_penalty": 0.3, "repeat_penalty": 1.1},
    {"logit_bias": {0: 2.5, 3: -100.0}},
    {"logit_bias": {0: -math.inf, 1: -math.inf}},
    {"logit_bias": {4: math.inf, 2: math.inf, 0: 5.0}},
]


@pytest.mark.parametrize("values", SINGLE, ids=str)
def test_each_sampler_alone_matches_its_definition(values):
    for seed, size in ((0, 6), (1, 50), (2, 777)):
        logits = random_logits(seed, size)
        if values.get("temperature", 1.0) == 1e-320:  # the reference overflows; the limit is the argmax
            assert exact(logits, off(**values))[int(logits.argmax())] == 1.0
            continue
        params = off(**values)
        want = reference(logits, params, PROMPT, OUTPUT)
        assert_same_float32(exact(logits, params, PROMPT, OUTPUT), want)


def assert_same_float32(got: dict[int, float], want: dict[int, float]) -> None:
    """As assert_same, after edits that are stored as float32."""
    assert set(got) == set(want)
    assert [got[t] for t in want] == pytest.approx(list(want.values()), rel=1e-4, abs=1e-300)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 7, 64, 300]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 10.0, 3000.0]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 2, 5, 40, 1000]),
    top_p=st.floats(0.05, 0.999) | st.just(1.0),  # nearer to 1 the rounding of sums decides
    min_p=st.floats(1e-6, 1.0) | st.just(0.0),
    typical_p=st.floats(0.05, 0.999) | st.just(1.0),
    order=st.permutations(["temperature", "top_k", "typical_p", "top_p", "min_p"]),
)
def test_filters_in_any_order_match_their_definitions(
    seed, size, scale, temperature, top_k, top_p, min_p, typical_p, order
):
    logits = random_logits(seed, size, scale)
    params = off(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        order=tuple(order),
    )
    if scale == 0:  # sums of equal numbers sit on the thresholds: only the invariants are certain
        got = exact(logits, params)
        assert list(got) == list(range(len(got)))
        assert sum(got.values()) == pytest.approx(1.0)
        return
    assert_same(exact(logits, params), reference(logits, params))


EDITS_TOO = list(itertools.permutations(["logit_bias", "penalties", "temperature", "top_k", "top_p"]))


@pytest.mark.parametrize("order", EDITS_TOO[::7], ids="-".join)
def test_edits_anywhere_in_the_order(order):
    for seed in range(4):
        logits = random_logits(seed, 40)
        params = off(
            temperature=0.6,
            top_k=12,
            top_p=0.8,
            repeat_penalty=1.4,
            frequency_penalty=0.2,
            logit_bias={2: 1.5, 7: -math.inf, 11: -0.5, 5: 2.0},
            order=order,
        )
        want = reference(logits, params, PROMPT, OUTPUT)
        assert_same_float32(exact(logits, params, PROMPT, OUTPUT), want)
        drawn = {one(logits, params, position, PROMPT, OUTPUT) for position in range(20)}
        assert drawn <= set(want)


def test_order_left_out_is_off_and_temperature_placement_matters():
    logits = random_logits(3, 100)
    assert_same(exact(logits, off(top_k=3, top_p=0.5, order=("top_p",))), reference(logits, off(top_p=0.5)))
    before = exact(logits, off(temperature=2.5, top_p=0.7, order=("temperature", "top_p")))
    after = exact(logits, off(temperature=2.5, top_p=0.7, order=("top_p", "temperature")))
    assert len(before) > len(after)
    untempered = exact(logits, off(top_p=0.7))
    assert set(after) == set(untempered)
    with pytest.raises(ValueError, match="distinct names"):
        off(order=("top_k", "top_k"))
    with pytest.raises(ValueError, match="distinct names"):
        off(order=("top_a",))


def warp(warper, logits: np.ndarray, ids: Sequence[int] = (0,)) -> np.ndarray:
    return warper(torch.tensor([list(ids)]), torch.from_numpy(logits[None].copy()))[0].numpy()


@pytest.mark.parametrize(
    ("values", "warper"),
    [
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"top_p": 0.99}, TopPLogitsWarper(0.99)),
        ({"min_p": 0.1}, MinPLogitsWarper(0.1)),
        ({"typical_p": 0.3}, TypicalLogitsWarper(0.3)),
        ({"typical_p": 0.95}, TypicalLogitsWarper(0.95)),
    ],
    ids=str,
)
def test_kept_sets_agree_with_transformers(values, warper):
    for seed in range(20):
        logits = random_logits(seed, 500)
        kept = set(np.flatnonzero(np.isfinite(warp(warper, logits))).tolist())
        assert set(exact(logits, off(**values))) == kept


def test_repetition_penalty_agrees_with_transformers():
    logits = random_logits(0, 64)
    ids = (*PROMPT, *OUTPUT)
    warped = warp(RepetitionPenaltyLogitsProcessor(1.7), logits, ids)
    want = torch.softmax(torch.from_numpy(warped).double(), 0).tolist()
    got = exact(logits, off(repeat_penalty=1.7), PROMPT, OUTPUT)
    assert [got[t] for t in range(64)] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}], ids=str)
def test_greedy_is_argmax_with_the_lowest_id(greedy):
    for seed in range(5):
        logits = random_logits(seed, 5000)
        assert one(logits, dataclasses.replace(SamplingParams(), **greedy), seed) == logits.argmax()
    ties = np.zeros(5000, dtype=np.float32)
    ties[[4999, 3000, 77]] = 1.0
    assert one(ties, dataclasses.replace(SamplingParams(), **greedy)) == 77
    assert one(np.array([-0.0, 0.0], dtype=np.float32), dataclasses.replace(SamplingParams(), **greedy)) == 0
    params = dataclasses.replace(SamplingParams(), **greedy, logit_bias={77: -1.0}, repeat_penalty=9.0)
    assert one(ties, params, 0, (3000,)) == 4999


@pytest.mark.parametrize("level", [1e4, -1e4, 3.4e38, -3.4e38, 0.0, -0.0])
def test_extreme_and_equal_logits(level):
    equal = np.full(3000, level, dtype=np.float32)
    assert exact(equal, off(top_k=4)) == dict.fromkeys(range(4), 0.25)
    assert len(exact(equal, off(min_p=1.0))) == 3000
    assert 0 <= one(equal, OFF) < 3000
    mixed = equal.copy()
    mixed[1234] = -level if level else 1e4
    assert one(mixed, SamplingParams(temperature=0)) == mixed.argmax()
    assert all(one(mixed, SamplingParams(seed=s)) < 3000 for s in range(5))
    assert one(np.array([level], dtype=np.float32), SamplingParams()) == 0
    hard = off(repeat_penalty=1e-300, frequency_penalty=1e308, presence_penalty=-1e308, temperature=0.5)
    assert 0 <= one(mixed, hard, 0, (0, 1), (2, 2, 2)) < 3000
    assert 0 <= one(mixed, off(repeat_penalty=1e300, logit_bias={0: 1e308}), 0, (0, 1), (1234,)) < 3000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [HostRows, DeviceRows])
def test_invalid_logits_name_the_row(bad, kind, monkeypatch):
    use(monkeypatch, kind)
    logits = torch.from_numpy(np.stack([random_logits(i, 3000) for i in range(4)]))
    logits[2, 1500] = bad
    logits[3, 7] = bad
    for params in (SamplingParams(temperature=0), SamplingParams()):
        rows = [SampleRow(SamplerChain(params, 3000), 0)] * 4
        with pytest.raises(InvalidLogitsError, match="row 2") as caught:
            sample(logits, rows)
        assert caught.value.row == 2
        assert isinstance(caught.value, ValueError)


def test_wrong_calls_are_value_errors():
    chain = SamplerChain(SamplingParams(), 8)
    good = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="rows to sample"):
        sample(good, [SampleRow(chain, 0)] * 2)
    with pytest.raises(ValueError, match="float32"):
        sample(good.double(), [SampleRow(chain, 0)])
    with pytest.raises(ValueError, match="8 tokens met 9"):
        sample(torch.zeros(1, 9), [SampleRow(chain, 0)])
    with pytest.raises(ValueError, match="position"):
        sample(good, [SampleRow(chain, -1)])
    with pytest.raises(ValueError, match="token 8"):
        SamplerChain(SamplingParams(logit_bias={8: 1.0}), 8)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        SamplerChain(SamplingParams(repeat_penalty=2), 8, [8])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        chain.append(8)
    with pytest.raises(ValueError, match="not in the answer"):
        SamplerChain(SamplingParams(repeat_penalty=2), 8, [1]).remove(1)
    assert sample(torch.zeros(0, 8), []).token_ids == []
    assert distribution(torch.zeros(0, 8), []) == []
    for field, value in {
        "temperature": -1,
        "top_k": 1.5,
        "top_p": 1.1,
        "min_p": math.nan,
        "typical_p": 0,
        "seed": 2**64,
        "repeat_penalty": 0,
    }.items():
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


@pytest.mark.parametrize("kind", [HostRows, DeviceRows])
def test_every_token_banned(kind, monkeypatch):
    use(monkeypatch, kind)
    logits = torch.zeros(2, 5)
    bans = dict.fromkeys(range(5), -math.inf)
    orders = [DEFAULT_ORDER, ("temperature", "top_k", "logit_bias"), DEFAULT_ORDER]
    for order, heat in zip(orders, (0.7, 0.7, 0.0), strict=True):
        params = SamplingParams(temperature=heat, logit_bias=bans, order=order)
        rows = [SampleRow(SamplerChain(SamplingParams(), 5), 0), SampleRow(SamplerChain(params, 5), 0)]
        with pytest.raises(NoTokenLeftError, match="every token is banned") as caught:
            sample(logits, rows)
        assert caught.value.row == 1
    alone = SamplingParams(logit_bias={**dict.fromkeys(range(4), -math.inf)})
    assert one(np.zeros(5, dtype=np.float32), alone) == 4
    assert one(np.zeros(5, dtype=np.float32), SamplingParams(temperature=0, logit_bias={3: math.inf})) == 3


def use(monkeypatch: pytest.MonkeyPatch, kind: type[HostRows] | type[DeviceRows]) -> None:
    """Make CPU tensors go through the given kind of rows: the device's operations, run on the CPU."""
    if kind is DeviceRows:
        monkeypatch.setattr(chain_module, "logit_rows", lambda logits: DeviceRows(logits))


VARIOUS = [
    SamplingParams(),
    SamplingParams(top_k=60, logprobs=3),
    SamplingParams(temperature=0, repeat_penalty=1.5),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(top_k=0),
    SamplingParams(top_k=0, top_p=0.999, min_p=0.0, temperature=1.7),
    OFF,
    off(temperature=3.0, logprobs=20),
    off(typical_p=0.6),
    SamplingParams(typical_p=0.5, top_k=200),
    SamplingParams(top_k=1000, top_p=0.9999, temperature=4.0, min_p=0.0),
    SamplingParams(repeat_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.1, logprobs=1),
    SamplingParams(logit_bias={5: math.inf, 6: math.inf, 7: 1.0}),
    SamplingParams(
        logit_bias={5: -math.inf, 6: 12.0}, order=("penalties", "temperature", "logit_bias", "top_p")
    ),
    SamplingParams(order=("min_p", "top_p", "temperature")),
    off(top_p=0.97, temperature=2.0, order=("top_p", "typical_p", "temperature")),
    off(min_p=0.3, repeat_penalty=1.1, order=("temperature", "penalties", "min_p")),
]


@pytest.mark.parametrize("kind", [HostRows, DeviceRows])
@pytest.mark.parametrize("size", [61, 9001])
def test_a_row_does_not_depend_on_its_company(kind, size, monkeypatch):
    use(monkeypatch, kind)
    logits = torch.from_numpy(np.stack([random_logits(i, size, 2.0) for i in range(17)]))
    params = [dataclasses.replace(p, seed=i) for i, p in enumerate(VARIOUS)]
    kept = logits.clone()
    for position in range(12):
        rows = [SampleRow(SamplerChain(p, size, PROMPT, OUTPUT), position) for p in params]
        together = sample(logits, rows)
        order = np.random.default_rng(position).permutation(17).tolist()
        shuffled = sample(logits[order], [rows[i] for i in order])
        for place, index in enumerate(order):
            alone = sample(logits[index : index + 1], [rows[index]])
            assert alone.token_ids[0] == together.token_ids[index] == shuffled.token_ids[place]
            assert alone.logprobs[0] == together.logprobs[index] == shuffled.logprobs[place]  # bit for bit
    assert torch.equal(kept, logits)
    rows = [SampleRow(SamplerChain(p, size, PROMPT, OUTPUT), 0) for p in params]
    for index, (ids, probabilities) in enumerate(distribution(logits, rows)):
        ((lone_ids, lone),) = distribution(logits[index : index + 1], [rows[index]])
        assert ids.tobytes() == lone_ids.tobytes()
        assert probabilities.tobytes() == lone.tobytes()


def test_host_and_device_agree(monkeypatch):
    logits = torch.from_numpy(np.stack([random_logits(i, 20_000, 2.5) for i in range(17)]))
    host, device = HostRows(list(logits.numpy())), DeviceRows(logits)
    for width in (1, 40, 300, 5000, 20_000, 30_000):
        for a, b in zip(host.leading(range(17), width), device.leading(range(17), width), strict=True):
            assert a.tobytes() == b.tobytes()
    maxima, heats = logits.max(dim=1).values.double().numpy(), np.linspace(0.3, 3, 17)
    np.testing.assert_allclose(
        host.mass(range(17), maxima, heats), device.mass(range(17), maxima, heats), rtol=1e-9
    )
    rows = [SampleRow(SamplerChain(p, 20_000, PROMPT, OUTPUT), 9) for p in VARIOUS]
    want = sample(logits, rows)
    use(monkeypatch, DeviceRows)
    got = sample(logits, rows)
    assert got.token_ids == want.token_ids


@pytest.mark.parametrize(
    "params",
    [
        OFF,
        SamplingParams(temperature=1.3),
        off(typical_p=0.8),
        off(top_k=6, order=("top_k", "temperature"), temperature=2.0),
        off(temperature=1.5, repeat_penalty=1.5, presence_penalty=0.5),
    ],
    ids=["off", "default", "typical", "top_k", "penalties"],
)
def test_draws_follow_the_distribution(params):
    logits = random_logits(11, 30, 1.5)
    want = reference(logits, params, PROMPT, OUTPUT)
    draws, batch = 8000, 400
    rows = torch.from_numpy(np.repeat(logits[None], batch, axis=0))
    chain = SamplerChain(dataclasses.replace(params, seed=3), 30, PROMPT, OUTPUT)
    counts = np.zeros(30)
    for start in range(0, draws, batch):
        step = [SampleRow(chain, start + i) for i in range(batch)]
        counts += np.bincount(sample(rows, step).token_ids, minlength=30)
    for token in range(30):
        p = want.get(token, 0.0)
        assert abs(counts[token] - draws * p) <= 5 * math.sqrt(draws * p * (1 - p)) + 1e-9


@pytest.mark.parametrize("params", VARIOUS[4:], ids=str)
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(params):
    logits = random_logits(5, 3000, 2.0)
    params = dataclasses.replace(params, seed=77)
    wanted = exact(logits, params, PROMPT, OUTPUT)
    ids, sums = list(wanted), np.cumsum(list(wanted.values()))
    for position in range(30):
        place = int(np.searchsorted(sums, uniform(77, position), side="right"))
        assert one(logits, params, position, PROMPT, OUTPUT) == ids[min(place, len(ids) - 1)]


def test_thresholds_are_met_exactly(monkeypatch):
    equal = np.zeros(4, dtype=np.float32)
    assert list(exact(equal, off(top_p=0.5))) == [0, 1]
    assert list(exact(equal, off(typical_p=0.5))) == [0, 1]
    assert list(exact(equal, off(min_p=1.0))) == [0, 1, 2, 3]
    for number, token in ((0.0, 0), (0.25, 1), (0.5, 2), (0.75 - 2.0**-53, 2), (0.75, 3)):
        monkeypatch.setattr(chain_module, "uniform", lambda seed, position, number=number: number)
        assert one(equal, OFF) == token
        for filtered in (
            OFF,
            off(min_p=1.0),
            off(top_p=0.9999),
        ):  # behind the tokens that are loaded at first
            assert one(np.zeros(4096, dtype=np.float32), filtered) == pytest.approx(4096 * number, abs=1)


def test_edits_keep_bans_and_stay_finite():
    logits = np.array([1.0, 2.0, 3.0, -4.0], dtype=np.float32)
    assert exact(logits, off(repeat_penalty=1e-300), (0, 1)) == {0: 0.5, 1: 0.5, 2: 0.0, 3: 0.0}
    assert list(exact(logits, off(logit_bias={2: -1e308, 0: 1e308, 3: 1e308}))) == [0, 3, 1, 2]
    banned = off(logit_bias={0: -math.inf}, frequency_penalty=-1e308, repeat_penalty=1e-300)
    assert set(exact(logits, banned, (0,), (0, 0))) == {1, 2, 3}
    late = off(top_k=3, logit_bias={0: math.inf, 1: math.inf, 3: math.inf}, order=("top_k", "logit_bias"))
    assert_same(exact(logits, late), reference(logits, late))


def test_the_last_uniform_number_draws_the_last_token_of_weight(monkeypatch):
    monkeypatch.setattr(chain_module, "uniform", lambda seed, position: 1 - 2.0**-53)
    for seed in range(20):
        logits = random_logits(seed, 3000, 1.0)
        assert one(logits, OFF) == np.lexsort((np.arange(3000), -logits))[-1]
        logits[100:] = -2000.0  # weight 0: never drawn
        assert one(logits, OFF) == np.argmin(logits[:100])


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 49), max_size=30),
    output=st.lists(st.integers(0, 49), max_size=200),
    rejected=st.lists(st.integers(0, 49), max_size=5),
)
def test_incremental_penalties_equal_a_recount(prompt, output, rejected):
    params = off(repeat_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1)
    logits = random_logits(1, 50)
    grown = SamplerChain(params, 50, prompt)
    for token in output:
        grown.append(token)
    for token in rejected:
        grown.append(token)
    for token in reversed(rejected):
        grown.remove(token)
    fresh = SamplerChain(params, 50, prompt, output)
    rows = [SampleRow(grown, 3), SampleRow(fresh, 3)]
    (ids, p), (fresh_ids, q) = distribution(torch.from_numpy(np.stack([logits] * 2)), rows)
    assert ids.tobytes() == fresh_ids.tobytes()
    assert p.tobytes() == q.tobytes()
    assert_same_float32(exact(logits, params, prompt, output), reference(logits, params, prompt, output))
    grown.restart(prompt, output)
    assert exact(logits, params, prompt, output) == dict(zip(ids.tolist(), p.tolist(), strict=True))


@pytest.mark.parametrize("kind", [HostRows, DeviceRows])
def test_logprobs_are_of_the_raw_logits(kind, monkeypatch):
    use(monkeypatch, kind)
    logits = random_logits(2, 3000)
    logits[[10, 20]] = 20.0
    params = SamplingParams(logprobs=5, temperature=0.3, logit_bias={10: -math.inf, 20: -5.0, 30: math.inf})
    want = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    result = sample(torch.from_numpy(logits[None]), [SampleRow(SamplerChain(params, 3000), 0)])
    (report,) = result.logprobs
    assert result.token_ids == [30]
    assert report.logprob == pytest.approx(float(want[30]), rel=1e-9)
    ids = [10, 20, *np.argsort(-logits, kind="stable")[2:5].tolist()]
    assert [token for token, _ in report.top] == ids
    assert [value for _, value in report.top] == pytest.approx(want[ids].tolist(), rel=1e-9)
    few = torch.zeros(1, 3)
    (report,) = sample(few, [SampleRow(SamplerChain(SamplingParams(logprobs=100), 3), 0)]).logprobs
    assert report.top == ((0, -math.log(3)), (1, -math.log(3)), (2, -math.log(3)))
    none = sample(few, [SampleRow(SamplerChain(SamplingParams(), 3), 0)])
    assert none.logprobs == [None]


def test_tensors_of_every_kind_of_memory():
    logits = torch.from_numpy(np.stack([random_logits(i, 4000) for i in range(6)]))
    rows = [SampleRow(SamplerChain(SamplingParams(seed=i), 4000), i) for i in range(3)]
    want = sample(logits[::2].clone(), rows).token_ids
    assert sample(logits[::2], rows).token_ids == want
    assert sample(logits.t().contiguous().t()[::2], rows).token_ids == want
    assert sample(logits[::2].clone().requires_grad_(), rows).token_ids == want
    with torch.inference_mode():
        assert sample(logits[::2] * 1.0, rows).token_ids == want
    assert isinstance(logit_rows(logits), HostRows)


@pytest.mark.gpu
def test_device_memory():
    logits = torch.from_numpy(np.stack([random_logits(i, 50_000, 2.0) for i in range(17)]))
    rows = [
        SampleRow(SamplerChain(dataclasses.replace(p, seed=4), 50_000, PROMPT, OUTPUT), 8) for p in VARIOUS
    ]
    on_device = sample(logits.cuda(), rows)
    assert on_device.token_ids == sample(logits, rows).token_ids
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].cuda(), [row])
        assert alone.token_ids[0] == on_device.token_ids[index]
        assert alone.logprobs[0] == on_device.logprobs[index]
