"""Strings of a header found many at a time are those found one after the other, whatever they hold."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.runtime.checkpoint import gguf_header, gguf_strings
from infer.runtime.checkpoint.arrays import TextArray
from infer.runtime.checkpoint.gguf import open_gguf
from infer.runtime.checkpoint.gguf_strings import leading_strings
from infer.runtime.errors import CheckpointError

#: as in vocabularies; empty; NULs alone, at an end and inside; what looks like a length; more than 255 bytes
STRINGS = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from([b"", b"\x00", b"a\x00", b"\x00a", b"a" * 255, b"a" * 256, b"\x00" * 300]),
    st.integers(0, 20).map(lambda size: struct.pack("<Q", size)),
    st.integers(0, 20).map(lambda size: b"x" + struct.pack("<Q", size) + b"y" * size),
)


def packed(strings: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in strings)


def written(path: Path, strings: list[bytes]) -> Path:
    key = struct.pack("<Q", 6) + b"tokens" + struct.pack("<IIQ", 9, 8, len(strings))
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + packed(strings)
    path.write_bytes(head + bytes(-len(head) % 32))
    return path


@settings(deadline=None)
@given(st.lists(STRINGS, max_size=60), st.binary(max_size=40), st.integers(0, 70), st.integers(16, 400))
def test_what_is_found_is_right(strings: list[bytes], rest: bytes, asked: int, window: int) -> None:
    data, before = packed(strings), b"\x05" * 9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_strings, "WINDOW", window)
        count = min(asked, len(strings))
        text, lengths, end = leading_strings(before + data + rest, len(before), count)
    found = strings[: len(lengths)]
    assert len(found) <= count
    assert lengths == [len(string) for string in found]
    assert text == b"".join(found)
    assert end == len(before) + len(packed(found))


def test_plain_strings_are_found_at_once() -> None:
    strings = [b"token %d" % number for number in range(2000)]
    text, lengths, end = leading_strings(packed(strings) + bytes(1), 0, 2000)
    # the last one is known by what follows it, which here is none
    assert (text, len(lengths), end) == (b"".join(strings[:-1]), 1999, len(packed(strings[:-1])))


@pytest.mark.parametrize("vectorized", [False, True])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strings=st.lists(STRINGS, max_size=400), window=st.integers(16, 4000), batch=st.integers(1, 50))
def test_headers_read_either_way(
    tmp_path: Path, strings: list[bytes], window: int, batch: int, vectorized: bool
) -> None:
    path = written(tmp_path / "model.gguf", strings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_strings, "WINDOW", window)
        patch.setattr(gguf_header, "_BATCH", batch)
        patch.setattr(gguf_header, "_FIRST_READ", window)
        if not vectorized:
            patch.delitem(sys.modules, "numpy")
        with open_gguf(path) as checkpoint:
            found = checkpoint.metadata["tokens"]
            assert isinstance(found, TextArray)
            assert [found.encoded(place) for place in range(len(found))] == strings


@pytest.mark.parametrize("vectorized", [False, True])
def test_a_string_past_the_end_of_the_file(
    tmp_path: Path, vectorized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "model.gguf", [b"token"] * 3000 + [b"x" * 70])
    path.write_bytes(path.read_bytes()[:-64])
    if not vectorized:
        monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        open_gguf(path)
