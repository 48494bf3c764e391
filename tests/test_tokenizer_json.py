"""Tokenizers of folders: ids equal to those of the libraries the files come from, and control tokens that only match
where they are asked for."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hf_folders import BOS, EOS, byte_level_tokenizer, edit_json
from tiny_models import CORPUS
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from infer.runtime.checkpoint.folder.texts import read_texts
from infer.runtime.errors import InferError, TokenizerError
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.load import load_chat_template, load_tokenizer
from infer.runtime.tokenizer.model_proto import parse

STRESS = [
    "", " ", "  ", "\n", "\n\n\n", "\t\t x", " leading", "trailing ", "a  b   c    d", CORPUS, "naïve café Ωmega",
    "日本語のテキスト と English", "👩‍👩‍👧‍👦 emoji 🏳️‍🌈", "\x00\x01\x7f", "e\u0301 vs é", "١٢٣ 456 ７８９",
    "don't I'LL we've",
    "x" * 500, "<|endoftext|>", "a<|im_end|>b", "<|tool|>", " <|tool|> ", "<|im_start|>user\nhi<|im_end|>\n", "<s>",
    "</s>x",
    "▁▁a▁b", "<0x41>", "\r\n\r\nline", "def f(x):\n    return x\n", "\ufeffbom", "\u202eevil", "A" + "\u0300" * 50,
]  # fmt: skip


def sentencepiece_like(scheme: str | None) -> tokenizers.Tokenizer:
    """Llama 2's pipeline. scheme: of a Metaspace pre-tokenizer; None: the older one, by its normalizer."""
    control = ["<unk>", "<s>", "</s>"]
    vocab = {
        piece: number for number, piece in enumerate([*control, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    merges: list[tuple[str, str]] = []

    def add(piece: str) -> None:
        vocab.setdefault(piece, len(vocab))

    for character in sorted(set(CORPUS.replace(" ", "▁")) | set("<s>/▁")):
        add(character)
    for word in sorted(set(CORPUS.split())):
        grown = "▁"
        for character in word:
            if character in vocab:
                merges.append((grown, character))
                grown += character
                add(grown)
    for pair in [("<", "s"), ("<s", ">"), ("▁", "▁")]:
        merges.append(pair)
        add("".join(pair))
    merges = list(dict.fromkeys(merges))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tail = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(tail)
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    tokenizer.add_special_tokens(control)
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True), AddedToken("<|left|>", lstrip=True)])
    tokenizer.add_tokens(
        [AddedToken("quick", single_word=True, normalized=True), AddedToken("\n\n", normalized=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram(
    pieces: list[tuple[str, float]],
    control: list[str],
    *,
    scheme: str = "always",
    byte_fallback: bool = False,
) -> tokenizers.Tokenizer:
    """T5's pipeline but for its normalizer."""
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    metaspace = decoders.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace]) if byte_fallback else metaspace
    )
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken("quick", single_word=True, normalized=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def scored_pieces() -> list[tuple[str, float]]:
    """With a piece for every byte, and scores that make words win over their parts."""
    control = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = sorted(set(CORPUS.split()))
    grown = {f"▁{word}"[:size] for word in words for size in range(1, len(word) + 2)} | set(CORPUS) - {
        " ",
        "\n",
    }
    return [(piece, 0.0) for piece in control] + [(piece, -9.0 - 0.1 / len(piece)) for piece in sorted(grown)]


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level_tokenizer,
    "older llama 2": lambda: sentencepiece_like(None),
    "llama 2": lambda: sentencepiece_like("first"),
    "always": lambda: sentencepiece_like("always"),
    "never": lambda: sentencepiece_like("never"),
    "unigram": lambda: unigram(scored_pieces(), ["<unk>", "<s>", "</s>"], byte_fallback=True),
    "unigram, first": lambda: unigram(
        scored_pieces(), ["<unk>", "<s>", "</s>"], scheme="first", byte_fallback=True
    ),
}


