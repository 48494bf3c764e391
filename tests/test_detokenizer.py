"""Streaming text equals decoding everything at once, cut at the first stop string, and is never late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.runtime.errors import UsageError
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.detokenizer import IncrementalDetokenizer


class BytesTokenizer(Tokenizer):
    """Token i stands for the i-th of the given byte strings."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)
        self.vocab_size = len(pieces)
        self.bos_id = self.eos_id = None
        self.add_bos = self.add_eos = False
        self.stop_ids = frozenset()
        self.kind = "bytes"

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(token_id)
        return self.pieces[token_id]

    def piece(self, token_id: int) -> str:
        return repr(self.pieces[token_id])

    def is_control(self, token_id: int) -> bool:
        return False

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Slow reference: the stop that is complete first, the longest of those; and where it begins."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def held(text: str, stops: Sequence[str]) -> int:
    """Slow reference: how much of the end of a text could still become a stop string."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
    )


# Few letters, so that stops overlap often; é, € and 😀 have two, three and four bytes, sharing some.
ALPHABET = "aab é€😀"
texts = st.text(alphabet=ALPHABET, max_size=12)
stop_lists = st.lists(st.text(alphabet=ALPHABET + "\ufffd", min_size=1, max_size=5), max_size=4)
raw = st.one_of(
    texts.map(str.encode),
    st.binary(max_size=4),
    st.sampled_from(
        [b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe2\x82", b"\xac", b"\xc3", b"\xa9", b"\xed\xa0\x80"]
    ),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(raw, max_size=14), stop_lists)
def test_deltas_join_to_the_whole_text_cut_at_the_first_stop(pieces: list[bytes], stops: list[str]) -> None:
    tokenizer = BytesTokenizer(pieces)
    ids = list(range(len(pieces)))
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
    emitted = "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.finish()
    whole = tokenizer.decode(ids)
    found = first_stop(whole, stops)
    assert emitted == (whole if found is None else whole[: found[0]])
    assert detokenizer.stopped == (None if found is None else found[1])


@settings(max_examples=600, deadline=None)
@given(st.text(alphabet=ALPHABET, max_size=40), stop_lists, st.lists(st.integers(1, 5), min_size=1))
def test_every_delta_is_all_that_is_certain(text: str, stops: list[str], sizes: list[int]) -> None:
    data = text.encode()
    pieces, start, turn = [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[start : start + size])
        start, turn = start + size, turn + 1
    detokenizer = IncrementalDetokenizer(BytesTokenizer(pieces), stop=stops)
    emitted, seen = "", b""
    for token_id, piece in enumerate(pieces):
        emitted += detokenizer.push(token_id)
        seen += piece
        known = seen.decode("utf-8", errors="ignore")  # the input is valid: only an unfinished end is ignored
        found = first_stop(known, stops)
        if found:
            assert emitted == known[: found[0]]
            assert detokenizer.stopped == found[1]
        else:
            assert emitted == known[: len(known) - held(known, stops)]
            assert detokenizer.stopped is None


@given(st.binary(max_size=30), st.integers(0, 30))
def test_any_bytes_cut_anywhere_decode_as_at_once(data: bytes, cut: int) -> None:
    tokenizer = BytesTokenizer([data[:cut], data[cut:]])
    detokenizer = IncrementalDetokenizer(tokenizer)
    emitted = detokenizer.push(0) + detokenizer.push(1) + detokenizer.finish()
    assert emitted == data.decode("utf-8", errors="replace")


def test_half_a_character_is_never_emitted() -> None:
    detokenizer = IncrementalDetokenizer(
        BytesTokenizer(["😀".encode()[:1], "😀".encode()[1:3], "😀".encode()[3:]])
    )
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.push(2)] == ["", "", "😀"]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer([b"a\xe2\x82"]))
    assert detokenizer.push(0) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_nothing_comes_after_a_stop() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer([b"one STOP two", b"three"]), stop=["STOP"])
    assert detokenizer.push(0) == "one "
    assert detokenizer.stopped == "STOP"
    assert detokenizer.push(1) == ""
    assert detokenizer.finish() == ""


def test_what_was_held_for_a_stop_is_given_back() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer([b"x\n", b"Us", b"ual\nUse"]), stop=["\nUser:"])
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.push(2)] == ["x", "", "\nUsual"]
    assert detokenizer.finish() == "\nUse"
    assert detokenizer.stopped is None


def test_the_longest_of_stops_that_end_together_wins() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer([b"xab"]), stop=["b", "ab"])
    assert detokenizer.push(0) == "x"
    assert detokenizer.stopped == "ab"


def test_the_stop_that_is_complete_first_wins() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer([b"xabcd"]), stop=["abcd", "bc"])
    assert detokenizer.push(0) == "xa"
    assert detokenizer.stopped == "bc"


@pytest.mark.parametrize(
    ("pieces", "text"), [([b" a", b" b"], "a b"), ([b"", b"  a"], " a"), ([b"a", b" b"], "a b")]
)
def test_one_leading_space_can_be_left_out(pieces: list[bytes], text: str) -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer(pieces), strip_leading_space=True)
    assert detokenizer.push(0) + detokenizer.push(1) + detokenizer.finish() == text


def test_an_empty_stop_string_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        IncrementalDetokenizer(BytesTokenizer([]), stop=["a", ""])


def test_an_id_out_of_range_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        IncrementalDetokenizer(BytesTokenizer([b"a"])).push(1)


def test_long_stops_and_many_tokens_stay_linear() -> None:
    detokenizer = IncrementalDetokenizer(BytesTokenizer([b"a"]), stop=["a" * 20_000 + "b"])
    emitted = [detokenizer.push(0) for _ in range(60_000)]
    assert sum(map(len, emitted)) == 40_000
    assert len(detokenizer.finish()) == 20_000
