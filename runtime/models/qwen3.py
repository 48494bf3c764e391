"""Qwen 3 (arXiv 2505.09388): llama's layers with an RMS norm of every head of q and k; qwen3moe with experts."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config


class Qwen3(Decoder):
    qk_norm = "head"

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="halves")
        windows = params.windows(config.block_count, period=0)
        return replace(config, windows=windows, moe=params.moe(config.block_count))
