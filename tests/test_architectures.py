"""Every family: logits against transformers, windows, what a cache holds, and files that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, WINDOW, Families
from logits import logits_of, prompt_ids

from infer.quant.kernels import native
from infer.quant.kernels import native_abi as abi
from infer.runtime.bench import weight_bytes
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError
from infer.runtime.loader import LoadedModel

Open = Callable[..., LoadedModel]

WINDOWED = {"mistral", "gemma2", "gemma3", "gemma3, extended", "phi3", "olmo3", "gpt-oss"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture
def opened(open_model: Open) -> Open:
    return partial(open_model, ctx=512, prefix_cache=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", ["float32", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(written: Any, opened: Open, case: str, kernel: str) -> None:
    path, theirs = written(case)
    ids = prompt_ids(5 * WINDOW)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = logits_of(opened(path, kernel=kernel, kv_type="f32"), ids, [50, *[1] * 30])
    assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())


@pytest.mark.filterwarnings("ignore")
def test_the_context_in_use_picks_the_factors_of_longrope(written: Any, opened: Open) -> None:
    path, theirs = written("phi3, long")
    ids = prompt_ids(50)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    short = opened(path, kernel="float32", kv_type="f32", ctx=64)
    spread = wanted.max() - wanted.min()
    assert (logits_of(short, ids, [50]) - wanted).abs().max() <= 1e-4 * spread
    assert short.engine._runner.model.config.rope.factors == "short"
    long = opened(path, kernel="float32", kv_type="f32", ctx=65)
    assert (logits_of(long, ids, [50]) - wanted).abs().max() > 1e-2 * spread
    assert long.engine._runner.model.config.rope.factors == "long"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_torch_path_agrees_within_its_precision(written: Any, opened: Open, case: str) -> None:
    path, ids = written(case, "Q8_0")[0], prompt_ids(60)
    found, wanted = (logits_of(opened(path, kernel=k), ids, [60]) for k in ("torch", "float32"))
    assert (found - wanted).abs().mean() <= 0.02 * (wanted.max() - wanted.min())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", sorted(WINDOWED))
def test_the_window_is_seen_from_its_first_token_on(
    written: Any, opened: Open, case: str, tmp_path: Path
) -> None:
    """The same weights with a window wider than the text: equal up to the narrow one's length, different after it."""
    from hf_to_gguf import ARCHITECTURES, write_gguf

    path, theirs = written(case)
    arch = ARCHITECTURES.get(theirs.config.model_type, theirs.config.model_type)
    wide = write_gguf(tmp_path / "wide.gguf", theirs, metadata={f"{arch}.attention.sliding_window": 400})
    ids = prompt_ids(60)
    near, far = (logits_of(opened(p, kernel="float32", kv_type="f32"), ids, [60]) for p in (path, wide))
    assert torch.allclose(near[:WINDOW], far[:WINDOW], atol=1e-5)
    assert (near[WINDOW:] - far[WINDOW:]).abs().amax(dim=1).min() > 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kv_type", "size"), [("f32", 4), ("f16", 2), ("int8", 1)])
def test_latent_attention_keeps_a_latent_and_the_rotated_part_and_no_more(
    written: Any, opened: Open, kv_type: str, size: int
) -> None:
    path, theirs = written("deepseek3")
    cache = opened(path, kv_type=kv_type).engine.runner.cache
    layers, width = (
        theirs.config.num_hidden_layers,
        theirs.config.kv_lora_rank + theirs.config.qk_rope_head_dim,
    )
    assert cache.bytes_per_token == layers * (width * size + (4 if kv_type == "int8" else 0))
    assert cache.block_bytes == BLOCK_SIZE * cache.bytes_per_token
    tensors = cache.tensors
    used = {plane.untyped_storage().data_ptr() for plane in (*tensors.keys, *tensors.values)}
    assert used == {cache.address}
    assert tensors.keys[0].untyped_storage().nbytes() < (cache.blocks + 1) * cache.block_bytes


@pytest.mark.filterwarnings("ignore")
def test_a_token_reads_the_experts_it_goes_to(written: Any, opened: Open) -> None:
    path, theirs = written("mixtral")
    sizes = {name: weight.nbytes for name, weight in theirs.named_parameters() if "norm" not in name}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    embedding = theirs.get_input_embeddings().weight
    read = sum(sizes.values()) - experts + experts * 3 // 8 - embedding.nbytes + embedding[0].nbytes
    assert weight_bytes(opened(path, kernel="float32").engine.runner.model) == read


