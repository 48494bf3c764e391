"""OLMo 2 (arXiv 2501.00656): norms only of what a branch adds, and of q and k over their whole width. OLMo 3 is the
same with a window on three layers of four, where the context extension does not apply."""

from __future__ import annotations

from dataclasses import replace

from infer.runtime.config import ModelConfig, RopeConfig
from infer.runtime.models.decoder import Decoder
from infer.runtime.models.hparams import HyperParameters, decoder_config


class Olmo2(Decoder):
    pre_norms = False
    post_norms = True
    qk_norm = "width"

    @staticmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig:
        config = decoder_config(params, vocab_size, pairing="halves")
        rope = config.rope
        local_base = params.number("rope.freq_base_swa", rope.base)
        return replace(
            config,
            windows=params.windows(config.block_count, period=4),
            local_rope=RopeConfig(dim=rope.dim, base=local_base, pairing=rope.pairing),
        )
