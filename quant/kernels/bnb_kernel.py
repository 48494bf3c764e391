"""bitsandbytes' own products for its formats, everything else as the torch kernel has it: `--kernel bnb`.

Weights stay as the library stores them. NF4 and FP4 multiply by `matmul_4bit`; INT8 rounds activations to 8 bits per
row without looking for outlier columns, which would let one row change another's result.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from infer.quant.base import QuantizedTensor
from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.rows import RowWeight, gather_rows
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.torch_kernel import TorchKernel
from infer.quant.kernels.weight import PackedWeight


@dataclass(frozen=True)
class LibraryWeight(PackedWeight):
    """codes: as the library has them, uint8 [N * K / 2, 1] with a state, or int8 [N, K] with scb float32 [N]."""

    shape: tuple[int, int]
    codes: torch.Tensor
    scb: torch.Tensor | None
    state: Any

    @property
    def nbytes(self) -> int:
        beside = self.state.absmax if self.scb is None else self.scb
        return int(self.codes.nbytes + beside.nbytes)


class LibraryKernel(TorchKernel):
    name = "bnb"

    def __init__(self, device: Device, library: ModuleType) -> None:
        super().__init__(device)
        self._library = library

    def pack(self, source: WeightSource) -> PackedWeight:
        four = source.format.name in ("NF4", "FP4") or (source.requantized and source.quant == "nf4")
        if not four and source.format.name != "INT8":
            return super().pack(source)
        values = gather_rows(source, self.device).values
        if not isinstance(values, QuantizedTensor):
            raise TypeError(f"{source.name}: {source.format.name} gave floats")
        if not four:
            codes = (values.codes ^ 0x80).view(torch.int8)
            return LibraryWeight(source.shape, codes, values.scales[:, 0] * 127, None)
        if values.group != 64:
            return RowWeight(values)
        packed = (values.codes << 4 | values.codes >> 4).reshape(-1, 1)
        state = self._library.functional.QuantState(
            absmax=values.scales.flatten(), shape=torch.Size(source.shape), code=values.table, blocksize=64,
            quant_type="fp4" if source.format.name == "FP4" else "nf4", dtype=self.dtype,
        )  # fmt: skip
        return LibraryWeight(source.shape, packed, None, state)

    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        if not isinstance(weight, LibraryWeight):
            return super().matmul(x, weight)
        if not x.shape[0]:
            return x.new_empty((0, weight.shape[0]))
        found: torch.Tensor
        if weight.scb is None:
            found = self._library.matmul_4bit(x, weight.codes.t(), weight.state)
            return found
        codes, scales, _ = self._library.functional.int8_vectorwise_quant(x.to(torch.float16))
        product = torch.ops.bitsandbytes.int8_scaled_mm.default
        found = product(codes, weight.codes, scales, weight.scb, dtype=self.dtype)
        return found

    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, LibraryWeight):
            return super().rows(weight, ids)
        n, k = weight.shape
        codes = weight.codes.view(n, -1)[ids]
        if weight.scb is not None:
            return (codes.float() * (weight.scb[ids] / 127).unsqueeze(1)).to(self.dtype)
        scales = weight.state.absmax.view(n, -1)[ids]
        shape = (len(ids), k)
        picked = QuantizedTensor(shape, 4, 64, 0, codes << 4 | codes >> 4, scales, table=weight.state.code)
        return picked.dequantize().to(self.dtype)


def create(device: Device, threads: int, isa: str | None = None) -> WeightKernel:
    """Raises ValueError in one line where bitsandbytes does not import."""
    before = os.environ.get("HF_HUB_OFFLINE")
    # On some processors it looks for a kernel on the hub while it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # and says so where it finds none
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"bitsandbytes cannot be imported here: {reason}") from None
    finally:
        logger.setLevel(level)
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
    return LibraryKernel(device, bitsandbytes)
