"""SentencePiece BPE of short texts: ids equal to those that the library gives the same text in a long one."""

from __future__ import annotations

import pytest

from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.load import load_tokenizer

KEY = "tokenizer.ggml."


def with_bytes(pieces: list[str], scores: list[float], types: list[int]) -> dict[str, object]:
    keys = {
        "model": "llama", "tokens": ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "token_type": [2] + [6] * 256 + types, "scores": [0.0] * 257 + scores, "add_space_prefix": False,
    }  # fmt: skip
    return {KEY + key: value for key, value in keys.items()}


def test_pieces_that_go_on_after_a_space_are_found() -> None:
    """A text is cut into words where no piece reaches across, and only there."""
    scores = [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0]
    found = with_bytes(["a", "b", "▁", "b▁", "b▁a", "▁a", "▁b"], scores, [1] * 7)
    short, library = load_tokenizer(found), load_tokenizer(found)
    library.encode("a" * (1 << 16))  # from here on the library encodes
    for text in ("b a", "a b", "ab ab", "b  a", "a a b b a", "bb aa bb", " b a"):
        assert short.encode(text) == library.encode(text)
    assert [short.piece(token) for token in short.encode("ab aab")] == ["a", "b▁a", "a", "b"]


def test_scores_of_minus_zero_rank_as_in_the_library() -> None:
    found = with_bytes(["a", "b", "c", "ab", "bc"], [-9.0, -9.0, -9.0, -0.0, 0.0], [1] * 5)
    short, library = load_tokenizer(found), load_tokenizer(found)
    library.encode("a" * (1 << 16))
    assert [short.piece(token) for token in short.encode("abc")] == ["a", "bc"]
    assert short.encode("abcabab") == library.encode("abcabab")


def test_defined_pieces_that_the_library_takes_for_one_are_refused() -> None:
    with pytest.raises(TokenizerError, match="already defined"):
        load_tokenizer(with_bytes([" ▁", "▁ "], [0.0, 0.0], [4, 4]))


@pytest.mark.parametrize(
    "pieces",
    [
        ["a" * size + end for size in range(1, 500) for end in "bc"],
        [chr(0x20000 + place) for place in range(20_000)],
        [chr(0x20000 + place) + "▁" for place in range(20_000)],
    ],
    ids=["lengths", "characters", "before a space"],
)
def test_many_defined_pieces_take_no_longer_than_few(pieces: list[str]) -> None:
    for kind in (1, 4):
        found = with_bytes(["a", "▁", *pieces], [-1.0] * (len(pieces) + 2), [1, 1] + [kind] * len(pieces))
        short, library = load_tokenizer(found), load_tokenizer(found)
        library.encode("a" * (1 << 16))
        text = "a" * 20_000 + pieces[-1] + " a" * 5_000
        assert short.encode(text) == library.encode(text)
