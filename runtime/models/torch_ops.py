"""The operations in torch, run as they are called: on CUDA, and on CPUs where the native library is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from infer.quant.kernels.base import PackedWeight, WeightKernel
from infer.runtime.attention.base import AttentionBackend
from infer.runtime.batch import ForwardBatch
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.models.ops import AttentionSpec, Linear, Norm, Ops, RopeTable

if TYPE_CHECKING:
    from infer.runtime.models.base import Model

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class TorchOps(Ops):
    """Values are tensors of the kernel's dtype; norms, rotation and attention run in float32 where the dtype is not
    exact enough. `batch` is the one that runs."""

    batch: ForwardBatch

    def __init__(self, kernel: WeightKernel, attention: AttentionBackend, cache: PagedKVCache) -> None:
        self._kernel = kernel
        self._attention = attention
        self._cache = cache

    @torch.inference_mode()
    def run(self, model: Model, batch: ForwardBatch) -> torch.Tensor:
        self._last_position = int(batch.positions.max())
        self.batch = batch.to(self._kernel.device)
        self._rotations: dict[int, torch.Tensor] = {}
        logits: torch.Tensor = model.forward(self)
        return logits.float()

    def embed(self, table: PackedWeight, scale: float = 1.0) -> torch.Tensor:
        rows = self._kernel.rows(table, self.batch.ids.long())
        return rows if scale == 1.0 else rows * scale

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), norm.weight, norm.eps).to(x.dtype)

    def linear(self, x: torch.Tensor, *layers: Linear, softcap: float = 0.0) -> tuple[torch.Tensor, ...]:
        results = tuple(self._apply(x, layer) for layer in layers)
        return tuple(softcap * torch.tanh(y.float() / softcap) for y in results) if softcap else results

    def linear_add(self, x: torch.Tensor, layer: Linear, residual: torch.Tensor) -> torch.Tensor:
        return residual + self._apply(x, layer)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        dim = spec.head_dim
        q = q.float().view(-1, spec.heads, dim)
        k = k.float().view(-1, spec.kv_heads, dim)
        v = v.float().view(-1, spec.kv_heads, dim)
        if spec.q_norm is not None:
            q = self.norm(q, spec.q_norm)
        if spec.k_norm is not None:
            k = self.norm(k, spec.k_norm)
        if spec.rope is not None:
            both = rotate(torch.cat((q, k), dim=1), self._rotation(spec.rope), spec.rope)
            q, k = both[:, : spec.heads], both[:, spec.heads :]
        self._cache.store(spec.layer, self.batch.slots, k, v)
        out = self._attention.forward(q, self._cache, self.batch, spec.layer, scale=spec.scale, window=spec.window,
                                      softcap=spec.softcap)  # fmt: skip
        return out.flatten(1).to(self._kernel.dtype)

    def glu(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](gate) * up

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + x

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.batch.output_rows.long()]

    def _rotation(self, table: RopeTable) -> torch.Tensor:
        """cos + i sin at the batch's positions, complex64 [T, 1, dim / 2]; layers share tables."""
        found = self._rotations.get(id(table))
        if found is None:
            table.ready(self._last_position + 1)
            positions = self.batch.positions.long()
            found = torch.complex(table.cos[positions], table.sin[positions]).unsqueeze(1)
            self._rotations[id(table)] = found
        return found

    def _apply(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        out = self._kernel.matmul(x, layer.weight)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)


def rotate(x: torch.Tensor, rotation: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """x float32 [T, heads, head_dim], rotation complex64 [T, 1, dim / 2]: the first `dim` dimensions turned, others
    kept."""
    turned, rest = x[..., : table.dim], x[..., table.dim :]
    pairs = turned.shape[-1] // 2
    if table.pairing == "adjacent":
        parts = torch.view_as_complex(turned.reshape(*x.shape[:-1], pairs, 2)) * rotation
        turned = torch.view_as_real(parts).flatten(-2)
    else:
        parts = torch.complex(turned[..., :pairs].contiguous(), turned[..., pairs:].contiguous()) * rotation
        turned = torch.cat((parts.real, parts.imag), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
