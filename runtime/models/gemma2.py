"""Gemma 2 (arXiv 2408.00118): norms on both sides of each branch, soft caps on scores and logits, a window on every
other layer. GGUF stores the weights of norms with the 1 that the papers add."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config

LAYERS_27B = 46  # the one size whose scores are scaled by width / heads instead of head_dim; no key says so


class Gemma2(Decoder):
    post_norms = True

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="halves")
        return replace(
            config,
            activation="gelu_tanh",
            embedding_scale=config.embedding_length**0.5,
            windows=params.windows(config.block_count, period=2, default=4096),
            attention_scale=gemma_scale(params, config, LAYERS_27B),
            attention_softcap=params.number("attn_logit_softcapping", 50.0),
            logit_softcap=params.number("final_logit_softcapping", 30.0),
        )


def gemma_scale(params: HyperParameters, config: ModelConfig, exception: int) -> float:
    """query_pre_attn_scalar^-0.5, which files seldom give. exception: number of layers of the size that does not use
    head_dim."""
    given = params.optional_number("attention.scale")
    if given is not None:
        return given
    if config.block_count == exception:
        return float((config.embedding_length / config.head_count) ** -0.5)
    return float(config.head_dim**-0.5)
