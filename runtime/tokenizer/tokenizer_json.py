"""The tokenizer in a `tokenizer.json`, by the `tokenizers` library, under this project's rule for control tokens: they
match a text only where they are asked for.

The library is given the file's normalizer, pre-tokenizer and merges as they are. Its added tokens are matched by the
library too, which knows about the blanks around them; two instances differ in whether the special ones are among them.
Format: https://github.com/huggingface/tokenizers (tokenizer.json is its serialization, version 1.0).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from infer.runtime.checkpoint.printable import shown
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.base import VocabularyTokenizer
from infer.runtime.tokenizer.bpe import parts, spelled_bytes, tells_words_apart
from infer.runtime.tokenizer.charsmap import check_charsmap
from infer.runtime.tokenizer.folder_vocabulary import AddedToken, FolderFiles
from infer.runtime.tokenizer.json_models import WHERE, build_model, read_pieces, the_library
from infer.runtime.tokenizer.piece_merges import SPACE
from infer.runtime.tokenizer.sentencepiece import byte_names
from infer.runtime.tokenizer.vocabulary import TokenType, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import tokenizers

#: what a pipeline may hold: nothing that draws at random, and nothing whose data could crash the library
#: (Precompiled is sentencepiece's rules, checked as those)
_KNOWN = {
    "normalizer": {
        "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Precompiled", "Prepend", "Replace", "Strip", "StripAccents",
    },
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
    """Byte-level BPE, and SentencePiece's BPE and unigram models, as tokenizer.json has them."""

    def __init__(
        self, vocabulary: Vocabulary, added: Mapping[int, AddedToken], pipeline: _Pipeline, decoder: _Decoder
    ) -> None:
        super().__init__(vocabulary, f"{type(pipeline.model).__name__.lower()} ({WHERE})")
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

    model: tokenizers.models.Model
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
        with the_library("no tokenizer comes of it"):
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
    files.tell_own_code(1, WHERE)
    content = files.json
    model = content.get("model")
    pieces = read_pieces(model)
    added = files.added_tokens()
    post = _flat(content.get("post_processor"), "post_processor")
    vocabulary = read_vocabulary(files.keys(pieces, added, template=_template_ids(post)))
    # tokenizer_config.json may name others than those added.
    for token_id, kind in enumerate(vocabulary.types):
        if kind == TokenType.CONTROL and token_id not in added:
            added[token_id] = AddedToken.control(token_id, vocabulary.tokens[token_id])
    silent = {token_id for token_id, kind in enumerate(vocabulary.types) if kind != TokenType.NORMAL}
    silent -= {token.id for token in added.values() if vocabulary.types[token.id] == TokenType.USER_DEFINED}
    _flat(content.get("pre_tokenizer"), "pre_tokenizer")
    for step in _flat(content.get("normalizer"), "normalizer"):
        if step["type"] == "Precompiled":
            _check_rules(step.get("precompiled_charsmap"))
    pipeline = _Pipeline(
        build_model(model, pieces, silent), content.get("normalizer"), content.get("pre_tokenizer")
    )
    return JSONTokenizer(vocabulary, added, pipeline, _decoder(content.get("decoder")))


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
            f"{WHERE}: its {key} is of type {shown(str(kind))}; this version reads {', '.join(sorted(_KNOWN[key]))}"
        )
    return [component]


def _check_rules(encoded: object) -> None:
    try:
        rules = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
    except (binascii.Error, ValueError):
        rules = b""
    check_charsmap(rules, f"{WHERE}: precompiled_charsmap")


def _decoder(component: object) -> _Decoder:
    steps = _flat(component, "decoder")
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _Decoder(byte_level=True, strips_leading_space=False)
    if not kinds & {"Metaspace", "Replace"}:
        raise TokenizerError(
            f"{WHERE}: has no decoder that makes texts of its tokens; this version needs one"
        )
    strips = any(
        (step["type"] == "Strip" and step.get("content") == " " and step.get("start"))
        or (
            step["type"] == "Metaspace"
            and step.get("prepend_scheme", "always") != "never"
            and step.get("add_prefix_space", True)
        )
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
                f"{WHERE}: its post_processor is not a template; download it again"
            ) from None
    if len(before) > 1 or len(after) > 1 or not all(type(token_id) is int for token_id in before + after):
        raise TokenizerError(
            f"{WHERE}: its post_processor puts {len(before)} tokens before a text and {len(after)} after it; "
            "this version supports one"
        )
    return before, after