def opened(folder: Path, rows: int, config: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a folder whose model has so many rows of embedding."""
    texts = read_texts(folder, [path.name for path in folder.iterdir()], config or {})
    return load_tokenizer({**texts.metadata, "general.architecture": "llama", "llama.vocab_size": rows})


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """The library's tokenizer and ours, from one file."""
    theirs = KINDS[request.param]()
    theirs.save(str(tmp_path / "tokenizer.json"))
    return theirs, opened(tmp_path, theirs.get_vocab_size())


@pytest.mark.parametrize("text", STRESS, ids=repr)
def test_ids_and_texts_equal_the_librarys(pair: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    theirs, ours = pair
    wanted = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, special=True) == wanted
    if not text.startswith("<s>"):  # which is not doubled here
        assert ours.encode_prompt(text, special=True) == theirs.encode(text).ids
    assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize("text", STRESS, ids=repr)
def test_no_text_becomes_a_control_token(pair: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    _, ours = pair
    ids = ours.encode(text)
    assert not [token for token in ids if ours.is_control(token)]
    joined = b"".join(map(ours.token_bytes, ids)).decode()
    if ours.kind.startswith("unigram"):  # the library's takes this text for the byte
        joined, text = joined.replace("A", "<0x41>"), text.replace("A", "<0x41>")
    assert re.sub("[ ▁]", "", joined) == re.sub("[ ▁]", "", text)  # some pipelines begin words with a space


@pytest.mark.parametrize("split", [False, True], ids=["T5", "XLM-R"])
def test_a_converted_sentencepiece_model(tmp_path: Path, split: bool) -> None:
    """Its normalization rules are in the file too. Both libraries are asked."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS.splitlines(), *STRESS[9:13]] * 20), model_writer=written, minloglevel=2,
        model_type="unigram", vocab_size=300, hard_vocab_limit=False, normalization_rule_name="nmt_nfkc",
        character_coverage=1.0, control_symbols=["<pad>"], num_threads=1,
    )  # fmt: skip
    model = parse(written.getvalue())
    theirs = unigram(list(zip(model.pieces, model.scores, strict=True)), ["<unk>", "<s>", "</s>", "<pad>"])
    precompiled = normalizers.Precompiled(model.charsmap)
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    theirs.normalizer = normalizers.Sequence([precompiled, normalizers.Strip(), spaces])
    if split:
        theirs.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁")]
        )
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = opened(tmp_path, theirs.get_vocab_size())
    assert ours.kind == "unigram (tokenizer.json)"
    assert (ours.add_bos, ours.add_eos) == (False, True)
    original = sentencepiece.SentencePieceProcessor()
    original.LoadFromSerializedProto(written.getvalue())
    for text in STRESS:
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False).ids
        assert not [
            token for token in ours.encode(text) if ours.is_control(token) and ours.piece(token) != "<unk>"
        ]
        plain = text.isprintable() and text == text.strip() and not re.search("quick|<|\u0300", text)
        if plain:  # not an added token, nor a row of accents, which the libraries normalize differently
            assert ours.encode(text) == original.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_names_what_is_silent(tmp_path: Path, kind: str) -> None:
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    ours = opened(tmp_path, KINDS[kind]().get_vocab_size())
    text = "\0unused 1\0 \0unused 2\0"
    assert not any(map(ours.is_control, ours.encode(text)))


def test_a_chat_gives_the_ids_of_its_text(tmp_path: Path) -> None:
    """Blanks that a control token takes in, and a space that begins texts but not what follows a control token."""
    for number, scheme in enumerate((None, "first", "never")):
        folder = tmp_path / str(number)
        folder.mkdir()
        theirs = sentencepiece_like(scheme)
        theirs.save(str(folder / "tokenizer.json"))
        template = "{{ bos_token }}{% for m in messages %}<|user|>\n{{ m.content }} <|left|>{{ eos_token }}{% endfor %}"
        settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        texts = read_texts(folder, [path.name for path in folder.iterdir()], {})
        metadata = {**texts.metadata, "general.architecture": "llama", "llama.vocab_size": 2000}
        ours = load_tokenizer(metadata)
        chat = load_chat_template(metadata, ours)
        assert chat is not None
        segments = chat.render(
            [{"role": "user", "content": " The quick  fox "}, {"role": "user", "content": "talk"}]
        )
        text = "".join(segment.text for segment in segments)
        assert text.startswith("<s><|user|>\n The quick")
        found = ours.encode_parts((segment.text, segment.special) for segment in segments)
        assert found == theirs.encode(text, add_special_tokens=False).ids
        assert ours.stop_ids == {2}


def test_ids_beyond_the_file_are_padding(tmp_path: Path) -> None:
    theirs = byte_level_tokenizer()
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = opened(tmp_path, 600)
    assert ours.vocab_size == 600
    assert (ours.piece(599), ours.token_bytes(599)) == ("[PAD599]", b"")


def test_what_begins_and_ends_texts(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 509, 40_000]}))
    ours = opened(tmp_path, 512, {"eos_token_id": 7})
    begin, end = (byte_level_tokenizer().token_to_id(token) for token in (BOS, EOS))
    assert ours.encode_prompt("x")[::2] == [begin, end]
    assert {3, 509, end} <= ours.stop_ids
    assert 7 not in ours.stop_ids


def test_tokens_that_only_the_settings_name(tmp_path: Path) -> None:
    theirs = byte_level_tokenizer()
    theirs.save(str(tmp_path / "tokenizer.json"))
    added = {"513": {"content": "<think>", "special": False}, "512": {"content": "<|pad|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    ours = opened(tmp_path, 520)
    assert ours.encode("<think>") == [513]
    assert 512 not in ours.encode("<|pad|>")
    assert ours.encode("<|pad|>", special=True) == [512]


def broken(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Changes of a tokenizer.json, by what the message must say."""
    model = content["model"]
    step = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    return {
        "is of type 'WordPiece'": {"model": {**model, "type": "WordPiece"}},
        "vocabulary of 1 to": {"model": {"type": "Unigram", "vocab": {"a": 1}, "unk_id": 0}},
        "entry 1 of its vocabulary is no piece": {"model": {"type": "Unigram", "vocab": [["a", 0], ["b", "x"]]}},
        "entry 0 of its vocabulary is no piece": {"model": {"type": "Unigram", "vocab": [["a", 1e300]]}},
        "holds the piece 'a' twice": {"model": {"type": "Unigram", "vocab": [["a", 0], ["a", 0]]}},
        "unk_id is 'None', no id of its 1 pieces": {"model": {"type": "Unigram", "vocab": [["a", 0]]}},
        "unk_id is '1', no id": {"model": {"type": "Unigram", "vocab": [["a", 0]], "unk_id": 1}},
        "has a 'nbest_size'": {"model": {"type": "Unigram", "vocab": [["a", 0]], "unk_id": 0, "nbest_size": 4}},
        "no vocabulary": {"model": {**model, "vocab": {}}},
        "holds ids that are not": {"model": {**model, "vocab": {"a": 1 << 40}}},
        "one id to two tokens": {"model": {**model, "vocab": {"a": 1, "b": 1}}},
        "is not two tokens": {"model": {**model, "merges": ["abc"]}},
        "do not fit its vocabulary": {"model": {**model, "merges": [["a", "zzz"]]}},
        "has a dropout": {"model": {**model, "dropout": 0.5}},
        "normalizer is of type 'Nmt'": {"normalizer": {"type": "Nmt"}},
        "its trie has 0 bytes": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "A"}},
        "tokenizer is of type 'Evil'": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Evil"}]}},
        "no tokenizer comes of it": {"pre_tokenizer": step},
        "has no decoder": {"decoder": None},
        "is no list": {"added_tokens": {}},
        "has no id": {"added_tokens": [{"content": "x"}]},
        "is no text of 1 to": {"added_tokens": [{"id": 3, "content": ""}]},
        "neither true nor false": {"added_tokens": [{"id": 3, "content": "x", "lstrip": 1}]},
        "rows: they are not of one model": {"added_tokens": [{"id": 9999, "content": "x"}]},
        "is id 1, in the model 65": {"added_tokens": [{"id": 1, "content": "b"}]},
        "not a template": {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}]}},
    }  # fmt: skip


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    whole = path.read_text()
    for message, changes in broken(json.loads(whole)).items():
        path.write_text(whole)
        edit_json(path, **changes)
        with pytest.raises(TokenizerError) as caught:
            opened(tmp_path, 512)
        assert message.replace("65", str(json.loads(whole)["model"]["vocab"]["b"])) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", range(0, 4000, 391))
