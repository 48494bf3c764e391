"""The structures of infer_cpu.h, a runner of operations, and buffers that the native kernels' tests share."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

EMBED, NORM, QUANTIZE, MATMUL, ROPE_STORE, ATTENTION, GLU, ADD, GATHER = range(1, 10)
KV_TYPES = {"f16": 0, "bf16": 1, "f32": 2, "int8": 3}
KV_DTYPES = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "int8": np.int8}
ISAS = ("avx512vnni+amx", "avx512vnni", "avxvnni", "avx2", "neon", "scalar")
SILU, GELU_TANH = 0, 1


def _fields(*runs: tuple[Any, str]) -> list[tuple[str, Any]]:
    """(type, names) in order as ctypes wants them."""
    return [(name, kind) for kind, names in runs for name in names.split()]


class Head(Structure):
    _fields_ = _fields((c_int32, "kind bytes rows reserved"))


class Weight(Structure):
    _fields_ = _fields(
        (c_int32, "n k elem bits group zero scale signed_scales"),
        (c_void_p, "codes high scales mins super_scales super_mins"),
    )


class Acts(Structure):
    _fields_ = _fields((c_int32, "capacity k"), (c_void_p, "codes scales sums"))


class Kv(Structure):
    _fields_ = _fields((c_void_p, "k v k_scale v_scale"), (c_int32, "type kv_heads head_dim blocks"))


class Batch(Structure):
    _fields_ = _fields(
        (c_int32, "tokens sequences max_blocks outputs"),
        (c_void_p, "ids positions slots query_start context_len block_tables output_rows"),
    )


class EmbedOp(Structure):
    _fields_ = _fields((Head, "head"), (POINTER(Weight), "table"), (c_void_p, "out"), (c_float, "scale"))


class NormOp(Structure):
    _fields_ = _fields(
        (Head, "head"),
        (c_void_p, "x weight out"),
        (POINTER(Acts), "acts"),
        (c_float, "eps"),
        (c_int32, "width"),
    )


class QuantizeOp(Structure):
    _fields_ = _fields((Head, "head"), (c_void_p, "x"), (POINTER(Acts), "acts"), (c_int32, "width"))


class RopeStoreOp(Structure):
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "q k v q_norm k_norm cos sin"), (POINTER(Kv), "kv"), (c_float, "eps"),
        (c_int32, "heads rope_dim pairing"),
    )  # fmt: skip


class AttentionOp(Structure):
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "q out"), (POINTER(Acts), "acts"), (POINTER(Kv), "kv"),
        (c_float, "scale softcap"), (c_int32, "heads window"),
    )  # fmt: skip


class GluOp(Structure):
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "gate up out"), (POINTER(Acts), "acts"), (c_int32, "width act")
    )


class AddOp(Structure):
    _fields_ = _fields((Head, "head"), (c_void_p, "x y"), (c_int32, "width"))


class GatherOp(Structure):
    _fields_ = _fields((Head, "head"), (c_void_p, "x out"), (c_int32, "width"))


KINDS = {EmbedOp: EMBED, NormOp: NORM, QuantizeOp: QUANTIZE, RopeStoreOp: ROPE_STORE, AttentionOp: ATTENTION,
         GluOp: GLU, AddOp: ADD, GatherOp: GATHER}  # fmt: skip


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class Native:
    """The library with a pool of one and one of two threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lib = library
        library.infer_pool_new.restype = c_void_p
        library.infer_pool_free.argtypes = [c_void_p]
        library.infer_run.argtypes = [c_void_p, c_void_p, c_int64, POINTER(Batch)]
        library.infer_isa.restype = ctypes.c_char_p
        self.pools = {threads: library.infer_pool_new(threads) for threads in (1, 2, 5)}
        self.default = library.infer_isa()

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Native]:
        from infer.quant.kernels import native as binding

        bound = cls(binding.load())
        yield bound
        for pool in bound.pools.values():
            bound.lib.infer_pool_free(pool)

    def each_isa(self) -> Iterator[str]:
        """The instruction sets of this processor, each in use while it is current; then the default."""
        try:
            for isa in self.available():
                assert self.lib.infer_set_isa(isa.encode()) == 0
                yield isa
        finally:
            self.lib.infer_set_isa(self.default)

    def available(self) -> list[str]:
        found = [isa for isa in ISAS if self.lib.infer_set_isa(isa.encode()) == 0]
        self.lib.infer_set_isa(self.default)
        return found

    def run(self, batch: Batch, *ops: Structure, threads: int = 1, rows: int = 0) -> None:
        assert self.status(batch, *ops, threads=threads, rows=rows) == 0

    def status(self, batch: Batch, *ops: Structure, threads: int = 1, rows: int = 0) -> int:
        for op in ops:
            op.head = Head(KINDS[type(op)], ctypes.sizeof(op), rows, 0)
        program = b"".join(bytes(op) for op in ops)
        code: int = self.lib.infer_run(self.pools[threads], program, len(program), byref(batch))
        return code


