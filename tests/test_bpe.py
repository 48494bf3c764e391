"""Byte-level BPE from GGUF metadata: ids equal to Hugging Face's pipelines, and what may match in a text."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HubTokenizer

from infer.runtime.checkpoint.arrays import NumberArray, TextArray
from infer.runtime.errors import ContextLengthError, TokenizerError
from infer.runtime.tokenizer import bpe
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.bpe import MAX_PART, BPETokenizer, tells_words_apart
from infer.runtime.tokenizer.literals import LiteralMatcher
from infer.runtime.tokenizer.load import load_tokenizer
from infer.runtime.tokenizer.pretokenizers import FAMILIES, PRETOKENIZERS

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"]
DEFINED = ["<tool_call>", "<tool_call>x", "</tool_call>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It'll do; they're 123 and 4567 of 89.\n\n",
    "def add(a, b):\n    return a + b  # sum\n\nfor i in range(10):\n\tprint(i, end='\\n')\n",
    "Le café à l'été, naïve œuvre; größer, Übermaß. 漢字かな交じり文、한국어 문장. שלום עולם مرحبا\r\n",
    "    spaces   and\t\ttabs  \n \n  \n😀👩‍👩‍👧 🇩🇪 … — “quotes” ½ Ⅻ ٣٤",
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
    "<|im_end|> <tool_call>x <tool_call> </tool_call> <|im_ end|>",
    "ſ K 'ſ a'\u017f",
    "\ufeffbom \ufffd \U0010ffff",
]
mixed_text = st.text(
    alphabet=st.one_of(
        st.sampled_from("abcXYZ'sStTlLdDmM0123  \n\r\t.,!?-_/\\<|>éßñ漢字한е\u0301\u00a0½😀\u200d🇩\x00"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


def train(pre: pre_tokenizers.PreTokenizer, drop: str = "") -> tuple[list[str], list[str]]:
    """Tokens and merges of a small vocabulary; bytes whose characters are in `drop` have no token."""
    tokenizer = HubTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token in sorted(model["vocab"], key=model["vocab"].get) if token not in drop]
    return tokens, [" ".join(merge) for merge in model["merges"]]


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


TOKENS, MERGES = train(byte_level(True))


def metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, object]:
    """A GGUF file's keys: the small vocabulary, then control, user-defined and unused tokens."""
    tokens = [*TOKENS, *CONTROL, *DEFINED, "<unused0>"]
    types = [1] * len(TOKENS) + [3] * len(CONTROL) + [4] * len(DEFINED) + [5]
    found: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    if pre is not None:
        found["tokenizer.ggml.pre"] = pre
    for key, value in changes.items():
        if value is None:
            found.pop(f"tokenizer.ggml.{key}", None)
        else:
            found[f"tokenizer.ggml.{key}"] = value
    return found


def id_of(piece: str) -> int:
    tokens = metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return tokens.index(piece)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Each family as its tokenizer.json on the hub describes it, written down apart from the table under test.
# (pre-tokenizer, normalized to NFC, ignores merges)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
PIPELINES: dict[str, tuple[pre_tokenizers.PreTokenizer, bool, bool]] = {
    "smollm": (pre_tokenizers.Sequence([DIGITS, byte_level(True)]), False, False),
    "starcoder": (pre_tokenizers.Sequence([DIGITS, byte_level(True)]), False, False),
    "gpt-2": (pre_tokenizers.Sequence([split(GPT2), byte_level(False)]), False, False),
    "olmo": (byte_level(True), True, False),
    "command-r": (pre_tokenizers.Sequence([DIGITS, byte_level(True)]), True, False),
    "llama-bpe": (pre_tokenizers.Sequence([split(LLAMA3), byte_level(False)]), False, True),
    "dbrx": (pre_tokenizers.Sequence([split(LLAMA3), byte_level(False)]), False, False),
    "falcon": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation(behavior="contiguous"),
                byte_level(True),
                pre_tokenizers.Digits(individual_digits=False),
                split(r"[0-9][0-9][0-9]"),
            ]
        ),
        False,
        False,
    ),
    "deepseek-coder": (
        pre_tokenizers.Sequence(
            [
                split("[\r\n]"),
                split(r"\s?\p{L}+"),
                split(r"\s?\p{P}+"),
                split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
                DIGITS,
                byte_level(False),
            ]
        ),
        False,
        False,
    ),
}


