"""A runner of native operations, and buffers that the tests of the native kernels share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from infer.quant.kernels import native
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.native_abi import Acts, Batch, Kv

KV_TYPES = {"f16": abi.KV_F16, "bf16": abi.KV_BF16, "f32": abi.KV_F32, "int8": abi.KV_INT8}
KV_DTYPES = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "int8": np.int8}


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class Native:
    """The library with pools of one, two and five threads."""

    def __init__(self) -> None:
        self.lib = native.load()
        self.pools = {threads: native.Pool(self.lib, threads) for threads in (1, 2, 5)}
        self.default: bytes = self.lib.infer_isa()

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()

    def each_isa(self) -> Iterator[str]:
        """The instruction sets of this processor, each in use while it is current; then the default."""
        try:
            for isa in native.offered(self.lib):
                assert self.lib.infer_set_isa(isa.encode()) == 0
                yield isa
        finally:
            self.lib.infer_set_isa(self.default)

    def run(self, batch: Batch, *ops: abi.Op, threads: int = 1, output_rows: bool = False) -> None:
        assert self.status(batch, *ops, threads=threads, output_rows=output_rows) == 0

    def status(self, batch: Batch, *ops: abi.Op, threads: int = 1, output_rows: bool = False) -> int:
        return self.raw(batch, abi.program(*ops, output_rows=output_rows), threads)

    def raw(self, batch: Batch, program: bytes, threads: int = 1) -> int:
        code: int = self.lib.infer_run(self.pools[threads].handle, program, len(program), ctypes.byref(batch))
        return code


def rows_batch(rows: int, outputs: np.ndarray | None = None, ids: np.ndarray | None = None) -> Batch:
    """A batch of rows without positions."""
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
    """Paged K and V full of NaN (or, as int8, of scales that are NaN). latent: dimensions of a key that are its value,
    0 where values are stored."""

    def __init__(self, kind: str, kv_heads: int, head_dim: int, blocks: int, latent: int = 0) -> None:
        self.kind = kind
        self.latent = latent
        nan = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": np.nan, "int8": 77}[kind]
        self.k = np.full((blocks, kv_heads, head_dim, 64), nan, KV_DTYPES[kind])
        self.v = np.full((blocks, kv_heads, 64, head_dim), nan, KV_DTYPES[kind])
        self.k_scale = np.full((blocks, kv_heads, 64), np.nan, np.float32)
        self.v_scale = np.full((blocks, kv_heads, 64), np.nan, np.float32)
        self.struct = Kv(
            k=address(self.k), v=None if latent else address(self.v), type=KV_TYPES[kind], kv_heads=kv_heads,
            head_dim=head_dim, value_dim=latent or head_dim, blocks=blocks,
        )  # fmt: skip
        if kind == "int8":
            self.struct.k_scale, self.struct.v_scale = address(self.k_scale), address(self.v_scale)

    def values(self, table: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """float64 K and V of a sequence, [kv_heads, length, head_dim or latent]."""
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
        return both[0], both[0][..., : self.latent] if self.latent else both[1]

    def contents(self) -> list[np.ndarray]:
        return [self.k, self.v] + ([self.k_scale, self.v_scale] if self.kind == "int8" else [])