def test_experts_in_tensors_of_their_own_ask_for_a_newer_file(
    tiny_llama: Callable[..., Path], opened: Open
) -> None:
    experts = {"llama.expert_count": 2, "llama.expert_used_count": 1}
    path = tiny_llama(metadata=experts, add={"blk.0.ffn_gate.0.weight": [[0.0] * 64] * 128})
    with pytest.raises(UnsupportedModelError, match="a tensor for each expert"):
        opened(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not native.available(), reason="the native library was not built here")
def test_quant_leaves_routers_alone(written: Any, opened: Open) -> None:
    model = opened(written("mixtral")[0], kernel="native", quant="int4").engine.runner.model
    assert [layer.mlp.router.layer.weight.struct.elem for layer in model.layers] == [abi.ELEM_F32] * 2
    assert {weight.struct.elem for layer in model.layers for weight in layer.mlp.experts.down} == {
        abi.ELEM_CODES
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("quant", "kernel"),
    [("F32", "float32"), pytest.param("F32", "native", marks=pytest.mark.native), ("Q8_0", "float32")],
)
def test_the_joined_up_projection_of_older_files_is_taken_apart(
    written: Any, opened: Open, tmp_path: Path, quant: str, kernel: str
) -> None:
    from hf_to_gguf import write_gguf

    _, theirs = written("deepseek2, lite")
    config = theirs.config
    old = {
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim, "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length_mla": None, "attention.value_length_mla": None,
    }  # fmt: skip
    metadata = {f"deepseek2.{key}": value for key, value in old.items()}
    path = write_gguf(tmp_path / "old.gguf", theirs, quant, metadata, joined=True)
    ids = prompt_ids(70)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = logits_of(opened(path, kernel=kernel, kv_type="f32"), ids, [70])
    if quant == "F32":
        assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())
    else:
        assert (found - wanted).abs().mean() <= 0.02 * (wanted.max() - wanted.min())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "metadata", "error", "message"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [True, False]}, CheckpointError, "covers 2 of 7 layers"),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [1, 0]}, CheckpointError, "of int where array of bool"),
        ("gemma3", {"gemma3.attention.sliding_window": 0.5}, CheckpointError, "gemma3.attention.sliding_window"),
        ("gemma3", {"gemma3.attention.clamp_kqv": 0.5}, UnsupportedModelError, "clamp_kqv is not known"),
        ("gemma2", {"gemma2.attn_logit_softcapping": -1.0}, CheckpointError, "attn_logit_softcapping is -1"),
        ("granite", {"granite.logit_scale": 0.0}, CheckpointError, "granite.logit_scale is 0"),
        ("granite", {"granite.residual_scale": 1e-30}, CheckpointError, "granite.residual_scale is"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.2}, CheckpointError, "rope_factors_short.weight is missing"),
        ("mixtral", {"llama.expert_used_count": 9}, CheckpointError, "9 of 8 experts from 1 of 1 groups"),
        ("mixtral", {"llama.expert_count": 7}, CheckpointError, r"blk.0.ffn_gate_exps.weight has shape \[8, 96, 64\]"),
        ("mixtral", {"llama.expert_count": None}, CheckpointError, "blk.0.ffn_gate.weight is missing"),
        ("qwen3moe", {"qwen3moe.expert_gating_func": 4}, UnsupportedModelError, "gating_func is 4; supported: 1"),
        ("deepseek3", {"deepseek2.expert_group_count": 3}, CheckpointError, "4 of 16 experts from 2 of 3 groups"),
        ("deepseek3", {"deepseek2.attention.kv_lora_rank": 63}, CheckpointError, "over a latent of 63"),
        ("deepseek3", {"deepseek2.attention.key_length_mla": 16}, CheckpointError, "heads of 16, 16 of them rotated"),
        ("deepseek3", {"deepseek2.attention.temperature_scale": 0.1}, UnsupportedModelError, "temperature_scale"),
        ("phi3, long", {"phi3.rope.scaling.attn_factor": None}, CheckpointError, "unexpected tensors rope_factors"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_that_names_it(
    written: Any, opened: Open, tmp_path: Path,
    case: str, metadata: dict[str, Any], error: type[InferError], message: str,
) -> None:  # fmt: skip
    from hf_to_gguf import write_gguf

    path = write_gguf(tmp_path / "changed.gguf", written(case)[1], metadata=metadata)
    with pytest.raises(error, match=message) as raised:
        opened(path)
    assert "\n" not in str(raised.value)