def hub_pipeline(name: str) -> HubTokenizer:
    pre, nfc, ignore_merges = PIPELINES[name]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    hub = HubTokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    hub.pre_tokenizer = pre
    hub.decoder = decoders.ByteLevel()
    if nfc:
        hub.normalizer = normalizers.NFC()
    hub.add_tokens([AddedToken(token, special=False, normalized=False) for token in [*CONTROL, *DEFINED]])
    return hub


@pytest.fixture(scope="module")
def tokenizers_by_name() -> dict[str, tuple[BPETokenizer, HubTokenizer]]:
    made = {}
    for name in PIPELINES:
        tokenizer = load_tokenizer(metadata(name))
        assert isinstance(tokenizer, BPETokenizer)
        made[name] = tokenizer, hub_pipeline(name)
    return made


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_hugging_faces(
    tokenizers_by_name: dict[str, tuple[BPETokenizer, HubTokenizer]], name: str, text: str
) -> None:
    tokenizer, hub = tokenizers_by_name[name]
    assert tokenizer.encode(text, special=True) == hub.encode(text, add_special_tokens=False).ids


@settings(max_examples=150, deadline=None)
@given(mixed_text, st.sampled_from(list(PIPELINES)))
def test_ids_equal_hugging_faces_on_any_text(
    tokenizers_by_name: dict[str, tuple[BPETokenizer, HubTokenizer]], text: str, name: str
) -> None:
    tokenizer, hub = tokenizers_by_name[name]
    assert tokenizer.encode(text, special=True) == hub.encode(text, add_special_tokens=False).ids


HUB_CLASSES = {
    "qwen2": "Qwen2Tokenizer",
    "mpt": "GPTNeoXTokenizer",
    "gpt-2": "GPT2Tokenizer",
    "command-r": "CohereTokenizer",
}


@pytest.mark.parametrize(("pre", "kind"), HUB_CLASSES.items())
def test_ids_equal_transformers_own_classes(pre: str, kind: str) -> None:
    import transformers

    vocabulary = {token: index for index, token in enumerate([*TOKENS, *CONTROL])}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    theirs = getattr(transformers, kind)(vocab=vocabulary, merges=pairs)
    ours = load_tokenizer(metadata(pre))
    for text in TEXTS:
        if "<" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


@settings(max_examples=200, deadline=None)
@given(mixed_text)
def test_what_is_encoded_decodes_to_the_same(text: str) -> None:
    tokenizer = cached("llama-bpe")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


_CACHE: dict[str, Tokenizer] = {}


def cached(pre: str) -> Tokenizer:
    if pre not in _CACHE:
        _CACHE[pre] = load_tokenizer(metadata(pre))
    return _CACHE[pre]


@pytest.mark.parametrize("pre", sorted(PRETOKENIZERS))
def test_every_known_pre_tokenizer_loses_nothing(pre: str) -> None:
    import unicodedata

    tokenizer = load_tokenizer(metadata(pre))
    assert tokenizer.kind == f"bpe ({pre})"
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if PRETOKENIZERS[pre].nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_control_tokens_match_only_where_asked() -> None:
    tokenizer = cached("smollm")
    text = "a<|im_end|>b"
    plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert id_of("<|im_end|>") not in plain
    assert tokenizer.decode(plain) == text
    assert special == [*tokenizer.encode("a"), id_of("<|im_end|>"), *tokenizer.encode("b")]
    assert tokenizer.decode(special) == "ab"


def test_user_defined_tokens_always_match_the_longest_first() -> None:
    tokenizer = cached("smollm")
    for special in (False, True):
        assert tokenizer.encode("<tool_call>x<tool_call></tool_call>", special=special) == [
            id_of("<tool_call>x"),
            id_of("<tool_call>"),
            id_of("</tool_call>"),
        ]
    assert tokenizer.token_bytes(id_of("<tool_call>")) == b"<tool_call>"


def test_unused_tokens_never_match_and_say_nothing() -> None:
    tokenizer = cached("smollm")
    assert id_of("<unused0>") not in tokenizer.encode("<unused0>", special=True)
    assert tokenizer.token_bytes(id_of("<unused0>")) == b""
    assert tokenizer.piece(id_of("<unused0>")) == "<unused0>"


def test_ignoring_merges_still_makes_no_control_token() -> None:
    tokens = ["a", "b", "ab", "abab"]
    data = metadata("llama-bpe", tokens=tokens, token_type=[1, 1, 1, 3], merges=["a b"],
                    bos_token_id=None, eos_token_id=None)  # fmt: skip
    assert load_tokenizer(data).encode("abab") == [2, 2]
    data["tokenizer.ggml.token_type"] = [1, 1, 1, 1]
    assert load_tokenizer(data).encode("abab") == [3]


