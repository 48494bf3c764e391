"""The signature every weight kernel has, and the factory that picks one.

A kernel owns the in-memory layout of a weight matrix: `pack` turns what a file holds into it, once, row chunk by
row chunk; `matmul` and `rows` read it. `native` is the library under `cpu/`; `torch` serves where that is absent
and on CUDA; `reference` has the native semantics in plain torch, slow and exact; `float32` dequantizes
everything; `bnb` leaves bitsandbytes' formats to that library.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from infer.quant.base import QuantFormat, QuantizedTensor
from infer.quant.bnb import BLOCK, quantize_table
from infer.quant.kernels.weight import PackedWeight
from infer.quant.rtn import quantize_rtn

#: name → module of this package with a `create(device, threads, isa)` function
KERNELS = {
    "native": "native", "torch": "torch_kernel", "reference": "reference", "float32": "float32",
    "bnb": "bnb_kernel",
}  # fmt: skip

CHUNK_BYTES = 1 << 20  # stored bytes read and decoded at a time


@dataclass(frozen=True)
class WeightSource:
    """A matrix [N, K] waiting in a file.

    read(start, stop): the stored bytes of rows [start, stop) as a uint8 tensor. quant: "int8", "int4" or "nf4" rounds a
    float matrix to nearest while it is loaded; it has no effect on quantized ones.
    """

    name: str
    shape: tuple[int, int]
    format: QuantFormat
    read: Callable[[int, int], torch.Tensor]
    quant: str | None = None

    @property
    def requantized(self) -> bool:
        """Whether the rows need more than decoding."""
        group = BLOCK if self.quant == "nf4" else 32
        return self.quant is not None and self.format.block == 1 and self.shape[1] % group == 0

    def chunks(self, multiple: int = 64) -> Iterator[tuple[int, int]]:
        """Row ranges of about CHUNK_BYTES each, beginning at multiples of `multiple`."""
        rows, columns = self.shape
        step = max(1, CHUNK_BYTES // self.format.row_bytes(columns) // multiple) * multiple
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def decode(self, start: int, stop: int) -> QuantizedTensor | torch.Tensor:
        """Rows [start, stop) in the internal form, or as floats in the file's own dtype."""
        decoded = self.format.decode(self.read(start, stop), (stop - start, self.shape[1]))
        if self.requantized and isinstance(decoded, torch.Tensor):
            if self.quant == "nf4":
                return quantize_table(decoded)
            return quantize_rtn(decoded, 8 if self.quant == "int8" else 4, 32)
        return decoded

    def dequantize(self, start: int, stop: int) -> torch.Tensor:
        """float32 [stop - start, K]."""
        decoded = self.decode(start, stop)
        return decoded.dequantize() if isinstance(decoded, QuantizedTensor) else decoded.to(torch.float32)


class WeightKernel(abc.ABC):
    """exact: each output row has the same bits whatever else is in the call. dtype: of activations it wants."""

    name: str
    exact: bool
    version: int
    device: torch.device
    dtype: torch.dtype

    @property
    def description(self) -> str:
        """For people: the name and what decides its speed."""
        return self.name

    @abc.abstractmethod
    def pack(self, source: WeightSource) -> PackedWeight: ...

    @abc.abstractmethod
    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """x [M, K] → [M, N] = x @ W^T, in self.dtype; M may be 0."""

    @abc.abstractmethod
    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64 [M]) of the matrix, dequantized: [M, K] in self.dtype."""


def create_kernel(name: str, device: torch.device, threads: int, isa: str | None = None) -> WeightKernel:
    """isa: instruction set of the native kernel, for tests; None for the best there is.

    Raises ValueError listing the choices when there is no such kernel or instruction set, OSError when the native
    library is absent.
    """
    if name not in KERNELS:
        raise ValueError(f"there is no kernel {name!r}; choose from {', '.join(KERNELS)}")
    module = importlib.import_module(f"infer.quant.kernels.{KERNELS[name]}")
    kernel: WeightKernel = module.create(device, threads, isa)
    return kernel
