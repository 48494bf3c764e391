"""SentencePiece vocabularies from GGUF metadata and `tokenizer.model` files: ids equal to the library's own."""

from __future__ import annotations

import io
import json
import logging
import math
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from charsmaps import units
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.runtime.checkpoint.folder.texts import read_texts
from infer.runtime.errors import CheckpointError, InferError, ModelNotFoundError, TokenizerError
from infer.runtime.tokenizer import sentencepiece as sentencepiece_module
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.charsmap import check_charsmap
from infer.runtime.tokenizer.detokenizer import IncrementalDetokenizer
from infer.runtime.tokenizer.load import load_tokenizer, load_tokenizer_model
from infer.runtime.tokenizer.model_proto import BPE, ModelProto, parse, serialize
from infer.runtime.tokenizer.sentencepiece import SentencePieceTokenizer
from infer.runtime.tokenizer.tokenizer_model import read_tokenizer_model

KEY = "tokenizer.ggml."
DEFINED = ["<tool>", "<tool>x", "▁▁", "\n\n"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It'll do; they're 123 and 4567 of 89.",
    "def add(a, b): return a + b  # sum    for i in range(10): print(i, end='x')",
    "Le café à l'été, naïve œuvre; größer, Übermaß. 漢字かな交じり文、한국어 문장. שלום עולם مرحبا",
    "    spaces   and  tabs    😀👩‍👩‍👧 🇩🇪 … — “quotes” ½ Ⅻ ٣٤ ＡＢＣ ﷺ",
]
TEXTS = [
    "",
    " ",
    "\n",
    "\x00",
    "a\x00b\x01\x1d\x7f",
    "I'LL they're DON'T it's 'S 's'S we'Ve",
    "1 12 123 1234 12345 3.14159 1,000,000 ½ Ⅻ ٣٤٥ 1a2b3",
    "  two   three    four     ",
    "a\n\nb\n \n\n  c\r\n\r\nd\t\t e \t\n",
    "trailing spaces   \n   leading",
    "漢字かな交じり文、한국어 문장。１２３ＡＢＣ",
    "cafe\u0301 café \u1100\u1161 가 A\u030a Å \u212b n\u0303",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷",
    "def f(x):\n\treturn x**2 != {'a': [1, 2]}  # hi\n\n\nclass A: ...\n",
    "שלום עולם مرحبا بالعالم \u200fRTL\u200e",
    "\u00a0\u2003\u3000x\u2028y\u0085z",
    '$100 + 20% = ~<>^|` \\ @#&*()_-=[]{};:"?/',
    "CamelCaseHTTPServer snake_case_name SCREAMING_CASE",
    "<tool>x <tool> <to ol> <c> </s> <s> <unk> <0x41>",
    "ſ K 'ſ a'\u017f ﷺ",
    "\ufeffbom \ufffd \U0010ffff",
    "▁a ▁▁ b",
    "supercalifragilisticexpialidocious" * 20,
    "a" * 3000 + " " * 300 + "\n" * 41,
]
mixed_text = st.text(
    alphabet=st.one_of(
        st.sampled_from("abcXYZ'sStTlLdD0123  \n\r\t.,!?-_/\\<tool>céßñ漢字한е\u0301\u00a0½😀\u200d🇩\x00▁Ａ"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


@dataclass(frozen=True)
class Case:
    """What a small model is trained with."""

    model_type: str = "bpe"
    byte_fallback: bool = True
    dummy_prefix: bool = True
    strip: bool = False
    rule: str = "identity"
    defined: bool = True


CASES = [
    Case(),
    Case(defined=False),
    Case(dummy_prefix=False),
    Case(byte_fallback=False),
    Case(strip=True, rule="nmt_nfkc"),
    Case("unigram"),
    Case("unigram", dummy_prefix=False),
    Case("unigram", byte_fallback=False, strip=True, rule="nmt_nfkc"),
    Case("unigram", byte_fallback=False, strip=True, rule="nfkc_cf", defined=False),
]


@cache
def trained(case: Case) -> bytes:
    """A `tokenizer.model` file of some 700 pieces, <unk>, <s> and </s> first."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=written,
        model_type=case.model_type,
        vocab_size=700,
        hard_vocab_limit=False,
        byte_fallback=case.byte_fallback,
        add_dummy_prefix=case.dummy_prefix,
        remove_extra_whitespaces=case.strip,
        normalization_rule_name=case.rule,
        user_defined_symbols=DEFINED if case.defined else [],
        control_symbols=["<c>"],
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    return written.getvalue()


@cache
def reference(case: Case) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(trained(case))
    return processor


def metadata(case: Case = CASES[0], **changes: Any) -> dict[str, object]:
    """The model as a GGUF file's keys: as the library reports it, spaces of user-defined pieces as spaces."""
    library = reference(case)
    ids = range(library.vocab_size())
    tokens = [library.id_to_piece(i) for i in ids]
    types = [
        2 if library.is_unknown(i)
        else 3 if library.is_control(i)
        else 6 if library.is_byte(i)
        else 4 if token in DEFINED
        else 1
        for i, token in zip(ids, tokens, strict=True)
    ]  # fmt: skip
    found: dict[str, object] = {
        "model": "llama" if case.model_type == "bpe" else "t5",
        "tokens": [t.replace("▁", " ") if kind == 4 else t for t, kind in zip(tokens, types, strict=True)],
        "scores": [library.get_score(i) for i in ids],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": case.dummy_prefix,
        "remove_extra_whitespaces": case.strip,
    }
    if case.rule != "identity":
        found["precompiled_charsmap"] = list(parse(trained(case)).charsmap)
    found.update(changes)
    return {KEY + key: value for key, value in found.items() if value is not None}


@cache
def built(case: Case) -> SentencePieceTokenizer:
    tokenizer = load_tokenizer(metadata(case))
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.warnings == ()
    return tokenizer


def small(kind: str = "llama", **changes: Any) -> dict[str, object]:
    """Ten pieces, written by hand; the first is unknown, the second a control token."""
    tokens = ["<unk>", "<s>", "▁", "a", "b", "ab", "▁a", "▁ab", " ", "x"]
    found: dict[str, object] = {
        "model": kind,
        "tokens": tokens,
        "scores": [-float(rank) for rank in range(len(tokens))],
        "token_type": [2, 3, 1, 1, 1, 1, 1, 1, 1, 1],
        "bos_token_id": 1,
    }
    found.update(changes)
    return {KEY + key: value for key, value in found.items() if value is not None}


def deltas(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def agrees(case: Case, text: str) -> None:
    """Ids are the library's; text comes back as from the library, at once and piece by piece."""
    tokenizer, library = built(case), reference(case)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text)
    decoded = tokenizer.decode(ids)
    assert deltas(tokenizer, ids) == decoded
    if 0 not in ids:  # the library shows unknown characters as U+2047
        theirs = library.decode(ids)
        if case.strip:  # the library also takes away what a text's own U+2581 leave in front
            assert decoded.lstrip(" ") == theirs.lstrip(" ")
        else:
            assert decoded == theirs
        if case.rule == "identity" and not case.strip:
            assert decoded == text.replace("▁", " ")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ids_equal_the_librarys(case: Case) -> None:
    for text in [*TEXTS, *CORPUS]:
        agrees(case, text)


@settings(max_examples=400, deadline=None)
@given(mixed_text, st.sampled_from(CASES))
def test_ids_equal_the_librarys_on_any_text(text: str, case: Case) -> None:
    agrees(case, text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(3, 400), max_size=12), st.sampled_from(CASES))
def test_deltas_join_to_the_decoded_text_for_any_ids(ids: list[int], case: Case) -> None:
    tokenizer = built(case)
    ids = [token_id % tokenizer.vocab_size for token_id in ids]
    text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    assert deltas(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == (text.removeprefix(" ") if case.dummy_prefix else text)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_long_texts_become_the_same_ids(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXTS, *CORPUS, "".join(CORPUS) * 30, "▁".join(CORPUS)]
    expected = [built(case).encode(text) for text in texts]
    monkeypatch.setattr(sentencepiece_module, "LONG_TEXT", 0)
    long = load_tokenizer(metadata(case))
    assert [long.encode(text) for text in texts] == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tokenizer_model_file_gives_the_same_tokenizer(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(case))
    tokenizer = load_tokenizer_model(path)
    assert tokenizer.kind == f"sentencepiece ({case.model_type})"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.stop_ids == {2}
    assert (tokenizer.add_bos, tokenizer.add_eos) == (
        (True, False) if case.model_type == "bpe" else (False, True)
    )
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(case).encode(text)
    theirs, ours = read_tokenizer_model(path), metadata(case)
    for key in ("scores", "token_type", "add_space_prefix", "remove_extra_whitespaces", "unknown_token_id"):
        assert theirs[KEY + key] == ours[KEY + key]


def test_control_tokens_match_only_where_asked() -> None:
    tokenizer, control = built(CASES[0]), 3
    assert tokenizer.piece(control) == "<c>"
    plain = tokenizer.encode("a<c>b</s>")
    assert not any(map(tokenizer.is_control, plain))
    assert tokenizer.decode(plain) == "a<c>b</s>"
    special = tokenizer.encode("a<c>b</s>", special=True)
    assert special == [*tokenizer.encode("a"), control, *tokenizer.encode("b"), 2]
    assert tokenizer.token_bytes(control) == b""


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_control_token_of_one_character_is_not_that_character(kind: str) -> None:
    tokenizer = load_tokenizer(small(kind, token_type=[2, 3, 1, 1, 1, 1, 1, 1, 1, 3]))
    assert tokenizer.encode("abx") == [7, 0]
    assert tokenizer.encode("xab", special=True) == [9, 7]
    assert tokenizer.piece(9) == "x"
    stubborn = small(kind, token_type=[2, 3, 1, 1, 1, 1, 1, 1, 1, 3])
    stubborn[KEY + "tokens"] = ["<control 9>", "<control 9>>", "▁", "a", "b", "ab", "▁a", "▁ab", " ", "x"]
    assert load_tokenizer(stubborn).encode("abx") == [7, 0]


def test_user_defined_tokens_match_always_and_keep_their_spaces() -> None:
    tokenizer = built(Case(dummy_prefix=False))
    tool, toolx, spaces, lines = (4, 5, 6, 7)
    for special in (False, True):
        assert tokenizer.encode("<tool>x<tool>  \n\n", special=special) == [toolx, tool, spaces, lines]
    assert tokenizer.token_bytes(spaces) == b"  "
    assert not tokenizer.is_control(tool)


def test_a_user_defined_token_wins_over_a_piece_that_looks_the_same_to_the_library() -> None:
    types = [2, 3, 1, 1, 1, 1, 1, 1, 4, 1]  # " " is user-defined, "▁" is ordinary
    tokenizer = load_tokenizer(small(token_type=types, add_space_prefix=False))
    assert tokenizer.encode("a b") == [3, 8, 4]
    assert tokenizer.token_bytes(2) == tokenizer.token_bytes(8) == b" "


def test_byte_tokens_are_bytes() -> None:
    tokenizer = built(CASES[0])
    euro = tokenizer.encode("€")  # not in the corpus
    assert [tokenizer.piece(i) for i in euro[1:]] == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert b"".join(map(tokenizer.token_bytes, euro)) == " €".encode()
    assert tokenizer.decode(euro[:-1]) == "\ufffd"
    without_types = load_tokenizer(metadata(Case(defined=False), token_type=None))
    assert without_types.encode("€") == built(Case(defined=False)).encode("€")
    assert any("token_type is missing" in line for line in without_types.warnings)


def test_unknown_characters_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(small())
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("a漢b") == [6, 0, 4]
        assert tokenizer.encode("漢") == [2, 0]
    assert len(caplog.records) == 1
    assert "have no token" in caplog.text
    assert tokenizer.decode([6, 0, 4]) == "ab"
    assert tokenizer.is_control(0)


def test_bos_and_eos_as_the_file_or_the_kind_says() -> None:
    tokenizer = built(CASES[0])
    a = tokenizer.encode("a")
    assert tokenizer.encode_prompt("a") == [1, *a]
    assert tokenizer.encode_prompt("<s>a", special=True) == [1, *a]
    assert tokenizer.encode_prompt("a", bos=False) == a
    assert built(Case("unigram")).encode_prompt("a</s>", special=True) == [
        *built(Case("unigram")).encode("a"),
        2,
    ]
    both = load_tokenizer(metadata(CASES[0], add_bos_token=False, add_eos_token=True))
    assert both.encode_prompt("a") == [*a, 2]


def test_the_dummy_prefix_is_there_unless_the_file_says_no() -> None:
    assert load_tokenizer(small()).encode("ab") == [7]
    assert load_tokenizer(small()).decode([7]) == "ab"
    assert load_tokenizer(small()).decode([2, 7]) == " ab"
    without = load_tokenizer(small(add_space_prefix=False))
    assert without.encode("ab") == [5]
    assert without.decode([7]) == " ab"


def test_unused_tokens_say_their_text_and_empty_ones_nothing() -> None:
    data = small(token_type=[2, 3, 1, 1, 1, 1, 1, 1, 5, 5])
    data[KEY + "tokens"] = ["<unk>", "<s>", "▁", "a", "b", "ab", "▁a", "▁ab", "", "x"]
    tokenizer = load_tokenizer(data)
    assert (tokenizer.token_bytes(8), tokenizer.token_bytes(9)) == (b"", b"x")


def test_ids_out_of_range_and_half_surrogates_are_errors() -> None:
    tokenizer = built(CASES[0])
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(IndexError):
            tokenizer.token_bytes(bad)
        with pytest.raises(IndexError):
            tokenizer.piece(bad)
    with pytest.raises(TokenizerError, match="character 1 of the text is half a surrogate pair"):
        tokenizer.encode("a\ud800b")


def test_a_pre_tokenizer_is_not_ignored_in_silence() -> None:
    assert any(
        "--pre qwen2 changes nothing" in line for line in load_tokenizer(small(), pre="qwen2").warnings
    )


MANY = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(255))]


@pytest.mark.parametrize("kind", ["llama", "t5"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, r"scores is missing"),
        ({"scores": [0.0]}, r"scores has 1 entries for 10 tokens"),
        ({"scores": [1] * 10}, r"scores holds values of type int, not float"),
        ({"scores": "x"}, r"scores is of type str, not an array"),
        ({"scores": [math.nan] * 10}, r"scores holds values that are not finite"),
        ({"scores": [-math.inf] * 10}, r"scores holds values that are not finite"),
        ({"scores": [1e300] * 10}, r"values that are not finite"),
        ({"token_type": [2, 3, 1]}, r"token_type has 3 entries for 10 tokens"),
        ({"token_type": [2, 3, 9, 1, 1, 1, 1, 1, 1, 1]}, r"token_type holds 9, which is no type"),
        ({"token_type": [2, 3, 1, 1, 1, 1, 1, 1, 1, 6]}, r"byte tokens are not <0x00> to <0xFF>"),
        ({"tokens": MANY, "token_type": [2] + [6] * 255, "scores": [0.0] * 256}, r"byte tokens are not"),
        ({"tokens": ["a", "a"], "token_type": [2, 1], "scores": [0.0] * 2}, r"'a' is there twice"),
        ({"tokens": ["a\x00", "b"], "token_type": [1, 2], "scores": [0.0] * 2}, r"null character"),
        ({"tokens": ["a" * 1025, "b"], "token_type": [1, 2], "scores": [0.0] * 2}, r"more than 1024 char"),
        ({"tokens": ["a", "b"], "token_type": [1, 3], "scores": [0.0] * 2},
         r"unknown_token_id is missing and no token is typed unknown"),
        ({"unknown_token_id": 10}, r"unknown_token_id is 10, outside the vocabulary of 10 tokens"),
        ({"unknown_token_id": "0"}, r"unknown_token_id is of type str"),
        ({"add_space_prefix": 1}, r"add_space_prefix is of type int, not bool"),
        ({"remove_extra_whitespaces": 1}, r"remove_extra_whitespaces is of type int"),
        ({"precompiled_charsmap": ["x"]}, r"precompiled_charsmap holds values of type str"),
        ({"precompiled_charsmap": [256]}, r"precompiled_charsmap holds values that are not bytes"),
        ({"precompiled_charsmap": [1, 2]}, r"precompiled_charsmap: the normalization rules are damaged"),
    ],
)  # fmt: skip
def test_broken_metadata_is_one_line(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(small(kind, **changes))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("rule", ["nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"])
def test_the_librarys_own_normalization_rules_pass(rule: str) -> None:
    case = Case(rule=rule, strip=True)
    check_charsmap(parse(trained(case)).charsmap, "x")
    for text in TEXTS:
        agrees(case, text)


def test_a_trie_written_by_hand_normalizes() -> None:
    # "a" becomes "x": the unit of "a" says that a key ends, one step on is the value 0.
    data = units((128 ^ 97, 97 | 1 << 8 | 1 << 10), (128 ^ 97 ^ 1, 0x80000000))
    assert load_tokenizer(small(precompiled_charsmap=list(data))).encode("ba") == [2, 4, 9]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff", "a number at byte 0 has no end"),
        (b"\x80" * 11, "a number at byte 0 has no end"),
        (b"\x00\x00", "number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\xff\xff\xff\xff\x0f", "goes on after the end"),
        (b"\x0a\x05\x0a\x01a", "goes on after the end"),
        (b"\x08\x01", "field 1 is of wire type 0"),
        (b"\x10\x01", "field 2 is of wire type 0"),
        (b"\x0a\x02\x08\x01", "field 1 of a piece is of wire type 0"),
        (b"\x0a\x03\x0a\x01\xff", "can't decode"),
        (b"\x12\x03\x1a\x01x", "field 3 is not a number"),
        (b"\x12\x02\x18\x03", "type 3, neither unigram"),
        (b"\x12\x03\xc0\x01\x01", "end, not begin, with a space"),
        (b"\x1a\x02\x28\x00", "spaces as they are"),
        (b"\x2a\x03\x12\x01x", "rewrites the text"),
        (b"", "tokens is missing or empty"),
        (b"GGUF" + b"\0" * 60, "is no SentencePiece model"),
        (b"\x0a\x03\x0a\x01a", "no token is typed unknown"),
    ],
)
def test_a_file_that_is_no_model_is_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer_model(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    import os

    with pytest.raises(ModelNotFoundError):
        load_tokenizer_model(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe"):
        load_tokenizer_model(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 29)
    with pytest.raises(TokenizerError, match="is the most that is read"):
        load_tokenizer_model(tmp_path / "huge")


@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=str)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_file_is_an_error_or_a_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, case: Case, data: st.DataObject
) -> None:
    whole = trained(case)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole))) or None])
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "tokenizer.model"
    path.write_bytes(damaged)
    try:
        tokenizer = load_tokenizer_model(path)
    except InferError as error:
        assert "\n" not in str(error)
        return
    for text in TEXTS[:14]:
        assert deltas(tokenizer, ids := tokenizer.encode(text)) == tokenizer.decode(ids)


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=str)
def test_sound_files_of_hostile_values_are_an_error_or_a_tokenizer(case: Case, tmp_path: Path) -> None:
    """What damage at random hardly reaches: extreme scores, other types, long pieces, rules bent within their trie. The
    library would end the process or not come back; an exception of another kind would be no line."""
    model, draw, path = parse(trained(case)), random.Random(1), tmp_path / "tokenizer.model"
    first = 300 if case.byte_fallback else 10  # behind the bytes
    refused = 0
    for _ in range(60):
        scores, types, pieces, rules = (
            [*model.scores],
            [*model.types],
            [*model.pieces],
            bytearray(model.charsmap),
        )
        for _ in range(draw.choice((1, 30, 700))):
            scores[draw.randrange(len(scores))] = draw.choice((3.4e38, -3.4e38, 0.0, 1e-45))
            types[draw.randrange(first, len(types))] = draw.choice((1, 1, 3, 4, 5))
        for _ in range(draw.choice((0, 0, 5))):
            at = draw.randrange(first, len(pieces))
            pieces[at] = draw.choice(
                ("a" * draw.randrange(1, 1030), f"▁▁{at}", f"\t{at}", f" x{at}", chr(at), "a", "")
            )
        if rules:
            at = draw.randrange(len(rules) // 4)
            for _ in range(draw.choice((0, 0, 1, 3))):
                rules[4 * at : 4 * at + 4] = draw.randbytes(4)
        changed = replace(model, scores=scores, types=types, pieces=pieces, charsmap=bytes(rules))
        path.write_bytes(serialize(changed))
        try:
            tokenizer = load_tokenizer_model(path)
        except InferError as error:
            assert error.exit_code == 3
            assert "\n" not in str(error)
            refused += 1
            continue
        for text in TEXTS:
            assert deltas(tokenizer, ids := tokenizer.encode(text)) == tokenizer.decode(ids)
    assert 5 < refused < 55


def test_a_model_is_written_as_it_is_read() -> None:
    model = ModelProto(
        pieces=["<unk>", "a", "é" * 300, "▁"],
        scores=[0.0, -1.5, 2.25, -0.0],
        types=[2, 1, 4, 3],
        model_type=BPE,
        byte_fallback=True,
        charsmap=b"abc",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
    )
    assert parse(serialize(model)) == model


def test_pieces_in_any_layout_are_read() -> None:
    # Type before text, an unknown field of each wire type, a length with a padded varint.
    parts = ["1802", "150000803f", "0a810061", "79" + "00" * 8, "7005", "72017a"]
    piece = bytes.fromhex("".join(parts))
    model = parse(b"\x0a" + bytes([len(piece)]) + piece + b"\x0a\x08\x0a\x01b\x15\x00\x00\x00\x40")
    assert (model.pieces, model.scores, model.types) == (["a", "b"], [1.0, 2.0], [2, 1])


def test_a_folders_tokenizer_model_takes_the_tokens_that_other_files_add(tmp_path: Path) -> None:
    case = CASES[0]
    (tmp_path / "tokenizer.model").write_bytes(trained(case))
    size = reference(case).vocab_size()
    decoder = {
        str(size): {"content": "<|im_end|>", "special": True},
        "1": {"content": "<s>", "special": True},
    }
    settings = {"add_bos_token": False, "eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size, "<new tool>": size + 1}))
    texts = read_texts(tmp_path, [path.name for path in tmp_path.iterdir()], {})
    tokenizer = load_tokenizer(
        {**texts.metadata, "general.architecture": "llama", "llama.vocab_size": size + 8}
    )
    assert tokenizer.kind == "sentencepiece (bpe)"
    assert (tokenizer.vocab_size, tokenizer.add_bos, tokenizer.bos_id, tokenizer.eos_id) == (
        size + 8,
        False,
        1,
        size,
    )
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(case).encode(text)
    assert tokenizer.encode("<|im_end|>", special=True) == [size]
    assert size not in tokenizer.encode("<|im_end|>")
    assert size + 1 in tokenizer.encode("x<new tool>")
    (tmp_path / "tokenizer.model").write_bytes(trained(case)[:3000])
    with pytest.raises(TokenizerError, match="is no SentencePiece model, or a damaged one"):
        load_tokenizer({**texts.metadata, "general.architecture": "llama", "llama.vocab_size": size + 8})
