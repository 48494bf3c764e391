"""The operations a model's maths is written in. A model is one description; each implementation of `Ops` runs it.

`Value` is whatever the implementation passes between its own operations: a tensor for torch, a buffer for native
programs. Every operation works on the rows of the current batch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infer.quant.kernels.base import PackedWeight
from infer.runtime.batch import ForwardBatch

if TYPE_CHECKING:
    from infer.runtime.models.base import Model

Value = Any


@dataclass(frozen=True)
class Linear:
    """y = x W^T + bias; weight [N, K], bias float32 [N]."""

    weight: PackedWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv 1910.07467): x / sqrt(mean(x²) + eps) * weight; weight float32 [width]."""

    weight: torch.Tensor
    eps: float


class RopeTable:
    """cos and sin, float32 [positions, dim / 2]; pairing as in RopeConfig.

    rows(start, stop) computes cos and sin of these positions. On the CPU rows are filled as positions come into use:
    a context of 32,768 would cost 17 MB and 45 ms at every start. `ready` makes them.
    """

    _STEP = 1024  # rows at a time: always the same ones together, whatever the context

    def __init__(
        self,
        shape: tuple[int, int],
        pairing: str,
        device: torch.device,
        rows: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.cos = torch.empty(shape, dtype=torch.float32, device=device)
        self.sin = torch.empty(shape, dtype=torch.float32, device=device)
        self.pairing = pairing
        self.dim = 2 * shape[1]
        self._rows = rows
        self._filled = 0
        if device.type != "cpu":
            self.ready(shape[0])

    def ready(self, positions: int) -> None:
        """Fill the rows below `positions`."""
        while self._filled < min(positions, len(self.cos)):
            target = slice(self._filled, min(self._filled + self._STEP, len(self.cos)))
            for table, values in zip(
                (self.cos, self.sin), self._rows(target.start, target.start + self._STEP), strict=True
            ):
                table[target] = values[: target.stop - target.start]
            self._filled = target.stop


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: softmax(scale q k^T) v over the cache of `layer`.

    window: positions visible to a query, itself included; 0 for all. softcap: scores become
    cap * tanh(score / cap); 0 for off. rope: None where positions are not encoded. q_norm, k_norm: of each head.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeTable | None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int = 0
    softcap: float = 0.0


class Ops(abc.ABC):
    @abc.abstractmethod
    def run(self, model: Model, batch: ForwardBatch) -> torch.Tensor:
        """float32 [R, vocab]: the model's forward pass over a batch."""

    @abc.abstractmethod
    def embed(self, table: PackedWeight, scale: float = 1.0) -> Value:
        """Rows of the table for the batch's ids, times scale: [T, K]."""

    @abc.abstractmethod
    def norm(self, x: Value, norm: Norm) -> Value: ...

    @abc.abstractmethod
    def linear(self, x: Value, *layers: Linear, softcap: float = 0.0) -> tuple[Value, ...]:
        """Each layer of the same input; with a soft cap, cap * tanh(y / cap) of each result y."""

    @abc.abstractmethod
    def linear_add(self, x: Value, layer: Linear, residual: Value) -> Value:
        """residual + layer(x). The residual is consumed: it may be changed in place."""

    @abc.abstractmethod
    def attention(self, q: Value, k: Value, v: Value, spec: AttentionSpec) -> Value:
        """Norm and rotate q and k, write k and v to the cache, attend: [T, heads * head_dim]."""

    @abc.abstractmethod
    def glu(self, gate: Value, up: Value, activation: str) -> Value:
        """activation(gate) * up; "silu" or "gelu_tanh"."""

    @abc.abstractmethod
    def add(self, x: Value, residual: Value) -> Value:
        """residual + x, consuming the residual."""

    @abc.abstractmethod
    def outputs(self, x: Value) -> Value:
        """The rows whose logits are wanted: [R, K]."""
