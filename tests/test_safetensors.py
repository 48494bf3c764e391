"""The safetensors reader: what it accepts is what the `safetensors` package accepts, but for what that lets pass."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hf_folders import PEAK
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.folder.shards import INDEX, open_shards
from infer.runtime.checkpoint.safetensors import parse_header
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def file_of(header: object, data: int = 0, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def parse(path: Path) -> dict[str, Any]:
    with contextlib.closing(ModelFile(path)) as file:
        return parse_header(file)


def test_every_dtype_is_read_where_the_package_put_it(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        f"{kind}/{shape}": draw.integers(0, 2, shape).astype(kind)
        for kind in ("bool", "uint8", "int8", "int16", "float16", "int32", "float32", "int64", "float64")
        for shape in ((), (3,), (2, 5), (0, 4), (2, 1, 3))
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    found = parse(path)
    assert found.keys() == arrays.keys()
    data = path.read_bytes()
    for name, tensor in found.items():
        stored = data[tensor.offset : tensor.offset + tensor.nbytes]
        assert (tensor.shape, stored) == (arrays[name].shape, arrays[name].tobytes())


WRONG: dict[str, tuple[bytes, str]] = {
    "no length": (b"\x01\x02", "inside its header"),
    "length past the end": (file_of({}, length=1 << 40), "promises a header of 1099511627776 bytes"),
    "length of 2^64 - 1": (file_of({}, length=(1 << 64) - 1), "promises a header"),
    "empty header": (file_of(b""), "does not begin with"),
    "a list": (file_of(b"[]"), "does not begin with"),
    "a blank first": (file_of(b" {}"), "does not begin with"),
    "cut JSON": (file_of(b'{"a":'), "is no valid JSON"),
    "two objects": (file_of(b"{}{}"), "is no valid JSON"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "is not UTF-8"),
    "half a surrogate pair": (file_of(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "is not UTF-8"),
    "duplicate": (file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                          b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1), "'a' is there twice"),
    "duplicate field": (file_of(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
                        "'dtype' is there twice"),
    "deep": (file_of(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "deep objects": (file_of(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "endless number": (file_of(b'{"a":' + b"9" * 100_000 + b"}"), "is no valid JSON: Exceeds the limit"),
    "NaN": (file_of(b'{"a":NaN}'), "NaN is not a number"),
    "1e999": (file_of(b'{"a":1e999}'), "out of range"),
    "not an object": (file_of({"a": 1}), "is not given by dtype"),
    "a field too many": (file_of({"a": {**entry(0, 1), "x": 1}}, 1), "is not given by dtype"),
    "no shape": (file_of({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "is not given by dtype"),
    "negative size": (file_of({"a": entry(0, 1, [-1])}, 1), "no list of sizes"),
    "float size": (file_of({"a": entry(0, 1, [1.0])}, 1), "no list of sizes"),  # type: ignore[list-item]
    "true size": (file_of({"a": entry(0, 1, [True])}, 1), "no list of sizes"),
    "absurd shape": (file_of({"a": entry(0, 1, [1 << 60])}, 1), "no list of sizes"),
    "absurd product": (file_of({"a": entry(0, 1, [1 << 40, 1 << 40])}, 1), "where its shape takes"),
    "too many dimensions": (file_of({"a": entry(0, 1, [1] * 9)}, 1), "no list of sizes"),
    "one offset": (file_of({"a": {**entry(0, 1), "data_offsets": [0]}}, 1), "are no range"),
    "backward": (file_of({"a": {**entry(0, 1), "data_offsets": [1, 0]}}, 1), "are no range"),
    "size and shape": (file_of({"a": entry(0, 2, [3])}, 2), "has 2 bytes where its shape takes 3"),
    "overlap": (file_of({"a": entry(0, 4), "b": entry(2, 6)}, 6), "overlaps"),
    "same place": (file_of({"a": entry(0, 4), "b": entry(0, 4)}, 4), "overlaps"),
    "hole": (file_of({"a": entry(0, 4), "b": entry(6, 8)}, 8), "leaves a hole"),
    "hole first": (file_of({"a": entry(2, 4)}, 4), "leaves a hole"),
    "past the end": (file_of({"a": entry(0, 400)}, 4), "tensors end at byte"),
    "bytes left over": (file_of({"a": entry(0, 4)}, 6), "tensors end at byte"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (file_of({"__metadata__": []}), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_header_is_one_line(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        parse(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400 + len(str(path))


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"a": entry(0, 1, [1], "F6_E2M3")}, 1))
    with pytest.raises(UnsupportedModelError, match=r"dtype 'F6_E2M3'; this version reads BOOL, U8"):
        parse(path)


def test_a_header_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 34))
        file.truncate((1 << 34) + 8)  # a sparse file
    with pytest.raises(CheckpointError, match="is the most that is read"):
        parse(path)


@given(st.binary(max_size=400), st.integers(0, 300))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_is_what_the_package_accepts(tmp_path: Path, noise: bytes, at: int) -> None:
    """A file with bytes changed: never another error, and no file that the package refuses."""
    content = bytearray(
        file_of({"a": entry(0, 8, [2, 4]), "b": entry(8, 16, [2], "F32"), "__metadata__": {"x": "y"}}, 16)
    )
    for index, byte in enumerate(noise[:6]):
        content[(at + index * byte) % len(content)] = byte
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        found = parse(path)
    except InferError:
        return
    with safetensors.safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == set(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_worst_header_of_the_size_that_is_read_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = b'{"a":{"dtype":"U8","data_offsets":[0,1],"shape":[' + b"1," * (1 << 23) + b"1]}}"
    path.write_bytes(file_of(text, 1))
    code = (
        "import sys; from pathlib import Path\n"
        "from infer.runtime.checkpoint.files import ModelFile\n"
        "from infer.runtime.checkpoint.safetensors import parse_header\n"
        "from infer.runtime.errors import CheckpointError\n"
        "try: parse_header(ModelFile(Path(sys.argv[1])))\n"
        "except CheckpointError: print(peak())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK + code, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 400_000  # KiB


def shards(folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        return open_shards(folder, sorted(path.name for path in folder.iterdir()), stack).tensors


def write_sharded(folder: Path) -> dict[str, Any]:
    """Two files and their index, which is returned."""
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (folder / one).write_bytes(file_of({"a": entry(0, 4), "b": entry(4, 8)}, 8))
    (folder / two).write_bytes(file_of({"c": entry(0, 4)}, 4))
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": one, "b": one, "c": two}}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def test_shards_are_joined(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read")
    found = shards(tmp_path)
    assert {name: tensor.file.name[6:11] for name, tensor in found.items()} == {
        "a": "00001",
        "b": "00001",
        "c": "00002",
    }


def _map(**changes: Any) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, index: dict[str, Any]) -> None:
        index["weight_map"].update(changes)
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not ...}
        (folder / INDEX).write_text(json.dumps(index))

    return change


def _twice(folder: Path, _: object) -> None:
    (folder / "model-00002-of-00002.safetensors").write_bytes(
        file_of({"c": entry(0, 4), "a": entry(4, 8)}, 8)
    )


def _link(folder: Path, _: object) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, _: (f / "model-00002-of-00002.safetensors").unlink(), r"is missing \(1 of 2 files are\)"),
        (_link, "no such file"),
        (_map(d="model-00002-of-00002.safetensors"), "has no tensor 'd'"),
        (_map(b=...), "tensor 'b' is not of this file"),
        (_map(b="model-00002-of-00002.safetensors"), "tensor 'b' is not of this file"),
        (_twice, "tensor 'a' is also in"),
        (_map(c="../model-00002-of-00002.safetensors"), "no name of a safetensors file beside it"),
        (_map(c="/etc/passwd"), "no name of a safetensors file beside it"),
        (_map(c="sub/x.safetensors"), "no name of a safetensors file beside it"),
        (_map(c="pytorch_model.bin"), "a pickle that can run code when it is read"),
        (_map(c=7), "no name of a safetensors file beside it"),
        (lambda f, _: (f / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}'), "'a' is there twice"),
        (lambda f, _: (f / INDEX).write_text("{}"), "has no weight_map"),
        (lambda f, _: (f / INDEX).write_text('{"weight_map": []}'), "has no weight_map"),
        (lambda f, _: (f / INDEX).write_text("[" * 100_000), "nested too deeply"),
        (lambda f, _: (f / "model.safetensors").write_bytes(file_of({})), "holds both"),
        (lambda f, _: (f / INDEX).unlink(), "holds 2 safetensors files and no model.safetensors.index.json"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_is_one_line(tmp_path: Path, change: Any, message: str) -> None:
    change(tmp_path, write_sharded(tmp_path))
    with pytest.raises(InferError, match=message) as caught:
        shards(tmp_path)
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "pytorch_model.bin.index.json"]
)
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02.")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(UnsupportedModelError, match="a pickle that can run code when it is read"):
        shards(tmp_path)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    whole = file_of({"a": entry(0, 8, [2, 4]), "b": entry(8, 16, [2], "F32")}, 16)
    path = tmp_path / "model.safetensors"
    for cut in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(whole[:cut])
        with pytest.raises(InferError):
            shards(tmp_path)
