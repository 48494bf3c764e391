"""Rotation, the paged cache and attention against float64 numpy, and the promise that bits never change."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from native_ops import ActBuffers, Cache, Native, address, bf16_bits, bf16_value

from infer.quant.kernels.native_abi import AttentionOp, Batch, RopeStoreOp


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    bound = Native()
    yield bound
    bound.close()


@dataclass
class Layer:
    """The shape of one attention layer."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    kind: str = "f16"
    window: int = 0
    softcap: float = 0.0
    pairing: int = 1
    rope_dim: int = 0  # 0: head_dim
    norms: bool = False
    latent: int = 0  # values are the first dimensions of keys, the rotated ones the last
    sinks: bool = False

    @property
    def rotary(self) -> int:
        return self.rope_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @property
    def rope_at(self) -> int:
        return self.head_dim - self.rotary if self.latent else 0


@dataclass
class Prompt:
    """Inputs of one sequence: q, k, v [positions, heads, head_dim], and its blocks."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray
    value_dim: int
    out: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.out = np.full((len(self.q), self.q.shape[1] * self.value_dim), np.nan, np.float32)

    def slots(self) -> np.ndarray:
        at = np.arange(len(self.q), dtype=np.int64)
        return self.table[at // 64] * np.int64(64) + at % 64


MAX_POSITIONS = 1100


class Setup:
    """A layer with its weights, a cache, and prompts in random blocks of it."""

    def __init__(self, layer: Layer, lengths: list[int], seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.layer = layer
        counts = [-(-n // 64) for n in lengths]
        self.order = rng.permutation(sum(counts) + 2).astype(np.int32)
        self.max_blocks = max(counts)
        self.prompts = []
        taken = 0
        for n, count in zip(lengths, counts, strict=True):
            make = np.random.default_rng([seed, n])
            q = make.normal(0, 1.5, (n, layer.heads, layer.head_dim)).astype(np.float32)
            k, v = make.normal(0, 1.5, (2, n, layer.kv_heads, layer.head_dim)).astype(np.float32)
            self.prompts.append(Prompt(q, k, v, self.order[taken : taken + count], layer.value_dim))
            taken += count
        self.cache = Cache(layer.kind, layer.kv_heads, layer.head_dim, len(self.order), layer.latent)
        half = layer.rotary // 2
        angle = np.arange(MAX_POSITIONS)[:, None] * 0.7 ** np.arange(half)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        weights = np.random.default_rng(seed).normal(1, 0.1, (2, layer.value_dim)).astype(np.float32)
        self.sinks = np.random.default_rng(seed + 1).normal(0, 4, layer.heads).astype(np.float32)
        self.q_norm: np.ndarray | None = weights[0] if layer.norms else None
        self.k_norm: np.ndarray | None = weights[1] if layer.norms else None
        self.scale = np.float32(layer.head_dim**-0.5)

    def step(self, native: Native, parts: list[tuple[int, int, int]], threads: int = 1) -> None:
        """One run: for each (prompt, start, stop), rope_store and attention of those positions."""
        layer, kv = self.layer, self.cache.struct
        cut = [(self.prompts[p], slice(a, b)) for p, a, b in parts]
        q, k, v = (np.concatenate([getattr(prompt, name)[run] for prompt, run in cut]) for name in "qkv")
        positions = np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in parts])
        slots = np.concatenate([prompt.slots()[run] for prompt, run in cut])
        query_start = np.cumsum([0] + [b - a for _, a, b in parts], dtype=np.int32)
        context = np.array([b for _, _, b in parts], np.int32)
        tables = np.full((len(parts), self.max_blocks), -1, np.int32)
        for row, (p, _, b) in zip(tables, parts, strict=True):
            used = -(-b // 64)
            row[:used] = self.prompts[p].table[:used]
        batch = Batch(len(positions), len(parts), self.max_blocks, 0, None,
                      *map(address, (positions, slots, query_start, context, tables)), None)  # fmt: skip
        width = layer.heads * layer.value_dim
        out = np.full((len(positions), width), np.nan, np.float32)
        acts = ActBuffers(len(positions), width) if width % 32 == 0 else None
        rope = RopeStoreOp(
            q=address(q), k=address(k), v=None if layer.latent else address(v), q_norm=address(self.q_norm),
            k_norm=address(self.k_norm), cos=address(self.cos), sin=address(self.sin),
            kv=ctypes.pointer(kv), eps=1e-6, heads=layer.heads, norm_dim=layer.value_dim,
            rope_at=layer.rope_at, rope_dim=layer.rotary, pairing=layer.pairing,
        )  # fmt: skip
        attention = AttentionOp(
            q=address(q), sinks=address(self.sinks) if layer.sinks else None, out=address(out),
            acts=ctypes.pointer(acts.struct) if acts else None, kv=ctypes.pointer(kv), scale=self.scale,
            softcap=layer.softcap, heads=layer.heads, window=layer.window,
        )  # fmt: skip
        native.run(batch, rope, attention, threads=threads)
        if acts:
            acts.check(out)
            only = ActBuffers(len(positions), width)  # the f32 result may stay inside
            attention.out, attention.acts = None, ctypes.pointer(only.struct)
            native.run(batch, attention, threads=threads)
            only.check(out)
        for i, (p, a, b) in enumerate(parts):
            self.prompts[p].out[a:b] = out[query_start[i] : query_start[i + 1]]

    def rotated(self, x: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        """float64 norm and rotation of [positions, heads, head_dim]."""
        y = x.astype(np.float64)
        if norm is not None:
            part = y[..., : len(norm)]
            part[...] = part / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-6) * norm
        half = self.layer.rotary // 2
        first, second = (
            (np.arange(half), np.arange(half) + half)
            if self.layer.pairing
            else (np.arange(half) * 2, np.arange(half) * 2 + 1)
        )
        first, second = first + self.layer.rope_at, second + self.layer.rope_at
        cos, sin = (t[: len(x), None].astype(np.float64) for t in (self.cos, self.sin))
        a, b = y[..., first].copy(), y[..., second].copy()
        y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
        return y

    def expected(self, index: int) -> np.ndarray:
        """float64 attention output of a prompt, from the K and V in the cache."""
        layer, prompt = self.layer, self.prompts[index]
        n = len(prompt.q)
        q = self.rotated(prompt.q, self.q_norm)
        k, v = self.cache.values(prompt.table, n)
        group = layer.heads // layer.kv_heads
        k, v = k.repeat(group, 0), v.repeat(group, 0)
        scores = np.einsum("qhd,hkd->hqk", q, k) * float(self.scale)
        if layer.softcap:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        ahead = np.arange(n)[:, None] - np.arange(n)[None]
        seen = (ahead >= 0) & ((ahead < layer.window) if layer.window else True)
        scores = np.where(seen, scores, -np.inf)
        if layer.sinks:
            scores = np.concatenate([scores, np.tile(self.sinks[:, None, None], (1, n, 1))], axis=2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True))[..., :n]
        out: np.ndarray = np.einsum("hqk,hkd->qhd", weights, v).reshape(n, -1)
        return out


LAYERS = [
    Layer(9, 3, 64, "f16", pairing=0),
    Layer(12, 2, 128, "f16"),
    Layer(4, 1, 256, "bf16", window=100, norms=True),
    Layer(2, 2, 80, "f32", rope_dim=32),
    Layer(8, 1, 32, "int8", softcap=5.0),
    Layer(2, 1, 40, "f16", pairing=0, rope_dim=20),
    Layer(6, 3, 96, "bf16", window=1),
    Layer(50, 1, 16, "int8", norms=True),
    Layer(3, 1, 90, "int8", window=300, rope_dim=0, softcap=20.0),
    Layer(8, 2, 64, "f16", window=70, sinks=True),
    Layer(4, 1, 48, "f32", sinks=True),
    Layer(16, 1, 160, "f16", pairing=0, rope_dim=32, latent=128, norms=True),
    Layer(5, 1, 60, "f32", pairing=0, rope_dim=20, latent=40),
    Layer(20, 1, 88, "bf16", pairing=0, rope_dim=8, latent=80, norms=True),
    Layer(6, 1, 96, "int8", rope_dim=32, latent=64, window=90),
]
IDS = [
    f"{x.heads}/{x.kv_heads}x{x.head_dim}-{x.kind}{' latent' * bool(x.latent)}{' sinks' * x.sinks}"
    for x in LAYERS
]


@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
def test_attention_is_accurate(native: Native, layer: Layer) -> None:
    lengths = [1, 64, 65, 200, 600 if layer.heads < 10 else 280]
    setup = Setup(layer, lengths)
    setup.step(native, [(i, 0, n) for i, n in enumerate(lengths)], threads=2)
    for i, prompt in enumerate(setup.prompts):
        np.testing.assert_allclose(prompt.out, setup.expected(i), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
def test_the_cache_holds_the_rounded_rotation(native: Native, layer: Layer) -> None:
    setup = Setup(layer, [130])
    setup.step(native, [(0, 0, 130)])
    prompt = setup.prompts[0]
    k, v = setup.cache.values(prompt.table, 130)
    exact_k = setup.rotated(prompt.k, setup.k_norm).swapaxes(0, 1)
    exact_v = exact_k[..., : layer.latent] if layer.latent else prompt.v.astype(np.float64).swapaxes(0, 1)
    step = {"f16": 2**-11, "bf16": 2**-8, "f32": 2**-23, "int8": 0}[layer.kind]
    for stored, exact in ((k, exact_k), (v, exact_v)):
        largest = np.abs(exact).max(-1, keepdims=True)
        if layer.latent:
            largest = np.abs(exact_k).max(-1, keepdims=True)  # one scale for all of a key
        bound = largest * (0.5001 / 127) if layer.kind == "int8" else np.abs(exact) * step * 1.001 + 1e-5
        assert (np.abs(stored - exact) <= bound + largest * 2e-6).all()
    if layer.latent:
        return
    if layer.kind == "f16":  # v is not rotated: rounded to nearest even
        np.testing.assert_array_equal(v, prompt.v.astype(np.float16).astype(np.float64).swapaxes(0, 1))
    if layer.kind == "bf16":
        np.testing.assert_array_equal(v, bf16_value(bf16_bits(prompt.v)).astype(np.float64).swapaxes(0, 1))


def chunks(index: int, length: int, size: int) -> list[tuple[int, int, int]]:
    return [(index, a, min(length, a + size)) for a in range(0, length, size)]


@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
def test_bits_do_not_depend_on_chunks_threads_or_company(native: Native, layer: Layer) -> None:
    lengths = [300, 77]
    whole = Setup(layer, lengths)
    whole.step(native, [(0, 0, 300), (1, 0, 77)], threads=2)

    def same(other: Setup) -> None:
        for mine, theirs in zip(other.prompts, whole.prompts, strict=True):
            np.testing.assert_array_equal(mine.out, theirs.out)
        for bits, expected in zip(other.cache.contents(), whole.cache.contents(), strict=True):
            np.testing.assert_array_equal(bits.view(np.uint8), expected.view(np.uint8))

    for size in (1, 7, 64):
        split = Setup(layer, lengths)
        for part in chunks(0, 300, size) + chunks(1, 77, size):
            split.step(native, [part])
        same(split)
    mixed = Setup(layer, lengths)
    mixed.step(native, [(1, 0, 40)])
    for i, part in enumerate(chunks(0, 300, 9)):  # 34 steps; the second prompt decodes beside the first 28
        decode = [(1, 40 + i, 41 + i)] if i < 28 else []
        mixed.step(native, [*decode, part], threads=2)
    mixed.step(native, [(1, 68, 77)], threads=2)
    same(mixed)
    alone = Setup(layer, lengths)
    for part in ((1, 0, 77), (0, 0, 300)):
        alone.step(native, [part], threads=5)
    same(alone)


@pytest.mark.parametrize("layer", LAYERS, ids=IDS)
def test_bits_do_not_depend_on_the_instruction_set(native: Native, layer: Layer) -> None:
    results = []
    for _ in native.each_isa():
        setup = Setup(layer, [150])
        setup.step(native, [(0, 0, 140)], threads=2)
        setup.step(native, [(0, 140, 150)])
        results.append([setup.prompts[0].out, *setup.cache.contents()])
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(mine.view(np.uint8), first.view(np.uint8))


@pytest.mark.parametrize("kind", ["f16", "int8"])
def test_long_contexts_split_over_threads_without_changing_bits(native: Native, kind: str) -> None:
    """Few rows over a long context run as chunks of positions, merged afterwards."""
    layer = Layer(4, 1, 128, kind)
    results = []
    for threads in (1, 2, 5):
        setup = Setup(layer, [1100])
        setup.step(native, [(0, 0, 1097)], threads=threads)
        setup.step(native, [(0, 1097, 1098)], threads=threads)
        setup.step(native, [(0, 1098, 1100)], threads=threads)
        results.append(setup.prompts[0].out)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    expected = setup.expected(0)
    np.testing.assert_allclose(results[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "int8"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("latent", [0, 48])
def test_a_position_that_is_not_finite_touches_no_earlier_row(
    native: Native, kind: str, bad: float, latent: int
) -> None:
    layer = Layer(6, 2, 64, kind, latent=latent, rope_dim=64 - latent)
    clean, broken = Setup(layer, [100]), Setup(layer, [100])
    broken.prompts[0].v[70:72] = bad
    broken.prompts[0].k[70 if latent else 71] = bad
    clean.step(native, [(0, 0, 100)])
    with np.errstate(invalid="ignore"):
        broken.step(native, [(0, 0, 100)])
    np.testing.assert_array_equal(broken.prompts[0].out[:70], clean.prompts[0].out[:70])
    assert not np.isfinite(broken.prompts[0].out[70:]).any()


def test_a_block_outside_the_cache_is_refused(native: Native) -> None:
    setup = Setup(Layer(), [70])
    setup.prompts[0].table[:] = setup.cache.struct.blocks
    with pytest.raises(AssertionError):
        setup.step(native, [(0, 0, 70)])