def test_a_cut_file_is_one_line(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level_tokenizer().save(str(path))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InferError) as caught:
        opened(tmp_path, 512)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("auto_map", "told"),
    [
        ({"AutoTokenizer": ["tokenization_x.XTokenizer", None]}, False),  # the slow one's, not in use
        ({"AutoTokenizer": ["tokenization_x.XTokenizer", "tokenization_x.XTokenizerFast"]}, True),
        (["a.A", "tokenization_x.XTokenizerFast"], True),
        ({"AutoTokenizer": 7}, False),
        (None, False),
    ],
)
def test_a_tokenizer_of_the_repositorys_own_code_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, auto_map: object, told: bool
) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit('run')")
    assert opened(tmp_path, 512).encode("a") == byte_level_tokenizer().encode("a").ids
    assert ("'tokenization_x.XTokenizerFast', which is never run" in caplog.text) is told


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        opened(tmp_path, 512)


def test_tokens_without_a_row_in_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma's text models have such tokens, for images; one that ends texts would make the model useless."""
    theirs = byte_level_tokenizer()
    theirs.add_special_tokens(["<image>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = opened(tmp_path, 512)
    assert ours.vocab_size == 512
    assert "no embedding for <image>" in caplog.text
    assert ours.encode("<image>", special=True) == ours.encode("<image>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<image>"}))
    with pytest.raises(TokenizerError, match="the tokenizer has 513 tokens, the model's embedding 512 rows"):
        opened(tmp_path, 512)
