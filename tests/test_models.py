"""Logits against transformers reading the same file, and the errors of files that are not what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from logits import as_tensor

from infer.quant.base import get_format
from infer.quant.kernels.base import create_kernel
from infer.quant.kernels.source import WeightSource
from infer.runtime.batch import build_batch
from infer.runtime.config import EngineConfig, RopeConfig
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError
from infer.runtime.loader import load_model
from infer.runtime.models.rope import rope_table
from infer.runtime.request import Request, Sequence
from infer.samplers.params import SamplingParams

Tiny = Callable[..., Path]


def _all_logits(path: Path, ids: list[int], tmp_path: Path, **settings: object) -> torch.Tensor:
    """[len(ids), vocab]: one prefill with every row's logits wanted."""
    config = EngineConfig(**{"device": "cpu", "threads": 1, "kernel": "float32", "kv_type": "f32", "ctx": 512,
                             **settings})  # fmt: skip
    model = load_model(path, config, memo_dir=tmp_path)
    seq = Sequence(Request("0", tuple(ids), SamplingParams()), list(ids), block_table=list(range(8)))
    batch = build_batch([(seq, len(ids))])
    object.__setattr__(batch, "output_rows", np.arange(len(ids), dtype=np.int32))
    logits = as_tensor(model.engine._runner.forward(batch))
    model.close()
    return logits


