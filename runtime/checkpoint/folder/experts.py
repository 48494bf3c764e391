"""Experts that a checkpoint stores together, a projection of all of them as one tensor, under GGUF's names.

    down_proj      [experts, width, inner]       gate_up_proj  [experts, 2 · inner, width]: gate's rows, then up's
    gpt-oss:
    down_proj      [experts, inner, width]       gate_up_proj  [experts, width, 2 · inner]: gate and up by turns
    …_bias         [experts, width]              …_bias        [experts, 2 · inner]: by turns
    …_blocks       MXFP4, see mxfp4.joined: rows as in …_bias, so not transposed

Written by: transformers, `save_pretrained(save_original_format=False)` and its GptOssExperts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError

_FUSED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")
Taken = tuple[RawTensor, tuple[RawTensor, ...]]


def fused_part(name: str) -> tuple[tuple[str, ...], str] | None:
    """The projections in a layer's tensor of that name, and which suffix GGUF gives it; None for another tensor."""
    match = _FUSED.fullmatch(name)
    return match and (tuple(match[1].split("_")), "bias" if match[2] else "weight")


def taken_apart(
    tensor: RawTensor, block: str, fused: tuple[tuple[str, ...], str], interleaved: bool
) -> Iterator[Taken]:
    """Each projection as a tensor, and the stored ones whose data, one after another, is its own.

    fused: of fused_part. interleaved: gpt-oss' order. Raises CheckpointError for a tensor of another shape.
    """
    names, suffix = fused
    step, table = len(names), tensor.type == "MXFP4"
    turned = interleaved and suffix == "weight" and not table
    dims = 2 if suffix == "bias" else 3
    rows = tensor.shape[-1 if turned else 1] if len(tensor.shape) == dims else 0
    if not rows or rows % step or (tensor.planes and not table) or (not interleaved and (table or dims == 2)):
        raise CheckpointError(
            f"{shown_path(tensor.file)}: tensor {shown(tensor.name)} {list(tensor.shape)} of {tensor.type} does not "
            "hold the experts of this family; download the model again"
        )
    experts, rows = tensor.shape[0], rows // step
    shape = (experts, rows) if dims == 2 else (experts, rows, tensor.shape[1 if turned else 2])
    for first, name in enumerate(names):
        part = replace(
            tensor, name=f"{block}ffn_{name}_exps.{suffix}", shape=shape, nbytes=tensor.nbytes // step
        )
        if table:
            yield replace(part, settings={"step": step, "first": first}), ()
        elif turned or (dims == 2 and step > 1):
            many = rows if turned else math.prod(shape)
            settings = {"rows": many, "step": step, "first": first}
            yield replace(part, planes={"transposed": tensor}, settings=settings), ()
        else:
            yield part, tuple(_slices(tensor, experts * step))[first::step]


def _slices(tensor: RawTensor, count: int) -> Iterator[RawTensor]:
    size = tensor.nbytes // count
    for index in range(count):
        yield replace(tensor, nbytes=size, offset=tensor.offset + index * size)
