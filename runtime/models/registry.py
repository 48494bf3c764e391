"""Architecture name in a file → the class that runs it, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from infer.runtime.checkpoint.base import Checkpoint
from infer.runtime.checkpoint.metadata import get_str
from infer.runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from infer.runtime.config import ModelConfig
    from infer.runtime.models.base import Model

#: name → (module of this package, class)
ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("llama", "Llama"),
    "qwen3": ("qwen3", "Qwen3"),
    "deepseek2": ("deepseek2", "DeepSeek2"),
    "qwen3moe": ("qwen3", "Qwen3"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "phi3": ("phi3", "Phi3"),
    "olmo2": ("olmo2", "Olmo2"),
    "gpt-oss": ("gpt_oss", "GptOss"),
    "granite": ("granite", "Granite"),
    "smollm3": ("smollm3", "SmolLM3"),
}


def resolve_model(checkpoint: Checkpoint) -> tuple[type[Model], ModelConfig]:
    """The class for a checkpoint and its configuration, from metadata alone.

    Raises UnsupportedModelError for an unknown architecture or an unknown key of a known one, CheckpointError
    for what is missing or wrong.
    """
    from infer.runtime.models.hparams import HyperParameters

    architecture = get_str(checkpoint.metadata, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{checkpoint.path}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor token_embd.weight is missing; a vocabulary-only file cannot answer"
        )
    module, name = ARCHITECTURES[architecture]
    family: type[Model] = getattr(importlib.import_module(f"infer.runtime.models.{module}"), name)
    params = HyperParameters(checkpoint.metadata, architecture)
    config = family.read_config(params, embedding.shape[0])
    params.finish()
    return family, config