def _transformers_logits(path: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def _close(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    spread = (theirs.max() - theirs.min()).item()
    assert (mine - theirs).abs().max().item() <= tolerance * spread


CASES = {
    "llama": {},
    "llama, one kv head, tied": {"kv_heads": 1, "tied": True},
    "llama, as many kv heads": {"kv_heads": 4},
    "qwen2 with biases": {"arch": "qwen2"},
    "llama, Q4_K": {"quant": "Q4_K"},
    "llama, Q8_0": {"quant": "Q8_0"},
    "llama, Q2_K": {"quant": "Q2_K"},
    "llama, IQ2_XS": {"quant": "IQ2_XS"},
    "llama, BF16": {"quant": "BF16"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tiny_llama: Tiny, tmp_path: Path, case: str) -> None:
    path = tiny_llama(**CASES[case])
    ids = np.random.default_rng(1).integers(0, 300, 90).tolist()
    _close(_all_logits(path, ids, tmp_path), _transformers_logits(path, ids), 1e-4)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_smollm2_logits_equal_transformers(smollm2_path: Path, tmp_path: Path) -> None:
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.tokenizer.load import load_tokenizer

    text = Path(__file__).read_text() + Path(torch.__file__).parent.joinpath("py.typed").name
    with open_checkpoint(smollm2_path) as checkpoint:
        ids = load_tokenizer(checkpoint.metadata).encode(text)[:200]
    assert len(ids) == 200
    mine, theirs = _all_logits(smollm2_path, ids, tmp_path), _transformers_logits(smollm2_path, ids)
    _close(mine, theirs, 2e-3)
    assert torch.equal(mine.argmax(dim=1), theirs.argmax(dim=1))


def test_rope_frequencies_divide(tiny_llama: Tiny, tmp_path: Path) -> None:
    ids = list(range(40))
    with_factors = _all_logits(tiny_llama(rope_freqs=True), ids, tmp_path)
    assert torch.isfinite(with_factors).all()
    config = RopeConfig(dim=8)
    plain = rope_table(config, 64, None, torch.device("cpu"))
    halved = rope_table(config, 64, np.full(4, 2.0, dtype=np.float32), torch.device("cpu"))
    plain.ready(64)
    halved.ready(64)
    assert np.allclose(halved.cos[2::2], plain.cos[1:32], atol=1e-6)


def test_rope_frequencies_out_of_range_are_no_warnings() -> None:
    config = RopeConfig(dim=8, scaling="linear", factor=1e-320)
    for factors in (None, np.zeros(4, dtype=np.float32)):
        rope_table(config, 64, factors, torch.device("cpu")).ready(64)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_scalings_equal_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": kind, "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 256,
                  "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
    unused = {
        "linear": {
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
        },
        "llama3": {"beta_fast", "beta_slow"},
        "yarn": {"low_freq_factor", "high_freq_factor"},
    }[kind]
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            max_position_embeddings=2048,
            rope_parameters={k: v for k, v in parameters.items() if k not in unused},
        )
    )
    cos, sin = theirs(torch.zeros(1, 500, 64), torch.arange(500).unsqueeze(0))
    config = RopeConfig(dim=64, base=5e5, scaling=kind, factor=8.0, original_context=256)
    table = rope_table(config, 500, None, torch.device("cpu"))
    table.ready(100)  # the rest later, as positions come into use
    table.ready(500)
    assert np.allclose(table.cos, cos[0, :, :32], atol=2e-4)
    assert np.allclose(table.sin, sin[0, :, :32], atol=2e-4)


def _load(path: Path, tmp_path: Path, **settings: object) -> None:
    load_model(path, EngineConfig(device="cpu", threads=1, **settings), memo_dir=tmp_path).close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drop": ["blk.1.ffn_up.weight"]}, CheckpointError, "tensor blk.1.ffn_up.weight is missing"),
        ({"add": {"blk.0.surprise": np.ones(4, np.float32)}}, CheckpointError, "unexpected tensors blk.0.surprise"),
        ({"metadata": {"llama.block_count": None}}, CheckpointError, "llama.block_count' is missing"),
        ({"metadata": {"llama.attention.head_count": "four"}}, CheckpointError, "llama.attention.head_count"),
        ({"metadata": {"llama.attention.head_count": 0}}, CheckpointError, "llama.attention.head_count is 0"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, CheckpointError, "cannot share 3"),
        ({"metadata": {"llama.feed_forward_length": 96}}, CheckpointError, "ffn_gate.weight has shape"),
        ({"metadata": {"llama.new_trick": 5}}, UnsupportedModelError, "llama.new_trick is not known"),
        ({"metadata": {"llama.attention.clamp_kqv": 8.0}}, UnsupportedModelError, "clamp_kqv is not known"),
        ({"metadata": {"general.architecture": "rwkv7"}}, UnsupportedModelError, "'rwkv7' is not supported"),
        ({"metadata": {"llama.rope.scaling.type": "wavy"}}, UnsupportedModelError, "'wavy' is not supported"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, CheckpointError, "original_context_length is missing"),
        ({"metadata": {"llama.rope.freq_base": float("nan")}}, CheckpointError, "llama.rope.freq_base"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": None}}, CheckpointError, "rms_epsilon' is missing"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_that_names_the_thing(
    tiny_llama: Tiny, tmp_path: Path, options: dict[str, object], error: type[InferError], message: str
) -> None:
    path = tiny_llama(tmp_path / "wrong.gguf", **options)
    with pytest.raises(error, match=message) as raised:
        _load(path, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_context_that_needs_more_memory_than_there_is_is_refused(tiny_llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InferError, match="use a smaller --ctx"):
        _load(tiny_llama(), tmp_path, ctx=10**11)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_float_weights_can_be_quantized_on_load(tiny_llama: Tiny, tmp_path: Path, quant: str) -> None:
    ids = list(range(30))
    full = _all_logits(tiny_llama(quant="F16"), ids, tmp_path)
    rounded = _all_logits(tiny_llama(quant="F16"), ids, tmp_path, quant=quant)
    spread = (full.max() - full.min()).item()
    error = (full - rounded).abs().max().item() / spread
    assert 0 < error < {"int8": 0.03, "int4": 0.35}[quant]


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32", "F16", "BF16"])
@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_kernels_multiply_and_select_rows(type_name: str, kernel: str) -> None:
    import gguf

    rng = np.random.default_rng(3)
    kind = getattr(gguf.GGMLQuantizationType, type_name)
    for rows, columns in ((1, 32), (70, 96), (200, 320)):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        stored = gguf.quants.quantize(values, kind)
        dense = torch.from_numpy(gguf.quants.dequantize(stored, kind).reshape(rows, columns).copy())
        raw = torch.from_numpy(stored.view(np.uint8).reshape(rows, -1).copy())
        source = WeightSource(
            "w", (rows, columns), get_format(type_name), lambda a, b, raw=raw: raw[a:b].flatten()
        )
        built = create_kernel(kernel, torch.device("cpu"), 1)
        weight = built.pack(source)
        assert weight.shape == (rows, columns)
        for count in (0, 1, 3, 40):
            x = torch.from_numpy(rng.standard_normal((count, columns)).astype(np.float32)).to(built.dtype)
            found = built.matmul(x, weight).float()
            wanted = x.float() @ dense.T
            assert found.shape == (count, rows)
            assert torch.allclose(found, wanted, atol=0.05 * columns**0.5)
        picked = torch.tensor([0, rows - 1, rows // 2])
        assert torch.allclose(built.rows(weight, picked).float(), dense[picked], atol=0.03)
