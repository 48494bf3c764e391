"""The signature every weight kernel has, and the factory that picks one.

A kernel owns the in-memory layout of a weight matrix: `pack` turns what a file holds into it, once, row chunk by
row chunk, and what computes with it knows that layout. `native` is the library under `cpu/`; `torch` serves where
that is absent and on CUDA; `reference` has the native semantics in plain torch, slow and exact; `float32` dequantizes
everything; `bnb` leaves bitsandbytes' formats to that library.

Nothing here imports torch before there is something to decode: `native` may do without.
"""

from __future__ import annotations

import abc
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infer.quant.kernels.device import Device
from infer.quant.kernels.weight import PackedWeight

if TYPE_CHECKING:
    from infer.quant.kernels.source import WeightSource

#: name → module of this package with a `create(device, threads, isa)` function
KERNELS = {
    "native": "native", "torch": "torch_kernel", "reference": "reference", "float32": "float32",
    "bnb": "bnb_kernel",
}  # fmt: skip


class WeightKernel(abc.ABC):
    """exact: each output row has the same bits whatever else is in the call."""

    name: str
    exact: bool
    version: int
    device: Device

    @property
    def description(self) -> str:
        """For people: the name and what decides its speed."""
        return self.name

    @abc.abstractmethod
    def pack(self, source: WeightSource) -> PackedWeight:
        """Raises ValueError when it cannot hold the matrix."""

    def decodes(self, source: WeightSource) -> bool:
        """Whether `pack` has torch decode the matrix, so that its version counts."""
        return True

    @abc.abstractmethod
    def vector(self, values: npt.NDArray[np.float32]) -> Any:
        """The values, contiguous, as what computes with this kernel has them: on its device."""


def create_kernel(name: str, device: Device, threads: int, isa: str | None = None) -> WeightKernel:
    """isa: instruction set of the native kernel, for tests; None for the best there is.

    Raises ValueError listing the choices when there is no such kernel or instruction set, OSError when the native
    library is absent.
    """
    if name not in KERNELS:
        raise ValueError(f"there is no kernel {name!r}; choose from {', '.join(KERNELS)}")
    module = importlib.import_module(f"infer.quant.kernels.{KERNELS[name]}")
    kernel: WeightKernel = module.create(device, threads, isa)
    return kernel
