"""The operations in torch, run as they are called: on CUDA, and on CPUs where the native library is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from infer.quant.kernels.rows import RowWeight
from infer.quant.kernels.tensor_kernel import TensorKernel
from infer.quant.kernels.weight import PackedWeight
from infer.runtime.attention.base import AttentionBackend, TensorBatch
from infer.runtime.batch import ForwardBatch
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.models.ops import AttentionSpec, Experts, Linear, Norm, Ops, RopeTable, Router

if TYPE_CHECKING:
    from infer.runtime.models.base import Model


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate, inplace=True).mul_(up),
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up),
    "swiglu_oai": swiglu_oai,
}
Choices = tuple[torch.Tensor, torch.Tensor]  # of each row: experts int64 [T, used], weights float32 [T, used]


class TorchOps(Ops):
    """Values are tensors of the kernel's dtype; norms, rotation and attention run in float32 where the dtype is not
    exact enough. `batch` is the one that runs."""

    batch: TensorBatch

    def __init__(self, kernel: TensorKernel, attention: AttentionBackend, cache: PagedKVCache) -> None:
        self._kernel = kernel
        self._attention = attention
        self._cache = cache.tensors

    @torch.inference_mode()
    def run(self, model: Model, batch: ForwardBatch) -> torch.Tensor:
        self._last_position = int(batch.positions.max())
        self.batch = TensorBatch.on(self._kernel.device, batch)
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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, spec: AttentionSpec
    ) -> torch.Tensor:
        dim = spec.head_dim
        q = q.float().view(-1, spec.heads, dim)
        k = k.float().view(-1, spec.kv_heads, dim)
        v = None if v is None else v.float().view(-1, spec.kv_heads, dim)
        q, k = (self._head_norm(x, norm) for x, norm in ((q, spec.q_norm), (k, spec.k_norm)))
        if spec.rope is not None:
            both = rotate(torch.cat((q, k), dim=1), self._rotation(spec.rope), spec.rope, spec.rope_at)
            q, k = both[:, : spec.heads], both[:, spec.heads :]
        self._cache.store(spec.layer, self.batch.slots, k, v)
        out = self._attention.forward(q, self._cache, self.batch, spec.layer, scale=spec.scale, window=spec.window,
                                      softcap=spec.softcap, sinks=spec.sinks)  # fmt: skip
        return out.flatten(1).to(self._kernel.dtype)

    def heads(self, x: torch.Tensor, weights: tuple[PackedWeight, ...]) -> torch.Tensor:
        parts = []
        for head, weight in zip(x.view(len(x), len(weights), -1).unbind(1), weights, strict=True):
            columns = weight.shape[1]
            parts += [self._kernel.matmul(head[:, :columns], weight), head[:, columns:]]
        return torch.cat(parts, dim=-1)

    def glu(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](gate, up)

    def route(self, x: torch.Tensor, router: Router) -> Choices:
        weight = router.layer.weight
        if isinstance(weight, RowWeight) and x.dtype != torch.float32:  # rounded logits could tie
            logits = F.linear(x.float(), weight.all())
            logits = logits if router.layer.bias is None else logits + router.layer.bias
        else:
            logits = self._apply(x, router.layer).float()
        return choose(logits, router)

    def experts(self, x: torch.Tensor, choices: Choices, experts: Experts) -> torch.Tensor:
        ids, weights = choices
        parts = x.new_empty((*ids.shape, x.shape[1]))
        for expert in torch.unique(ids).tolist():
            rows, places = torch.where(ids == expert)

            def apply(
                y: torch.Tensor, layers: tuple[PackedWeight, ...], bias: torch.Tensor | None, at: int = expert
            ) -> torch.Tensor:
                return self._apply(y, Linear(layers[at], None if bias is None else bias[at]))

            gate = apply(x[rows], experts.gate, experts.gate_bias)
            up = apply(x[rows], experts.up, experts.up_bias)
            gated = self.glu(gate, up, experts.activation)
            parts[rows, places] = apply(gated, experts.down, experts.down_bias)
        total = torch.zeros_like(x, dtype=torch.float32)
        for place in range(ids.shape[1]):
            total += weights[:, place, None] * parts[:, place].float()
        return total.to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + x

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.batch.output_rows.long()]

    def _head_norm(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Norms the first dimensions of each head, as many as the norm has."""
        if norm is None:
            return x
        width = len(norm.weight)
        normed = self.norm(x[..., :width], norm)
        return normed if width == x.shape[-1] else torch.cat((normed, x[..., width:]), dim=-1)

    def _rotation(self, table: RopeTable) -> torch.Tensor:
        """cos + i sin at the batch's positions, complex64 [T, 1, dim / 2]; layers share tables."""
        found = self._rotations.get(id(table))
        if found is None:
            table.ready(self._last_position + 1)
            positions = self.batch.positions.long()
            cos, sin = table.tensors
            found = torch.complex(cos[positions], sin[positions]).unsqueeze(1)
            self._rotations[id(table)] = found
        return found

    def _apply(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        out = self._kernel.matmul(x, layer.weight)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)


def choose(logits: torch.Tensor, router: Router) -> Choices:
    """The rule of MoEConfig on logits float32 [T, experts]; experts in ascending order, of equals the lowest first."""
    rule = router.rule
    scores = logits
    if rule.gate != "chosen_softmax":
        scores = torch.softmax(logits, dim=-1) if rule.gate == "softmax" else torch.sigmoid(logits)
    selection = scores if router.bias is None else scores + router.bias
    if rule.groups_used < rule.groups:
        grouped = selection.view(len(logits), rule.groups, -1)
        count = min(2, grouped.shape[-1]) if rule.gate == "sigmoid" else 1
        best = _largest(grouped.topk(count).values.sum(dim=-1), rule.groups_used)
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        selection = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _largest(selection, rule.used).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if rule.gate == "chosen_softmax":
        weights = torch.softmax(weights, dim=-1)
    elif rule.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * rule.scale


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest of each row, the first of equals first."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :count]


def rotate(x: torch.Tensor, rotation: torch.Tensor, table: RopeTable, at: int = 0) -> torch.Tensor:
    """x float32 [T, heads, head_dim], rotation complex64 [T, 1, dim / 2]: `dim` dimensions from `at` on turned, others
    kept."""
    before, turned, after = x[..., :at], x[..., at : at + table.dim], x[..., at + table.dim :]
    pairs = turned.shape[-1] // 2
    if table.pairing == "adjacent":
        parts = torch.view_as_complex(turned.reshape(*x.shape[:-1], pairs, 2)) * rotation
        turned = torch.view_as_real(parts).flatten(-2)
    else:
        parts = torch.complex(turned[..., :pairs].contiguous(), turned[..., pairs:].contiguous()) * rotation
        turned = torch.cat((parts.real, parts.imag), dim=-1)
    return torch.cat((before, turned, after), dim=-1) if turned.shape != x.shape else turned
