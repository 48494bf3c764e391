"""Quantizing on load, measured from outside: the weights never lie in memory as floats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import PEAK, byte_level_tokenizer, write_folder

pytestmark = pytest.mark.filterwarnings("ignore")
Written = Callable[..., tuple[Path, Any]]


_LOAD = """
import sys
from pathlib import Path
import torch
from infer.runtime.config import EngineConfig
from infer.runtime.loader import load_model
small, large, quant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def load(path):
    config = EngineConfig(device="cpu", threads=1, ctx=64, quant=quant, prefix_cache=False)
    model = load_model(path, config, memo_dir=small)
    return model, peak()
first, before = load(small)
first.close()
second, after = load(large)
print(after - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of bfloat16 in two files."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    width, inner, layers = 1024, 4096, 6
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=16, vocab_size=512
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    shapes = {"model.embed_tokens": (512, width), "lm_head": (512, width), "model.norm": (width,)}
    for layer in range(layers):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}self_attn.{part}_proj": (width, width) for part in "qkvo"}
        shapes |= {f"{block}mlp.gate_proj": (inner, width), f"{block}mlp.up_proj": (inner, width)}
        shapes |= {f"{block}mlp.down_proj": (width, inner), f"{block}input_layernorm": (width,)}
        shapes[f"{block}post_attention_layernorm"] = (width,)
    names, weight_map = sorted(shapes), {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        tensors = {f"{name}.weight": torch.rand(shapes[name]).sub_(0.5).to(torch.bfloat16) for name in some}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("quant", "bits"), [("int8", 8.5), ("int4", 5.0), ("nf4", 4.5)])
def test_the_peak_of_quantizing_on_load_is_the_result_and_one_tensor(
    large: Path, tmp_path: Path, quant: str, bits: float
) -> None:
    from hf_to_gguf import build_model

    small = write_folder(tmp_path / "small", build_model("llama", num_hidden_layers=1))
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert size > 190_000_000
    done = subprocess.run(
        [sys.executable, "-c", PEAK + _LOAD, str(small), str(large), quant],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    tensor = 2 * 1024 * 4096
    assert int(done.stdout) * 1024 <= size / 16 * bits + tensor + 24_000_000, done.stdout
