"""The families of architectures as tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_to_gguf import build_model, write_gguf

WINDOW = 16
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
#: name → (transformers' model type, its options)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "head_dim": 32}),
    "qwen3, tied": ("qwen3", {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {
        "num_hidden_layers": 3, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3_text", {
        "num_hidden_layers": 7, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32,
    }),
    "gemma3, extended": ("gemma3_text", {
        "num_hidden_layers": 6, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }),
    "phi3": ("phi3", {
        "num_hidden_layers": 2, "sliding_window": WINDOW, "original_max_position_embeddings": 512,
        "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5},
    }),
    "phi3, long": ("phi3", {
        "num_hidden_layers": 2, "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        },
    }),
    "olmo2": ("olmo2", {"num_hidden_layers": 2}),
    "olmo3": ("olmo3", {
        "num_hidden_layers": 4, "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                            "original_max_position_embeddings": 64},
    }),
    "granite": ("granite", {
        "num_hidden_layers": 3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
        "logits_scaling": 6.0, "tie_word_embeddings": True,
    }),
    "mixtral": ("mixtral", {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen3moe": ("qwen3_moe", {
        "num_hidden_layers": 2, "head_dim": 32, "num_experts": 12, "num_experts_per_tok": 5,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    }),
    "deepseek2, lite": ("deepseek_v2", {
        "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.707,
                            "mscale_all_dim": 0.707, "original_max_position_embeddings": 64},
    }),
    "deepseek2, grouped": ("deepseek_v2", {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 12, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "moe_intermediate_size": 32, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 4.0, "rope_parameters": DEFAULT,
    }),
    "deepseek3": ("deepseek_v3", {
        "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
                            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64},
    }),
    "gpt-oss": ("gpt_oss", {
        "num_hidden_layers": 3, "head_dim": 32, "sliding_window": WINDOW, "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64},
    }),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "rope_parameters": DEFAULT}),
}  # fmt: skip


class Families:
    """Writes the file of a case when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], tuple[Path, Any]] = {}

    def __call__(self, case: str, quant: str = "F32") -> tuple[Path, Any]:
        """The file, and the model that transformers made."""
        if (case, quant) not in self._made:
            kind, options = CASES[case]
            model = build_model(kind, **options)
            path = write_gguf(self._folder / f"{len(self._made)}.gguf", model, quant)
            self._made[case, quant] = path, model
        return self._made[case, quant]
