"""Gemma 3, text (arXiv 2503.19786): as Gemma 2, with norms of q and k instead of soft caps, and full attention on every
sixth layer only. Layers with a window rotate by a base of their own, and the context extension is not theirs."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig, RopeConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.gemma2 import gemma_scale
from infer.runtime.models.hparams import HyperParameters, decoder_config

LAYERS_27B = 62


class Gemma3(Decoder):
    post_norms = True
    qk_norm = "head"

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="halves")
        rope = config.rope
        local_base = params.number("rope.freq_base_swa", 10000.0)
        return replace(
            config,
            activation="gelu_tanh",
            embedding_scale=config.embedding_length**0.5,
            windows=params.windows(config.block_count, period=6),
            local_rope=RopeConfig(dim=rope.dim, base=local_base, pairing=rope.pairing),
            attention_scale=gemma_scale(params, config, LAYERS_27B),
            logit_softcap=params.optional_number("final_logit_softcapping") or 0.0,
        )
