"""The GGUF reader against the gguf package, and against files that are wrong in every way a file can be."""

from __future__ import annotations

import itertools
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.runtime.checkpoint import gguf_header
from infer.runtime.checkpoint.arrays import NumberArray, TextArray
from infer.runtime.checkpoint.base import Checkpoint, RawTensor
from infer.runtime.checkpoint.gguf import GGUFCheckpoint, open_gguf
from infer.runtime.checkpoint.gguf_types import REMOVED_TENSOR_TYPES, TENSOR_TYPES
from infer.runtime.errors import CheckpointError, InferError, UnsupportedModelError

V = gguf.GGUFValueType
SCALARS: list[tuple[Any, list[Any]]] = [
    (V.UINT8, [0, 255]),
    (V.INT8, [-128, 127]),
    (V.UINT16, [0, 65535]),
    (V.INT16, [-32768, 32767]),
    (V.UINT32, [0, 2**32 - 1]),
    (V.INT32, [-(2**31), 2**31 - 1]),
    (V.UINT64, [0, 2**64 - 1]),
    (V.INT64, [-(2**63), 2**63 - 1]),
    (V.FLOAT32, [0.5, -1.25, float("inf")]),
    (V.FLOAT64, [0.1, 1e300]),
    (V.BOOL, [True, False]),
    (V.STRING, ["plain", "Ġtwo words, 漢字 🙂", "nul\x00inside"]),
]


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(value: bytes) -> bytes:
    return u64(len(value)) + value


