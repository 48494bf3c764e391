"""Stored tensors under GGUF's names. A tensor here may be several stored ones, in order: an expert's each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.folder import fp8
from infer.runtime.checkpoint.folder.experts import fused_part, taken_apart
from infer.runtime.checkpoint.folder.families import Family, Translated
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)\.(weight|bias)")
_ANY_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(0|[1-9][0-9]{0,3})\.(\w+)")
# Buffers that older versions of transformers wrote; they follow from config.json.
_DERIVED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")
_TYPES = {"F32", "F16", "BF16"}

Parts = dict[str, tuple[RawTensor, ...]]


def renamed(
    stored: Mapping[str, RawTensor], family: Family, config: Translated
) -> tuple[dict[str, RawTensor], Parts]:
    """The tensors by GGUF's names, and of each the stored ones whose data, one after another, is its own.

    Raises CheckpointError for a name that is not of this family, for experts that do not make one matrix, and for
    biases that config.json does not announce.
    """
    tensors: dict[str, RawTensor] = {}
    parts: Parts = {}
    experts: dict[str, dict[int, RawTensor]] = {}

    def add(tensor: RawTensor, members: tuple[RawTensor, ...]) -> None:
        if tensor.name in tensors:
            raise CheckpointError(
                f"{shown_path(tensor.file)}: {tensor.name} is there twice, under two names; download the model again"
            )
        tensors[tensor.name], parts[tensor.name] = tensor, members

    for name, tensor in stored.items():
        layer = _ANY_LAYER.fullmatch(name)
        if _DERIVED.fullmatch(name) or (config.tied and name == "lm_head.weight"):
            continue
        if layer is not None and int(layer[1]) in config.unused:
            continue
        if not tensor.planes and tensor.type not in _TYPES:
            raise CheckpointError(
                f"{shown_path(tensor.file)}: tensor {shown(name)} is {tensor.type}, which config.json does "
                "not explain; use a checkpoint of float weights"
            )
        if layer is not None and family.stacks and (fused := fused_part(layer[2])):
            for part, slices in taken_apart(tensor, f"blk.{layer[1]}.", fused, family.interleaved):
                add(part, slices)
            continue
        new, expert = _name(name, family)
        if new is None:
            raise CheckpointError(
                f"{shown_path(tensor.file)}: tensor {shown(name)} is not one of a {family.classes} model; "
                "the files are of another model than config.json says"
            )
        vector = layer is not None and layer[2] in family.vectors
        if new.endswith(".bias") and not vector and new.split(".")[-2] not in config.biased:
            raise CheckpointError(
                f"{shown_path(tensor.file)}: tensor {shown(name)} is there, but config.json says that there is no bias"
            )
        if expert is None:
            shift = family.norm_shift if new.endswith("norm.weight") else 0.0
            add(replace(tensor, name=new, shift=shift), (tensor,))
        else:
            experts.setdefault(new, {})[expert] = tensor
    for new, members in experts.items():
        ordered = tuple(members[number] for number in sorted(members))
        stacked = _stacked(new, ordered, max(members) + 1)
        planes = {}
        for plane in stacked.planes:
            apart = tuple(member.planes[plane] for member in ordered)
            planes[plane] = _stacked(f"{new}.{plane}", apart, len(apart))
            parts[planes[plane].name] = apart
        add(replace(stacked, planes=planes), ordered)
    _check_biases(tensors, config)
    embedding, rows = tensors.get("token_embd.weight"), config.metadata[f"{family.architecture}.vocab_size"]
    if embedding is not None and embedding.shape[:1] != (rows,):
        raise CheckpointError(
            f"{shown_path(embedding.file)}: the embedding has {embedding.shape[0]} rows, config.json says {rows}"
        )
    if not config.tied and "output.weight" not in tensors and "token_embd.weight" in tensors:
        raise CheckpointError(
            f"{shown_path(tensors['token_embd.weight'].file)}: tensor lm_head.weight is missing, "
            "and config.json does not say that it is the embedding (tie_word_embeddings); download the model again"
        )
    return tensors, parts


def _name(name: str, family: Family) -> tuple[str | None, int | None]:
    """The new name and, for a matrix of one expert, its number. None for a name that is not of the family."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL and suffix == "weight":
        return f"{_GLOBAL[stem]}.weight", None
    match = _ANY_LAYER.fullmatch(name)
    if match is not None and match[2] in family.vectors:
        return f"blk.{match[1]}.{family.vectors[match[2]]}", None
    match = _LAYER.fullmatch(name)
    if match is None:
        return None, None
    layer, part, suffix = match.groups()
    expert = _EXPERT.fullmatch(part)
    found = family.layer_names.get(part) if expert is None else family.stacks.get(expert[2])
    if found is None:
        return None, None
    return f"blk.{layer}.{found}.{suffix}", None if expert is None else int(expert[1])


def _stacked(name: str, members: Sequence[RawTensor], count: int) -> RawTensor:
    first = members[0]
    if len(members) != count:
        raise CheckpointError(f"{shown_path(first.file)}: {name} has {len(members)} of {count} experts")
    kind = (first.shape, first.type, first.settings)
    other = next(
        (m for m in members if (m.shape, m.type, m.settings) != kind or (m.planes and m.type != fp8.TYPE)),
        None,
    )
    if other is not None:
        raise CheckpointError(
            f"{shown_path(other.file)}: tensor {shown(other.name)} is not like that of the other experts"
        )
    return replace(first, name=name, shape=(count, *first.shape), nbytes=count * first.nbytes)


def _check_biases(tensors: Mapping[str, RawTensor], config: Translated) -> None:
    for name, tensor in tensors.items():
        bias = f"{name.removesuffix('.weight')}.bias"
        if name.endswith(".weight") and name.split(".")[-2] in config.biased and bias not in tensors:
            raise CheckpointError(
                f"{shown_path(tensor.file)}: {bias}, which config.json announces, is missing"
            )
