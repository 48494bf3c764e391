"""Tiny random models of every family, made by `transformers`, and the same weights as a GGUF file.

`write_gguf` stores what llama.cpp's converter would: its names, q and k of llama's kind with each head's rotation pairs
side by side, Gemma's norms with their 1 added, LongRoPE's factors as tensors, each projection of a layer's experts as
one tensor, MLA's two up projections apart and a matrix per head.
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
ARCHITECTURES = {
    "gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2", "mixtral": "llama", "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss",
}  # fmt: skip
PERMUTED = {"llama", "mistral", "mixtral", "granite", "smollm3"}
DEEPSEEK = {"deepseek_v2", "deepseek_v3"}
GEMMA = {"gemma2", "gemma3_text"}
POST_NORMED = GEMMA | {"olmo2", "olmo3", "gpt_oss"}

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip


def build_model(model_type: str, seed: int = 0, **options: Any) -> Any:
    """A causal language model in float32 with attention written out. Weights are drawn so that attention, MLP and
    logits all have a spread of order one: with transformers' own, attention would be nearly flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SHAPE, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [item for item in model.named_buffers() if item[0].endswith("e_score_correction_bias")]
        for name, weight in [*model.named_parameters(), *biases]:
            values = torch.randn(weight.shape, generator=draw)
            if "embed_tokens" in name:
                # a tied output gives the current token a logit that grows with its embedding
                values *= 0.2 if config.tie_word_embeddings else 1.0
            elif name.endswith("bias"):
                values *= 0.2
            elif weight.dim() > 1:  # gpt-oss has its experts transposed
                values *= 1.5 / weight.shape[1 if model_type == "gpt_oss" else -1] ** 0.5
            elif name.endswith("sinks"):
                pass
            else:
                values = 0.1 * values + (0.0 if model_type in GEMMA else 1.0)
            weight.copy_(values)
    return model


def write_gguf(
    path: Path,
    model: Any,
    quant: str = "F32",
    metadata: dict[str, Any] | None = None,
    *,
    joined: bool = False,
) -> Path:
    """quant: type of every matrix but routers. metadata: further keys, or other values (None leaves a key out).
    joined: MLA's two up projections as one matrix, as in files before April 2025."""
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    keys = {f"{arch}.{key}": value for key, value in _hyperparameters(config).items()}
    for key, value in {**keys, **tokenizer_metadata(VOCAB), **(metadata or {})}.items():
        if value is not None:
            whole = isinstance(value, int) and not isinstance(value, bool)
            writer.add_key_value(key, value, GGUFValueType.UINT32 if whole else GGUFValueType.get_type(value))
    for name, values in _tensors(model, joined).items():
        plain = values.ndim == 1 or "ffn_gate_inp" in name or name.endswith(".bias")
        kind = GGMLQuantizationType["F32" if plain else quant]
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
    kv_heads = 1 if kind in DEEPSEEK else config.num_key_value_heads
    keys = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(full["rope_theta"]),
    }  # fmt: skip
    if kind in {"gemma2", "gemma3_text", "qwen3", "qwen3_moe", "gpt_oss"}:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in PERMUTED:
        keys |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if kind in {"mistral", "gemma2", "gemma3_text", "phi3", "olmo3", "gpt_oss"}:
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
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if kind in {"qwen3_moe", "gpt_oss"} | DEEPSEEK:
        keys["expert_feed_forward_length"] = getattr(
            config, "moe_intermediate_size", config.intermediate_size
        )
    if kind in DEEPSEEK:
        keys |= _deepseek(config)
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


def _deepseek(config: Any) -> dict[str, Any]:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    keys = {
        "leading_dense_block_count": config.first_k_dense_replace, "vocab_size": config.vocab_size,
        "attention.kv_lora_rank": rank, "attention.key_length": rank + rope, "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope, "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope, "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
    }  # fmt: skip
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.norm_topk_prob:
        keys["expert_weights_norm"] = True
    if config.n_group is not None:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.model_type == "deepseek_v3":
        keys["expert_gating_func"] = 2
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    return keys


def _tensors(model: Any, joined: bool) -> dict[str, np.ndarray]:
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
        if ".experts." in name:
            found |= _experts(name, values, transposed=config.model_type == "gpt_oss")
        elif name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = values.numpy()
        elif name.endswith("sinks"):
            found[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = values.numpy()
        elif name.endswith("kv_b_proj.weight") and not joined:
            block, nope = f"blk.{name.split('.')[2]}.attn_", config.qk_nope_head_dim
            heads = values.view(config.num_attention_heads, -1, config.kv_lora_rank)
            found[block + "k_b.weight"] = heads[:, :nope].transpose(1, 2).contiguous().numpy()
            found[block + "v_b.weight"] = heads[:, nope:].contiguous().numpy()
        else:
            found[_gguf_name(name, config.model_type)] = values.numpy()
    for kind in ("long", "short"):
        if factors := config.rope_parameters.get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = np.array(factors, dtype=np.float32)
    return found


def _experts(name: str, values: torch.Tensor, transposed: bool) -> dict[str, np.ndarray]:
    """gate and up are one after another, in gpt-oss by turns."""
    part, kind = name.rsplit(".", 1)[1], "weight"
    if part.endswith("_bias"):
        part, kind = part.removesuffix("_bias"), "bias"
    elif transposed:
        values = values.transpose(1, 2)
    block = f"blk.{name.split('.')[2]}.ffn_"
    if part == "down_proj":
        return {f"{block}down_exps.{kind}": values.contiguous().numpy()}
    gate, up = (values[:, ::2], values[:, 1::2]) if transposed else values.chunk(2, dim=1)
    return {f"{block}{n}_exps.{kind}": v.contiguous().numpy() for n, v in (("gate", gate), ("up", up))}


def _gguf_name(name: str, model_type: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    post = "post_attention_norm" if model_type in POST_NORMED else "ffn_norm"
    return f"blk.{layer}.{ {**_LAYER, 'post_attention_layernorm': post}[part] }.{suffix}"
