"""The dense decoder-only transformer: embedding, layers, norm, output. A family is a subclass that reads its own
configuration and says which norms it has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from infer.runtime.config import ModelConfig
from infer.runtime.models.base import Model, WeightLoader
from infer.runtime.models.layers import Attention, DecoderLayer, GatedMLP, LatentAttention, MoE
from infer.runtime.models.moe import load_mlp, load_moe
from infer.runtime.models.ops import AttentionSpec, Linear, Norm, Ops, RopeTable, Value
from infer.runtime.models.rope import rope_table


class Decoder(Model):
    """pre_norms, post_norms: an RMS norm of what each branch reads, of what it adds. qk_norm: of q and k, per "head" or
    over the whole "width"; "" for none. fused: the file holds q, k and v as one matrix, gate and up as another.
    sinks: a score without a value for each head. mlp_norm: name of the norm of what the MLP reads.

    A residual scale s costs nothing: the stream is kept divided by s, so that branches add to it as they are; an RMS
    norm of it is the same with eps / s². A logit scale goes into the weights of the last norm.
    """

    pre_norms = True
    post_norms = False
    qk_norm = ""
    fused = False
    sinks = False
    mlp_norm = "ffn_norm"

    def __init__(self, config: ModelConfig, loader: WeightLoader, positions: int) -> None:
        self.config = config
        width = config.embedding_length
        self._stream_eps = config.norm_eps / config.residual_scale**2
        self.embedding = loader.matrix("token_embd.weight", config.vocab_size, width)
        ropes = self._ropes(loader, positions)
        self.layers = [self._layer(loader, index, rope) for index, rope in enumerate(ropes)]
        self.output_norm = loader.norm("output_norm", width, self._stream_eps)
        if config.logit_scale != 1.0:
            self.output_norm = replace(self.output_norm, weight=self.output_norm.weight * config.logit_scale)
        tied = "output.weight" not in loader
        self.output = Linear(self.embedding) if tied else loader.linear("output", config.vocab_size, width)

    def forward(self, ops: Ops) -> Value:
        config = self.config
        x = ops.embed(self.embedding, config.embedding_scale / config.residual_scale)
        for layer in self.layers:
            x = layer.forward(ops, x)
        x = ops.norm(ops.outputs(x), self.output_norm)
        (logits,) = ops.linear(x, self.output, softcap=config.logit_softcap)
        return logits

    def _ropes(self, loader: WeightLoader, positions: int) -> list[RopeTable | None]:
        """The rotation of each layer."""
        factors = self._rope_factors(loader, positions)
        config = self.config
        everywhere = rope_table(config.rope, positions, factors, loader.device)
        local = everywhere
        if config.local_rope is not None and any(config.windows):
            local = rope_table(config.local_rope, positions, None, loader.device)
        every = config.nope_interval
        return [
            None if every and (index + 1) % every == 0 else local if config.window(index) else everywhere
            for index in range(config.block_count)
        ]

    def _rope_factors(self, loader: WeightLoader, positions: int) -> npt.NDArray[np.float32] | None:
        """The file's divisors of the frequencies. Between longrope's two sets the context in use decides, not the text:
        a key must not depend on what comes after it."""
        config, half = self.config, self.config.rope.dim // 2
        if config.rope.scaling != "longrope":
            return loader.values("rope_freqs.weight", half) if "rope_freqs.weight" in loader else None
        sets = {name: loader.values(f"rope_factors_{name}.weight", half) for name in ("short", "long")}
        chosen = "long" if positions > (config.rope.original_context or config.context_length) else "short"
        self.config = replace(config, rope=replace(config.rope, factors=chosen))
        return sets[chosen]

    def _layer(self, loader: WeightLoader, index: int, rope: RopeTable | None) -> DecoderLayer:
        config, name = self.config, f"blk.{index}."

        def norm(present: bool, tensor: str, eps: float) -> Norm | None:
            return loader.norm(name + tensor, config.embedding_length, eps) if present else None

        return DecoderLayer(
            attention_norm=norm(self.pre_norms, "attn_norm", self._stream_eps),
            attention=self._attention(loader, index, rope),
            post_attention_norm=norm(self.post_norms, "post_attention_norm", config.norm_eps),
            mlp_norm=norm(self.pre_norms, self.mlp_norm, self._stream_eps),
            mlp=self._mlp(loader, index),
            post_mlp_norm=norm(self.post_norms, "post_ffw_norm", config.norm_eps),
        )

    def _attention(
        self, loader: WeightLoader, index: int, rope: RopeTable | None
    ) -> Attention | LatentAttention:
        config, name = self.config, f"blk.{index}.attn_"
        width, head_dim = config.embedding_length, config.head_dim
        q_width, kv_width = config.head_count * head_dim, config.head_count_kv * head_dim
        if self.fused:
            q, k, v = loader.split(name + "qkv", (q_width, kv_width, kv_width), width)
        else:
            sizes = {"q": q_width, "k": kv_width, "v": kv_width}
            q, k, v = (loader.linear(name + part, rows, width) for part, rows in sizes.items())

        def norms(kind: str, q_size: int, k_size: int) -> tuple[Norm | None, Norm | None]:
            if self.qk_norm != kind:
                return None, None
            eps = config.norm_eps
            return loader.norm(name + "q_norm", q_size, eps), loader.norm(name + "k_norm", k_size, eps)

        q_norm, k_norm = norms("head", head_dim, head_dim)
        spec = AttentionSpec(
            layer=index, heads=config.head_count, kv_heads=config.head_count_kv, head_dim=head_dim,
            scale=head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            rope=rope, q_norm=q_norm, k_norm=k_norm, window=config.window(index), softcap=config.attention_softcap,
            sinks=loader.vector(name + "sinks.weight", config.head_count) if self.sinks else None,
        )  # fmt: skip
        q_norm, k_norm = norms("width", q_width, kv_width)
        output = loader.linear(name + "output", width, q_width)
        return Attention(q=q, k=k, v=v, output=output, spec=spec, q_norm=q_norm, k_norm=k_norm)

    def _mlp(self, loader: WeightLoader, index: int) -> GatedMLP | MoE:
        config, name = self.config, f"blk.{index}.ffn_"
        width, inner, moe = config.embedding_length, config.feed_forward_length, config.moe
        if moe is not None and index >= moe.leading_dense:
            return load_moe(loader, index, config, moe)
        if self.fused:
            gate, up = loader.split(name + "up", (inner, inner), width)
            return GatedMLP(gate, up, loader.linear(name + "down", width, inner), config.activation)
        return load_mlp(loader, name + "{}", width, inner, config.activation)
