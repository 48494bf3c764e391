"""`infer bench`: what is counted and what is said; never how fast it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from command_line import Infer

from infer.quant.kernels import native
from infer.runtime import bandwidth
from infer.runtime.batch import ForwardBatch
from infer.runtime.bench import Bench, BenchConfig, kv_bytes, weight_bytes
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.loader import LoadedModel, load_model
from infer.samplers.logit_rows import Logits

Load = Callable[..., LoadedModel]

RATE = {"type": ["number", "null"], "exclusiveMinimum": 0}
COUNT = {"type": "integer", "minimum": 0}
PROPERTIES: dict[str, Any] = {
    "prefill_tok_s": RATE, "prefill_min_tok_s": RATE, "prefill_max_tok_s": RATE,
    "decode_tok_s": RATE, "decode_min_tok_s": RATE, "decode_max_tok_s": RATE,
    "prefill_tokens": COUNT, "decode_tokens": COUNT, "depth": COUNT, "repetitions": COUNT,
    "weight_bytes_per_token": {"type": ["integer", "null"], "exclusiveMinimum": 0},
    "kv_bytes_per_token": {"type": ["integer", "null"], "exclusiveMinimum": 0},
    "gb_s": RATE, "bandwidth_gb_s": RATE, "bandwidth_share": RATE,
    "model": {
        "type": "object", "additionalProperties": {"type": "string"},
        "required": ["name", "fingerprint", "architecture", "quantization"],
    },
    "kernel": {"type": "string"}, "device": {"type": "string"}, "threads": COUNT, "exact": {"type": "boolean"},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": list(PROPERTIES),
    "properties": PROPERTIES,
}


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 1 << 20)


@pytest.fixture
def load(tiny_llama: Callable[..., Path], tmp_path: Path) -> Iterator[Load]:
    """Loads a tiny float model with the dequantizing kernel and the given engine settings; closes it afterwards."""
    opened: list[LoadedModel] = []

    def open_model(path: Path | None = None, **settings: object) -> LoadedModel:
        config = EngineConfig(**{"device": "cpu", "threads": 1, "kernel": "float32", **settings})
        opened.append(load_model(path or tiny_llama(), config, memo_dir=tmp_path))
        return opened[-1]

    yield open_model
    for model in opened:
        model.close()


@pytest.fixture
def run(tiny_infer: Infer) -> Infer:
    """run(*arguments, stdin=b"") runs `infer bench` on a tiny model."""
    return partial(tiny_infer, "bench")


def _watch(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first position, tokens) of every forward pass."""
    seen: list[tuple[int, int]] = []
    forward = model.engine.runner.forward

    def watched(batch: ForwardBatch) -> Logits:
        seen.append((int(batch.positions[0]), len(batch.ids)))
        return forward(batch)

    monkeypatch.setattr(model.engine.runner, "forward", watched)
    return seen


