"""The torch path on a CUDA device: agrees with float32 on the CPU and keeps weights quantized."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infer.runtime.config import EngineConfig
from infer.runtime.errors import UsageError
from infer.runtime.generation import generate
from infer.runtime.loader import LoadedModel, load_model
from infer.samplers.params import SamplingParams

Tiny = Callable[..., Path]


def _load(path: Path, tmp_path: Path, **settings: object) -> LoadedModel:
    return load_model(path, EngineConfig(**{"ctx": 256, **settings}), memo_dir=tmp_path)


def _first_logprob(model: LoadedModel, prompt: list[int]) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)
    return generate(model.engine, model.tokenizer, prompt, sampling).logprobs[0].logprob


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"])
def test_cuda_agrees_with_float32(tiny_llama: Tiny, tmp_path: Path, quant: str) -> None:
    path = tiny_llama(quant=quant)
    prompt = random.Random(1).choices(range(300), k=100)
    exact = _load(path, tmp_path, device="cpu", kernel="float32")
    cuda = _load(path, tmp_path, device="cuda")
    assert (cuda.device, cuda.exact) == ("cuda:0", False)
    assert _first_logprob(cuda, prompt) == pytest.approx(_first_logprob(exact, prompt), abs=0.15)


@pytest.mark.gpu
@pytest.mark.model
def test_smollm2_stays_quantized_on_cuda(smollm2_path: Path, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = _load(smollm2_path, tmp_path, device="cuda")
    size = smollm2_path.stat().st_size
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size + (64 << 20)
    cpu = _load(smollm2_path, tmp_path, device="cpu")
    prompt = model.tokenizer.encode("The capital of France is")
    sampling = SamplingParams(temperature=0, max_tokens=3)
    texts = [generate(m.engine, m.tokenizer, prompt, sampling).text for m in (model, cpu)]
    assert texts[0] == texts[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_device_is_one_line(tiny_llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no usable CUDA device"):
        _load(tiny_llama(), tmp_path, device="cuda")
    with pytest.raises(UsageError, match="use auto, cpu, cuda or cuda:N"):
        _load(tiny_llama(), tmp_path, device="tpu")
