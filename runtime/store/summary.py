"""What a model file says about itself: metadata and tensor table only, no tensor data and no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from infer.runtime.checkpoint.arrays import TextArray
from infer.runtime.checkpoint.base import Checkpoint

T = TypeVar("T", int, str)

# general.file_type: the mix a file was quantized with
# (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, `general.file_type`).
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
}


@dataclass(frozen=True)
class TypeShare:
    """All tensors stored in one type: how many, their bytes and their elements."""

    type: str
    tensors: int
    nbytes: int
    parameters: int


@dataclass(frozen=True)
class ModelSummary:
    """Facts for `infer show`. None: the file does not say, or says it in a form that is no single number.

    quantization: the mix by its usual name (Q4_K_M), else the type that holds most bytes. mix: largest first.
    tokenizer: kind and pre-tokenizer as the file names them, `gpt2/qwen2`.
    """

    name: str | None
    architecture: str | None
    parameters: int
    tensor_bytes: int
    quantization: str | None
    mix: tuple[TypeShare, ...]
    context_length: int | None
    block_count: int | None
    embedding_length: int | None
    head_count: int | None
    head_count_kv: int | None
    vocab_size: int | None
    tokenizer: str | None
    chat_template: str | None
    license: str | None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element, over all tensors."""
        return 8 * self.tensor_bytes / self.parameters if self.parameters else 0.0


def summarize(checkpoint: Checkpoint) -> ModelSummary:
    """The facts of an open checkpoint. Values of an unexpected type count as not given."""
    metadata = checkpoint.metadata
    architecture = _value(metadata, "general.architecture", str)
    mix = _mix(checkpoint)
    kind = _value(metadata, "tokenizer.ggml.model", str)
    pre = _value(metadata, "tokenizer.ggml.pre", str)
    tokens = metadata.get("tokenizer.ggml.tokens")
    file_type = _value(metadata, "general.file_type", int)
    largest = mix[0].type if mix else None

    def size(key: str) -> int | None:
        return _value(metadata, f"{architecture}.{key}", int)

    return ModelSummary(
        name=_value(metadata, "general.name", str),
        architecture=architecture,
        parameters=sum(share.parameters for share in mix),
        tensor_bytes=sum(share.nbytes for share in mix),
        quantization=largest if file_type is None else _FILE_TYPES.get(file_type, largest),
        mix=mix,
        context_length=size("context_length"),
        block_count=size("block_count"),
        embedding_length=size("embedding_length"),
        head_count=size("attention.head_count"),
        head_count_kv=size("attention.head_count_kv"),
        vocab_size=len(tokens) if isinstance(tokens, list | TextArray) else size("vocab_size"),
        tokenizer=f"{kind}/{pre}" if kind and pre else kind,
        chat_template=_value(metadata, "tokenizer.chat_template", str),
        license=_value(metadata, "general.license", str),
    )


def _mix(checkpoint: Checkpoint) -> tuple[TypeShare, ...]:
    shares: dict[str, TypeShare] = {}
    for tensor in checkpoint.tensors.values():
        share = shares.get(tensor.type, TypeShare(tensor.type, 0, 0, 0))
        shares[tensor.type] = TypeShare(
            tensor.type,
            share.tensors + 1,
            share.nbytes + tensor.nbytes,
            share.parameters + math.prod(tensor.shape),
        )
    return tuple(sorted(shares.values(), key=lambda share: (-share.nbytes, share.type)))


def _value(metadata: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    value = metadata.get(key)
    return value if type(value) is kind else None
