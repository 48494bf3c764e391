"""The compiled CPU kernels: weights in strips of 16 rows, exact integer products, one order of every float sum.

The library is `_infer_cpu.so` beside this file, built at install time (`build`). Semantics and layout are written in
`cpu/infer_cpu.h`; `reference` computes the same bits in torch.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.arena import Arena
from infer.quant.kernels.base import WeightKernel, WeightSource
from infer.quant.kernels.strips import STORED, NativeWeight, Planes
from infer.quant.kernels.weight import PackedWeight

#: every instruction set the library may hold, best first
ISAS = ("avx512vnni+amx", "avx512vnni", "avxvnni", "avx2", "neon", "scalar")


def load(isa: str | None = None) -> ctypes.CDLL:
    """The library with its signatures, set to an instruction set for the whole process (None: leave the one in use).

    Raises OSError when there is no library for this machine or version, ValueError when the processor does not offer
    the instruction set.
    """
    library = abi.open_library(abi.library_path())
    if isa is not None and library.infer_set_isa(isa.encode()) != 0:
        raise ValueError(f"this processor does not offer {isa}; choose from {', '.join(offered(library))}")
    return library


def available() -> bool:
    """Whether the library loads."""
    try:
        load()
    except OSError:
        return False
    return True


def offered(library: ctypes.CDLL) -> list[str]:
    """The instruction sets that this processor offers, best first."""
    used: bytes = library.infer_isa()
    found = [isa for isa in ISAS if library.infer_set_isa(isa.encode()) == 0]
    library.infer_set_isa(used)
    return found


class Pool:
    """Threads of the library, the calling one included; they end with close() or with this object."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        handle = library.infer_pool_new(threads)
        if not handle:
            raise MemoryError("no memory for a pool of threads")
        self.handle: int = handle
        self.threads = threads
        self.close = weakref.finalize(self, library.infer_pool_free, handle)


def planes_of(part: QuantizedTensor) -> Planes:
    """The layout that holds a part of a matrix exactly."""
    scale = {torch.float16: abi.SCALE_F16, torch.float32: abi.SCALE_F32}.get(
        part.scales.dtype, abi.SCALE_SUPER
    )
    signed = part.scales.dtype == torch.int8
    table = () if part.table is None else tuple(part.table.tolist())
    elem = abi.ELEM_TABLE if table else abi.ELEM_CODES
    return Planes(elem, part.bits, part.group, part.zero, scale, signed, part.mins is not None, table)