def entry(key: bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + u32(kind) + payload


@dataclass
class Info:
    """One tensor info as written; dims fastest first."""

    name: bytes = b"t"
    dims: tuple[int, ...] = (8,)
    kind: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        dims = b"".join(map(u64, self.dims))
        return string(self.name) + u32(len(self.dims)) + dims + u32(self.kind) + u64(self.offset)


def file_bytes(
    entries: Iterable[bytes] = (),
    infos: Iterable[Info] = (),
    data: bytes = b"",
    version: int = 3,
    align: int = 32,
) -> bytes:
    entries, infos = list(entries), list(infos)
    head = b"GGUF" + u32(version) + u64(len(infos)) + u64(len(entries))
    head += b"".join(entries) + b"".join(info.pack() for info in infos)
    return head + bytes(-len(head) % align) + data


SMALL = file_bytes(
    [
        entry(b"general.architecture", 8, string(b"llama")),
        entry(b"n", 4, u32(7)),
        entry(b"flags", 9, u32(7) + u64(2) + b"\x01\x00"),
        entry(b"tokens", 9, u32(8) + u64(3) + string(b"a") + string(b"") + string("é".encode())),
        entry(b"scores", 9, u32(6) + u64(2) + struct.pack("<2f", 1, 2)),
    ],
    [Info(b"a", (8, 2)), Info(b"b", (32,), 8, 64), Info(b"c", (1,), 24, 128)],
    bytes(range(64)) + bytes(range(34)) + bytes(30) + b"\x07" + bytes(31),
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write_file


def tensor_bytes(checkpoint: Checkpoint, tensor: RawTensor) -> bytes:
    buffer = bytearray(tensor.nbytes)
    checkpoint.read_into(tensor, memoryview(buffer))
    return bytes(buffer)


def error_of(path: Path, kind: type[InferError] = CheckpointError) -> str:
    with pytest.raises(InferError) as caught:
        open_gguf(path).close()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert message.isprintable()  # which a line break is not
    assert message.startswith(str(path.parent))
    return message


def assert_same_as_oracle(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    with open_gguf(path) as checkpoint:
        assert dict(checkpoint.metadata) == expected
        for key, value in checkpoint.metadata.items():
            plain = list(value) if isinstance(value, TextArray | NumberArray) else value
            assert type(plain) is type(expected[key])
        assert list(checkpoint.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors:
            ours = checkpoint.tensors[theirs.name]
            assert ours.shape == tuple(theirs.shape.tolist()[::-1])
            assert (ours.type, ours.offset) == (theirs.tensor_type.name, theirs.data_offset)
            assert tensor_bytes(checkpoint, ours) == theirs.data.tobytes()


# What the format allows


def test_every_value_type_as_the_oracle_reads_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for kind, values in SCALARS:
        for index, value in enumerate(values):
            writer.add_key_value(f"{kind.name}.{index}", value, kind)
        writer.add_key_value(f"{kind.name}.array", values, V.ARRAY, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_oracle(tmp_path / "m.gguf")


def test_every_tensor_type_as_the_oracle_reads_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    random_bytes = np.random.default_rng(0)
    for kind, (_, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # the package counts its two half-precision fields as float32
            data = random_bytes.integers(0, 256, (3, 2, nbytes), dtype=np.uint8)
            writer.add_tensor(f"{kind.name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_oracle(tmp_path / "m.gguf")


def test_type_table_agrees_with_the_oracle() -> None:
    for kind, size in gguf.GGML_QUANT_SIZES.items():
        ours = TENSOR_TYPES[kind.value]
        assert ours.name == kind.name
        assert (ours.block, ours.nbytes) == ((32, 36) if kind.name == "Q8_1" else size)
    assert not TENSOR_TYPES.keys() & REMOVED_TENSOR_TYPES.keys()


@pytest.mark.parametrize("align", [8, 64, 24])
def test_alignment_of_the_file(write: Callable[[bytes], Path], align: int) -> None:
    infos = [Info(b"a", (5,), 24), Info(b"b", (2,), 0, align)]
    data = b"a" * 5 + bytes(align - 5) + b"b" * 8
    path = write(file_bytes([entry(b"general.alignment", 4, u32(align))], infos, data, align=align))
    with open_gguf(path) as checkpoint:
        assert tensor_bytes(checkpoint, checkpoint.tensors["b"]) == b"b" * 8


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3(write: Callable[[bytes], Path], version: int) -> None:
    with open_gguf(write(SMALL[:4] + u32(version) + SMALL[8:])) as checkpoint:
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.version == version
        assert checkpoint.metadata == {
            "general.architecture": "llama",
            "n": 7,
            "flags": [True, False],
            "tokens": ["a", "", "é"],
            "scores": [1.0, 2.0],
        }
        assert checkpoint.tensors["a"].shape == (2, 8)
        assert tensor_bytes(checkpoint, checkpoint.tensors["b"]) == bytes(range(34))
        assert checkpoint.nbytes == 64 + 34 + 1


def test_empty_arrays_and_no_tensors(write: Callable[[bytes], Path]) -> None:
    entries = [entry(str(kind).encode(), 9, u32(kind) + u64(0)) for kind in range(13) if kind != 9]
    with open_gguf(write(file_bytes(entries))) as checkpoint:
        assert list(checkpoint.metadata.values()) == [[]] * 12
        assert checkpoint.tensors == {}


def test_strings_that_are_not_utf8_keep_their_bytes(write: Callable[[bytes], Path]) -> None:
    values = [b"\xff\xfe", "é".encode()[:1], b"\xa9", b"a\x00b", b"\xed\xa0\x80", b""]
    tokens = entry(b"tokens", 9, u32(8) + u64(len(values)) + b"".join(map(string, values)))
    with open_gguf(write(file_bytes([tokens, entry(b"one", 8, string(b"\xe2\x82"))]))) as checkpoint:
        read = checkpoint.metadata["tokens"]
        assert isinstance(read, TextArray)
        assert not read.is_utf8
        assert [text.encode("utf-8", "surrogateescape") for text in read] == values
        assert checkpoint.metadata["one"] == "\udce2\udc82"


def test_a_header_read_in_many_pieces(
    write: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [bytes([65 + n % 26]) * (n * 7919 % 300) for n in range(3000)]
    tokens = entry(b"tokens", 9, u32(8) + u64(len(texts)) + b"".join(map(string, texts)))
    path = write(file_bytes([tokens, entry(b"n", 4, u32(7))], [Info()], bytes(32)))
    monkeypatch.setattr(gguf_header, "_FIRST_READ", 1)
    monkeypatch.setattr(gguf_header, "_BATCH", 7)
    with open_gguf(path) as checkpoint:
        assert checkpoint.metadata == {"tokens": [text.decode() for text in texts], "n": 7}


def test_metadata_and_tensors_cannot_be_changed(write: Callable[[bytes], Path]) -> None:
    with open_gguf(write(SMALL)) as checkpoint, pytest.raises(TypeError):
        checkpoint.metadata["n"] = 8  # type: ignore[index]


@pytest.mark.model
def test_real_model_as_the_oracle_reads_it(smollm2_path: Path) -> None:
    assert_same_as_oracle(smollm2_path)


# Reading tensors


def test_ranges_of_a_tensor(write: Callable[[bytes], Path]) -> None:
    with open_gguf(write(SMALL)) as checkpoint:
        tensor = checkpoint.tensors["a"]
        for start, end in itertools.combinations_with_replacement((0, 1, 33, 64), 2):
            buffer = bytearray(end - start)
            checkpoint.read_into(tensor, memoryview(buffer), start)
            assert buffer == bytes(range(start, end))
        wide = np.zeros((2, 4), np.float32)
        checkpoint.read_into(tensor, wide.data, 32)
        assert wide.tobytes() == bytes(range(32, 64))
        for size, start in [(65, 0), (1, 64), (1, -1), (0, 65)]:
            with pytest.raises(CheckpointError, match="tensor 'a' has 64 bytes"):
                checkpoint.read_into(tensor, memoryview(bytearray(size)), start)
        for bad in (memoryview(bytes(8)), memoryview(bytearray(8))[::2]):
            with pytest.raises(ValueError, match="writable and contiguous"):
                checkpoint.read_into(tensor, bad)
        foreign = RawTensor("a", (4096,), "I8", 4096, checkpoint.path, 0)
        with pytest.raises(ValueError, match="not of this checkpoint"):
            checkpoint.read_into(foreign, memoryview(bytearray(4096)))


def test_reads_from_several_threads(write: Callable[[bytes], Path]) -> None:
    content = random.Random(0).randbytes(1 << 20)
    with open_gguf(write(file_bytes([], [Info(b"t", (1 << 20,), 24)], content))) as checkpoint:
        tensor = checkpoint.tensors["t"]

        def piece(start: int) -> bytes:
            buffer = bytearray(4096)
            checkpoint.read_into(tensor, memoryview(buffer), start)
            return bytes(buffer)

        with ThreadPoolExecutor(8) as pool:
            assert b"".join(pool.map(piece, range(0, 1 << 20, 4096))) == content


def test_file_that_shrinks_after_it_was_opened(write: Callable[[bytes], Path]) -> None:
    path = write(SMALL)
    with open_gguf(path) as checkpoint:
        tensor = checkpoint.tensors["a"]
        os.truncate(path, tensor.offset + 10)
        with pytest.raises(CheckpointError, match=f"ended at byte {tensor.offset + 10} while") as caught:
            checkpoint.read_into(tensor, memoryview(bytearray(64)))
        assert str(caught.value).isprintable()


def test_close_is_final_and_may_be_repeated(write: Callable[[bytes], Path]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    checkpoint = open_gguf(write(SMALL))
    assert set(os.listdir("/proc/self/fd")) != before
    checkpoint.close()
    checkpoint.close()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="is closed"):
        checkpoint.read_into(checkpoint.tensors["a"], memoryview(bytearray(1)))


# Files that are wrong


def test_truncated_at_every_byte(write: Callable[[bytes], Path]) -> None:
    path = write(SMALL)
    with open_gguf(path) as checkpoint:
        last = checkpoint.tensors["c"]
        end = last.offset + last.nbytes
    for size in range(len(SMALL) - 1, 0, -1):
        os.truncate(path, size)
        if size >= end:  # only padding is missing
            open_gguf(path).close()
        else:
            assert "truncated" in error_of(path)
    assert "empty" in error_of(write(b""))


def test_truncated_in_the_data_says_how_much_is_there(write: Callable[[bytes], Path]) -> None:
    size = len(SMALL) - 31
    assert f"ends at byte {size - 5} of {size}; download it again" in error_of(write(SMALL[: size - 5]))


F16_ROW = Info(b"a", (8,), 1)
WRONG: dict[str, tuple[bytes, str]] = {
    "tensor count": (b"GGUF" + u32(3) + u64(2**63) + u64(0), "truncated or damaged"),
    "entry count": (b"GGUF" + u32(3) + u64(0) + u64(2**64 - 1), "truncated or damaged"),
    "key length": (file_bytes([u64(2**63) + bytes(40)]), "name of 9223372036854775808 bytes"),
    "long key": (file_bytes([entry(b"k" * 65536, 4, u32(1))]), "name of 65536 bytes"),
    "empty key": (file_bytes([entry(b"", 4, u32(1))]), "name of 0 bytes"),
    "key not UTF-8": (file_bytes([entry(b"\xff", 4, u32(1))]), "not UTF-8"),
    "string length": (file_bytes([entry(b"k", 8, u64(2**63))]), "metadata key 'k' needs"),
    "array length": (file_bytes([entry(b"k", 9, u32(4) + u64(2**62))]), "metadata key 'k' needs"),
    "strings length": (file_bytes([entry(b"k", 9, u32(8) + u64(2**61))]), "metadata key 'k' needs"),
    "bools length": (file_bytes([entry(b"k", 9, u32(7) + u64(2**63))]), "metadata key 'k' needs"),
    "string in array": (
        file_bytes([entry(b"k", 9, u32(8) + u64(2) + u64(1) + b"a" + u64(2**64 - 1))]),
        "'k' needs",
    ),
    "value type": (file_bytes([entry(b"k", 13, u32(1))]), "unknown value type 13"),
    "element type": (file_bytes([entry(b"k", 9, u32(99) + u64(1) + u32(0))]), "unknown value type 99"),
    "nested array": (file_bytes([entry(b"k", 9, u32(9) + u64(1) + u32(4) + u64(0))]), "array of arrays"),
    "bool": (file_bytes([entry(b"k", 7, b"\x02")]), "neither 0 nor 1"),
    "bools": (file_bytes([entry(b"k", 9, u32(7) + u64(3) + b"\x01\x00\xff")]), "neither 0 nor 1"),
    "duplicate key": (file_bytes([entry(b"k\n", 4, u32(1))] * 2), "metadata key 'k\\n' appears twice"),
    "alignment type": (file_bytes([entry(b"general.alignment", 10, u64(32))]), "not a uint32"),
    "alignment text": (file_bytes([entry(b"general.alignment", 8, string(b"32"))]), "not a uint32"),
    "alignment 0": (file_bytes([entry(b"general.alignment", 4, u32(0))]), "is 0, not a multiple of 8"),
    "alignment 4": (file_bytes([entry(b"general.alignment", 4, u32(4))]), "is 4, not a multiple of 8"),
    "no dimensions": (file_bytes([], [Info(dims=())], bytes(64)), "0 dimensions"),
    "five dimensions": (file_bytes([], [Info(dims=(1,) * 5)], bytes(64)), "5 dimensions"),
    "dimension count": (file_bytes([], [Info(dims=(1,) * 1000)], bytes(64)), "1000 dimensions"),
    "zero dimension": (file_bytes([], [Info(dims=(8, 0))]), "shape [0, 8]: a dimension is zero"),
    "huge dimensions": (file_bytes([], [Info(dims=(2**63,) * 4)], bytes(64)), "truncated"),
    "overflowing dimensions": (file_bytes([], [Info(dims=(2**32, 2**32))], bytes(64)), "truncated"),
    "not whole blocks": (
        file_bytes([], [Info(dims=(40, 4), kind=2)], bytes(96)),
        "Q4_0 needs a multiple of 32",
    ),
    "duplicate name": (file_bytes([], [Info(), Info(offset=32)], bytes(64)), "tensor 't' appears twice"),
    "name not UTF-8": (file_bytes([], [Info(name=b"\xff")], bytes(32)), "not UTF-8"),
    "empty name": (file_bytes([], [Info(name=b"")], bytes(32)), "name of 0 bytes"),
    "overlap": (file_bytes([], [Info(b"a", (16,)), Info(b"b", offset=32)], bytes(96)), "not 64: it overlaps"),
    "gap": (file_bytes([], [Info(b"a"), Info(b"b", offset=64)], bytes(96)), "not 32: it leaves a gap"),
    "first not at 0": (file_bytes([], [Info(offset=32)], bytes(64)), "not 0: it leaves a gap"),
    "misaligned": (file_bytes([], [F16_ROW, Info(b"b", offset=16)], bytes(64)), "not 32: it is not aligned"),
    "offset": (file_bytes([], [Info(offset=2**64 - 32)], bytes(64)), "leaves a gap"),
    "data missing": (file_bytes([], [Info()]), "truncated"),
    "data left over": (file_bytes([], [Info()], bytes(33)), "1 unexpected bytes after the last tensor"),
    "data and no tensors": (file_bytes([entry(b"k", 4, u32(1))], [], b"x"), "1 unexpected bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_files(write: Callable[[bytes], Path], case: str) -> None:
    content, message = WRONG[case]
    assert message in error_of(write(content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (file_bytes([], [Info(b"blk.0\n", kind=99)], bytes(32)), r"tensor 'blk.0\n' has the unknown type 99"),
        (file_bytes([], [Info(kind=31)], bytes(32)), "withdrawn type 31 (Q4_0_4_4)"),
        (file_bytes(version=1), "GGUF version 1"),
        (file_bytes(version=0), "GGUF version 0"),
        (file_bytes(version=4), "GGUF version 4; this program reads 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_unsupported_files(write: Callable[[bytes], Path], content: bytes, message: str) -> None:
    assert message in error_of(write(content), UnsupportedModelError)


def test_header_larger_than_allowed(write: Callable[[bytes], Path]) -> None:
    path = write(file_bytes([entry(b"k", 8, u64(300 << 20))]))
    os.truncate(path, 400 << 20)  # sparse: no bytes are written
    tracemalloc.start()
    try:
        assert "larger than 256 MiB" in error_of(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def mutations() -> st.SearchStrategy[bytes]:
    """SMALL with some bytes or whole fields overwritten, pieces removed, repeated or cut off."""
    place = st.integers(0, len(SMALL) - 1)
    fields = st.sampled_from([u64(2**64 - 1), u64(2**63), u64(2**31), u64(0), u64(1), u32(8), u32(9), u32(7)])
    overwrite = st.tuples(st.just("write"), place, st.one_of(st.binary(min_size=1, max_size=9), fields))
    other = st.tuples(st.sampled_from(["remove", "repeat", "cut"]), place, st.binary(max_size=40))

    def apply(changes: list[tuple[str, int, bytes]]) -> bytes:
        content = SMALL
        for what, at, text in changes:
            if what == "write":
                content = content[:at] + text + content[at + len(text) :]
            elif what == "remove":
                content = content[:at] + content[at + len(text) :]
            elif what == "repeat":
                content = content[: at + len(text)] + content[at:]
            else:
                content = content[:at]
        return content

    return st.lists(st.one_of(overwrite, overwrite, other), min_size=1, max_size=4).map(apply)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutations())
def test_mutated_files_open_or_fail_in_one_line(write: Callable[[bytes], Path], content: bytes) -> None:
    path = write(content)
    tracemalloc.start()
    try:
        with open_gguf(path) as checkpoint:
            for tensor in checkpoint.tensors.values():
                assert tensor.nbytes <= len(content)
                assert len(tensor_bytes(checkpoint, tensor)) == tensor.nbytes
    except InferError as error:
        assert str(error).isprintable()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20 * len(content) + (1 << 20)


def repeated(kind: int, element: bytes, count: int) -> bytes:
    return file_bytes([entry(b"k", 9, u32(kind) + u64(count) + element * count)])


@pytest.mark.parametrize(
    "content",
    [
        repeated(0, b"\xff", 1 << 20),
        repeated(7, b"\x01", 1 << 20),
        repeated(6, struct.pack("<f", 0.1), 1 << 18),
        repeated(8, string(b""), 1 << 16),
        repeated(8, string(b"ab"), 1 << 16),
        repeated(8, string("🙂".encode()), 1 << 16),
        repeated(8, string(b"\xff\xff"), 1 << 16),
        file_bytes([entry(b"%05d" % n, 0, b"\xff") for n in range(10000)]),
        file_bytes([], [Info(b"%04x" % n, (1,), 24, 32 * n) for n in range(10000)]),
        file_bytes([], [Info(b"%04x" % n, (1,), 24, 32 * n) for n in range(10000)], bytes(32 * 10000)),
    ],
    ids=["bytes", "bools", "floats", "empty", "short", "emoji", "not UTF-8", "keys", "infos", "tensors"],
)
def test_memory_stays_in_proportion_to_the_file(write: Callable[[bytes], Path], content: bytes) -> None:
    path = write(content)
    tracemalloc.start()
    start = time.process_time()
    try:
        open_gguf(path).close()
    except CheckpointError as error:
        assert "truncated" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20 * len(content) + (1 << 20)
    assert time.process_time() - start < 5


# Split files


def split_file(number: int, count: int, names: list[bytes], total: int | None, kind: int = 2) -> bytes:
    form = "<H" if kind == 2 else "<Q"
    entries = [
        entry(b"split.no", kind, struct.pack(form, number)),
        entry(b"split.count", kind, struct.pack(form, count)),
        entry(b"shard", 4, u32(number)),
    ]
    if total is not None:
        entries.append(entry(b"split.tensors.count", 5, struct.pack("<i", total)))
    infos = [Info(name, (4,), 24, 32 * index) for index, name in enumerate(names)]
    return file_bytes(entries, infos, b"".join(name * 4 + bytes(28) for name in names))


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, (path, names) in enumerate(zip(paths, [[b"a", b"b"], [b"c"], []], strict=True)):
        path.write_bytes(split_file(number, 3, names, 3))
    return paths


@pytest.mark.parametrize("given_shard", [0, 1, 2])
def test_any_shard_opens_the_whole_model(split: list[Path], given_shard: int) -> None:
    with open_gguf(split[given_shard]) as checkpoint:
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.path == split[0]
        assert checkpoint.files == tuple(split)
        assert checkpoint.metadata["shard"] == 0
        read = {name: tensor_bytes(checkpoint, tensor) for name, tensor in checkpoint.tensors.items()}
        assert read == {"a": b"aaaa", "b": b"bbbb", "c": b"cccc"}
        assert checkpoint.tensors["c"].file == split[1]


@pytest.mark.parametrize("small_first", [False, True])
def test_split_files_of_the_oracle(tmp_path: Path, small_first: bool) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", split_max_tensors=2, small_first_shard=small_first)
    data = {f"t{index}": np.full((index + 1, 32), index, np.float32) for index in range(5)}
    for name, values in data.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    last = max(tmp_path.iterdir())
    with open_gguf(last) as checkpoint:
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert len(checkpoint.files) == (4 if small_first else 3)
        assert checkpoint.metadata["general.architecture"] == "llama"
        for name, values in data.items():
            assert tensor_bytes(checkpoint, checkpoint.tensors[name]) == values.tobytes()


def test_a_merged_file_is_no_split_file(write: Callable[[bytes], Path]) -> None:
    for count in (0, 1):
        with open_gguf(write(split_file(0, count, [b"a"], 1))) as checkpoint:
            assert list(checkpoint.tensors) == ["a"]


def test_missing_shard_is_named(split: list[Path]) -> None:
    split[1].unlink()
    for path in (split[0], split[2]):
        message = error_of(path)
        assert message.startswith(f"{split[1]}: is missing (1 of 3 shards are)")


@pytest.mark.parametrize(
    ("shard", "content", "message"),
    [
        (1, split_file(2, 3, [b"c"], 3), "is shard 3 of 3, not shard 2 of 3"),
        (1, split_file(1, 4, [b"c"], 3), "is shard 2 of 4, not shard 2 of 3"),
        (1, SMALL, "is a whole model, not shard 2 of 3"),
        (1, split_file(1, 3, [b"a"], 3), "tensor 'a' is also in"),
        (
            0,
            split_file(0, 3, [b"a", b"b", b"d"], 3),
            "promises 3 tensors (split.tensors.count), the shards hold",
        ),
        (1, split_file(1, 3, [b"c"], 4), "promises 4 tensors"),
        (0, split_file(0, 3, [b"a", b"b"], None), "promises no number of tensors"),
        (1, SMALL[:100], "truncated"),
        (1, split_file(1, 3, [b"c"], 3, kind=12), "'split.no' holds float where int belongs"),
        (2, b"", "is empty"),
    ],
)
def test_shards_that_do_not_fit(split: list[Path], shard: int, content: bytes, message: str) -> None:
    split[shard].write_bytes(content)
    before = set(os.listdir("/proc/self/fd"))
    message_given = error_of(split[0])
    assert message in message_given
    assert message_given.startswith(str(split[shard]))
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-00001-of-00003.gguf", "m-00002-of-00004.gguf", "m-2-of-3.gguf"]
)
def test_shard_under_another_name(split: list[Path], name: str) -> None:
    path = split[1].rename(split[1].with_name(name))
    assert "is shard 2 of 3, but its name does not say so; name it …-00002-of-00003.gguf" in error_of(path)
