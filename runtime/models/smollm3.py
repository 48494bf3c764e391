"""SmolLM 3: llama with every fourth layer not rotated (NoPE, arXiv 2501.18795); no key of a file says so."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config


class SmolLM3(Decoder):
    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        return replace(decoder_config(params, vocab_size, pairing="adjacent"), nope_interval=4)
