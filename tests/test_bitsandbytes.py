"""Weights of bitsandbytes: equal to what the library makes of them, bit for bit where it dequantizes the same way."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hf_folders import write_folder
from logits import logits_of

from infer.quant.base import PlanarFormat, QuantizedTensor, get_format
from infer.quant.bnb import TABLES, quantize_table, table_of
from infer.quant.kernels import native, reference
from infer.quant.kernels.base import create_kernel
from infer.quant.kernels.source import WeightSource
from infer.runtime.checkpoint.folder.bitsandbytes import joined
from infer.runtime.checkpoint.folder.shards import open_shards
from infer.runtime.errors import InferError, UsageError
from infer.runtime.loader import LoadedModel

pytestmark = pytest.mark.filterwarnings("ignore")
Open = Callable[..., LoadedModel]
CPU = torch.device("cpu")
ISAS = native.offered(native.load()) if native.available() else []


@pytest.fixture(scope="module")
def library() -> Any:
    """bitsandbytes.functional, imported without a look at the network."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = pytest.importorskip("bitsandbytes.functional")
    yield functional
    patch.undo()


def stored(
    library: Any, weight: torch.Tensor, kind: str, nested: bool, block: int = 64
) -> dict[str, torch.Tensor]:
    """The tensors that transformers writes for a weight called X.weight."""
    if kind == "int8":
        codes, scb, _ = library.int8_vectorwise_quant(weight.half())
        return {"X.weight": codes, "X.SCB": scb, "X.weight_format": torch.tensor(0, dtype=torch.uint8)}
    packed, state = library.quantize_4bit(
        weight, quant_type=kind, blocksize=block, compress_statistics=nested
    )
    return {
        "X.weight": packed,
        **{f"X.weight.{key}": value for key, value in state.as_dict(packed=True).items()},
    }


def source_of(folder: Path, tensors: dict[str, torch.Tensor]) -> WeightSource:
    """The weight as a kernel gets it, by way of a file."""
    path = folder / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    with contextlib.ExitStack() as stack:
        shards = open_shards(folder, [path.name], stack)
        (tensor,) = joined(shards).values()
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    form = get_format(tensor.type)
    assert isinstance(form, PlanarFormat)
    planes = {
        name: lambda start, count, at=plane.offset: data[at + start : at + start + count].clone()
        for name, plane in tensor.planes.items()
    }
    shape = (tensor.shape[0], tensor.shape[1])
    return WeightSource("X", shape, form, form.open(planes, tensor.settings, shape))


