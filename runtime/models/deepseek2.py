"""DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, and experts after the first dense layers.

Files before April 2025 hold both up projections of the latent as one matrix, `attn_kv_b`; it is taken apart here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from infer.quant.kernels.weight import PackedWeight
from infer.runtime.config import LatentConfig, ModelConfig
from infer.runtime.errors import CheckpointError
from infer.runtime.models.base import WeightLoader
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config
from infer.runtime.models.layers import LatentAttention
from infer.runtime.models.ops import AttentionSpec, RopeTable


class DeepSeek2(Decoder):
    latent: LatentConfig

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="adjacent", latent=True)
        rope = config.rope
        key_dim = params.integer("attention.key_length_mla", config.head_dim, high=4096)
        value_dim = params.integer("attention.value_length", config.head_dim, high=4096)
        latent = LatentConfig(
            rank=params.integer("attention.kv_lora_rank", high=4096),
            query_rank=params.integer("attention.q_lora_rank", 0, low=0),
            key_dim=key_dim - rope.dim,
            value_dim=params.integer("attention.value_length_mla", value_dim, high=4096),
        )
        if rope.dim >= key_dim or latent.rank % 2:
            raise CheckpointError(
                f"heads of {key_dim}, {rope.dim} of them rotated, over a latent of {latent.rank} cannot be; "
                "use another file"
            )
        # YaRN's temperature counts in all of the score, squared, and not in the rotated parts; the key is 0.1 times its
        # factor. Without the key it is as everywhere else.
        temperature, factor = 1.0, params.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0)
        if factor and rope.scaling == "yarn":
            temperature = 1 + factor * math.log(max(1.0, rope.factor))
            rope = replace(rope, attention_factor=rope.attention_factor or 1.0)
        return replace(
            config,
            head_count_kv=1,
            head_dim=latent.rank + rope.dim,
            latent=latent,
            rope=rope,
            attention_scale=temperature**2 / math.sqrt(key_dim),
            moe=params.moe(config.block_count, normalize=False),
        )

    def __init__(self, config: ModelConfig, loader: WeightLoader, positions: int) -> None:
        if config.latent is None:
            raise ValueError("no latent attention")
        self.latent = config.latent
        super().__init__(config, loader, positions)

    def _attention(self, loader: WeightLoader, index: int, rope: RopeTable | None) -> LatentAttention:
        config, latent, name = self.config, self.latent, f"blk.{index}.attn_"
        width, heads, eps = config.embedding_length, config.head_count, config.norm_eps
        q_width, rank = heads * (latent.key_dim + config.rope.dim), latent.query_rank
        k_norm = loader.norm(name + "kv_a_norm", latent.rank, eps)
        k_up, v_up = self._up_projections(loader, name)
        return LatentAttention(
            q=loader.linear(name + "q_b" if rank else name + "q", q_width, rank or width),
            kv=loader.linear(name + "kv_a_mqa", config.head_dim, width),
            k_up=k_up,
            v_up=v_up,
            output=loader.linear(name + "output", width, heads * latent.value_dim),
            spec=AttentionSpec(
                layer=index, heads=heads, kv_heads=1, head_dim=config.head_dim, scale=config.attention_scale or 0.0,
                rope=rope, k_norm=k_norm, latent_dim=latent.rank,
            ),
            q_down=loader.linear(name + "q_a", rank, width) if rank else None,
            q_norm=loader.norm(name + "q_a_norm", rank, eps) if rank else None,
        )  # fmt: skip

    def _up_projections(
        self, loader: WeightLoader, name: str
    ) -> tuple[tuple[PackedWeight, ...], tuple[PackedWeight, ...]]:
        latent, heads = self.latent, self.config.head_count
        rank, key, value = latent.rank, latent.key_dim, latent.value_dim
        if name + "kv_b.weight" not in loader:
            keys = loader.matrices(name + "k_b.weight", heads, rank, key)
            return keys, loader.matrices(name + "v_b.weight", heads, value, rank)
        both = [(head * (key + value), key, True) for head in range(heads)]
        both += [(first + key, value, False) for first, _, _ in both]
        parts = loader.pieces(name + "kv_b.weight", heads * (key + value), rank, both)
        return parts[:heads], parts[heads:]
