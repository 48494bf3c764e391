"""The native router, experts and matrices per head: against torch, one row at a time, and bits that never change."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from native_ops import ActBuffers, Native, address, rows_batch

from infer.quant.base import get_format
from infer.quant.kernels import native as native_kernel
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.native import NativeKernel
from infer.quant.kernels.native_abi import ExpertsOp, HeadsOp, RouteOp, Weight
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.strips import NativeWeight
from infer.runtime.config import MoEConfig
from infer.runtime.models.native_ops import GATES
from infer.runtime.models.ops import Linear, Router
from infer.runtime.models.torch_ops import choose

pytestmark = pytest.mark.skipif(not native_kernel.available(), reason="the native library was not built here")
CHOICE = np.dtype([("expert", np.int32), ("weight", np.float32)])


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    bound = Native()
    yield bound
    bound.close()


@pytest.fixture(scope="module")
def kernel() -> Iterator[NativeKernel]:
    made = NativeKernel(1)
    yield made
    made.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def _route(
    native: Native, logits: np.ndarray, rule: MoEConfig, bias: np.ndarray | None = None, threads: int = 1
) -> np.ndarray:
    out = np.zeros((len(logits), rule.used), CHOICE)
    op = RouteOp(
        logits=address(logits), bias=address(bias), out=address(out), experts=rule.experts, used=rule.used,
        groups=rule.groups, groups_used=rule.groups_used, gate=GATES[rule.gate], normalize=rule.normalize,
        scale=rule.scale,
    )  # fmt: skip
    native.run(rows_batch(len(logits)), op, threads=threads)
    return out


def _chosen(logits: np.ndarray, rule: MoEConfig, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    layer: Any = None
    router = Router(Linear(layer), rule, None if bias is None else torch.from_numpy(bias))
    ids, weights = choose(torch.from_numpy(logits), router)
    return ids.numpy(), weights.numpy()


RULES = [
    MoEConfig(experts=8, used=2, inner=1),
    MoEConfig(experts=128, used=8, inner=1, normalize=False, scale=3.5),
    MoEConfig(experts=37, used=37, inner=1),
    MoEConfig(experts=64, used=6, inner=1, normalize=False, groups=8, groups_used=3),
    MoEConfig(experts=256, used=8, inner=1, gate="sigmoid", scale=2.5, groups=8, groups_used=4),
    MoEConfig(experts=20, used=4, inner=1, gate="sigmoid", groups=20, groups_used=5),
    MoEConfig(experts=32, used=4, inner=1, gate="chosen_softmax"),
    MoEConfig(experts=1, used=1, inner=1),
]
IDS = [f"{r.gate} {r.used} of {r.experts}, {r.groups_used} of {r.groups}" for r in RULES]


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_the_router_chooses_as_torch_does(
    native: Native, rng: np.random.Generator, rule: MoEConfig, with_bias: bool
) -> None:
    logits = rng.normal(0, 2, (300, rule.experts)).astype(np.float32)
    bias = rng.normal(0, 0.2, rule.experts).astype(np.float32) if with_bias else None
    ids, weights = _chosen(logits, rule, bias)
    found = [
        _route(native, logits, rule, bias, threads=threads) for _ in native.each_isa() for threads in (1, 5)
    ]
    np.testing.assert_array_equal(found[0]["expert"], ids)
    np.testing.assert_allclose(found[0]["weight"], weights, rtol=3e-6)
    assert all(other.tobytes() == found[0].tobytes() for other in found)


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_of_equal_scores_the_lowest_number_wins(
    native: Native, rng: np.random.Generator, rule: MoEConfig
) -> None:
    logits = rng.integers(0, 2, (100, rule.experts)).astype(np.float32)
    logits[0] = 0
    found = _route(native, logits, rule)
    np.testing.assert_array_equal(found["expert"], _chosen(logits, rule, None)[0])
    if rule.groups_used == rule.groups:
        np.testing.assert_array_equal(found["expert"][0], np.arange(rule.used))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_still_choose_experts(native: Native, bad: float) -> None:
    for rule in RULES:
        logits = np.zeros((2, rule.experts), np.float32)
        logits[0] = bad
        found = _route(native, logits, rule)
        assert all(len(set(row)) == rule.used and max(row) < rule.experts for row in found["expert"].tolist())
        assert np.isfinite(found["weight"][1]).all()


@dataclass
class Stack:
    """`count` weights [n, k], and the array that the library takes. It keeps them alive."""

    weights: list[NativeWeight]

    @property
    def array(self) -> Any:
        return (Weight * len(self.weights))(*(weight.struct for weight in self.weights))


def _stack(kernel: NativeKernel, rng: np.random.Generator, kind: str, count: int, n: int, k: int) -> Stack:
    weights = []
    for _ in range(count):
        values = (rng.normal(0, 1, (n, k)) / k**0.5).astype(np.float32)
        data = torch.from_numpy(gguf.quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8))
        source = WeightSource("w", (n, k), get_format(kind), lambda a, b, data=data: data[a:b].reshape(-1))
        weights.append(kernel.pack(source))
    return Stack(weights)


@dataclass
class Layer:
    """Twelve experts, three of them for each row."""

    gate: Stack
    up: Stack
    down: Stack
    biases: list[np.ndarray | None]
    act: int
    used: int = 3

    def op(self, x: np.ndarray, choices: np.ndarray, acts: ActBuffers | None, out: np.ndarray) -> ExpertsOp:
        return ExpertsOp(
            choices=address(choices), acts=ctypes.pointer(acts.struct) if acts else None, x=address(x),
            gate=self.gate.array, up=self.up.array, down=self.down.array, gate_bias=address(self.biases[0]),
            up_bias=address(self.biases[1]), down_bias=address(self.biases[2]), out=address(out),
            experts=len(self.gate.weights), used=self.used, act=self.act,
        )  # fmt: skip

    def run(self, native: Native, x: np.ndarray, choices: np.ndarray, threads: int = 1) -> np.ndarray:
        out = np.full((len(x), self.down.weights[0].shape[0]), np.nan, np.float32)
        acts = ActBuffers(len(x), x.shape[1])
        quantize = abi.QuantizeOp(x=address(x), acts=ctypes.pointer(acts.struct), width=x.shape[1])
        native.run(rows_batch(len(x)), quantize, self.op(x, choices, acts, out), threads=threads)
        return out

    def expected(
        self, native: Native, kernel: NativeKernel, x: np.ndarray, choices: np.ndarray
    ) -> np.ndarray:
        """One row and one expert at a time, from the operations that the dense layers have."""
        total = np.zeros((len(x), self.down.weights[0].shape[0]), np.float32)
        for row in range(len(x)):
            for expert, weight in choices[row].tolist():
                gate, up = (self._product(kernel, part, i, expert, x[row : row + 1])
                            for i, part in enumerate((self.gate, self.up)))  # fmt: skip
                gated = np.empty_like(gate)
                native.run(rows_batch(1), abi.GluOp(gate=address(gate), up=address(up), out=address(gated),
                                                    width=gate.shape[1], act=self.act))  # fmt: skip
                part = self._product(kernel, self.down, 2, expert, gated)[0]
                total[row] = (np.float64(np.float32(weight)) * part.astype(np.float64) + total[row]).astype(
                    np.float32
                )
        return total

    def _product(
        self, kernel: NativeKernel, part: Stack, index: int, expert: int, x: np.ndarray
    ) -> np.ndarray:
        y: np.ndarray = kernel.matmul(torch.from_numpy(x), part.weights[expert]).numpy()
        bias = self.biases[index]
        return y if bias is None else y + bias[expert]


KINDS = {
    "Q8_0": ("Q8_0", "Q8_0"), "Q4_0, F16": ("Q4_0", "F16"), "F32": ("F32", "F32"), "F32, Q5_1": ("F32", "Q5_1"),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def layer(request: pytest.FixtureRequest, kernel: NativeKernel, rng: np.random.Generator) -> Layer:
    first, last = KINDS[request.param]
    count, width, inner, rows = 12, 64, 96, 40 if first == "F32" else 64
    biases = [rng.normal(0, 0.3, (count, n)).astype(np.float32) for n in (inner, inner, rows)]
    return Layer(
        _stack(kernel, rng, first, count, inner, width),
        _stack(kernel, rng, "Q8_0" if first == "F32" else first, count, inner, width),
        _stack(kernel, rng, last, count, rows, inner),
        list(biases) if last != "Q8_0" else [None] * 3,
        abi.ACT_SWIGLU_OAI if last == "F16" else abi.ACT_SILU,
    )


def _choices(rng: np.random.Generator, rows: int, experts: int = 12, used: int = 3) -> np.ndarray:
    """Experts 0 and 1 are much asked for, 11 never."""
    chance = np.array([5.0, 5.0, *[1.0] * (experts - 3), 0.0])
    picks = [np.sort(rng.choice(experts, used, replace=False, p=chance / chance.sum())) for _ in range(rows)]
    out = np.zeros((rows, used), CHOICE)
    out["expert"], out["weight"] = picks, rng.uniform(0, 1, (rows, used))
    return out


def test_experts_compute_what_dense_layers_would(
    native: Native, kernel: NativeKernel, rng: np.random.Generator, layer: Layer
) -> None:
    x, choices = rng.normal(0, 1, (50, 64)).astype(np.float32), _choices(rng, 50)
    found = layer.run(native, x, choices)
    wanted = layer.expected(native, kernel, x, choices)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)  # numpy's fma is rounded twice
    assert (found == wanted).mean() > 0.99


def test_a_row_of_experts_does_not_know_its_company(
    native: Native, rng: np.random.Generator, layer: Layer
) -> None:
    x, choices = rng.normal(0, 1, (150, 64)).astype(np.float32), _choices(rng, 150)
    whole = layer.run(native, x, choices)
    for _ in native.each_isa():
        for threads in (1, 2, 5):
            np.testing.assert_array_equal(layer.run(native, x, choices, threads), whole)
        order = rng.permutation(150)
        np.testing.assert_array_equal(layer.run(native, x[order], choices[order]), whole[order])
        for size in (1, 7):
            parts = [
                layer.run(native, x[at : at + size], choices[at : at + size]) for at in range(0, 28, size)
            ]
            np.testing.assert_array_equal(np.concatenate(parts), whole[:28])


def test_many_rows_are_taken_in_turns(native: Native, kernel: NativeKernel, rng: np.random.Generator) -> None:
    """More rows than the workspace takes at a time, and few experts."""
    stacks = [_stack(kernel, rng, "Q4_0", 3, n, k) for n, k in ((2048, 32), (2048, 32), (32, 2048))]
    layer = Layer(*stacks, [None] * 3, abi.ACT_SILU, used=3)
    x = rng.normal(0, 1, (4000, 32)).astype(np.float32)
    choices = np.zeros((4000, 3), CHOICE)
    choices["expert"], choices["weight"] = np.arange(3), 0.5
    found = layer.run(native, x, choices, threads=2)
    np.testing.assert_array_equal(found[3900:], layer.run(native, x[3900:], choices[3900:]))


@pytest.mark.parametrize("kind", ["Q8_0", "F32", "BF16"])
@pytest.mark.parametrize("rest", [0, 24])
def test_every_head_has_its_matrix(
    native: Native, kernel: NativeKernel, rng: np.random.Generator, kind: str, rest: int
) -> None:
    heads, n, k, rows = 5, 48, 64, 70
    stack = _stack(kernel, rng, kind, heads, n, k)
    x = rng.normal(0, 1, (rows, heads, k + rest)).astype(np.float32)

    def run(x: np.ndarray, threads: int = 1) -> np.ndarray:
        out = np.full((len(x), heads, n + rest), np.nan, np.float32)
        op = HeadsOp(x=address(x), w=stack.array, out=address(out), heads=heads, width=k + rest)
        native.run(rows_batch(len(x)), op, threads=threads)
        return out

    whole = run(x)
    np.testing.assert_array_equal(whole[..., n:], x[..., k:])
    for head, weight in enumerate(stack.weights):
        wanted = kernel.matmul(torch.from_numpy(np.ascontiguousarray(x[:, head, :k])), weight).numpy()
        np.testing.assert_array_equal(whole[:, head, :n], wanted)
    for _ in native.each_isa():
        np.testing.assert_array_equal(run(x, threads=2), whole)
        np.testing.assert_array_equal(np.concatenate([run(x[:1]), run(x[1:9], 5), run(x[9:])]), whole)


def test_what_leaves_its_buffers_is_refused(
    native: Native, kernel: NativeKernel, rng: np.random.Generator
) -> None:
    logits, out = np.zeros((1, 8), np.float32), np.zeros(8, CHOICE)
    good = {"experts": 8, "used": 2, "groups": 2, "groups_used": 1}
    for wrong in (
        {},
        {"used": 5},
        {"used": 0},
        {"groups": 3},
        {"groups_used": 3},
        {"groups": 0},
        {"gate": 3},
    ):
        op = RouteOp(logits=address(logits), out=address(out), scale=1, **{**good, **wrong})
        assert native.status(rows_batch(1), op) == (-1 if wrong else 0)

    stacks = [_stack(kernel, rng, "F32", 3, n, k) for n, k in ((16, 8), (16, 8), (8, 16))]
    layer = Layer(*stacks, [None] * 3, abi.ACT_SILU, used=1)
    x, sums = np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32)
    choices = np.zeros((1, 1), CHOICE)
    assert native.status(rows_batch(1), layer.op(x, choices, None, sums)) == 0
    for expert in (-1, 3):
        choices["expert"] = expert
        assert native.status(rows_batch(1), layer.op(x, choices, None, sums)) == -1
    choices["expert"] = 0
    for change in ({"used": 4}, {"act": 3}, {"x": None}, {"down": stacks[0].array}):
        op = layer.op(x, choices, None, sums)
        for name, value in change.items():
            setattr(op, name, value)
        assert native.status(rows_batch(1), op) == -1
    heads = HeadsOp(x=address(x), w=stacks[0].array, out=address(sums), heads=1, width=7)
    assert native.status(rows_batch(1), heads) == -1
