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
        if params.architecture != "llama":
            return config
        layers = config.block_count
        # Mistral's window, Mixtral's experts
        return replace(config, windows=params.windows(layers, period=0), moe=params.moe(layers))
