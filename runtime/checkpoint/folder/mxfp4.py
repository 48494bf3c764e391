"""Weights in MXFP4 as gpt-oss' repositories store them, as one tensor each.

`X_blocks` is uint8 [experts, rows, columns / 32, 16], `X_scales` uint8 [experts, rows, columns / 32]; quant/table4.py
says what the bytes are. Written by: OpenAI (huggingface.co/openai/gpt-oss-20b).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError

METHOD = "mxfp4"


def joined(stored: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The stored tensors, blocks and scales made one. Raises CheckpointError where they do not fit."""
    left = dict(stored)
    found: dict[str, RawTensor] = {}
    for name, blocks in stored.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        scales = left.pop(f"{stem}_scales", None)
        shape = left.pop(name).shape
        if (
            scales is None
            or {blocks.type, scales.type} != {"U8"}
            or shape != (*scales.shape, 16)
            or len(shape) != 4
        ):
            raise CheckpointError(
                f"{shown_path(blocks.file)}: tensor {shown(name)} and its scales are not MXFP4; download it again"
            )
        found[stem] = replace(
            blocks, name=stem, shape=(*shape[:2], 32 * shape[2]), type="MXFP4", nbytes=blocks.nbytes + scales.nbytes,
            planes={"blocks": blocks, "scales": scales},
        )  # fmt: skip
    return {**left, **found}
