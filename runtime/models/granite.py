"""Granite 3 and 4, dense: llama with a factor on embeddings, scores, residual branches and logits. The file's
`logit_scale` divides; its `rope.scaling.finetuned`, when false, says that positions are not encoded."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config


class Granite(Decoder):
    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        return replace(
            decoder_config(params, vocab_size, pairing="adjacent"),
            embedding_scale=params.number("embedding_scale", 1.0),
            residual_scale=params.number("residual_scale", 1.0, low=1e-6),
            logit_scale=1.0 / params.number("logit_scale"),
            attention_scale=params.optional_number("attention.scale"),
            nope_interval=0 if params.flag("rope.scaling.finetuned", True) else 1,
        )
