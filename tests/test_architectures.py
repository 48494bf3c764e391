"""Every dense family: logits against transformers, and the exactness of the native path where a window has passed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.quant.kernels import native
from infer.runtime.batch import build_batch
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request, Sequence
from infer.samplers.params import SamplingParams

Open = Callable[..., LoadedModel]

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
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
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
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "rope_parameters": DEFAULT}),
}  # fmt: skip
WINDOWED = {"mistral", "gemma2", "gemma3", "gemma3, extended", "phi3", "olmo3"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """`written(case, quant)`: the file of a case, and the model that transformers made."""
    from hf_to_gguf import build_model, write_gguf

    folder = tmp_path_factory.mktemp("families")
    made: dict[tuple[str, str], tuple[Path, Any]] = {}

    def make(case: str, quant: str = "F32") -> tuple[Path, Any]:
        if (case, quant) not in made:
            kind, options = CASES[case]
            model = build_model(kind, **options)
            made[case, quant] = write_gguf(folder / f"{len(made)}.gguf", model, quant), model
        return made[case, quant]

    return make


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    models: list[LoadedModel] = []

    def open_file(path: Path, **settings: object) -> LoadedModel:
        config = EngineConfig(
            **{"device": "cpu", "threads": 1, "ctx": 512, "prefix_cache": False, **settings}
        )
        models.append(load_model(path, config, memo_dir=tmp_path))
        return models[-1]

    yield open_file
    for model in models:
        model.close()


def _prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(500) for _ in range(length))


def _logits(model: LoadedModel, ids: tuple[int, ...], steps: list[int]) -> torch.Tensor:
    """[len(ids), vocab]: the logits of every position, computed in steps of so many tokens each."""
    seq = Sequence(Request("0", ids, SamplingParams()), list(ids), block_table=list(range(8)))
    found = []
    for count in steps:
        batch = build_batch([(seq, count)])
        object.__setattr__(batch, "output_rows", torch.arange(count, dtype=torch.int32))
        found.append(model.engine._runner.forward(batch).clone())
        seq.num_computed += count
    return torch.cat(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", ["float32", "native"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(written: Any, opened: Open, case: str, kernel: str) -> None:
    if kernel == "native" and not native.available():
        pytest.skip("the native library was not built here")
    path, theirs = written(case)
    ids = _prompt(5 * WINDOW)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = _logits(opened(path, kernel=kernel, kv_type="f32"), ids, [50, *[1] * 30])
    assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())


@pytest.mark.filterwarnings("ignore")
def test_the_context_in_use_picks_the_factors_of_longrope(written: Any, opened: Open) -> None:
    path, theirs = written("phi3, long")
    ids = _prompt(50)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    short = opened(path, kernel="float32", kv_type="f32", ctx=64)
    spread = wanted.max() - wanted.min()
    assert (_logits(short, ids, [50]) - wanted).abs().max() <= 1e-4 * spread
    assert short.engine._runner.model.config.rope.factors == "short"
    long = opened(path, kernel="float32", kv_type="f32", ctx=65)
    assert (_logits(long, ids, [50]) - wanted).abs().max() > 1e-2 * spread
    assert long.engine._runner.model.config.rope.factors == "long"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_torch_path_agrees_within_its_precision(written: Any, opened: Open, case: str) -> None:
    path, ids = written(case, "Q8_0")[0], _prompt(60)
    found, wanted = (_logits(opened(path, kernel=k), ids, [60]) for k in ("torch", "float32"))
    assert (found - wanted).abs().mean() <= 0.02 * (wanted.max() - wanted.min())


def _answer(
    model: LoadedModel, prompt: tuple[int, ...], count: int = 5
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens drawn after the prompt, and the logits that each was drawn from."""
    engine, logits = model.engine, []
    forward = engine._runner.forward

    def watched(batch: Any) -> torch.Tensor:
        found = forward(batch)
        logits.extend(found.clone())
        return found

    engine._runner.forward = watched
    try:
        sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=count, ignore_eos=True)
        engine.add(Request("a", prompt, sampling))
        tokens: list[int] = []
        while engine.has_unfinished():
            tokens += [token for output in engine.step() for token in output.new_ids]
    finally:
        del engine._runner.forward
    return tokens, logits


def _same(one: tuple[list[int], list[torch.Tensor]], other: tuple[list[int], list[torch.Tensor]]) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.skipif(not native.available(), reason="the native library was not built here")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_chunks_and_a_cache_hit_change_no_bit(written: Any, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    prompt = _prompt(2 * BLOCK_SIZE + 20)
    expected = _answer(opened(path, prefill_chunk=512), prompt)
    assert len(expected[1]) == 5
    for chunk in (1, 7):
        assert _same(_answer(opened(path, prefill_chunk=chunk), prompt), expected)
    warm = opened(path, prefix_cache=True)
    _answer(warm, (*prompt[:-1], 501))
    assert _same(_answer(warm, prompt), expected)
    assert warm.engine.cached_tokens("a") >= 2 * BLOCK_SIZE > WINDOW


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
    ids = _prompt(60)
    near, far = (_logits(opened(p, kernel="float32", kv_type="f32"), ids, [60]) for p in (path, wide))
    assert torch.allclose(near[:WINDOW], far[:WINDOW], atol=1e-5)
    assert (near[WINDOW:] - far[WINDOW:]).abs().amax(dim=1).min() > 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "metadata", "error", "message"),
    [
        ("gemma3", {"gemma3.attention.sliding_window_pattern": [True, False]}, CheckpointError, "covers 2 of 7 layers"),
        ("gemma3", {"gemma3.attention.sliding_window": 0.5}, CheckpointError, "gemma3.attention.sliding_window"),
        ("gemma3", {"gemma3.attention.scale": 0.5}, UnsupportedModelError, "gemma3.attention.scale is not known"),
        ("gemma2", {"gemma2.attn_logit_softcapping": -1.0}, CheckpointError, "attn_logit_softcapping is -1"),
        ("granite", {"granite.logit_scale": 0.0}, CheckpointError, "granite.logit_scale is 0"),
        ("granite", {"granite.residual_scale": 1e-30}, CheckpointError, "granite.residual_scale is"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.2}, CheckpointError, "rope_factors_short.weight is missing"),
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
