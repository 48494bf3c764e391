"""Checkpoint folders of tiny random models, as `transformers` and `tokenizers` write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
from tiny_models import CHAT_TEMPLATE, tokenizer_metadata
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<|endoftext|>", "<|im_end|>"
WINDOW = 16
THETA = {"rope_theta": 10000.0}
EXPERTS = ("mixtral", "qwen3moe", "deepseek2, lite", "deepseek2, grouped", "deepseek3", "gpt-oss")
#: name → (transformers' model type, its options)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "llama, biased": ("llama", {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama, linear": ("llama", {
        "num_hidden_layers": 2, "rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0},
    }),
    "llama, dynamic": ("llama", {
        "num_hidden_layers": 2, "rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 4.0},
    }),
    "llama, llama3": ("llama", {"num_hidden_layers": 2, "tie_word_embeddings": True, "rope_parameters": {
        **THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "llama, yarn": ("llama", {"num_hidden_layers": 2, "rope_parameters": {
        **THETA, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5,
    }}),
    "mistral": ("mistral", {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"num_hidden_layers": 2}),
    "qwen2, windows": ("qwen2", {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    }),
    "qwen3": ("qwen3", {"num_hidden_layers": 2, "head_dim": 32, "rope_parameters": {
        **THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
    }}),
    "gemma2": ("gemma2", {
        "num_hidden_layers": 3, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3_text", {
        "num_hidden_layers": 7, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 50,
        "rope_parameters": {
            "sliding_attention": {**THETA, "rope_type": "default"},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    }),
    "phi3": ("phi3", {
        "num_hidden_layers": 2, "sliding_window": WINDOW, "original_max_position_embeddings": 512,
        "rope_parameters": {**THETA, "rope_type": "default", "partial_rotary_factor": 0.5},
    }),
    "phi3, long": ("phi3", {
        "num_hidden_layers": 2, "original_max_position_embeddings": 64,
        "rope_parameters": {
            **THETA, "rope_type": "longrope", "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        },
    }),
    "olmo2": ("olmo2", {"num_hidden_layers": 2}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": WINDOW, "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }}),
    "granite": ("granite", {
        "num_hidden_layers": 3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
        "logits_scaling": 6.0, "tie_word_embeddings": True,
    }),
    **{case: families.CASES[case] for case in EXPERTS},
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "rope_parameters": {**THETA, "rope_type": "default"}}),
}  # fmt: skip


def write_folder(path: Path, model: Any, *, dtype: Any = None, **saving: Any) -> Path:
    """A model of `hf_to_gguf.build_model` with a tokenizer of as many tokens. saving: for save_pretrained."""
    vocab = model.config.vocab_size
    tokenizer = byte_level_tokenizer(vocab)
    ends = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    for settings in (model.config, model.generation_config):
        for key, value in ends.items():
            setattr(settings, key, value)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(path, **saving)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def byte_level_tokenizer(vocab: int = 512) -> Tokenizer:
    """The vocabulary of `tiny_models`, its special tokens added under the same ids."""
    keys = tokenizer_metadata(vocab)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    plain = {token: number for number, token in enumerate(tokens) if types[number] not in (3, 4)}
    tokenizer = Tokenizer(models.BPE(vocab=plain, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    for number, kind in enumerate(types):
        if kind == 3:
            tokenizer.add_special_tokens([tokens[number]])
        elif kind == 4:
            tokenizer.add_tokens([AddedToken(tokens[number], special=False, normalized=False)])
    return tokenizer


#: code for a child process: its own peak of memory in KiB (ru_maxrss would also count the parent's)
PEAK = "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; `...` removes one."""
    found = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            found.pop(key, None)
        else:
            found[key] = value
    path.write_text(json.dumps(found))


def folder_maker(root: Path) -> Callable[..., tuple[Path, Any]]:
    """`make(case, dtype=None)`: the folder of one of CASES below `root`, written once, and the model in it."""
    from hf_to_gguf import build_model

    made: dict[tuple[str, Any], tuple[Path, Any]] = {}

    def make(case: str, dtype: Any = None) -> tuple[Path, Any]:
        if (case, dtype) not in made:
            kind, options = CASES[case]
            model = build_model(kind, **options)
            made[case, dtype] = write_folder(root / str(len(made)), model, dtype=dtype), model
        return made[case, dtype]

    return make


def folder_copier(make: Callable[..., tuple[Path, Any]], target: Path) -> Callable[..., Path]:
    """`copy(case="llama", **changes)`: a folder to change, with keys of its config.json changed already."""

    def copy(case: str = "llama", **changes: Any) -> Path:
        folder = Path(shutil.copytree(make(case)[0], target))
        edit_json(folder / "config.json", **changes)
        return folder

    return copy
