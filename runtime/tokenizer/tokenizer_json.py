"""The tokenizer in a `tokenizer.json`, by the `tokenizers` library, under this project's rule for control tokens: they
match a text only where they are asked for.

The library is given the file's normalizer, pre-tokenizer and merges as they are. Its added tokens are matched by the
library too, which knows about the blanks around them; two instances differ in whether the special ones are among them.
Format: https://github.com/huggingface/tokenizers (tokenizer.json is its serialization, version 1.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from infer.runtime.checkpoint.printable import shown
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.base import VocabularyTokenizer
from infer.runtime.tokenizer.bpe import parts, spelled_bytes, tells_words_apart
from infer.runtime.tokenizer.folder_vocabulary import AddedToken, FolderFiles
from infer.runtime.tokenizer.sentencepiece import SPACE, byte_names
from infer.runtime.tokenizer.vocabulary import MAX_TOKENS, TokenType, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import tokenizers

_WHERE = "tokenizer.json"
#: what a pipeline may hold: nothing that draws at random, and nothing whose data could crash the library
_KNOWN = {
    "normalizer": {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "Strip", "StripAccents"},
    "pre_tokenizer": {
        "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace",
        "WhitespaceSplit",
    },
    "decoder": {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"},
    "post_processor": {"ByteLevel", "TemplateProcessing"},
}  # fmt: skip
_MEMBERS = ("normalizers", "pretokenizers", "decoders", "processors")
_MAX_DEPTH = 8


@dataclass(frozen=True)
class _Decoder:
    """byte_level: pieces spell bytes as characters; else U+2581 is a space and `<0xNN>` a byte."""

    byte_level: bool
    strips_leading_space: bool


class JSONTokenizer(VocabularyTokenizer):
    """Byte-level BPE and SentencePiece's BPE as tokenizer.json has them."""

    def __init__(
        self, vocabulary: Vocabulary, added: Mapping[int, AddedToken], pipeline: _Pipeline, decoder: _Decoder
    ) -> None:
        super().__init__(vocabulary, f"bpe ({_WHERE})")
        self.add_bos, self.add_eos = bool(vocabulary.add_bos), bool(vocabulary.add_eos)
        self.strips_leading_space = decoder.strips_leading_space
        self._added, self._byte_level = added, decoder.byte_level
        plain = [token for token in added.values() if token.id not in self._control]
        self._plain = pipeline.build(plain)
        self._later = pipeline.inside_a_text().build(plain) if pipeline.begins_texts else self._plain
        self._special = pipeline.build(added.values())
        self._words = tells_words_apart(self._plain.tokenizer)
        self._ids = {token.content: token.id for token in added.values()}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self._run(self._special if special else self._plain, text)

    def encode_parts(self, texts: Iterable[tuple[str, bool]]) -> list[int]:
        """As Tokenizer.encode_parts; blanks beside a control token that takes them in belong to it."""
        given = list(texts)
        ids: list[int] = []
        for index, (text, special) in enumerate(given):
            token = self._flags(given, index)
            if special and token is not None:
                ids.append(token.id)
                continue
            before, after = self._flags(given, index - 1), self._flags(given, index + 1)
            text = text.lstrip() if before is not None and before.rstrip else text
            text = text.rstrip() if after is not None and after.lstrip else text
            ids += self._run(self._special if special else self._later if index else self._plain, text)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        self._check(token_id)
        if token_id in self._control or self._types[token_id] == TokenType.UNUSED:
            return b""
        token = self._tokens[token_id]
        if token_id in self._added:
            return token.encode() if self._byte_level else token.replace(SPACE, " ").encode()
        if not self._byte_level:
            return byte_names().get(token) or token.replace(SPACE, " ").encode()
        return spelled_bytes(token)

    def _flags(self, texts: Sequence[tuple[str, bool]], index: int) -> AddedToken | None:
        """The control token that stands at that place of a chat, if one does."""
        if not 0 <= index < len(texts) or not texts[index][1]:
            return None
        token_id = self._ids.get(texts[index][0])
        return None if token_id is None else self._added[token_id]

    def _run(self, library: _Instance, text: str) -> list[int]:
        ids: list[int] = []
        for part in parts(text, cut=self._byte_level, words=self._words):
            found = library.tokenizer.encode(part, add_special_tokens=False).ids
            ids.extend(library.renumbered.get(token_id, token_id) for token_id in found)
        return ids


