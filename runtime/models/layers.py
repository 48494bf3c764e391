"""The decoder layer that the families share; what differs between them is a field, not a copy."""

from __future__ import annotations

from dataclasses import dataclass

from infer.runtime.models.ops import AttentionSpec, Linear, Norm, Ops, Value


@dataclass(frozen=True)
class Attention:
    q: Linear
    k: Linear
    v: Linear
    output: Linear
    spec: AttentionSpec

    def mix(self, ops: Ops, x: Value) -> Value:
        """Everything before the output projection."""
        q, k, v = ops.linear(x, self.q, self.k, self.v)
        return ops.attention(q, k, v, self.spec)


@dataclass(frozen=True)
class GatedMLP:
    """SwiGLU and its kin (arXiv 2002.05202)."""

    gate: Linear
    up: Linear
    down: Linear
    activation: str = "silu"

    def gated(self, ops: Ops, x: Value) -> Value:
        """Everything before the down projection."""
        gate, up = ops.linear(x, self.gate, self.up)
        return ops.glu(gate, up, self.activation)


@dataclass(frozen=True)
class DecoderLayer:
    """Pre-norm residual layer. post_attention_norm, post_mlp_norm: norms of a branch before it is added."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: GatedMLP
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None

    def forward(self, ops: Ops, x: Value) -> Value:
        mixed = self.attention.mix(ops, ops.norm(x, self.attention_norm))
        x = _join(ops, mixed, self.attention.output, self.post_attention_norm, x)
        gated = self.mlp.gated(ops, ops.norm(x, self.mlp_norm))
        return _join(ops, gated, self.mlp.down, self.post_mlp_norm, x)


def _join(ops: Ops, branch: Value, layer: Linear, norm: Norm | None, residual: Value) -> Value:
    if norm is None:
        return ops.linear_add(branch, layer, residual)
    (out,) = ops.linear(branch, layer)
    return ops.add(ops.norm(out, norm), residual)
