"""What a checkpoint folder may not hold: each is one line that names it, before anything large is read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.runtime.checkpoint.base import RawTensor
from infer.runtime.checkpoint.folder.families import FAMILIES, Family, Translated
from infer.runtime.checkpoint.folder.names import renamed
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.config import EngineConfig
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError
from infer.runtime.loader import load_model
from infer.runtime.models.registry import resolve_model

pytestmark = pytest.mark.filterwarnings("ignore")
Written = Callable[..., tuple[Path, Any]]


def _error(path: Path) -> InferError:
    with pytest.raises(InferError) as caught:
        load_model(path, EngineConfig(device="cpu", ctx=64), memo_dir=path)
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    return caught.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral, qwen2"),
        ({"model_type": ...}, "model_type is missing"),
        ({"model_type": 7}, "model_type is '7', expected a text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "this version runs LlamaForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}}, "auto_map names code"),
        ({"trust_remote_code": True}, "trust_remote_code is 'True'"),
        ({"num_attention_heads": 0}, "num_attention_heads is '0', expected an integer from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is '1000000000', expected an integer from 1 to 4096"),
        ({"num_hidden_layers": 10**300}, "num_hidden_layers is '1000"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is '2.0'"),
        ({"num_hidden_layers": 3}, "blk.2.attn_norm.weight is missing"),
        ({"num_hidden_layers": 1}, "unexpected tensors blk.1"),
        ({"hidden_size": 128}, "has shape"),
        ({"hidden_size": -1}, "hidden_size is '-1'"),
        ({"vocab_size": 500}, "the embedding has 512 rows, config.json says 500"),
        ({"intermediate_size": ...}, "intermediate_size is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is '0', expected a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is 'True'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; this version runs silu only"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"attention_bias": True}, "attn_k.bias, which config.json announces, is missing"),
        ({"new_gate": 3}, "'new_gate' is not known to this version of infer"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "'ntk' is not supported; supported: "),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 0}, "max_position_embeddings is '0'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is '0', expected a number above 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "'mrope_section' is not known"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor is '-2'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is 'False'"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
         "low_freq_factor 4 is not below"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
         "long_factor is"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
         "rope_factors_short.weight has shape"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 rotates 0 of 16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'; this version reads bitsandbytes"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_run_is_one_line(
    hf_folder_copy: Any, changes: dict[str, Any], message: str
) -> None:
    assert message in str(_error(hf_folder_copy(**changes)))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is not set"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types is not one of"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types is not one of"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is 'True'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
        ("gemma3", {"sliding_window": 0.5}, "sliding_window is '0.5'"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers differs from every fourth layer"),
        ("granite", {"residual_multiplier": 1e-30}, "residual_scale is"),
        ("mixtral", {"num_local_experts": 9}, "has shape [8, 96, 64], expected [9, 96, 64]"),
        ("qwen3moe", {"num_experts": 16}, "num_local_experts is '12'; this version runs 16 only"),
        ("qwen3moe", {"mlp_only_layers": [1]}, "mlp_only_layers names layers without experts"),
        ("deepseek2, lite", {"topk_method": "noaux_tc"}, "this version runs group_limited_greedy only"),
        ("deepseek2, lite", {"norm_topk_prob": True}, "norm_topk_prob is 'True'"),
        ("deepseek3", {"scoring_func": "softmax"}, "this version runs sigmoid only"),
        ("deepseek3", {"qk_head_dim": 40}, "qk_head_dim is '40'"),
        ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit is '6.0'"),
        ("gpt-oss", {"rope_parameters": ...}, "rope_scaling is missing"),
        ("gpt-oss", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "truncate is 'True'"),
        ("qwen2", {"model_type": "qwen3", "architectures": None}, "config.json says that there is no bias"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_run_is_one_line(
    hf_folder_copy: Any, case: str, changes: dict[str, Any], message: str
) -> None:
    assert message in str(_error(hf_folder_copy(case, **changes)))


def test_bad_json_is_one_line(hf_folder_copy: Any) -> None:
    folder = hf_folder_copy()
    path = folder / "config.json"
    whole = path.read_text()
    for text, message in {
        whole.replace("10000.0", "NaN"): "NaN is not a number of JSON",
        whole.replace("10000.0", "1e999"): "out of range",
        whole.replace(
            '"hidden_size": 64', '"hidden_size": 64, "hidden_size": 32'
        ): "'hidden_size' is there twice",
        '{"a":' * 100_000: "nested too deeply",
        "": "is no valid JSON",
        "[]": "holds list, not a JSON object",
        "\ud800": "is not UTF-8",
        " " * (1 << 21): "the most that is read",
    }.items():
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        assert message in str(_error(folder))


def test_code_that_transformers_has_itself_is_not_needed(hf_folder_copy: Any) -> None:
    """Phi 3's repositories name their own classes, from before transformers knew them; the files are never read."""
    folder = hf_folder_copy(
        "phi3",
        auto_map={"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "x.Phi3ForCausalLM"},
    )
    (folder / "configuration_phi3.py").write_text("raise SystemExit('run')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.metadata["general.architecture"] == "phi3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "holds no safetensors file"),
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "neither tokenizer.json nor tokenizer.model"),
    ],
)
def test_a_missing_file_is_named(hf_folder_copy: Any, name: str, message: str) -> None:
    folder = hf_folder_copy()
    (folder / name).unlink()
    assert message in str(_error(folder))


