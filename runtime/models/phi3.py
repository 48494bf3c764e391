"""Phi 3 to 4 (arXiv 2404.14219): q, k, v and gate, up stored as one matrix each, part of a head rotated, a
window on all layers, and LongRoPE (arXiv 2402.13753) in files that `rope.scaling.attn_factor` marks."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config


class Phi3(Decoder):
    fused = True

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="halves")
        if config.rope.attention_factor is not None:
            config = replace(config, rope=replace(config.rope, scaling="longrope"))
        return replace(config, windows=params.windows(config.block_count, period=0))
