"""Llama 1 to 3, SmolLM, TinyLlama, Yi, Mistral, Mixtral and what else is `llama` in GGUF; qwen2 is the same with
q, k, v biases.

GGUF stores llama's q and k with each head's rotation pairs side by side; qwen2's keep the two halves.
"""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config

PAIRING = {"llama": "adjacent", "qwen2": "halves"}


class Llama(Decoder):
    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing=PAIRING[params.architecture])
        windows = params.windows(config.block_count, period=0)  # Mistral's, at times Qwen's
        moe = params.moe(config.block_count) if params.architecture == "llama" else None  # Mixtral's
        return replace(config, windows=windows, moe=moe)
