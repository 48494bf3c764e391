"""Weights that bitsandbytes quantized, as one tensor each: codes, and beside them what its names and a JSON text say.

`X.weight` of NF4 and FP4 has `X.weight.absmax`, `.quant_map`, `.quant_state.bitsandbytes__nf4` (or fp4: UTF-8 JSON as
bytes) and, quantized twice, `.nested_absmax` and `.nested_quant_map`; of INT8 `X.SCB` and `X.weight_format`.
Written by: transformers (save_pretrained), bitsandbytes.functional.QuantState.as_dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.folder import fp8, mxfp4
from infer.runtime.checkpoint.folder.config import ConfigReader
from infer.runtime.checkpoint.folder.shards import Shards
from infer.runtime.checkpoint.json_file import parse_object
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError, UnsupportedModelError

_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE = 1 << 12
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
#: stored name behind the weight's → plane, for NF4 and FP4
_PLANES = {
    ".absmax": "absmax", ".nested_absmax": "nested_absmax", ".nested_quant_map": "nested_map", ".quant_map": "map",
}  # fmt: skip
METHOD = "bitsandbytes"


def quant_method(config: ConfigReader) -> str | None:
    """What quantized the weights, None for nothing. Raises UnsupportedModelError for what is not read."""
    section = config.section("quantization_config")
    if section is None:
        return None
    old = "load_in_4bit" in section or "load_in_8bit" in section  # before there were others, it was not named
    method = section.text("quant_method", METHOD if old else None)
    if method not in (METHOD, mxfp4.METHOD, fp8.METHOD):
        raise UnsupportedModelError(
            f"{section.where}: quant_method is {shown(method)}; this version reads {METHOD}, {mxfp4.METHOD} and "
            f"{fp8.METHOD}"
        )
    if method == fp8.METHOD:
        fp8.check_settings(section)
    return method


def joined(shards: Shards) -> dict[str, RawTensor]:
    """The stored tensors, those that belong to one weight made one. Raises CheckpointError where they do not fit."""
    left = dict(shards.tensors)
    found: dict[str, RawTensor] = {}
    for name in shards.tensors:
        stem, mark, kind = name.partition(_STATE)
        if mark and kind in ("nf4", "fp4"):
            found[stem] = _table_weight(shards, left, stem, kind.upper(), left.pop(name))
        elif name.endswith(".SCB"):
            stem = name.removesuffix(".SCB").removesuffix(".weight") + ".weight"
            found[stem] = _int8_weight(shards, left, stem, left.pop(name))
    return {**left, **found}


def _table_weight(
    shards: Shards, left: dict[str, RawTensor], name: str, kind: str, state: RawTensor
) -> RawTensor:
    where = f"{shown_path(state.file)}: tensor {shown(name)}"
    codes = left.pop(name, None)
    if codes is None or state.nbytes > _MAX_STATE:
        raise CheckpointError(f"{where} has a quant_state and no codes, or one too large; download it again")
    text = shards.files[state.file].read(state.offset, state.nbytes)
    values = ConfigReader(parse_object(text, f"{where}: quant_state"), f"{where}: quant_state")
    planes = {"codes": codes}
    for suffix, plane in _PLANES.items():
        if name + suffix in left:
            planes[plane] = left.pop(name + suffix)
    shape = values.items("shape")
    if shape is None or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 32 for n in shape):
        raise CheckpointError(f"{where} is no matrix by its quant_state; download it again")
    values.require("quant_type", kind.lower())
    values.require("blocksize", *_BLOCKS)
    settings: dict[str, float] = {"blocksize": values.integer("blocksize")}
    rows, columns = int(str(shape[0])), int(str(shape[1]))
    blocks = math.ceil(rows * columns / settings["blocksize"])
    sizes = {"codes": (None, rows * columns / 2), "absmax": ("F32", 4 * blocks), "map": ("F32", 64)}
    if "nested_blocksize" in values:
        values.require("nested_dtype", "float32")
        settings["nested_blocksize"] = values.integer("nested_blocksize", high=1 << 16)
        settings["nested_offset"] = values.number("nested_offset", low=-math.inf)
        outer = math.ceil(blocks / settings["nested_blocksize"])
        sizes |= {"absmax": ("U8", blocks), "nested_absmax": ("F32", 4 * outer), "nested_map": ("F32", 1024)}
    _check_planes(where, planes, sizes)
    return _joined(name, kind, (rows, columns), planes, settings)


def _int8_weight(shards: Shards, left: dict[str, RawTensor], name: str, scb: RawTensor) -> RawTensor:
    where = f"{shown_path(scb.file)}: tensor {shown(name)}"
    codes = left.pop(name, None)
    if codes is None or codes.type != "I8" or len(codes.shape) != 2:
        raise CheckpointError(f"{where} has an SCB and is no int8 matrix; download it again")
    layout = left.pop(f"{name}_format", None)
    if layout is not None:
        text = shards.files[layout.file].read(layout.offset, min(layout.nbytes, _MAX_STATE))
        if any(text):
            raise UnsupportedModelError(
                f"{where} is stored in a tiled layout; save the model again with a newer library"
            )
    planes = {"codes": codes, "scb": scb}
    _check_planes(where, planes, {"codes": ("I8", codes.nbytes), "scb": ("F32", 4 * codes.shape[0])})
    return _joined(name, "INT8", (codes.shape[0], codes.shape[1]), planes, {})


def _joined(
    name: str,
    kind: str,
    shape: tuple[int, int],
    planes: Mapping[str, RawTensor],
    settings: Mapping[str, float],
) -> RawTensor:
    nbytes = sum(plane.nbytes for plane in planes.values())
    return replace(
        planes["codes"], name=name, shape=shape, type=kind, nbytes=nbytes, planes=planes, settings=settings
    )


def _check_planes(
    where: str, planes: Mapping[str, RawTensor], sizes: Mapping[str, tuple[str | None, float]]
) -> None:
    """sizes: dtype (None for any) and bytes of each plane that must be there."""
    if planes.keys() != sizes.keys():
        odd = min(planes.keys() ^ sizes.keys())
        raise CheckpointError(f"{where}: its {odd} is missing or not expected; download it again")
    for plane, (dtype, nbytes) in sizes.items():
        tensor = planes[plane]
        if tensor.nbytes != nbytes or (dtype is not None and tensor.type != dtype):
            raise CheckpointError(
                f"{where}: its {plane} has {tensor.nbytes} bytes of {tensor.type}, "
                f"expected {nbytes:.0f} of {dtype or 'any type'}; download it again"
            )
