"""A kernel whose products are torch operations, for `TorchOps`."""

from __future__ import annotations

import abc

import numpy as np
import numpy.typing as npt
import torch

from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.weight import PackedWeight


class TensorKernel(WeightKernel):
    """dtype: of the activations it wants."""

    device: torch.device
    dtype: torch.dtype = torch.float32

    def __init__(self, device: Device) -> None:
        self.device = torch.device(str(device))

    def vector(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    @abc.abstractmethod
    def matmul(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """x [M, K] → [M, N] = x @ W^T, in self.dtype; M may be 0."""

    @abc.abstractmethod
    def rows(self, weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64 [M]) of the matrix, dequantized: [M, K] in self.dtype."""
