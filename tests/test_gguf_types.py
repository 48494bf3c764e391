"""Files whose types are unpacked on load: they run on every kernel, and say what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from logits import as_tensor

from infer.quant.base import get_format
from infer.quant.kernels import native
from infer.runtime.batch import build_batch
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.config import EngineConfig
from infer.runtime.errors import UnsupportedModelError
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request, Sequence
from infer.runtime.store.files import human_size
from infer.runtime.store.summary import _FILE_TYPES
from infer.samplers.params import SamplingParams

Tiny = Callable[..., Path]
TYPES = (
    "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0",
)  # fmt: skip
IDS = list(range(40, 60))
#: kernel → largest distance of logits from those of float32 weights, as a share of their spread
DISTANCES = {"native": 0.05, "reference": 0.05, "torch": 0.07}
needs_native = pytest.mark.skipif(not native.available(), reason="the native library was not built here")


def load(path: Path, tmp_path: Path, kernel: str) -> LoadedModel:
    config = EngineConfig(device="cpu", threads=1, kernel=kernel, kv_type="f32")
    return load_model(path, config, memo_dir=tmp_path)


def logits(path: Path, tmp_path: Path, kernel: str) -> torch.Tensor:
    """float32 [len(IDS), vocab]: one prefill with every row's logits wanted."""
    model = load(path, tmp_path, kernel)
    seq = Sequence(Request("0", tuple(IDS), SamplingParams()), list(IDS), block_table=[0])
    batch = build_batch([(seq, len(IDS))])
    object.__setattr__(batch, "output_rows", np.arange(len(IDS), dtype=np.int32))
    found = as_tensor(model.engine._runner.forward(batch))
    model.close()
    return found


@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "reference", "torch"])
@pytest.mark.parametrize("name", TYPES)
def test_every_kernel_runs_every_type(tiny_llama: Tiny, tmp_path: Path, name: str, kernel: str) -> None:
    path = tiny_llama(quant=name)
    expected = logits(path, tmp_path, "float32")
    found = logits(path, tmp_path, kernel)
    spread = (expected.max() - expected.min()).item()
    assert (found - expected).abs().max().item() <= DISTANCES[kernel] * spread


@pytest.mark.parametrize(
    "kernel", [pytest.param("native", marks=needs_native), "reference", "torch", "float32"]
)
@pytest.mark.parametrize("name", TYPES)
def test_any_bytes_load_and_run(tiny_llama: Tiny, tmp_path: Path, name: str, kernel: str) -> None:
    """Scales may be NaN, infinite or huge: the answer is worthless, the program is sound."""
    path = tiny_llama(tmp_path / "random.gguf", quant=name, layers=1, vocab=300)
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(7)
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type.name == name:
            start, size = int(tensor.data_offset), int(tensor.n_bytes)
            data[start : start + size] = rng.bytes(size)
    path.write_bytes(data)
    assert logits(path, tmp_path, kernel).shape == (len(IDS), 300)


@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "torch"])
def test_loading_says_what_unpacking_costs(tiny_llama: Tiny, tmp_path: Path, kernel: str) -> None:
    path = tiny_llama(quant="IQ2_XS", types={"output.weight": "Q2_K", "*.attn_v.weight": "Q4_K"})
    model = load(path, tmp_path, kernel)
    model.close()
    (warning,) = model.warnings
    with open_checkpoint(path) as checkpoint:
        tensors = [t for t in checkpoint.tensors.values() if t.type in ("IQ2_XS", "Q2_K")]
    stored = sum(tensor.nbytes for tensor in tensors)
    held = 0
    for tensor in tensors:
        rows, columns = tensor.shape
        form = get_format(tensor.type).decode(torch.zeros(tensor.nbytes, dtype=torch.uint8), (rows, columns))
        held += form.nbytes
    assert warning == (
        f"IQ2_XS, Q2_K weights are unpacked on load: {human_size(held)} in memory instead of {human_size(stored)}"
    )


def test_types_that_stay_as_they_are_say_nothing(tiny_llama: Tiny, tmp_path: Path) -> None:
    for name in ("F16", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"):
        model = load(tiny_llama(quant=name), tmp_path, "torch")
        model.close()
        assert model.warnings == ()


@pytest.mark.parametrize(("name", "weights", "size"), [("Q8_1", 32, 36), ("Q8_K", 256, 292)])
def test_types_of_activations_are_refused(
    tiny_llama: Tiny, tmp_path: Path, name: str, weights: int, size: int
) -> None:
    """ggml makes them while it runs; no file should hold weights in them."""
    path = tiny_llama(tmp_path / "activations.gguf", quant="Q4_K")
    *_, last = gguf.GGUFReader(path).tensors
    data = bytearray(path.read_bytes())
    kind_at = last.field.offset + sum(part.nbytes for part in last.field.parts[:-2])
    data[kind_at : kind_at + 4] = np.uint32(gguf.GGMLQuantizationType[name]).tobytes()
    path.write_bytes(data[: int(last.data_offset)] + bytes(int(last.n_elements) // weights * size))
    with pytest.raises(UnsupportedModelError) as caught:
        load(path, tmp_path, "torch")
    assert f"tensor {last.name}: quantization type {name} is not supported; supported: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mixes_have_the_names_of_the_gguf_package() -> None:
    for value, name in _FILE_TYPES.items():
        assert gguf.LlamaFileType(value).name.split("_", 1)[1].removesuffix("_MOE") == name
