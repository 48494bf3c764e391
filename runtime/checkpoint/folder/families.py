"""What each `model_type` of config.json is in GGUF's words: keys of metadata, names of tensors, and what differs.

A family is one entry of FAMILIES: the architecture that runs it, its defaults, and the keys that only it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infer.runtime.checkpoint.folder import moe
from infer.runtime.checkpoint.folder.config import MAX_LAYERS, ConfigReader
from infer.runtime.checkpoint.folder.rope import Rope, Values, read_rope
from infer.runtime.checkpoint.folder.windows import everywhere, if_used, windowed
from infer.runtime.errors import CheckpointError, UnsupportedModelError

#: keys that change no logit
HARMLESS = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "_sliding_window_pattern",
    "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "do_sample", "dtype", "early_stopping", "embd_pdrop", "eos_token_id",
    "finetuning_task", "id2label", "initializer_range", "is_decoder", "is_llama_config",
    "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "model_type", "name_or_path", "no_repeat_ngram_size", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "quantization_config",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
}  # fmt: skip

LAYER_NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_EXPERTS = {f"{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip
# Repositories older than a family's support in transformers bring the same classes as code, which nobody needs.
_OWN_CLASSES = ("Config", "Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class Family:
    """architecture: GGUF's name of what runs it. classes: how the names of its transformers classes begin. tied:
    whether the output is the embedding where config.json does not say. activation: its key and value.

    theta, local_theta, truncate: see read_rope. names: of a layer's tensors, added to LAYER_NAMES. vectors: those whose
    name has no `.weight`. stacks: names of matrices that an expert has, `mlp.experts.N.NAME`, to the tensor that holds
    all experts' one after another. interleaved: see experts.taken_apart. norm_shift: of the weights of norms. biased:
    matrices with a bias, whatever config.json says. extra: reads the keys only this family has, the window's among
    them, into metadata below the architecture; None where it has neither. drafts: config.json may announce layers
    behind the last one that predict further tokens (arXiv 2412.19437, 2.2); they are not used.
    """

    architecture: str
    classes: str
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    theta: float = 10000.0
    local_theta: float | None = None
    truncate: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_shift: float = 0.0
    biased: tuple[str, ...] = ()
    extra: Callable[[ConfigReader, Values], None] | None = None
    drafts: bool = False

    @property
    def layer_names(self) -> Mapping[str, str]:
        return {**LAYER_NAMES, **self.names}


@dataclass(frozen=True)
class Translated:
    """metadata: under full names. factors: vectors that config.json holds, by tensor name. biased: names of a layer's
    matrices that have a bias. tied: no output matrix of its own. unused: layers whose tensors are not read."""

    metadata: Values
    factors: Mapping[str, list[float]]
    biased: frozenset[str]
    tied: bool
    unused: range = range(0)


def translate(config: ConfigReader, family: Family) -> Translated:
    """Raises CheckpointError for values out of range, UnsupportedModelError for keys and values this cannot run."""
    heads = config.integer("num_attention_heads", high=4096)
    width = config.integer("hidden_size", high=1 << 24)
    context = config.integer("max_position_embeddings")
    head_dim = config.integer("head_dim", max(1, width // heads), high=4096)
    rope = read_rope(
        config, context=context, theta=family.theta, local_theta=family.local_theta, truncate=family.truncate
    )
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    drafts = config.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS) if family.drafts else 0
    keys: Values = {
        "block_count": layers,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": config.integer("intermediate_size", high=1 << 24),
        "attention.head_count": heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", heads, high=4096),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
        "vocab_size": config.integer("vocab_size", high=1 << 24),
        "rope.dimension_count": _rotated(head_dim, rope),
        "rope.pairing": "halves",
        **rope.keys,
    }
    key, value = family.activation
    config.require(key, value)
    config.ignore({"hidden_act"} if key != "hidden_act" else ())  # Gemma's older files hold both
    if family.extra is not None:
        family.extra(config, keys)
    biased = {*family.biased}
    biased.update(_ATTENTION if config.flag("attention_bias", False) else ())
    biased.update(_MLP if config.flag("mlp_bias", False) else ())
    tied = config.flag("tie_word_embeddings", family.tied)
    for key in ("add_cross_attention", "is_encoder_decoder", "lm_head_bias", "rope_interleaved", "use_mrope"):
        config.require(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.require(key, 1)
    config.ignore(HARMLESS)
    config.finish()
    metadata = {f"{family.architecture}.{key}": value for key, value in keys.items()}
    return Translated(metadata, rope.factors, frozenset(biased), tied, range(layers, layers + drafts))


def _rotated(head_dim: int, rope: Rope) -> int:
    rotated = int(head_dim * rope.partial)
    if not 2 <= rotated <= head_dim:
        raise CheckpointError(
            f"partial_rotary_factor {rope.partial:g} rotates {rotated} of {head_dim} dimensions"
        )
    return rotated


def _gemma(config: ConfigReader, keys: Values) -> None:
    keys["attention.scale"] = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    config.require("use_bidirectional_attention", False)


def _gemma2(config: ConfigReader, keys: Values) -> None:
    _gemma(config, keys)
    windowed(config, keys, lambda layer: layer % 2 == 0)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key not in config:
            raise UnsupportedModelError(
                f"{config.where}: {key} is not set; this version runs gemma2 with it only"
            )
        keys[key] = config.number(key)


def _gemma3(config: ConfigReader, keys: Values) -> None:
    _gemma(config, keys)
    period = config.integer("sliding_window_pattern", 6, high=MAX_LAYERS)
    windowed(config, keys, lambda layer: (layer + 1) % period != 0)
    if "attn_logit_softcapping" in config:
        raise UnsupportedModelError(
            f"{config.where}: attn_logit_softcapping is set; this version runs gemma3 without"
        )
    if "final_logit_softcapping" in config:
        keys["final_logit_softcapping"] = config.number("final_logit_softcapping")


def _olmo3(config: ConfigReader, keys: Values) -> None:
    windowed(config, keys, lambda layer: (layer + 1) % 4 != 0)


def _granite(config: ConfigReader, keys: Values) -> None:
    keys["embedding_scale"] = config.number("embedding_multiplier", 1.0)
    keys["residual_scale"] = config.number("residual_multiplier", 1.0)
    keys["logit_scale"] = config.number("logits_scaling", 1.0)
    keys["attention.scale"] = config.number("attention_multiplier", 1.0)


def _smollm3(config: ConfigReader, keys: Values) -> None:
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    config.require("use_sliding_window", False)
    config.ignore({"sliding_window", "layer_types", "max_window_layers"})
    every = config.integer("no_rope_layer_interval", 4, high=MAX_LAYERS)
    rotated = config.items("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if rotated[:layers] != [int((layer + 1) % 4 != 0) for layer in range(layers)]:
        raise UnsupportedModelError(
            f"{config.where}: no_rope_layers differs from every fourth layer, which is all this version runs"
        )


#: model_type → family
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "Llama"),
    "mistral": Family("llama", "Mistral", extra=everywhere),
    "qwen2": Family("qwen2", "Qwen2", biased=("attn_q", "attn_k", "attn_v"), extra=if_used),
    "qwen3": Family("qwen3", "Qwen3", extra=if_used),
    "gemma2": Family(
        "gemma2", "Gemma2", tied=True, activation=("hidden_activation", "gelu_pytorch_tanh"),
        names=_POST_NORMS, norm_shift=1.0, extra=_gemma2,
    ),
    "gemma3_text": Family(
        "gemma3", "Gemma3", tied=True, activation=("hidden_activation", "gelu_pytorch_tanh"), theta=1e6,
        local_theta=1e4, names=_POST_NORMS, norm_shift=1.0, extra=_gemma3,
    ),
    "phi3": Family(
        "phi3", "Phi3", names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}, extra=everywhere
    ),
    "olmo2": Family("olmo2", "Olmo2", names=_POST_NORMS),
    "olmo3": Family("olmo2", "Olmo3", theta=5e5, local_theta=5e5, names=_POST_NORMS, extra=_olmo3),
    "granite": Family("granite", "Granite", extra=_granite),
    "smollm3": Family("smollm3", "SmolLM3", tied=True, theta=2e6, extra=_smollm3),
    "mixtral": Family(
        "llama", "Mixtral", theta=1e6, names=dict.fromkeys(("mlp.gate", "block_sparse_moe.gate"), "ffn_gate_inp"),
        stacks={"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}, extra=moe.mixtral,
    ),
    "qwen3_moe": Family(
        "qwen3moe", "Qwen3Moe", names={"mlp.gate": "ffn_gate_inp"}, stacks=_EXPERTS, extra=moe.qwen3_moe
    ),
    "deepseek_v2": Family("deepseek2", "DeepseekV2", names=_LATENT, stacks=_EXPERTS, extra=moe.deepseek_v2),
    "deepseek_v3": Family(
        "deepseek2", "DeepseekV3", names=_LATENT, vectors={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
        stacks=_EXPERTS, extra=moe.deepseek_v3, drafts=True,
    ),
    "gpt_oss": Family(
        "gpt-oss", "GptOss", theta=150000.0, truncate=False,
        names={"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"},
        vectors={"self_attn.sinks": "attn_sinks.weight"}, stacks=_EXPERTS, interleaved=True,
        biased=(*_ATTENTION, "ffn_gate_inp", *_EXPERTS.values()), extra=moe.gpt_oss,
    ),
}  # fmt: skip


def family_of(config: ConfigReader) -> Family:
    """Raises UnsupportedModelError listing the families for another one, and for code that a repository brings."""
    kind = config.text("model_type")
    family = FAMILIES.get(kind)
    if family is None:
        raise UnsupportedModelError(
            f"{config.where}: model_type {kind[:40]!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    classes = config.items("architectures") or [f"{family.classes}ForCausalLM"]
    if classes != [f"{family.classes}ForCausalLM"]:
        raise UnsupportedModelError(
            f"{config.where}: architectures is {str(classes)[:80]}; this version runs {family.classes}ForCausalLM"
        )
    code = config.section("auto_map")
    if code is not None and not code.classes() <= {f"{family.classes}{end}" for end in _OWN_CLASSES}:
        raise UnsupportedModelError(
            f"{config.where}: auto_map names code of the repository's own, which is never run; use another model"
        )
    config.require("trust_remote_code", False)
    return family