def test_merges_that_lead_to_a_control_token_are_left_out() -> None:
    data = metadata("gpt-2", tokens=["a", "b", "ab", "abab"], token_type=[1, 1, 1, 3],
                    merges=["a b", "ab ab"], bos_token_id=None, eos_token_id=None)  # fmt: skip
    assert load_tokenizer(data).encode("abab") == [2, 2]
    assert load_tokenizer(data).encode("abab", special=True) == [3]


def test_pieces_bytes_and_control() -> None:
    tokenizer = cached("smollm")
    assert tokenizer.piece(id_of("<|im_end|>")) == "<|im_end|>"
    assert tokenizer.token_bytes(id_of("<|im_end|>")) == b""
    assert tokenizer.is_control(id_of("<|im_end|>"))
    assert not tokenizer.is_control(id_of("<tool_call>"))
    assert tokenizer.token_bytes(id_of("Ġ")) == b" "
    assert sorted(tokenizer.token_bytes(id_of(c)) for c in pre_tokenizers.ByteLevel.alphabet()) == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokenizer.decode([id_of("Ċ"), id_of("ð"), id_of("Ł")]) == "\n\ufffd"
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(IndexError):
            tokenizer.token_bytes(bad)
        with pytest.raises(IndexError):
            tokenizer.piece(bad)


def test_bos_and_eos_as_the_file_or_the_family_says() -> None:
    assert not load_tokenizer(metadata("smollm")).add_bos
    assert load_tokenizer(metadata("llama-bpe")).add_bos
    assert load_tokenizer(metadata("tekken")).add_bos
    assert not load_tokenizer(metadata("llama-bpe", add_bos_token=False)).add_bos
    tokenizer = load_tokenizer(metadata("smollm", add_bos_token=True, add_eos_token=True))
    bos, eos = id_of("<|im_start|>"), id_of("<|im_end|>")
    assert tokenizer.encode_prompt("a") == [bos, *tokenizer.encode("a"), eos]
    assert tokenizer.encode_prompt("<|im_start|>a", special=True) == [bos, *tokenizer.encode("a"), eos]
    assert tokenizer.encode_prompt("a", bos=False) == [*tokenizer.encode("a"), eos]
    without = load_tokenizer(metadata("llama-bpe", bos_token_id=None))
    assert without.encode_prompt("a") == without.encode("a")
    assert any("BOS" in line for line in without.warnings)


def test_stop_ids_are_all_tokens_that_end_a_turn() -> None:
    ends = {id_of("<|endoftext|>"), id_of("<|im_end|>")}
    assert load_tokenizer(metadata()).stop_ids == ends
    more = metadata(eot_token_id=id_of("<|im_sep|>"), eos_token_ids=[0, 1], eom_token_id=2)
    assert load_tokenizer(more).stop_ids == ends | {id_of("<|im_sep|>"), 0, 1, 2}
    assert load_tokenizer(metadata(eos_token_id=-1)).stop_ids == ends


def test_end_closes_a_message_where_return_closes_the_turn() -> None:
    names = ["a", "<|end|>", "<|return|>", "<|call|>"]
    data = metadata(tokens=names, token_type=[1, 3, 3, 3], merges=[], bos_token_id=None, eos_token_id=2)
    assert load_tokenizer(data).stop_ids == {2, 3}
    data["tokenizer.ggml.tokens"] = ["a", "<|end|>", "x", "y"]
    assert load_tokenizer(data).stop_ids == {1, 2}


