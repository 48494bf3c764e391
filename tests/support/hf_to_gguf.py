"""Tiny random models of every family, made by `transformers`, and the same weights as a GGUF file.

`write_gguf` stores what llama.cpp's converter would: its names, q and k of llama's kind with each head's rotation pairs
side by side, Gemma's norms with their 1 added, LongRoPE's factors as tensors.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from tiny_models import tokenizer_metadata

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

#: transformers' model type → the architecture's name in GGUF, where it is another
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2"}
PERMUTED = {"llama", "mistral", "granite", "smollm3"}
GEMMA = {"gemma2", "gemma3_text"}
POST_NORMED = GEMMA | {"olmo2", "olmo3"}

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def build_model(model_type: str, seed: int = 0, **options: Any) -> Any:
    """A causal language model in float32 with attention written out. Weights are drawn so that attention, MLP and
    logits all have a spread of order one: with transformers' own, attention would be nearly flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SHAPE, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=draw)
            if "embed_tokens" in name:
                # a tied output gives the current token a logit that grows with its embedding
                values *= 0.2 if config.tie_word_embeddings else 1.0
            elif weight.dim() == 2:
                values *= 1.5 / weight.shape[1] ** 0.5
            else:
                values = 0.1 * values + (0.0 if model_type in GEMMA else 1.0)
            weight.copy_(values)
    return model


def write_gguf(path: Path, model: Any, quant: str = "F32", metadata: dict[str, Any] | None = None) -> Path:
    """quant: type of every matrix. metadata: further keys, or other values (None leaves a key out)."""
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    keys = {f"{arch}.{key}": value for key, value in _hyperparameters(config).items()}
    for key, value in {**keys, **tokenizer_metadata(VOCAB), **(metadata or {})}.items():
        if value is not None:
            whole = isinstance(value, int) and not isinstance(value, bool)
            writer.add_key_value(key, value, GGUFValueType.UINT32 if whole else GGUFValueType.get_type(value))
    for name, values in _tensors(model).items():
        kind = GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _hyperparameters(config: Any) -> dict[str, Any]:
    kind, heads = config.model_type, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    keys = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(full["rope_theta"]),
    }  # fmt: skip
    if kind in {"gemma2", "gemma3_text", "qwen3"}:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in PERMUTED:
        keys |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if kind in {"mistral", "gemma2", "gemma3_text", "phi3", "olmo3"}:
        keys["attention.sliding_window"] = config.sliding_window or 0
    if kind == "olmo3":
        keys["attention.sliding_window_pattern"] = [t == "sliding_attention" for t in config.layer_types]
    if kind == "gemma2":
        keys |= {"attn_logit_softcapping": config.attn_logit_softcapping,
                 "final_logit_softcapping": config.final_logit_softcapping}  # fmt: skip
    if kind == "granite":
        keys |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier,
                 "residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}  # fmt: skip
    if kind == "phi3":
        keys |= {"rope.dimension_count": int(head_dim * full["partial_rotary_factor"]),
                 "rope.scaling.original_context_length": config.original_max_position_embeddings}  # fmt: skip
    if full["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    if full["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / full["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = math.sqrt(
            1 + math.log(stretch) / math.log(full["original_max_position_embeddings"])
        )
    return keys


def _tensors(model: Any) -> dict[str, np.ndarray]:
    config, found = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.clone()
        if config.model_type in PERMUTED and (part := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
            values = values.view(heads, 2, -1, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        if config.model_type in GEMMA and name.endswith("norm.weight"):
            values = values + 1
        found[_gguf_name(name, config.model_type)] = values.numpy()
    for kind in ("long", "short"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = np.array(factors, dtype=np.float32)
    return found


def _gguf_name(name: str, model_type: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    post = "post_attention_norm" if model_type in POST_NORMED else "ffn_norm"
    return f"blk.{layer}.{ {**_LAYER, 'post_attention_layernorm': post}[part] }.{suffix}"
