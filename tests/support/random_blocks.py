"""Quantized blocks of random bits under scales that a test chooses."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType

#: type → where a block's float16 scale and minimum are; IQ1_M, MXFP4 and NVFP4 keep theirs in other ways
HALVES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q1_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
OTHER_SCALES = ("IQ1_M", "MXFP4", "NVFP4")

#: a minimum that centres the weights on zero, in scales: the mean code
_CENTRES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def block_size(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]


def put_scales(name: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Overwrite the scale of each block, and its minimum where it has one.

    blocks: uint8 [count, bytes]. scales: [count, number of HALVES_AT], or [count, 1] for OTHER_SCALES, whose FP4
    formats take positive ones and round them.
    """
    halves = scales.astype("<f2")
    if name == "IQ1_M":
        blocks[:, 49::2] = (blocks[:, 49::2] & 0x0F) | (halves.view("<u2") >> [0, 4, 8, 12] & 15) << 4
    elif name == "MXFP4":
        blocks[:, :1] = np.round(np.log2(scales)) + 128
    elif name == "NVFP4":
        blocks[:, :4] = gguf.quants.NVFP4.fp32_to_ue4m3(2 * scales)
    else:
        for index, at in enumerate(HALVES_AT[name]):
            blocks[:, at : at + 2] = halves[:, index : index + 1].copy().view(np.uint8)


def random_blocks(name: str, shape: tuple[int, ...], std: float, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes]: blocks of random bits, with scales that give weights of about that spread."""
    rows, columns = shape
    weights, size = block_size(name)
    if columns % weights:
        raise ValueError(f"{columns} columns do not fill blocks of {name}")
    blocks = rng.integers(0, 256, (rows * columns // weights, size), dtype=np.uint8)
    factors = np.float32([1, _CENTRES.get(name, 0)])[: len(HALVES_AT.get(name, (0,)))]

    def spread(scale: np.ndarray) -> None:
        put_scales(name, blocks, scale[:, None] * factors)

    spread(np.ones(len(blocks), dtype=np.float32))
    unit = gguf.quants.dequantize(blocks[:64], GGMLQuantizationType[name]).std()
    spread((std / unit * rng.uniform(0.7, 1.3, len(blocks))).astype(np.float32))
    return blocks.reshape(rows, -1)
