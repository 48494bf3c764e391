"""The operations a model's maths is written in. A model is one description; each implementation of `Ops` runs it.

`Value` is whatever the implementation passes between its own operations: a tensor for torch, a buffer for native
programs. Every operation works on the rows of the current batch.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infer.quant.kernels.device import Device
from infer.quant.kernels.weight import PackedWeight
from infer.runtime.batch import ForwardBatch
from infer.runtime.config import MoEConfig
from infer.samplers.logit_rows import Logits

if TYPE_CHECKING:
    import torch

    from infer.runtime.models.base import Model

Value = Any
Vector = Any  # contiguous float32 as `WeightKernel.vector` has it: an array for native kernels, a tensor for others


@dataclass(frozen=True)
class Linear:
    """y = x W^T + bias; weight [N, K], bias float32 [N]."""

    weight: PackedWeight
    bias: Vector | None = None


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv 1910.07467): x / sqrt(mean(x²) + eps) * weight; weight float32 [width]."""

    weight: Vector
    eps: float


class RopeTable:
    """cos and sin, float32 [positions, dim / 2], in host memory; tensors: the same on the device. pairing as in
    RopeConfig.

    rows(start, stop) computes cos and sin of these positions, float64. On the CPU rows are filled as positions come
    into use: a context of 32,768 would cost 17 MB and 45 ms at every start. `ready` makes them.
    """

    _STEP = 256  # rows at a time: always the same ones together, whatever the context

    def __init__(
        self,
        shape: tuple[int, int],
        pairing: str,
        device: Device,
        rows: Callable[[int, int], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]],
    ) -> None:
        self.pairing = pairing
        self.dim = 2 * shape[1]
        self._rows = rows
        self._filled = 0
        self._device = device
        self.cos, self.sin = (np.empty(shape, dtype=np.float32) for _ in range(2))
        if device.type != "cpu":
            self.ready(shape[0])

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        cos, sin = (torch.from_numpy(table).to(str(self._device)) for table in (self.cos, self.sin))
        return cos, sin

    def ready(self, positions: int) -> None:
        """Fill the rows below `positions`."""
        size = len(self.cos)
        while self._filled < min(positions, size):
            start, stop = self._filled, min(self._filled + self._STEP, size)
            for table, values in zip(
                (self.cos, self.sin), self._rows(start, start + self._STEP), strict=True
            ):
                table[start:stop] = values[: stop - start]
            self._filled = stop


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: softmax(scale q k^T) v over the cache of `layer`.

    window: positions visible to a query, itself included; 0 for all. softcap: scores become
    cap * tanh(score / cap); 0 for off. rope: None where positions are not encoded. q_norm, k_norm: of each head.
    latent_dim: of latent attention, else 0: there are no values, the first so many dimensions of a key are its value
    and what k_norm norms, and the rotated ones are the last. sinks: float32 [heads], a score of each head without a
    value.
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
    latent_dim: int = 0
    sinks: Vector | None = None

    @property
    def norm_dim(self) -> int:
        """Dimensions of a head that q_norm and k_norm cover, from the first on."""
        return self.latent_dim or self.head_dim

    @property
    def rope_at(self) -> int:
        """The first rotated dimension of a head."""
        return self.head_dim - self.rope.dim if self.latent_dim and self.rope else 0


@dataclass(frozen=True)
class Router:
    """The layer whose outputs score the experts, and the rule that chooses among them (MoEConfig). bias: float32
    [experts], added to the scores for the choice only (arXiv 2408.15664)."""

    layer: Linear
    rule: MoEConfig
    bias: Vector | None = None


@dataclass(frozen=True)
class Experts:
    """A gated MLP for each expert, [experts] weights each; the biases float32 [experts, rows]."""

    gate: tuple[PackedWeight, ...]
    up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    activation: str = "silu"
    gate_bias: Vector | None = None
    up_bias: Vector | None = None
    down_bias: Vector | None = None


class Ops(abc.ABC):
    @abc.abstractmethod
    def run(self, model: Model, batch: ForwardBatch) -> Logits:
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
    def attention(self, q: Value, k: Value, v: Value | None, spec: AttentionSpec) -> Value:
        """Norm and rotate q and k, write k and v to the cache, attend: [T, heads * head_dim], or heads * latent_dim."""

    @abc.abstractmethod
    def heads(self, x: Value, weights: tuple[PackedWeight, ...]) -> Value:
        """Each head of x by its matrix [N, K]: [T, heads * (K + rest)] → [T, heads * (N + rest)]; what a head has
        beyond its first K elements stays as it is."""

    @abc.abstractmethod
    def glu(self, gate: Value, up: Value, activation: str) -> Value:
        """activation(gate) * up, consuming gate; "silu" or "gelu_tanh". "swiglu_oai" (gpt-oss):
        (up + 1) * gate * sigmoid(1.702 gate) with gate at most 7 and up within ±7."""

    @abc.abstractmethod
    def route(self, x: Value, router: Router) -> Value:
        """The experts of each row, in ascending order, with their weights; of equal scores the lowest number wins."""

    @abc.abstractmethod
    def experts(self, x: Value, choices: Value, experts: Experts) -> Value:
        """The weighted sum of each row's experts, in ascending order: [T, K]."""

    @abc.abstractmethod
    def add(self, x: Value, residual: Value) -> Value:
        """residual + x, consuming the residual."""

    @abc.abstractmethod
    def outputs(self, x: Value) -> Value:
        """The rows whose logits are wanted: [R, K]."""
