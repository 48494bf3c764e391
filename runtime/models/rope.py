"""Tables of rotary position embeddings and their context extensions."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from infer.quant.kernels.device import Device
from infer.runtime.config import RopeConfig
from infer.runtime.models.ops import RopeTable

Frequencies = npt.NDArray[np.float64]


def rope_table(
    config: RopeConfig, positions: int, factors: npt.NDArray[np.float32] | None, device: Device
) -> RopeTable:
    """factors: the file's own divisors of the frequencies (`rope_freqs`, `rope_factors_long`), float32 [dim / 2].
    Computed in float64."""
    with np.errstate(all="ignore"):  # what is not finite shows in the logits, which are checked
        inverse: Frequencies = config.base ** -(np.arange(0, config.dim, 2, dtype=np.float64) / config.dim)
        if factors is not None:
            inverse = inverse / factors.astype(np.float64)
        inverse, magnitude = _scaled(config, inverse)

    def rows(start: int, stop: int) -> tuple[Frequencies, Frequencies]:
        with np.errstate(all="ignore"):
            angles = np.arange(start, stop, dtype=np.float64)[:, np.newaxis] * inverse
            return np.cos(angles) * magnitude, np.sin(angles) * magnitude

    return RopeTable((positions, config.dim // 2), config.pairing, device, rows)


def _scaled(config: RopeConfig, inverse: Frequencies) -> tuple[Frequencies, float]:
    magnitude = 1.0 if config.attention_factor is None else config.attention_factor
    if config.scaling == "linear":
        return inverse / config.factor, magnitude
    if config.scaling == "llama3":
        return _llama3(config, inverse), magnitude
    if config.scaling == "yarn":
        return _yarn(config, inverse)
    return inverse, magnitude


def _llama3(config: RopeConfig, inverse: Frequencies) -> Frequencies:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    original = config.original_context or 0
    waves = 2 * math.pi / inverse
    blend = (original / waves - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clip(0, 1)
    return inverse / config.factor * (1 - blend) + inverse * blend


def _yarn(config: RopeConfig, inverse: Frequencies) -> tuple[Frequencies, float]:
    """arXiv 2309.00071, sections 3.2 and 3.4: "NTK by parts" and the attention temperature."""
    original = config.original_context or 0

    def dimension(turns: float) -> float:
        return config.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.base))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    ramp = (np.arange(len(inverse), dtype=np.float64) - low) / max(high - low, 1e-3)
    keep = 1 - ramp.clip(0, 1)
    magnitude = config.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return inverse / config.factor * (1 - keep) + inverse * keep, magnitude