def rows_batch(rows: int, outputs: np.ndarray | None = None, ids: np.ndarray | None = None) -> Batch:
    count = 0 if outputs is None else len(outputs)
    return Batch(tokens=rows, outputs=count, ids=address(ids), output_rows=address(outputs))


class ActBuffers:
    """Quantized activations of `rows` rows, and their float64 value."""

    def __init__(self, rows: int, width: int) -> None:
        self.codes = np.full((rows, width), 99, np.int8)
        self.scales = np.full((rows, width // 32), 9, np.float32)
        self.sums = np.full((rows, width // 16), 99, np.int32)
        self.struct = Acts(rows, width, address(self.codes), address(self.scales), address(self.sums))

    def check(self, expected: np.ndarray) -> None:
        """That they are the quantization of `expected`, float32."""
        x = expected.reshape(*self.scales.shape, 32)
        largest = np.abs(x).max(-1)
        broken = ~np.isfinite(largest)
        largest[broken] = np.nan
        np.testing.assert_array_equal(self.scales, largest / np.float32(127))
        scaled = np.where(broken[..., None], 0, x) * np.where(broken, 0, np.float32(127) / largest)[..., None]
        codes = np.rint(scaled).astype(np.int8)
        np.testing.assert_array_equal(self.codes, codes.reshape(self.codes.shape))
        np.testing.assert_array_equal(self.sums, codes.reshape(*self.sums.shape, 16).sum(-1, dtype=np.int32))


def bf16_bits(x: np.ndarray) -> np.ndarray:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Cache:
    """Paged K and V full of NaN (or, as int8, of scales that are NaN)."""

    def __init__(self, kind: str, kv_heads: int, head_dim: int, blocks: int) -> None:
        self.kind = kind
        nan = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": np.nan, "int8": 77}[kind]
        self.k = np.full((blocks, kv_heads, head_dim, 64), nan, KV_DTYPES[kind])
        self.v = np.full((blocks, kv_heads, 64, head_dim), nan, KV_DTYPES[kind])
        self.k_scale = np.full((blocks, kv_heads, 64), np.nan, np.float32)
        self.v_scale = np.full((blocks, kv_heads, 64), np.nan, np.float32)
        scales = (address(self.k_scale), address(self.v_scale)) if kind == "int8" else (None, None)
        shape = (KV_TYPES[kind], kv_heads, head_dim, blocks)
        self.struct = Kv(address(self.k), address(self.v), *scales, *shape)

    def values(self, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 K and V of a sequence, [kv_heads, length, head_dim]."""
        both = []
        for stored, scale in ((self.k.swapaxes(2, 3), self.k_scale), (self.v, self.v_scale)):
            x = stored[table]
            if self.kind == "f16":
                wide = x.view(np.float16).astype(np.float64)
            elif self.kind == "bf16":
                wide = bf16_value(x).astype(np.float64)
            elif self.kind == "int8":
                wide = x.astype(np.float64) * scale[table][..., None]
            else:
                wide = x.astype(np.float64)
            both.append(wide.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1])[:, :length])
        return both[0], both[1]

    def contents(self) -> list[np.ndarray]:
        return [self.k, self.v] + ([self.k_scale, self.v_scale] if self.kind == "int8" else [])