def generic_dequantize(library: Any, packed: torch.Tensor, state: Any) -> torch.Tensor:
    """What the library computes on any device."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    absmax = state.absmax
    if state.nested:
        absmax = library.dequantize_blockwise(absmax, state.state2) + state.offset
    return _dequantize_4bit_compute(
        packed.reshape(-1), absmax, state.code, state.blocksize, state.shape, torch.float32
    )


@pytest.mark.parametrize("columns", [64, 192, 96, 48])
@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_dequantize_to_the_same_bits(
    library: Any, tmp_path: Path, kind: str, nested: bool, block: int, columns: int
) -> None:
    weight = torch.randn(
        (50 if columns == 64 else 64, columns), generator=torch.Generator().manual_seed(columns)
    )
    tensors = stored(library, weight, kind, nested, block)
    source = source_of(tmp_path, tensors)
    state = library.QuantState.from_dict(
        {key.removeprefix("X.weight."): value for key, value in tensors.items() if key != "X.weight"},
        device="cpu",
    )
    wanted = generic_dequantize(library, tensors["X.weight"], state)
    if (
        columns % block == 0
    ):  # else the library's own CPU kernel takes blocks for parts of rows, which they are not
        assert torch.equal(library.dequantize_4bit(tensors["X.weight"], state), wanted)
    assert torch.equal(source.dequantize(0, source.shape[0]), wanted)
    assert torch.equal(source.dequantize(7, 20), wanted[7:20])


def test_int8_dequantizes_to_the_same_numbers(library: Any, tmp_path: Path) -> None:
    weight = torch.randn((40, 96), generator=torch.Generator().manual_seed(1))
    tensors = stored(library, weight, "int8", False)
    source = source_of(tmp_path, tensors)
    wanted = library.int8_vectorwise_dequant(tensors["X.weight"], tensors["X.SCB"])
    found = source.dequantize(0, 40)
    assert torch.allclose(found, wanted, rtol=2e-7, atol=0)


def test_rounding_on_load_gives_the_librarys_codes(library: Any) -> None:
    weight = torch.randn((70, 256), generator=torch.Generator().manual_seed(2))
    weight[3] = 0
    packed, state = library.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    ours = quantize_table(weight)
    theirs = packed.view(70, -1)
    assert torch.equal(ours.codes, theirs << 4 | theirs >> 4)
    assert torch.equal(ours.scales.flatten(), state.absmax)
    assert torch.equal(ours.dequantize(), library.dequantize_4bit(packed, state))
    for bad in (torch.inf, torch.nan):
        weight[0, 0] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize_table(weight)


def test_the_tables_are_the_librarys(library: Any) -> None:
    for name in TABLES:
        _, state = library.quantize_4bit(torch.randn(64, 64), quant_type=name.lower())
        assert torch.equal(table_of(name), state.code)


def table_weight(rows: int, columns: int, seed: int = 3) -> QuantizedTensor:
    return quantize_table(torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)))


def plain_source(weight: QuantizedTensor) -> WeightSource:
    """A float matrix that `--quant nf4` rounds to `weight`."""
    floats = weight.dequantize()
    read = lambda start, stop: floats[start:stop].contiguous().view(torch.uint8).flatten()  # noqa: E731
    return WeightSource("X", weight.shape, get_format("F32"), read, "nf4")


@pytest.mark.skipif(not ISAS, reason="the native library was not built here")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (37, 192), (130, 128)])
def test_the_native_product_equals_the_references_bits(isa: str, rows: int, columns: int) -> None:
    weight = table_weight(rows, columns)
    x = torch.randn((9, columns), generator=torch.Generator().manual_seed(4))
    used = native.load().infer_isa().decode()
    try:
        kernel = create_kernel("native", CPU, 2, isa)
        packed = kernel.pack(plain_source(weight))
        wanted = reference.matmul_floats(x, weight.dequantize())
        assert torch.equal(kernel.matmul(x, packed), wanted)
        for count in (1, 2, 4, 5):
            assert torch.equal(kernel.matmul(x[:count], packed), wanted[:count])
        ids = torch.tensor([0, rows - 1, 5])
        assert torch.equal(kernel.rows(packed, ids), weight.dequantize()[ids])
        assert packed.nbytes <= (-(-rows // 16) * 16) * columns * 0.57 + 64
    finally:
        native.load(used)


@pytest.mark.parametrize("name", ["torch", "reference", "float32"])
def test_every_kernel_holds_a_table(name: str) -> None:
    weight = table_weight(40, 128)
    kernel = create_kernel(name, CPU, 1)
    packed = kernel.pack(plain_source(weight))
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(5)).to(kernel.dtype)
    wanted = x.float() @ weight.dequantize().T
    assert (kernel.matmul(x, packed).float() - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert torch.allclose(
        kernel.rows(packed, torch.tensor([3, 0])).float(), weight.dequantize()[[3, 0]], rtol=0.01
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, library: Any) -> Callable[[str], tuple[Path, Any]]:
    """`written(kind)`: a checkpoint that transformers quantized, and its model."""
    from hf_to_gguf import build_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    root = tmp_path_factory.mktemp("bnb")
    plain = write_folder(
        root / "plain", build_model("phi3", num_hidden_layers=2, hidden_size=128, intermediate_size=192)
    )
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
            settings = {
                "nf4": {**four, "bnb_4bit_quant_type": "nf4"},
                "nf4, twice": {**four, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
                "fp4, twice": {**four, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
                "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
            }[kind]
            model = AutoModelForCausalLM.from_pretrained(
                plain,
                quantization_config=BitsAndBytesConfig(**settings),
                device_map="cpu",
                dtype=torch.float32,
            )
            folder = root / kind
            model.save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(plain / name, folder / name)
            if kind != "int8":  # the library's own products on a CPU are of bfloat16
                float_model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
                for name, module in model.named_modules():
                    if state := getattr(getattr(module, "weight", None), "quant_state", None):
                        weight = library.dequantize_4bit(module.weight.data, state)
                        float_model.get_submodule(name).weight.data = weight.float()
                model = float_model
            made[kind] = folder, model
        return made[kind]

    return make


@pytest.fixture
def opened(open_model: Open) -> Open:
    return partial(open_model, ctx=128, prefix_cache=False, kv_type="f32")


@pytest.mark.parametrize("kernel", ["float32", pytest.param("native", marks=pytest.mark.native)])
@pytest.mark.parametrize("kind", ["nf4", "nf4, twice", "fp4, twice"])
def test_a_checkpoint_of_four_bits_gives_the_logits_of_transformers(
    written: Any, opened: Open, kind: str, kernel: str
) -> None:
    path, theirs = written(kind)
    ids = tuple(7 * number % 500 for number in range(60))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    found = logits_of(opened(path, kernel=kernel), ids, [50, *[1] * 10])
    assert (found - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())
    assert torch.equal(logits_of(opened(path, kernel=kernel), ids, [1] * 60), found) or kernel == "float32"


def test_a_checkpoint_of_int8_runs_on_the_dequantized_weights(written: Any, opened: Open) -> None:
    """The library's own product rounds activations to 8 bits per row; the weights are what can be compared."""
    path, theirs = written("int8")
    ids = tuple(7 * number % 500 for number in range(40))
    with torch.inference_mode():
        rough = theirs(torch.tensor([ids])).logits[0]
    found = logits_of(opened(path, kernel="float32"), ids, [40])
    assert (found - rough).abs().mean() <= 0.02 * (rough.max() - rough.min())
    if ISAS:
        codes = logits_of(opened(path, kernel="native"), ids, [40])
        assert (found - codes).abs().mean() <= 0.01 * (rough.max() - rough.min())
        assert torch.equal(logits_of(opened(path, kernel="native"), ids, [7, 33]), codes)


