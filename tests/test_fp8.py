"""FP8 in blocks: the values that torch's own float8 gives, through every kernel, stacked experts included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import folder_copier
from logits import logits_of, prompt_ids
from safetensors.torch import load_file, save_file

from infer.quant.base import Plane, get_format
from infer.quant.fp8 import BlockFP8
from infer.runtime.config import EngineConfig
from infer.runtime.errors import InferError
from infer.runtime.loader import LoadedModel, load_model

pytestmark = pytest.mark.filterwarnings("ignore")
Open = Callable[..., LoadedModel]
Written = Callable[..., tuple[Path, Any]]
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def _quantized(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what DeepSeek's conversion makes of them."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128), dtype=dtype)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j].float()).to(torch.float8_e4m3fn)
            values[block] = (codes[block].float() * scales[i, j].float()).to(torch.bfloat16)
    return codes, scales, values


def _plane(part: torch.Tensor) -> Plane:
    data = part.contiguous().view(torch.uint8).flatten()
    return lambda start, count: data[start : start + count].clone()


@pytest.fixture
def opened(open_model: Open) -> Open:
    return partial(open_model, ctx=512, prefix_cache=False)


def _convert(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The folder's projections become FP8; the same model with their values as BF16."""
    file = folder / "model.safetensors"
    stored, plain = {}, {}
    for name, weight in load_file(file).items():
        stored[name] = plain[name] = weight
        if name.endswith("proj.weight") or "kv_a_proj" in name:
            codes, scales, plain[name] = _quantized(weight, dtype)
            stored |= {name: codes, f"{name}_scale_inv": scales}
    save_file(stored, file)
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_torch(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    form = get_format("F8_E4M3")
    assert isinstance(form, BlockFP8)
    for rows, columns in ((300, 200), (128, 128), (5, 1000)):
        matrices = [_quantized(torch.randn(rows, columns, generator=draw), dtype) for _ in range(3)]
        codes, scales, values = (torch.cat(parts) for parts in zip(*matrices, strict=True))
        planes = {"codes": _plane(codes), "scales": _plane(scales)}
        shape = (3 * rows, columns)
        read = form.open(planes, {"rows": rows, "scale_bytes": dtype.itemsize}, shape)
        for start, stop in ((0, shape[0]), (rows - 1, rows + 1), (shape[0] - 1, shape[0])):
            found = form.decode(read(start, stop), (stop - start, columns))
            assert torch.equal(found, values[start:stop])


@pytest.mark.parametrize("kernel", ["float32", "torch", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("case", ["qwen3", "qwen3moe", "deepseek3"])
def test_a_folder_of_fp8_is_the_model_of_its_values(
    hf_folder: Written, hf_folder_copy: Any, opened: Open, tmp_path: Path, case: str, kernel: str
) -> None:
    folder = hf_folder_copy(case, quantization_config=FP8)
    plain = _convert(folder, torch.float32 if case == "deepseek3" else torch.bfloat16)
    model = opened(folder, kernel=kernel, kv_type="f32")
    ids = prompt_ids(40)
    found = logits_of(model, ids, [30, *[1] * 10])
    assert "F8_E4M3" in model.quantization
    assert sum("F8_E4M3 weights are unpacked on load" in line for line in model.warnings) == 1
    other = folder_copier(hf_folder, tmp_path / "plain")(case)
    save_file(plain, other / "model.safetensors")
    wanted = logits_of(opened(other, kernel=kernel, kv_type="f32"), ids, [30, *[1] * 10])
    assert torch.equal(found, wanted)


def test_quantized_on_load(hf_folder_copy: Any, opened: Open) -> None:
    folder = hf_folder_copy("qwen3", quantization_config=FP8)
    _convert(folder, torch.float32)
    for quant in ("int8", "int4"):
        model = opened(folder, quant=quant)
        assert logits_of(model, prompt_ids(20), [20]).isfinite().all()
        assert not any("F8_E4M3" in line for line in model.warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 128]}, "weight_block_size is '[64, 128]'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'; this version runs e4m3 only"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
    ],
)
def test_other_settings_are_refused(
    hf_folder_copy: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    _refused(hf_folder_copy("qwen3", quantization_config={**FP8, **changes}), message, tmp_path)


def test_weights_and_scales_that_do_not_fit(hf_folder_copy: Any, tmp_path: Path) -> None:
    folder = hf_folder_copy("qwen3", quantization_config=FP8)
    _convert(folder, torch.float32)
    file, name = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    whole = load_file(file)
    scale = f"{name}_scale_inv"
    lost = {key: value for key, value in whole.items() if key != name}
    alone = {key: value for key, value in whole.items() if key != scale}
    for tensors, message in (
        (lost, "are not FP8 in blocks of 128 x 128"),
        (alone, "is F8_E4M3, which config.json does not explain"),
        ({**whole, scale: torch.ones(1, 3)}, "are not FP8 in blocks"),
        ({**whole, scale: whole[scale].double()}, "are not FP8 in blocks"),
        ({**whole, name: whole[name].float()}, "are not FP8 in blocks"),
    ):
        save_file(tensors, file)
        _refused(folder, message, tmp_path)


def _refused(folder: Path, message: str, memo: Path) -> None:
    with pytest.raises(InferError) as caught:
        load_model(folder, EngineConfig(device="cpu", ctx=64), memo_dir=memo)
    assert caught.value.exit_code == 3
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
