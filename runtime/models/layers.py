"""The decoder layer that the families share; what differs between them is a field, not a copy."""

from __future__ import annotations

from dataclasses import dataclass

from infer.quant.kernels.weight import PackedWeight
from infer.runtime.models.ops import AttentionSpec, Experts, Linear, Norm, Ops, Router, Value


@dataclass(frozen=True)
class Attention:
    """q_norm, k_norm: over all heads at once; norms of each head are the spec's."""

    q: Linear
    k: Linear
    v: Linear
    output: Linear
    spec: AttentionSpec
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def mix(self, ops: Ops, x: Value) -> Value:
        """Everything before the output projection."""
        q, k, v = ops.linear(x, self.q, self.k, self.v)
        q, k = _normed(ops, q, self.q_norm), _normed(ops, k, self.k_norm)
        return ops.attention(q, k, v, self.spec)


@dataclass(frozen=True)
class LatentAttention:
    """MLA (arXiv 2405.04434, 2.1), absorbed: a head's query goes through its part of the key's up projection, and the
    latent itself is what all heads attend to and mix. One form for prefill and decoding: a row's bits do not tell.

    q_down, q_norm: of queries with a rank of their own. kv: latent and rotated part. k_up, v_up: a matrix [rank, key]
    and [value, rank] for each head.
    """

    q: Linear
    kv: Linear
    k_up: tuple[PackedWeight, ...]
    v_up: tuple[PackedWeight, ...]
    output: Linear
    spec: AttentionSpec
    q_down: Linear | None = None
    q_norm: Norm | None = None

    def mix(self, ops: Ops, x: Value) -> Value:
        """Everything before the output projection."""
        if self.q_down is None:
            q, kv = ops.linear(x, self.q, self.kv)
        else:
            q, kv = ops.linear(x, self.q_down, self.kv)
            (q,) = ops.linear(_normed(ops, q, self.q_norm), self.q)
        mixed = ops.attention(ops.heads(q, self.k_up), kv, None, self.spec)
        return ops.heads(mixed, self.v_up)


@dataclass(frozen=True)
class GatedMLP:
    """SwiGLU and its kin (arXiv 2002.05202)."""

    gate: Linear
    up: Linear
    down: Linear
    activation: str = "silu"

    def add_to(self, ops: Ops, x: Value, residual: Value, norm: Norm | None = None) -> Value:
        """residual + norm(self(x))."""
        gate, up = ops.linear(x, self.gate, self.up)
        return _join(ops, ops.glu(gate, up, self.activation), self.down, norm, residual)


@dataclass(frozen=True)
class MoE:
    """Experts that a router chooses for each row (arXiv 1701.06538), and one that all rows go to, or None."""

    router: Router
    experts: Experts
    shared: GatedMLP | None = None

    def add_to(self, ops: Ops, x: Value, residual: Value, norm: Norm | None = None) -> Value:
        """residual + norm(self(x))."""
        out = ops.experts(x, ops.route(x, self.router), self.experts)
        if self.shared is not None:
            out = self.shared.add_to(ops, x, out)
        return ops.add(_normed(ops, out, norm), residual)


@dataclass(frozen=True)
class DecoderLayer:
    """Residual layer. attention_norm, mlp_norm: norms of what a branch reads; post_attention_norm, post_mlp_norm: of
    what it adds. None where a family has no such norm."""

    attention_norm: Norm | None
    attention: Attention | LatentAttention
    mlp_norm: Norm | None
    mlp: GatedMLP | MoE
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None

    def forward(self, ops: Ops, x: Value) -> Value:
        mixed = self.attention.mix(ops, _normed(ops, x, self.attention_norm))
        x = _join(ops, mixed, self.attention.output, self.post_attention_norm, x)
        return self.mlp.add_to(ops, _normed(ops, x, self.mlp_norm), x, self.post_mlp_norm)


def _normed(ops: Ops, x: Value, norm: Norm | None) -> Value:
    return x if norm is None else ops.norm(x, norm)


def _join(ops: Ops, branch: Value, layer: Linear, norm: Norm | None, residual: Value) -> Value:
    if norm is None:
        return ops.linear_add(branch, layer, residual)
    (out,) = ops.linear(branch, layer)
    return ops.add(ops.norm(out, norm), residual)
