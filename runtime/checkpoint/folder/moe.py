"""The keys that only families with experts have: how many, how they are chosen, and DeepSeek's latent attention."""

from __future__ import annotations

from infer.runtime.checkpoint.folder.config import ConfigReader
from infer.runtime.checkpoint.folder.rope import Values
from infer.runtime.checkpoint.folder.windows import everywhere, windowed
from infer.runtime.errors import UnsupportedModelError

#: keys of training
_TRAINING = {
    "aux_loss_alpha", "ep_size", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
}  # fmt: skip


def _experts(config: ConfigReader, keys: Values, count: str, *other_names: str) -> None:
    """other_names: of the key `count`; which one is written depends on the version of transformers."""
    found = next((name for name in (count, *other_names) if name in config), count)
    keys["expert_count"] = number = config.integer(found, high=4096)
    for name in {count, *other_names} - {found}:
        config.require(name, number)
    keys["expert_used_count"] = config.integer("num_experts_per_tok", high=4096)
    config.ignore(_TRAINING)


def mixtral(config: ConfigReader, keys: Values) -> None:
    _experts(config, keys, "num_local_experts")
    everywhere(config, keys)


def qwen3_moe(config: ConfigReader, keys: Values) -> None:
    _experts(config, keys, "num_experts", "num_local_experts")
    keys["expert_feed_forward_length"] = config.integer("moe_intermediate_size")
    keys["expert_weights_norm"] = config.flag("norm_topk_prob", False)
    config.require("decoder_sparse_step", 1)
    if config.items("mlp_only_layers"):
        raise UnsupportedModelError(
            f"{config.where}: mlp_only_layers names layers without experts; this version runs models without such"
        )
    if config.flag("use_sliding_window", False):
        everywhere(config, keys)
    config.ignore({"sliding_window", "max_window_layers"})


def deepseek_v2(config: ConfigReader, keys: Values) -> None:
    _latent(config, keys)
    config.require("scoring_func", "softmax")
    config.require("norm_topk_prob", False)
    if config.text("topk_method", "greedy") == "greedy":
        config.ignore({"n_group", "topk_group"})
    else:
        config.require("topk_method", "group_limited_greedy")
        _groups(config, keys)


def deepseek_v3(config: ConfigReader, keys: Values) -> None:
    _latent(config, keys)
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    keys["rope.pairing"] = "adjacent" if config.flag("rope_interleave", True) else "halves"
    keys["expert_gating_func"] = 2
    keys["expert_weights_norm"] = config.flag("norm_topk_prob", True)
    _groups(config, keys)


def _groups(config: ConfigReader, keys: Values) -> None:
    keys["expert_group_count"] = config.integer("n_group", 1, high=4096)
    keys["expert_group_used_count"] = config.integer("topk_group", 1, high=4096)


def _latent(config: ConfigReader, keys: Values) -> None:
    """Heads in GGUF's words: what the cache holds of all of them at once, and beside it (`_mla`) what each has."""
    rank, rotated = (config.integer(key, high=4096) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    key_dim = config.integer("qk_nope_head_dim", high=4096) + rotated
    config.require("qk_head_dim", key_dim)
    config.require("num_key_value_heads", keys["attention.head_count"])
    config.require("attention_bias", False)
    config.require("moe_layer_freq", 1)
    config.ignore({"head_dim"})
    keys |= {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": key_dim,
        "attention.value_length_mla": config.integer("v_head_dim", high=4096),
        "rope.dimension_count": rotated,
        "rope.pairing": "adjacent",
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts", 0, low=0, high=4096),
        "expert_weights_scale": config.number("routed_scaling_factor", 1.0),
        "leading_dense_block_count": config.integer("first_k_dense_replace", 0, low=0),
    }
    if "q_lora_rank" in config:
        keys["attention.q_lora_rank"] = config.integer("q_lora_rank", high=4096)
    _experts(config, keys, "n_routed_experts", "num_local_experts", "num_experts")
    rope = config.section("rope_scaling") or config.section("rope_parameters")
    config.require("partial_rotary_factor", 1.0, 1)
    if rope is not None:
        rope.require("partial_rotary_factor", 1.0, 1)
        if "mscale_all_dim" in rope:
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.number("mscale_all_dim", low=-1.0)


def gpt_oss(config: ConfigReader, keys: Values) -> None:
    _experts(config, keys, "num_local_experts", "num_experts")
    windowed(config, keys, lambda layer: layer % 2 == 0)
    config.require("attention_bias", True)
    config.require("swiglu_alpha", 1.702)
    config.require("swiglu_limit", 7.0, 7)
    config.require("experts_per_token", keys["expert_used_count"])
    config.ignore({"initial_context_length"})  # of the rope, which says it itself
    if "rope_scaling" not in config and "rope_parameters" not in config:
        raise UnsupportedModelError(
            f"{config.where}: rope_scaling is missing; its default differs between versions of transformers"
        )
