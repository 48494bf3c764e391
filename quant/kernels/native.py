"""The compiled CPU kernels: weights in strips of 16 rows, exact integer products, one order of every float sum.

The library is `_infer_cpu.so` beside this file, built at install time (`build`). Semantics and layout are written in
`cpu/infer_cpu.h`; `reference` computes the same bits in torch. Imports no torch: what takes or gives tensors is in
`native_tensors`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.arena import Arena, empty
from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import CPU, Device
from infer.quant.kernels.strips import STORED, NativeWeight
from infer.quant.kernels.weight import PackedWeight

if TYPE_CHECKING:
    import torch

    from infer.quant.kernels.source import WeightSource

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


@dataclass(frozen=True)
class ActBuffer:
    """Memory for `rows` quantized rows of `width` inputs. struct points into the arrays."""

    struct: abi.Acts
    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    sums: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int, width: int) -> ActBuffer:
        codes = empty((rows, width), np.int8)
        scales = empty((rows, width // abi.BLOCK), np.float32)
        sums = empty((rows, width // 16), np.int32)
        struct = abi.Acts(rows, width, *(array.ctypes.data for array in (codes, scales, sums)))
        return cls(struct, codes, scales, sums)


class NativeKernel(WeightKernel):
    """Kernels with a pool of `threads` threads. Calls from several threads at once take turns."""

    name = "native"
    exact = True
    version = 1
    device = CPU

    def __init__(self, threads: int, isa: str | None = None) -> None:
        """Raises OSError and ValueError as `load` does."""
        self.library = load(isa)
        self.pool = Pool(self.library, threads)
        self.arena = Arena()
        self._lock = threading.Lock()

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
        from infer.quant.kernels.native_tensors import pack

        return pack(self, source)

    def decodes(self, source: WeightSource) -> bool:
        return source.requantized or source.format.rows_as not in STORED

    def vector(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return values

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """x [M, K] → float32 [M, N] = x @ W^T."""
        from infer.quant.kernels.native_tensors import matmul

        return matmul(self, x, weight)

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64 [M]) of the matrix, dequantized: float32 [M, K]."""
        from infer.quant.kernels.native_tensors import rows

        return rows(self, weight, ids)

    def run(self, ops: Sequence[abi.Op] | bytes, batch: abi.Batch) -> None:
        """Runs a program, or operations that make one. Raises ValueError naming the operation that does not fit."""
        code = ops if isinstance(ops, bytes) else abi.program(*ops)
        with self._lock:
            status: int = self.library.infer_run(self.pool.handle, code, len(code), byref(batch))
        if status:
            raise ValueError(f"operation {-status} of the program does not fit its buffers or the batch")


def create(device: Device, threads: int, isa: str | None = None) -> WeightKernel:
    if device.type != "cpu":
        raise ValueError(f"the native kernels run on the CPU, not on {device}")
    return NativeKernel(threads, isa)