@dataclass(frozen=True)
class _Instance:
    """renumbered: the library's ids of added tokens → the file's."""

    tokenizer: tokenizers.Tokenizer
    renumbered: Mapping[int, int]


@dataclass(frozen=True)
class _Pipeline:
    """Everything that turns a text into ids, but for the added tokens. begins_texts: the pre-tokenizer treats the
    beginning of a text unlike the beginning of what follows a control token."""

    model: tokenizers.models.BPE
    normalizer: object
    pre_tokenizer: object

    @property
    def begins_texts(self) -> bool:
        return any(
            part.get("prepend_scheme") == "first" for part in _flat(self.pre_tokenizer, "pre_tokenizer")
        )

    def inside_a_text(self) -> _Pipeline:
        text = json.dumps(self.pre_tokenizer).replace(
            '"prepend_scheme": "first"', '"prepend_scheme": "never"'
        )
        return replace(self, pre_tokenizer=json.loads(text))

    def build(self, added: Iterable[AddedToken]) -> _Instance:
        import tokenizers

        steps = {"normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer}
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        with _the_library("no tokenizer comes of it"):
            built = tokenizers.Tokenizer.from_str(
                json.dumps({"version": "1.0", "added_tokens": [], "model": empty} | steps)
            )
            built.model = self.model
            given = sorted(added, key=lambda token: token.id)
            built.add_tokens(
                [
                    tokenizers.AddedToken(
                        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                        normalized=token.normalized, special=False,
                    )
                    for token in given
                ]
            )  # fmt: skip
            numbers = {built.token_to_id(token.content) or 0: token.id for token in given}
        return _Instance(built, numbers)


def load_tokenizer_json(files: FolderFiles) -> JSONTokenizer:
    """Raises TokenizerError for a file that is not one, or that asks for what this version does not do."""
    content = files.json
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        found = model.get("type") if isinstance(model, dict) else None
        raise TokenizerError(f"{_WHERE}: its model is of type {shown(str(found))}; this version reads BPE")
    added = files.added_tokens()
    post = _flat(content.get("post_processor"), "post_processor")
    pieces = _pieces(model)
    vocabulary = read_vocabulary(files.keys(pieces, added, template=_template_ids(post)))
    # tokenizer_config.json may name others than those added.
    for token_id, kind in enumerate(vocabulary.types):
        if kind == TokenType.CONTROL and token_id not in added:
            added[token_id] = AddedToken.control(token_id, vocabulary.tokens[token_id])
    silent = {token_id for token_id, kind in enumerate(vocabulary.types) if kind != TokenType.NORMAL}
    silent -= {token.id for token in added.values() if vocabulary.types[token.id] == TokenType.USER_DEFINED}
    for key in ("normalizer", "pre_tokenizer"):
        _flat(content.get(key), key)
    pipeline = _Pipeline(
        _build_model(model, pieces, silent), content.get("normalizer"), content.get("pre_tokenizer")
    )
    return JSONTokenizer(vocabulary, added, pipeline, _decoder(content.get("decoder")))


def _pieces(model: Mapping[str, object]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise TokenizerError(f"{_WHERE}: its model has no vocabulary; download it again")
    if not all(type(token_id) is int and 0 <= token_id < MAX_TOKENS for token_id in vocab.values()):
        raise TokenizerError(f"{_WHERE}: its vocabulary holds ids that are not from 0 to {MAX_TOKENS - 1}")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{_WHERE}: its vocabulary gives one id to two tokens; download it again")
    return vocab


def _build_model(
    model: Mapping[str, object], pieces: Mapping[str, int], silent: set[int]
) -> tokenizers.models.BPE:
    """silent: ids that no text becomes. Their pieces get names that nothing leads to, and so do ids without a piece:
    the library numbers added tokens from the size of the vocabulary on."""
    from tokenizers import models

    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise TokenizerError(f"{_WHERE}: its model has a {key}, which this version does not support")
    muted = {piece for piece, token_id in pieces.items() if token_id in silent}
    vocab = {piece: token_id for piece, token_id in pieces.items() if piece not in muted}
    size = max(pieces.values()) + 1
    for token_id in set(range(size)) - set(vocab.values()):
        vocab[f"\0unused {token_id}\0"] = token_id
    merges = list(_merges(model.get("merges")))
    if muted:
        merges = [pair for pair in merges if muted.isdisjoint((*pair, "".join(pair)))]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in muted:
        unknown = f"\0unused {pieces[unknown]}\0"
    with _the_library("its merges do not fit its vocabulary"):
        return models.BPE(
            vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=bool(model.get("fuse_unk")),
            byte_fallback=bool(model.get("byte_fallback")), ignore_merges=bool(model.get("ignore_merges")),
        )  # fmt: skip


def _merges(given: object) -> Iterator[tuple[str, str]]:
    """Pairs, or texts with a space between."""
    if not isinstance(given, list):
        raise TokenizerError(f"{_WHERE}: its model has no merges; download it again")
    for merge in given:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(piece, str) for piece in pair):
            raise TokenizerError(
                f"{_WHERE}: the merge {shown(str(merge))} is not two tokens; download it again"
            )
        yield pair[0], pair[1]


def _flat(component: object, key: str, depth: int = 0) -> list[dict[str, object]]:
    """The steps of a component, sequences opened. Raises TokenizerError for one that is not known."""
    if component is None:
        return []
    kind = component.get("type") if isinstance(component, dict) else None
    if isinstance(component, dict) and kind == "Sequence" and depth < _MAX_DEPTH:
        members = next((component[name] for name in _MEMBERS if name in component), None)
        if isinstance(members, list):
            return [step for member in members for step in _flat(member, key, depth + 1)]
    if not isinstance(component, dict) or kind not in _KNOWN[key]:
        raise TokenizerError(
            f"{_WHERE}: its {key} is of type {shown(str(kind))}; this version reads {', '.join(sorted(_KNOWN[key]))}"
        )
    return [component]


def _decoder(component: object) -> _Decoder:
    steps = _flat(component, "decoder")
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _Decoder(byte_level=True, strips_leading_space=False)
    if not kinds & {"Metaspace", "Replace"}:
        raise TokenizerError(
            f"{_WHERE}: has no decoder that makes texts of its tokens; this version needs one"
        )
    strips = any(
        (step["type"] == "Strip" and step.get("content") == " " and step.get("start"))
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return _Decoder(byte_level=False, strips_leading_space=strips)


def _template_ids(steps: Sequence[Mapping[str, object]]) -> tuple[list[int], list[int]]:
    """What post-processing puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in steps:
        if step["type"] != "TemplateProcessing":
            continue
        try:
            side = before
            for item in step["single"]:  # type: ignore[attr-defined]
                if "Sequence" in item:
                    side = after
                else:
                    side += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]  # type: ignore[index]
        except (KeyError, TypeError):
            raise TokenizerError(
                f"{_WHERE}: its post_processor is not a template; download it again"
            ) from None
    if len(before) > 1 or len(after) > 1 or not all(type(token_id) is int for token_id in before + after):
        raise TokenizerError(
            f"{_WHERE}: its post_processor puts {len(before)} tokens before a text and {len(after)} after it; "
            "this version supports one"
        )
    return before, after


@contextmanager
def _the_library(refusal: str) -> Iterator[None]:
    """Raises TokenizerError for whatever fails in the block, the library's panics included, which are no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{_WHERE}: {refusal}: {' '.join(str(error).split())[:200]}") from None