@dataclass(frozen=True)
class ActBuffer:
    """Memory for `rows` quantized rows of `width` inputs. struct points into the tensors."""

    struct: abi.Acts
    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int) -> ActBuffer:
        codes = torch.empty((rows, width), dtype=torch.int8)
        scales = torch.empty((rows, width // abi.BLOCK), dtype=torch.float32)
        sums = torch.empty((rows, width // 16), dtype=torch.int32)
        struct = abi.Acts(rows, width, codes.data_ptr(), scales.data_ptr(), sums.data_ptr())
        return cls(struct, codes, scales, sums)


class NativeKernel(WeightKernel):
    """Kernels with a pool of `threads` threads. Calls from several threads at once take turns."""

    name = "native"
    exact = True
    version = 1
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, threads: int, isa: str | None = None) -> None:
        """Raises OSError and ValueError as `load` does."""
        self.library = load(isa)
        self.pool = Pool(self.library, threads)
        self._lock = threading.Lock()
        self._arena = Arena()

    @property
    def isa(self) -> str:
        name: bytes = self.library.infer_isa()
        return name.decode()

    @property
    def description(self) -> str:
        return f"{self.name} ({self.isa})"

    def close(self) -> None:
        """Ends the threads; nothing may be called afterwards."""
        self.pool.close()

    def pack(self, source: WeightSource) -> NativeWeight:
        """Reads the matrix chunk by chunk: memory peaks at the packed form and one chunk.

        Raises ValueError when the matrix is empty or its columns do not fill whole blocks."""
        if 0 in source.shape:
            raise ValueError(f"{source.name}: an empty matrix {list(source.shape)} cannot be loaded")
        kind = STORED.get(source.format.rows_as)
        weight: NativeWeight | None = None
        if kind is not None and not source.requantized:
            weight = NativeWeight.empty(source.shape, kind, self._arena)
            for start, stop in source.chunks():
                self._pack_stored(source, weight, start, stop)
            return weight
        for start, stop in source.chunks():
            part = source.decode(start, stop)
            if not isinstance(part, QuantizedTensor):
                raise ValueError(
                    f"{source.name}: {source.format.name} is not a type the native kernels can hold"
                )
            if weight is None:
                weight = NativeWeight.empty(source.shape, planes_of(part), self._arena)
            self._pack_codes(source, weight, part, start)
        if weight is None:
            raise ValueError(f"{source.name}: nothing to load")
        return weight

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        packed = _native(weight)
        n, k = packed.shape
        x = x.to(torch.float32).contiguous()
        if x.dim() != 2 or x.shape[1] != k:
            raise ValueError(f"a matrix [M, {k}] is needed, not {list(x.shape)}")
        out = torch.empty((x.shape[0], n), dtype=torch.float32)
        product = abi.MatmulOp(count=1, x=x.data_ptr())
        product.w[0] = ctypes.pointer(packed.struct)
        product.out[0] = out.data_ptr()
        ops: list[abi.Op] = [product]
        if packed.struct.elem == abi.ELEM_CODES:
            acts = ActBuffer.empty(x.shape[0], k)
            product.acts = ctypes.pointer(acts.struct)
            ops.insert(0, abi.QuantizeOp(x=x.data_ptr(), acts=ctypes.pointer(acts.struct), width=k))
        if x.shape[0]:
            self.run(ops, abi.Batch(tokens=x.shape[0]))
        return out

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        packed = _native(weight)
        n, k = packed.shape
        ids = ids.to(torch.int32).contiguous()
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < n):
            raise IndexError(f"row ids must be in [0, {n})")
        out = torch.empty((ids.numel(), k), dtype=torch.float32)
        if ids.numel():
            op = abi.EmbedOp(table=ctypes.pointer(packed.struct), out=out.data_ptr(), scale=1.0)
            self.run([op], abi.Batch(tokens=ids.numel(), ids=ids.data_ptr()))
        return out

    def run(self, ops: Sequence[abi.Op] | bytes, batch: abi.Batch) -> None:
        """Runs a program, or operations that make one. Raises ValueError naming the operation that does not fit."""
        code = ops if isinstance(ops, bytes) else abi.program(*ops)
        with self._lock:
            status: int = self.library.infer_run(self.pool.handle, code, len(code), byref(batch))
        if status:
            raise ValueError(f"operation {-status} of the program does not fit its buffers or the batch")

    def _pack_stored(self, source: WeightSource, weight: NativeWeight, start: int, stop: int) -> None:
        raw = source.read(start, stop).contiguous()
        expected = (stop - start) * source.format.row_bytes(source.shape[1])
        if raw.dtype != torch.uint8 or raw.numel() != expected:
            raise ValueError(f"{source.name}: {raw.numel()} bytes were read where {expected} are expected")
        status = self.library.infer_pack(
            self.pool.handle,
            source.format.rows_as.encode(),
            raw.data_ptr(),
            byref(weight.struct),
            start,
            stop - start,
        )
        _check_packed(status, source)

    def _pack_codes(
        self, source: WeightSource, weight: NativeWeight, part: QuantizedTensor, start: int
    ) -> None:
        parts = [part.unpacked_codes(), part.scales, part.mins, part.super_scales, part.super_mins]
        held = [None if t is None else t.contiguous() for t in parts]
        pointers = [None if t is None else t.data_ptr() for t in held]
        status = self.library.infer_pack_codes(
            self.pool.handle, *pointers, byref(weight.struct), start, part.shape[0]
        )
        _check_packed(status, source)


def _native(weight: PackedWeight) -> NativeWeight:
    if not isinstance(weight, NativeWeight):
        raise TypeError(f"not a weight of this kernel: {type(weight).__name__}")
    return weight


def _check_packed(status: int, source: WeightSource) -> None:
    if status:
        raise ValueError(f"{source.name}: {source.format.name} {list(source.shape)} cannot be packed")


def create(device: torch.device, threads: int, isa: str | None = None) -> WeightKernel:
    if device.type != "cpu":
        raise ValueError(f"the native kernels run on the CPU, not on {device}")
    return NativeKernel(threads, isa)
