"""The native operations on rows (norm, gates, sums, embedding) against numpy, and the checks of a program."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from native_ops import ActBuffers, Native, address, bf16_bits, bf16_value, rows_batch

from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.native_abi import AddOp, EmbedOp, GatherOp, GluOp, Head, NormOp, QuantizeOp, Weight


@pytest.fixture(scope="module")
def native() -> Iterator[Native]:
    bound = Native()
    yield bound
    bound.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("width", [32, 80, 576, 1000])
def test_norm(native: Native, rng: np.random.Generator, width: int) -> None:
    x = rng.normal(0, 3, (5, width)).astype(np.float32)
    weight = rng.normal(1, 0.2, width).astype(np.float32)
    out = np.empty_like(x)
    op = NormOp(x=address(x), weight=address(weight), out=address(out), eps=1e-5, width=width)
    native.run(rows_batch(5), op)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, exact, rtol=1e-6)
    # the stated order: 16 lanes by column, then pairs 8, 4, 2 and 1 apart
    padded = np.zeros((5, (width + 15) // 16 * 16))
    padded[:, :width] = x
    lanes = np.zeros((5, 16), np.float32)
    for part in padded.reshape(5, -1, 16).transpose(1, 0, 2):
        lanes = (part**2 + lanes).astype(np.float32)  # the square is exact in float64
    for apart in (8, 4, 2, 1):
        lanes = lanes[:, :apart] + lanes[:, apart : 2 * apart]
    scale = np.float32(1) / np.sqrt(lanes / np.float32(width) + np.float32(1e-5))
    np.testing.assert_array_equal(out, x * scale * weight)


def test_norm_and_glu_to_activations(native: Native, rng: np.random.Generator) -> None:
    width, rows = 576, 3
    x, y = rng.normal(0, 2, (2, rows, width)).astype(np.float32)
    weight = np.ones(width, np.float32)
    batch = rows_batch(rows)
    for both in (
        lambda **to: NormOp(x=address(x), weight=address(weight), eps=1e-6, width=width, **to),
        lambda **to: GluOp(gate=address(x), up=address(y), width=width, act=abi.ACT_SILU, **to),
    ):
        out, only = np.empty_like(x), ActBuffers(rows, width)
        native.run(batch, both(acts=ctypes.pointer(only.struct)))
        native.run(batch, both(out=address(out)))
        only.check(out)
        again = ActBuffers(rows, width)
        native.run(batch, QuantizeOp(x=address(out), acts=ctypes.pointer(again.struct), width=width))
        again.check(out)


@pytest.mark.parametrize("act", [abi.ACT_SILU, abi.ACT_GELU_TANH])
def test_glu_is_accurate(native: Native, act: int) -> None:
    gate = np.concatenate([np.linspace(-100, 100, 4001), np.logspace(-30, 1, 500), [0, 1e38, -1e38]])
    gate = np.concatenate([gate, -gate]).astype(np.float32)[None]
    up, out = np.full_like(gate, 2), np.empty_like(gate)
    op = GluOp(gate=address(gate), up=address(up), out=address(out), width=gate.shape[1], act=act)
    native.run(rows_batch(1), op)
    x = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        inner = x if act == abi.ACT_SILU else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        exact = 2 * x / (1 + np.exp(-inner))
    # the gelu's argument carries its own rounding, times up to |x|; below e^-87 results may be 0
    tolerance = 4e-7 if act == abi.ACT_SILU else 4e-7 * (1 + np.abs(np.clip(inner, -90, 0)))
    assert (np.abs(out - exact) <= np.abs(exact) * tolerance + 1e-33).all()


def test_add_and_gather(native: Native, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 300, 200)).astype(np.float32)
    expected = x + y
    native.run(rows_batch(300), AddOp(x=address(x), y=address(y), width=200), threads=2)
    np.testing.assert_array_equal(y, expected)
    wanted, out = np.array([299, 0, 7], np.int32), np.empty((3, 200), np.float32)
    native.run(rows_batch(300, wanted), GatherOp(x=address(x), out=address(out), width=200), output_rows=True)
    np.testing.assert_array_equal(out, x[wanted])


def test_bits_do_not_depend_on_the_instruction_set(native: Native, rng: np.random.Generator) -> None:
    gate, up = rng.normal(0, 8, (2, 40, 1000)).astype(np.float32)
    weight = rng.normal(1, 0.1, 1000).astype(np.float32)
    results = []
    for _ in native.each_isa():
        outs = [np.empty_like(gate) for _ in range(3)]
        native.run(
            rows_batch(40),
            GluOp(gate=address(gate), up=address(up), out=address(outs[0]), width=1000, act=abi.ACT_SILU),
            GluOp(
                gate=address(gate), up=address(up), out=address(outs[1]), width=1000, act=abi.ACT_GELU_TANH
            ),
            NormOp(x=address(gate), weight=address(weight), out=address(outs[2]), eps=1e-5, width=1000),
            threads=2,
        )
        results.append(outs)
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(mine.view(np.uint32), first.view(np.uint32))


def strips(plane: np.ndarray) -> np.ndarray:
    """[rows, columns] → [strip, columns, 16 rows], the last strip padded with zeros."""
    rows = -(-plane.shape[0] // 16) * 16
    padded = np.zeros((rows, plane.shape[1]), plane.dtype)
    padded[: plane.shape[0]] = plane
    return np.ascontiguousarray(padded.reshape(-1, 16, plane.shape[1]).transpose(0, 2, 1))


def pack_codes(codes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray | None]:
    """uint8 [rows, k] → the planes drawn in infer_cpu.h."""
    s = strips(codes)  # [strip, k, 16]
    s = s.reshape(s.shape[0], -1, 32, 16).transpose(0, 1, 3, 2)  # [strip, block, row, column]
    if bits == 8:
        return np.ascontiguousarray(s.reshape(*s.shape[:3], 8, 4).transpose(0, 1, 3, 2, 4)), None
    low = s.reshape(*s.shape[:3], 4, 2, 4) & 15
    low = np.ascontiguousarray((low[..., 0, :] | low[..., 1, :] << 4).transpose(0, 1, 3, 2, 4))
    if bits == 4:
        return low, None
    if bits == 5:
        high = (s >> 4).reshape(*s.shape[:3], 8, 4) << np.arange(8, dtype=np.uint8)[:, None]
        return low, np.ascontiguousarray(np.bitwise_or.reduce(high, axis=3))
    high = (s >> 4).reshape(*s.shape[:3], 2, 4, 4) << (2 * np.arange(4, dtype=np.uint8))[:, None]
    return low, np.ascontiguousarray(np.bitwise_or.reduce(high, axis=4).transpose(0, 1, 3, 2, 4))


@pytest.mark.parametrize(
    ("bits", "group", "zero", "scale", "with_mins"),
    [
        (4, 32, 8, 0, False), (4, 32, 0, 0, True), (5, 32, 16, 0, False), (5, 32, 0, 2, True),
        (4, 32, 0, 2, True), (6, 16, 32, 2, False), (8, 32, 128, 0, False), (8, 128, 128, 1, False),
        (4, 64, 0, 1, True),
    ],
)  # fmt: skip
def test_embed_codes(
    native: Native, rng: np.random.Generator, bits: int, group: int, zero: int, scale: int, with_mins: bool
) -> None:
    torch = pytest.importorskip("torch")
    from infer.quant.base import QuantizedTensor

    n, k = 37, 512
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    kind = {0: np.float16, 1: np.float32, 2: np.int8 if bits == 6 else np.uint8}[scale]
    if scale == 2:
        scales = rng.integers(-60 if bits == 6 else 0, 63, (n, k // group)).astype(kind)
        mins = rng.integers(0, 63, (n, k // group)).astype(np.uint8)
        super_scales, super_mins = rng.normal(0, 0.01, (2, n, k // 256)).astype(np.float16)
    else:
        scales, mins = rng.normal(0, 0.1, (2, n, k // group)).astype(kind)
        super_scales = super_mins = None
    scales.flat[0] = 1  # and a subnormal half, where there are halves
    if scale == 0:
        scales.view(np.uint16).flat[1] = 3
    canonical = codes if bits != 4 else codes[:, ::2] | codes[:, 1::2] << 4

    def tensor(array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(np.ascontiguousarray(array))

    expected = QuantizedTensor(
        (n, k), bits, group, zero, tensor(canonical), tensor(scales), tensor(mins if with_mins else None),
        tensor(super_scales), tensor(super_mins if with_mins else None),
    ).dequantize()  # fmt: skip
    low, high = pack_codes(codes, bits)
    stored = (scales, mins if with_mins else None, super_scales, super_mins if with_mins else None)
    planes = [None if plane is None else strips(plane) for plane in stored]
    weight = Weight(n, k, 0, bits, group, zero, scale, int(bits == 6), address(low), address(high),
                    *map(address, planes))  # fmt: skip
    ids = np.array([36, 0, 15, 16, 31, 20], np.int32)
    out = np.empty((6, k), np.float32)
    native.run(rows_batch(6, ids=ids), EmbedOp(table=ctypes.pointer(weight), out=address(out), scale=3.5))
    np.testing.assert_array_equal(out, expected.numpy()[ids] * np.float32(3.5))


@pytest.mark.parametrize(("elem", "dtype"), [(1, np.float32), (2, np.float16), (3, np.uint16)])
def test_embed_floats(native: Native, rng: np.random.Generator, elem: int, dtype: Any) -> None:
    table = rng.normal(0, 1, (20, 48)).astype(np.float32)
    stored = bf16_bits(table) if elem == 3 else table.astype(dtype)
    plane = strips(stored)
    weight = Weight(n=20, k=48, elem=elem, codes=address(plane))
    ids = np.array([19, 3], np.int32)
    out = np.empty((2, 48), np.float32)
    native.run(rows_batch(2, ids=ids), EmbedOp(table=ctypes.pointer(weight), out=address(out), scale=1))
    expected = bf16_value(stored) if elem == 3 else stored.astype(np.float32)
    np.testing.assert_array_equal(out, expected[ids])


def test_a_program_is_checked_before_it_runs(native: Native) -> None:
    x, y = np.ones((2, 4, 32), np.float32)
    good = AddOp(x=address(x), y=address(y), width=32)
    batch = rows_batch(4)
    native.run(batch, good)
    np.testing.assert_array_equal(y, 2)
    head = ctypes.sizeof(Head)
    valid = bytes(good)
    for wrong in (
        bytes(Head(99, head, 0, 0)),
        bytes(Head(0, head, 0, 0)),
        bytes(Head(abi.OP_ADD, 0, 0, 0)),
        bytes(Head(abi.OP_ADD, -8, 0, 0)),
        bytes(Head(abi.OP_ADD, len(valid) + 8, 0, 0)) + valid[head:] + bytes(8),
        valid[:-8],
        valid[:8],
        bytes(Head(abi.OP_ADD, len(valid), 2, 0)) + valid[head:],
    ):
        assert native.raw(batch, valid + wrong) == -2
    np.testing.assert_array_equal(y, 2)
    assert native.raw(batch, b"") == 0


def test_what_leaves_its_buffers_is_refused(native: Native) -> None:
    table = np.zeros((1, 48, 16), np.float32)
    weight = Weight(n=10, k=48, elem=1, codes=address(table))
    out = np.empty((2, 48), np.float32)
    embed = EmbedOp(table=ctypes.pointer(weight), out=address(out), scale=1)
    for ids in ([0, 10], [-1, 0]):
        assert native.status(rows_batch(2, ids=np.array(ids, np.int32)), embed) == -1
    acts = ActBuffers(1, 32)
    x = np.ones((2, 32), np.float32)
    op = QuantizeOp(x=address(x), acts=ctypes.pointer(acts.struct), width=32)
    assert native.status(rows_batch(2), op) == -1
    assert native.status(rows_batch(1), op) == 0

    short = ActBuffers(4, 64)
    weight = Weight(n=16, k=32, bits=8, group=32)
    matmul = abi.MatmulOp(count=1, acts=ctypes.pointer(short.struct), x=address(x))
    matmul.w[0], matmul.out[0] = ctypes.pointer(weight), address(out)
    assert native.status(rows_batch(1), matmul) == -1  # activations of another width
    matmul.count = 5
    assert native.status(rows_batch(1), matmul) == -1