def test_pickles_are_refused(hf_folder_copy: Any) -> None:
    folder = hf_folder_copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = _error(folder)
    assert isinstance(error, UnsupportedModelError)
    assert "'pytorch_model.bin', a pickle" in str(error)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    (folder / "training_args.bin").write_bytes(b"\x80\x02.")
    open_checkpoint(folder).close()  # what lies beside safetensors is never read
    index = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}}
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = _error(folder)
    assert isinstance(error, UnsupportedModelError)
    assert "'pytorch_model-00001-of-00002.bin', a pickle" in str(error)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "other.safetensors").write_bytes(b"\x80\x02}q\x00.")
    assert "is a PyTorch checkpoint (pickle)" in str(_error(folder))


def test_a_file_cut_after_opening_is_an_error(hf_folder_copy: Any) -> None:
    folder = hf_folder_copy()
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensors["output_norm.weight"]
        buffer = bytearray(tensor.nbytes)
        checkpoint.read_into(tensor, memoryview(buffer))
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="ended at byte"):
            checkpoint.read_into(tensor, memoryview(buffer))


HUB = {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
    "use_cache": True,
    "_name_or_path": "x/y",
    "head_dim": None,
}


@pytest.mark.parametrize(
    ("case", "extra"),
    [
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": {}}}),
        ("qwen2", {"use_mrope": False, "rope_scaling": None, "sliding_window": 32768, "max_window_layers": 21}),
        ("qwen3", {"head_dim": 32, "attention_bias": False, "sliding_window": None, "max_window_layers": 28}),
        ("gemma2", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
        ("gemma3", {"head_dim": 32, "_sliding_window_pattern": 6, "cache_implementation": "hybrid"}),
        ("phi3", {
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "other/tokenizer"},
            "interpolate_factor": 1, "full_attn_mod": 1, "lm_head_bias": False, "mlp_bias": False,
        }),
        ("smollm3", {"pretraining_tp": 2, "max_window_layers": 28}),
        ("granite", {"attention_dropout": 0.1, "initializer_range": 0.02}),
        ("mixtral", {"router_aux_loss_coef": 0.02, "output_router_logits": False}),
        ("qwen3moe", {"num_experts": 12, "num_local_experts": ..., "max_window_layers": 48, "head_dim": 32}),
        ("deepseek2, lite", {
            "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "seq_aux": True,
            "scoring_func": "softmax", "head_dim": ..., "qk_head_dim": ...,
        }),
        ("deepseek3", {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "ep_size": 1}),
        ("gpt-oss", {"experts_per_token": 3, "initial_context_length": 4096, "swiglu_alpha": ..., "head_dim": 32}),
    ],
)  # fmt: skip
def test_keys_that_repositories_carry_are_no_obstacle(
    hf_folder_copy: Any, case: str, extra: dict[str, Any]
) -> None:
    with open_checkpoint(hf_folder_copy(case, **{**HUB, **extra})) as checkpoint:
        resolve_model(checkpoint)


def test_reading_does_not_import_torch_or_numpy(hf_folder: Written) -> None:
    code = (
        "import sys; from pathlib import Path; from infer.runtime.checkpoint.open import open_checkpoint\n"
        "from infer.runtime.tokenizer.load import load_tokenizer\n"
        "with open_checkpoint(Path(sys.argv[1])) as checkpoint:\n"
        "    print({'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules))\n"
        "    load_tokenizer(checkpoint.metadata)\n"  # whose index is numpy's
        "    print({'torch', 'transformers', 'safetensors'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(hf_folder("llama")[0])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\nset()\n"


def _experts(count: int, **changes: Any) -> dict[str, RawTensor]:
    stored = {}
    for number in range(count):
        name = f"model.layers.0.mlp.experts.{number}.up_proj.weight"
        stored[name] = RawTensor(name, (2, 3), "F16", 12, Path("x"), 12 * number)
    return stored


def test_experts_become_one_tensor() -> None:
    family = Family("llama", "Llama", stacks={"up_proj": "ffn_up_exps"})
    config = Translated({"llama.vocab_size": 512}, {}, frozenset(), tied=True)
    stored = _experts(12)
    tensors, parts = renamed(stored, family, config)
    stacked = tensors["blk.0.ffn_up_exps.weight"]
    assert (stacked.shape, stacked.nbytes) == ((12, 2, 3), 144)
    assert [part.offset for part in parts[stacked.name]] == [12 * number for number in range(12)]
    lost = {name: tensor for name, tensor in stored.items() if ".7." not in name}
    with pytest.raises(CheckpointError, match="has 11 of 12 experts"):
        renamed(lost, family, config)
    with pytest.raises(CheckpointError, match="is not one of a Llama model"):
        renamed(stored, FAMILIES["llama"], config)
