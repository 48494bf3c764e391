"""Vocabularies kept as bytes: arrays of texts and numbers, and the index of a text, against lists and dicts."""

from __future__ import annotations

from array import array
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.runtime.checkpoint.arrays import NumberArray, TextArray
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.load import load_tokenizer
from infer.runtime.tokenizer.merging import merge
from infer.runtime.tokenizer.token_index import TokenIndex

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=40)


@given(texts)
def test_an_array_of_texts_is_the_list(values: list[str]) -> None:
    found = TextArray.of(values)
    assert found == values
    assert list(found) == [found[place] for place in range(len(found))] == values
    assert found[1:3] == values[1:3]
    assert found.is_utf8
    assert found.longest == max((len(value.encode()) for value in values), default=0)
    assert found.empty() == [place for place, value in enumerate(values) if not value]
    assert found != [*values, "x"]


def test_what_is_not_utf8_is_seen_also_where_the_whole_is() -> None:
    halves = "é".encode()
    cut = TextArray.joined([(b"a" + halves[:1], [2]), (halves[1:] + b"b", [2])])
    assert not cut.is_utf8
    assert [text.encode("utf-8", "surrogateescape") for text in cut] == [b"a\xc3", b"\xa9b"]
    assert not TextArray.joined([(b"\xff", [1])]).is_utf8
    assert not TextArray.joined([(halves[:1], [0, 1])]).is_utf8
    with pytest.raises(UnicodeEncodeError):
        TextArray.of(["\udcc3"])
    with pytest.raises(IndexError):
        cut[2]
    with pytest.raises(IndexError):
        cut[-3]
    assert cut[-2] == cut[0]


def test_an_array_of_numbers_is_the_list() -> None:
    numbers: NumberArray[int] = NumberArray(array("H", [1, 2, 65535]))
    assert numbers == [1, 2, 65535]
    assert (numbers[0], numbers[-1], numbers[1:], len(numbers)) == (1, 65535, [2, 65535], 3)
    assert numbers.kind is int
    assert NumberArray(array("f", [1.0])).kind is float
    assert NumberArray(array("f", [1.0])) != NumberArray(array("B", [1]))


@given(texts, st.text(max_size=8))
def test_the_index_is_the_dict(values: list[str], other: str) -> None:
    index = TokenIndex(TextArray.of(values))
    known = {value: place for place, value in enumerate(values)}  # of equal ones the last
    assert {value: index[value] for value in values} == known
    assert (other in index) == (other in known)
    assert index.get(other, -2) == known.get(other, -2)
    assert index.repeated() is None if len(known) == len(values) else values.count(index.repeated() or "") > 1


def test_texts_of_any_length_are_found() -> None:
    values = [text * size for text in ("a", "é") for size in (1, 3, 4, 5, 511, 512, 1023, 1024, 1025, 5000)]
    index = TokenIndex(TextArray.of(values))
    assert [index[value] for value in values] == list(range(len(values)))
    assert "a" * 1022 not in index


PIECES = ["a", "b", "ab", "abab", "é", "aé"]


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        ([], True),
        (["a b", "ab ab", "a é"], True),
        (["a b", "b a"], False),  # joined they are no piece
        (["a c"], False),
        ([" b"], False),
        (["a "], False),
        (["ab"], False),
        (["a  b"], False),
        (["a b", "a b ab"], False),
        (["a " + "b" * 5000], False),
    ],
)
def test_pairs_of_pieces_are_told(pairs: list[str], found: bool) -> None:
    assert TokenIndex(TextArray.of(PIECES)).holds_pairs(TextArray.of(pairs)) is found
    assert TokenIndex(TextArray.of([])).holds_pairs(TextArray.of(pairs)) is (not pairs)


def colliding(count: int) -> list[str]:
    """Printable texts of six characters with one hash."""
    first = int.from_bytes(b"aaaaaa", "big")
    prime = (1 << 31) - 19
    numbers = (value.to_bytes(6, "big") for value in range(first, 1 << 48, prime))
    printable = (text.decode() for text in numbers if text.isascii() and text.decode().isprintable())
    return list(islice(printable, count))


def test_a_vocabulary_made_to_be_slow_is_refused() -> None:
    few, many = colliding(16), colliding(40)
    assert TokenIndex(TextArray.of(few))[few[-1]] == 15
    assert not TokenIndex(TextArray.of(few)).crowded
    assert TokenIndex(TextArray.of(many)).crowded
    keys = {"model": "gpt2", "pre": "gpt-2", "merges": []}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    with pytest.raises(TokenizerError, match="looking one up takes long"):
        load_tokenizer({**metadata, "tokenizer.ggml.tokens": many})
    with pytest.raises(TokenizerError, match="'a' is there twice"):
        load_tokenizer({**metadata, "tokenizer.ggml.tokens": ["a"] * 40})


@pytest.mark.parametrize(
    "tokens",
    [
        ["-" * size for size in range(2, 513)],
        ["Ġ" * size for size in range(2, 513)],
        [f"<{row}_{column}>" for row in range(100, 200) for column in range(100, 200)],
    ],
    ids=["dashes", "spaces", "places"],
)
def test_vocabularies_of_one_pattern_are_not_taken_for_such(tokens: list[str]) -> None:
    assert not TokenIndex(TextArray.of(tokens)).crowded


@given(st.text("ab", max_size=30), st.dictionaries(st.text("ab", min_size=2, max_size=4), st.integers(0, 9)))
def test_merging_takes_the_cheapest_pair_first_and_of_equal_ones_the_leftmost(
    text: str, costs: dict[str, int]
) -> None:
    def slowly(symbols: list[str]) -> list[str]:
        while True:
            pairs = [symbols[i] + symbols[i + 1] for i in range(len(symbols) - 1)]
            known = [(costs[pair], place) for place, pair in enumerate(pairs) if pair in costs]
            if not known:
                return symbols
            place = min(known)[1]
            symbols = [*symbols[:place], pairs[place], *symbols[place + 2 :]]

    ids = {joined: place for place, joined in enumerate(costs)}

    def pair_of(left: str, right: str) -> tuple[float, int] | None:
        joined = left + right
        return (costs[joined], ids[joined]) if joined in costs else None

    assert merge(list(text), pair_of) == slowly(list(text))