def test_an_end_token_of_the_wrong_type_is_used_and_told() -> None:
    types = list(metadata()["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    types[id_of("<|im_end|>")] = 1
    tokenizer = load_tokenizer(metadata(token_type=types))
    assert tokenizer.is_control(id_of("<|im_end|>"))
    assert any("'<|im_end|>'" in line for line in tokenizer.warnings)


def test_bytes_without_a_token_are_left_out_as_on_the_hub_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens, merges = train(byte_level(True), drop="\u0100\u010a")  # the bytes 0x00 and 0x0a
    merges = [merge for merge in merges if not {"\u0100", "\u010a"} & set(merge)]
    tokens = [token for token in tokens if not {"\u0100", "\u010a"} & set(token)]
    data = metadata(tokens=tokens, token_type=[1] * len(tokens), merges=merges,
                    bos_token_id=None, eos_token_id=None)  # fmt: skip
    tokenizer = load_tokenizer(data)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.decode(tokenizer.encode("a\x00b\n\n")) == "ab"
        assert tokenizer.decode(tokenizer.encode("a\x00b\n\n")) == "ab"
    assert [record.getMessage() for record in caplog.records] == [
        "3 bytes of the text have no token in this vocabulary and are left out"
    ]


def test_missing_pre_tokenizer_is_a_warning_and_an_override_is_taken() -> None:
    tokenizer = load_tokenizer(metadata(None))
    assert tokenizer.kind == "bpe (gpt-2)"
    assert len(tokenizer.warnings) == 1
    assert "--pre" in tokenizer.warnings[0]
    assert load_tokenizer(metadata(None), pre="qwen2").kind == "bpe (qwen2)"
    assert load_tokenizer(metadata("no-such"), pre="qwen2").warnings == ()


def test_empty_pieces_stay_unused() -> None:
    data = metadata(tokens=["a", "", ""], token_type=[1, 1, 1], merges=[], bos_token_id=None, eos_token_id=0)
    tokenizer = load_tokenizer(data)
    assert tokenizer.encode("a", special=True) == [0]
    assert [tokenizer.token_bytes(index) for index in (1, 2)] == [b"", b""]
    assert any("empty" in line for line in tokenizer.warnings)


def test_merges_with_raw_spaces_are_cut_where_both_parts_are_tokens() -> None:
    data = metadata(tokens=["a", " ", " a", "b", " ab"], token_type=None, merges=["  a", " a b"],
                    bos_token_id=None, eos_token_id=None)  # fmt: skip
    assert any("token_type is missing" in line for line in load_tokenizer(data).warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, r"'rwkv' is not supported by this version, which reads: gpt2"),
        ({"model": None}, r"model is missing"),
        ({"model": 3}, r"model is of type int, not str"),
        ({"pre": "brand-new"}, r"'brand-new' is not known to this version; .* --pre NAME: gpt-2, gpt-neox, "),
        ({"tokens": None}, r"tokens is missing or empty"),
        ({"tokens": []}, r"tokens is missing or empty"),
        ({"tokens": "abc"}, r"tokens is of type str, not an array"),
        ({"tokens": ["a", 1]}, r"tokens holds values of type int, not str"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, r"'a' is there twice"),
        ({"tokens": ["a", "\udcff"], "token_type": [1, 1]}, r"tokens holds text that is not UTF-8"),
        ({"token_type": [1]}, r"token_type has 1 entries for"),
        ({"token_type": ["x"]}, r"token_type holds values of type str"),
        ({"merges": None}, r"merges is missing"),
        ({"merges": ["ab"]}, r"'ab' is not two tokens"),
        ({"merges": ["a "]}, r"'a ' is not two tokens"),
        ({"merges": ["漢 b"]}, r"is not two tokens"),
        ({"merges": ["Q ÿ"]}, r"'Q ÿ' makes no token"),
        ({"bos_token_id": 10**6}, r"bos_token_id is 1000000, outside the vocabulary"),
        ({"eos_token_id": -7}, r"eos_token_id is -7, outside"),
        ({"eos_token_ids": [0, 10**6]}, r"eos_token_ids is 1000000, outside"),
        ({"eot_token_id": "x"}, r"eot_token_id is of type str, not int"),
        ({"add_bos_token": 1}, r"add_bos_token is of type int, not bool"),
        ({"tokens": ["a", "<" * 2000], "token_type": [1, 3], "eos_token_id": None, "bos_token_id": None,
          "merges": []}, r"a special token of 2000 characters"),
    ],
)  # fmt: skip
def test_broken_metadata_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(metadata(**changes))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_half_a_surrogate_pair_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="character 1 of the text is half a surrogate pair"):
        cached("smollm").encode("a\ud800b")


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "gpt-4o", "deepseek-v3"])
@pytest.mark.parametrize("unit", ["a", "A", " ", " \n", "漢", "1", "<"])
def test_long_runs_are_not_quadratic(pre: str, unit: str) -> None:
    tokenizer = cached(pre)
    text = unit * (100_000 // len(unit))
    started = time.process_time()
    ids = tokenizer.encode(text, special=True)
    assert time.process_time() - started < 4
    assert tokenizer.decode(ids) == text


def test_long_texts_are_encoded_in_parts_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    import infer.runtime.tokenizer.bpe as bpe

    text = ("".join(CORPUS) + "\n\nx\n\n y\nzebra\n") * 20
    whole = {pre: cached(pre).encode(text) for pre in FAMILIES}
    words = text.replace("\n", " ")
    without_breaks = {pre: cached(pre).encode(words) for pre in FAMILIES}
    monkeypatch.setattr(bpe, "MAX_PART", 2000)
    for pre, ids in whole.items():
        assert cached(pre).encode(text) == ids, pre
        assert cached(pre).encode(words) == without_breaks[pre], pre


def test_words_are_told_apart_only_where_the_pre_tokenizer_does() -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    library = tokenizers.Tokenizer(models.BPE())
    assert not tells_words_apart(library)
    for pre, expected in (
        (pre_tokenizers.ByteLevel(add_prefix_space=False), True),
        (pre_tokenizers.Digits(), False),
        (pre_tokenizers.Split(tokenizers.Regex("."), behavior="removed"), False),
    ):
        library.pre_tokenizer = pre
        assert tells_words_apart(library) == expected


def test_a_text_too_long_without_a_place_to_part_it_is_an_error() -> None:
    with pytest.raises(ContextLengthError, match="without a line break or a space between two words"):
        cached("smollm").encode(" " * (MAX_PART + 1))


@given(
    st.lists(st.text(alphabet="ab<|", min_size=1, max_size=4), max_size=6),
    st.text(alphabet="ab<|", max_size=30),
)
def test_the_matcher_is_leftmost_longest(literals: list[str], text: str) -> None:
    expected, start = [], 0
    while start < len(text):
        here = [literal for literal in literals if text.startswith(literal, start)]
        if here:
            longest = max(here, key=len)
            expected.append((longest, True))
            start += len(longest)
        elif expected and not expected[-1][1]:
            expected[-1] = (expected[-1][0] + text[start], False)
            start += 1
        else:
            expected.append((text[start], False))
            start += 1
    assert list(LiteralMatcher(literals).split(text)) == expected


ascii_text = st.text(
    st.one_of(
        st.sampled_from("aBc'sStTlLdDmMvVrReE0123  \n\r\t.,!?-_/\\<|>$^`~()[]{}\x0b\x1c\x1f\x85"[:-1]),
        st.characters(max_codepoint=127),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150)
@given(text=ascii_text)
def test_ascii_texts_are_cut_as_the_library_cuts_them(name: str, text: str) -> None:
    tokenizer = load_tokenizer(metadata(name))
    assert isinstance(tokenizer, BPETokenizer)
    assert tokenizer._ascii.cut(text) == tokenizer._cut(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_takes_time_by_its_square(name: str) -> None:
    tokenizer = load_tokenizer(metadata(name))
    assert isinstance(tokenizer, BPETokenizer)
    for run in " a!":
        text = run * 100_000 + "1"
        assert tokenizer._ascii.cut(text) == tokenizer._cut(text)


def test_the_library_is_loaded_for_what_needs_it_alone() -> None:
    program = (
        "import sys; from infer.runtime.tokenizer.load import load_tokenizer;"
        f"tokenizer = load_tokenizer({metadata('llama-bpe')!r});"
        "tokenizer.encode('<|im_start|>plain text', special=True); print('tokenizers' in sys.modules);"
        "tokenizer.encode('caf\\u00e9'); print('tokenizers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("name", FAMILIES)
def test_long_texts_become_the_same_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXTS, *CORPUS, "".join(CORPUS) * 20]
    short = load_tokenizer(metadata(name))
    expected = [short.encode(text, special=True) for text in texts]
    monkeypatch.setattr(bpe, "LONG_TEXT", 0)
    long = load_tokenizer(metadata(name))
    assert [long.encode(text, special=True) for text in texts] == expected


@pytest.mark.model
def test_the_real_smollm2_equals_transformers(smollm2_path: Path) -> None:
    from infer.runtime.checkpoint.open import open_checkpoint

    data = open_checkpoint(smollm2_path).metadata
    tokens, merges = (TextArray.of(data[f"tokenizer.ggml.{key}"]) for key in ("tokens", "merges"))  # type: ignore[arg-type]
    types = data["tokenizer.ggml.token_type"]
    assert isinstance(types, NumberArray)
    hub = HubTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    hub.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level(True)]
    )
    hub.add_special_tokens(
        [AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == 3]
    )
    tokenizer = load_tokenizer(data)
    assert tokenizer.kind == "bpe (smollm)"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.warnings == ()
    for text in [*TEXTS, *CORPUS, *CONTROL]:
        assert tokenizer.encode(text, special=True) == hub.encode(text, add_special_tokens=False).ids
        plain = tokenizer.encode(text)
        assert not any(tokenizer.is_control(token_id) for token_id in plain)
