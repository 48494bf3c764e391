"""Llama 1 to 3, SmolLM, TinyLlama, Yi and what else is `llama` in GGUF; qwen2 is the same with q, k, v biases.

GGUF stores llama's q and k with each head's rotation pairs side by side; qwen2's keep the two halves.
"""

from __future__ import annotations

from infer.runtime.config import ModelConfig
from infer.runtime.models.base import Model, WeightLoader
from infer.runtime.models.hparams import HyperParameters, decoder_config
from infer.runtime.models.layers import Attention, DecoderLayer, GatedMLP
from infer.runtime.models.ops import AttentionSpec, Linear, Ops, RopeTable, Value
from infer.runtime.models.rope import rope_table

PAIRING = {"llama": "adjacent", "qwen2": "halves"}


class Llama(Model):
    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        return decoder_config(params, vocab_size, pairing=PAIRING[params.architecture])

    def __init__(self, config: ModelConfig, loader: WeightLoader, positions: int) -> None:
        self.config = config
        width = config.embedding_length
        self.embedding = loader.matrix("token_embd.weight", config.vocab_size, width)
        factors = loader.optional_vector("rope_freqs.weight", config.rope.dim // 2)
        rope = rope_table(config.rope, positions, factors, loader.device)
        self.layers = [self._layer(loader, index, rope) for index in range(config.block_count)]
        self.output_norm = loader.norm("output_norm", width, config.norm_eps)
        tied = "output.weight" not in loader
        self.output = Linear(self.embedding) if tied else loader.linear("output", config.vocab_size, width)

    def forward(self, ops: Ops) -> Value:
        x = ops.embed(self.embedding)
        for layer in self.layers:
            x = layer.forward(ops, x)
        (logits,) = ops.linear(ops.norm(ops.outputs(x), self.output_norm), self.output)
        return logits

    def _layer(self, loader: WeightLoader, index: int, rope: RopeTable) -> DecoderLayer:
        config, name = self.config, f"blk.{index}."
        width, inner = config.embedding_length, config.feed_forward_length
        q_width, kv_width = config.head_count * config.head_dim, config.head_count_kv * config.head_dim
        spec = AttentionSpec(
            layer=index, heads=config.head_count, kv_heads=config.head_count_kv, head_dim=config.head_dim,
            scale=config.head_dim**-0.5, rope=rope,
        )  # fmt: skip
        return DecoderLayer(
            attention_norm=loader.norm(name + "attn_norm", width, config.norm_eps),
            attention=Attention(
                q=loader.linear(name + "attn_q", q_width, width),
                k=loader.linear(name + "attn_k", kv_width, width),
                v=loader.linear(name + "attn_v", kv_width, width),
                output=loader.linear(name + "attn_output", width, q_width),
                spec=spec,
            ),
            mlp_norm=loader.norm(name + "ffn_norm", width, config.norm_eps),
            mlp=GatedMLP(
                gate=loader.linear(name + "ffn_gate", inner, width),
                up=loader.linear(name + "ffn_up", inner, width),
                down=loader.linear(name + "ffn_down", width, inner),
            ),
        )
