"""Weights in blocks of FP8, as the repositories of DeepSeek V3 and of Qwen3 have them, as one tensor each.

`X.weight` is F8_E4M3 [rows, columns], `X.weight_scale_inv` F32 or BF16 [rows / 128, columns / 128], rounded up;
quant/fp8.py says what they mean. Written by: DeepSeek-AI (huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md),
transformers' FineGrainedFP8Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.folder.config import ConfigReader
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError

METHOD, TYPE = "fp8", "F8_E4M3"
_BLOCK = 128
_SCALE = "_scale_inv"
_SCALE_BYTES = {"F32": 4, "BF16": 2}


def check_settings(section: ConfigReader) -> None:
    """section: quantization_config. Raises UnsupportedModelError for other blocks, other codes, activations of FP8 by
    scales of the file."""
    section.require("fmt", "e4m3")
    section.require("activation_scheme", "dynamic")
    section.require("weight_block_size", [_BLOCK, _BLOCK])


def joined(stored: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The stored tensors, codes and scales made one. Raises CheckpointError where they do not fit."""
    left = dict(stored)
    found: dict[str, RawTensor] = {}
    for name, scales in stored.items():
        if not name.endswith(_SCALE):
            continue
        weight = name.removesuffix(_SCALE)
        del left[name]
        codes = left.pop(weight, None)
        blocks = tuple(-(-size // _BLOCK) for size in codes.shape) if codes is not None else ()
        if (
            codes is None
            or codes.type != TYPE
            or len(blocks) != 2
            or scales.shape != blocks
            or scales.type not in _SCALE_BYTES
        ):
            raise CheckpointError(
                f"{shown_path(scales.file)}: tensor {shown(name)} and its weight are not FP8 in blocks of {_BLOCK} x "
                f"{_BLOCK}; download it again"
            )
        settings = {"rows": codes.shape[0], "scale_bytes": _SCALE_BYTES[scales.type]}
        planes = {"codes": codes, "scales": scales}
        found[weight] = replace(codes, nbytes=codes.nbytes + scales.nbytes, planes=planes, settings=settings)
    return {**left, **found}