def test_passes_without_depth(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BenchConfig(prefill=50, decode=20, repetitions=2)
    model = load(ctx=config.ctx, prefix_cache=False)
    seen = _watch(model, monkeypatch)
    bench = Bench(model.engine, config)
    told: list[float] = []
    rates = bench.prefill(told.append)
    assert seen == [(0, 50)] * 3  # the first warms up
    assert list(rates.values) == told
    assert len(told) == 2
    seen.clear()
    assert len(bench.decode().values) == 2
    assert seen == [(i, 1) for count in (16, 20, 20) for i in range(count + 1)]


def test_the_depth_is_computed_once_and_not_timed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    depth = 2 * BLOCK_SIZE
    config = BenchConfig(prefill=50, decode=4, depth=depth, repetitions=3)
    model = load(ctx=config.ctx)
    seen = _watch(model, monkeypatch)
    bench = Bench(model.engine, config)
    bench.prefill()
    assert seen == [(0, depth)] + [(depth, 50)] * 4
    seen.clear()
    bench.decode()
    decoded = [first for first, count in seen if count == 1 and first >= depth]
    assert decoded == [depth + i for i in range(4)] * 4
    assert all(first >= depth - BLOCK_SIZE for first, _ in seen)


def test_ctx_is_just_enough(load: Load) -> None:
    for config in (
        BenchConfig(prefill=3, decode=9, repetitions=1),
        BenchConfig(prefill=9, decode=3, depth=5, repetitions=1),
        BenchConfig(prefill=0, decode=1, depth=1, repetitions=1),
    ):
        bench = Bench(load(ctx=config.ctx).engine, config)
        assert len(bench.decode().values) == 1
        if config.prefill:
            assert len(bench.prefill().values) == 1


def test_weight_bytes_count_the_embedding_by_the_row_unless_it_is_the_output(
    load: Load, tiny_llama: Callable[..., Path]
) -> None:
    width, ff, vocab = 64, 128, 512
    layer = width * (width + 2 * width // 2 + width + 3 * ff)  # q, k and v of half as many heads, o, the MLP
    rest = 4 * (2 * layer + vocab * width)
    assert weight_bytes(load().engine.runner.model) == rest + 4 * width
    assert weight_bytes(load(tiny_llama(tied=True)).engine.runner.model) == rest


@pytest.mark.parametrize(("kv_type", "size"), [("f16", 2 * 16), ("f32", 4 * 16), ("int8", 16 + 4)])
def test_kv_bytes_count_positions(load: Load, kv_type: str, size: int) -> None:
    model = load(ctx=256, kv_type=kv_type)
    runner = model.engine.runner
    assert kv_bytes(runner.model, runner.cache, 1) == 2 * 2 * 2 * size  # K and V of 2 layers and 2 heads
    assert kv_bytes(runner.model, runner.cache, 100) == 100 * kv_bytes(runner.model, runner.cache, 1)
    read = Bench(model.engine, BenchConfig(decode=3, depth=7)).memory_read()
    assert read.kv == 9 * kv_bytes(runner.model, runner.cache, 1)  # 8, 9 and 10 positions
    assert read.total == read.weights + read.kv


def test_bandwidth_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert bandwidth.measure_bandwidth(cpu, 2) > 0
    monkeypatch.setattr(native, "available", lambda: False)
    assert bandwidth.measure_bandwidth(cpu, 2) > 0


def test_the_command_prints_a_table_or_an_object(run: Infer) -> None:
    code, out, err = run("-p", "40", "-n", "3", "-r", "2", "-d", "70", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    assert None not in found.values()
    assert (found["prefill_tokens"], found["decode_tokens"], found["depth"]) == (40, 3, 70)
    assert (found["repetitions"], found["threads"], found["device"]) == (2, 1, "cpu")
    assert found["decode_min_tok_s"] <= found["decode_tok_s"] <= found["decode_max_tok_s"]
    assert found["gb_s"] == pytest.approx(
        (found["weight_bytes_per_token"] + found["kv_bytes_per_token"]) * found["decode_tok_s"] / 1e9,
        rel=1e-3,
    )
    assert found["bandwidth_share"] == pytest.approx(found["gb_s"] / found["bandwidth_gb_s"])
    code, out, err = run("-p", "40", "-n", "3", "-r", "1", "-v")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "model", "prefill", "decode", "read", "bandwidth", "device",
    ]  # fmt: skip
    assert err.count("tok/s") == 2


def test_either_part_can_be_left_out(run: Infer) -> None:
    found = json.loads(run("-p", "0", "-n", "3", "-r", "1", "--json")[1])
    jsonschema.validate(found, SCHEMA)
    assert found["prefill_tok_s"] is None
    assert found["decode_tok_s"] is not None
    found = json.loads(run("-p", "9", "-n", "0", "-r", "1", "--json")[1])
    jsonschema.validate(found, SCHEMA)
    assert found["prefill_tok_s"] is not None
    assert {name for name, value in found.items() if value is None} == {
        "decode_tok_s", "decode_min_tok_s", "decode_max_tok_s", "weight_bytes_per_token", "kv_bytes_per_token",
        "gb_s", "bandwidth_gb_s", "bandwidth_share",
    }  # fmt: skip
    assert [line.split(":")[0] for line in run("-p", "9", "-n", "0", "-r", "1")[1].splitlines()] == [
        "model", "prefill", "device",
    ]  # fmt: skip


def test_bad_calls_are_one_line(run: Infer) -> None:
    for arguments, message in (
        (("-p", "-1"), "--prefill must be at least 0"),
        (("-r", "0"), "--repetitions must be at least 1"),
        (("-p", "0", "-n", "0"), "--prefill must be at least 1"),
        (("-d", "-5"), "--depth must be at least 0"),
        (("-d", "5", "--no-cache"), "--no-cache and --depth"),
        (("-p", "500", "--ctx", "499"), "less than the 500 tokens"),
        (("-p", "x"), "-p"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_a_measurement_beyond_the_context(run: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("-p", "513", "-n", "1")
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "needs 513 tokens of context" in err
    code, _, err = run("-p", "513", "-n", "1", "-r", "1", "--ctx", "513")
    assert (code, err.count("\n")) == (0, 1)
    monkeypatch.setenv("INFER_NO_CACHE", "1")
    assert run("-p", "4", "-n", "1", "-r", "1", "-d", "9")[0] == 0


def test_the_disk_cache_is_left_alone(run: Infer, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    code, _, err = run("-p", "9", "-n", "2", "-r", "1", "-d", "130", "--cache-dir", str(folder))
    assert code == 0
    assert err == "infer: note: --cache-dir: a measurement uses no disk cache\n"
    assert not folder.exists()
    assert not list((tmp_path / "home").rglob("*.kv"))