def test_what_runs_is_shown(written: Any, opened: Open) -> None:
    model = opened(written("nf4, twice")[0])
    assert model.quantization.startswith("F32") and "NF4" in model.quantization


def test_no_part_of_it_needs_the_library(written: Any) -> None:
    """The files are read without bitsandbytes."""
    code = (
        "import sys; sys.modules['bitsandbytes'] = None; from pathlib import Path\n"
        "from infer.runtime.config import EngineConfig; from infer.runtime.loader import load_model\n"
        "path = Path(sys.argv[1]); model = load_model(path, EngineConfig(device='cpu', ctx=64), memo_dir=path)\n"
        "print(model.quantization)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(written("nf4")[0])], capture_output=True, text=True, check=True
    )
    assert "NF4" in done.stdout


def _state(tensors: dict[str, torch.Tensor], **changes: Any) -> None:
    key = next(name for name in tensors if ".quant_state." in name)
    values = {**json.loads(bytes(tensors[key].tolist())), **changes}
    text = json.dumps({name: value for name, value in values.items() if value is not ...})
    tensors[key] = torch.tensor(list(text.encode()), dtype=torch.uint8)


def _drop(tensors: dict[str, torch.Tensor], end: str) -> None:
    del tensors[next(name for name in tensors if name.endswith(end))]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("nf4", lambda t: _drop(t, ".absmax"), "its absmax is missing or not expected"),
        ("nf4", lambda t: _drop(t, ".quant_map"), "its map is missing or not expected"),
        ("nf4", lambda t: _drop(t, "nested_quant_map"), "its nested_map is missing"),
        ("nf4", lambda t: t.pop("X.weight"), "has a quant_state and no codes"),
        ("nf4", lambda t: t.update({"X.weight.absmax": t["X.weight.absmax"][:-1].clone()}), "its absmax has"),
        ("nf4", lambda t: t.update({"X.weight": t["X.weight"][:-1].clone()}), "its codes has"),
        ("nf4", lambda t: t.update({"X.weight.quant_map": torch.zeros(16)}), "quant_map is not the table of NF4"),
        ("nf4", lambda t: _state(t, blocksize=0), "blocksize is '0'"),
        ("nf4", lambda t: _state(t, blocksize=32), "blocksize is '32'"),
        ("nf4", lambda t: _state(t, shape=[1 << 40, 64]), "is no matrix by its quant_state"),
        ("nf4", lambda t: _state(t, shape=[64.0, 64]), "is no matrix by its quant_state"),
        ("nf4", lambda t: _state(t, shape=...), "is no matrix by its quant_state"),
        ("nf4", lambda t: _state(t, quant_type="fp4"), "quant_type is 'fp4'"),
        ("nf4", lambda t: _state(t, nested_offset="x"), "nested_offset is 'x'"),
        ("nf4", lambda t: _state(t, nested_blocksize=0), "nested_blocksize is '0'"),
        ("int8", lambda t: t.update({"X.weight_format": torch.tensor(2, dtype=torch.uint8)}), "tiled layout"),
        ("int8", lambda t: t.update({"X.SCB": t["X.SCB"][:-1].clone()}), "its scb has"),
        ("int8", lambda t: t.update({"X.weight": t["X.weight"].flatten()}), "is no int8 matrix"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_one_line(
    library: Any, tmp_path: Path, kind: str, change: Any, message: str
) -> None:
    tensors = stored(library, torch.randn(64, 64), kind, nested=True)
    change(tensors)
    with pytest.raises((InferError, ValueError), match=message) as caught:
        source_of(tmp_path, tensors)
    assert str(caught.value).isprintable()


@pytest.mark.native
def test_quantize_on_load_to_nf4_is_exact_in_company(written: Any, opened: Open) -> None:
    path = written("nf4")[0].parent / "plain"
    ids = tuple(11 * number % 500 for number in range(40))
    whole, steps = (logits_of(opened(path, quant="nf4"), ids, s) for s in ([40], [1, 7, 32]))
    assert torch.equal(whole, steps)


@pytest.mark.parametrize("kind", ["nf4, twice", "fp4, twice", "int8"])
def test_the_librarys_own_kernels_agree_within_their_precision(written: Any, opened: Open, kind: str) -> None:
    path, theirs = written(kind)
    ids = tuple(7 * number % 500 for number in range(40))
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    model = opened(path, kernel="bnb")
    assert (model.kernel, model.exact) == ("bnb", False)
    found = logits_of(model, ids, [30, *[1] * 10])
    assert (found - wanted).abs().mean() <= 0.02 * (wanted.max() - wanted.min())


def test_the_librarys_kernels_hold_what_was_rounded_on_load(written: Any, opened: Open) -> None:
    path = written("nf4")[0].parent / "plain"
    ids = tuple(7 * number % 500 for number in range(40))
    found, wanted = (logits_of(opened(path, kernel=k, quant="nf4"), ids, [40]) for k in ("bnb", "float32"))
    assert (found - wanted).abs().mean() <= 0.02 * (wanted.max() - wanted.min())


def test_without_the_library_its_kernels_are_one_line(
    written: Any, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UsageError, match="--kernel bnb: bitsandbytes cannot be imported here: "):
        opened(written("nf4")[0], kernel="bnb")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["torch", "bnb"])
@pytest.mark.parametrize("kind", ["nf4, twice", "fp4, twice", "int8"])
def test_the_checkpoints_run_on_cuda(written: Any, opened: Open, kind: str, kernel: str) -> None:
    path, _ = written(kind)
    ids = tuple(7 * number % 500 for number in range(40))
    wanted = logits_of(opened(path, kernel="float32"), ids, [40])
    found = logits_of(opened(path, kernel=kernel, device="cuda", kv_type="bf16"), ids, [40]).cpu()
    assert (found - wanted).abs().mean() <= 0.02 * (wanted.max() - wanted.min())
