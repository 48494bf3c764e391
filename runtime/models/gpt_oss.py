"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, a sink in each head's softmax, a window on every
other layer."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config


class GptOss(Decoder):
    sinks = True
    mlp_norm = "post_attention_norm"

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="halves")
        return replace(
            config,
            activation="swiglu_oai",
            rope=replace(config.rope, truncate=False),  # in no file
            windows=params.windows(config.block_count, period=2),
            moe=params.moe(config.block_count, gate="chosen_softmax", normalize=False),
        )
