"""SentencePiece vocabularies: pieces of text with scores, merged pair by pair or chosen by a unigram model.

Source: Kudo & Richardson 2018 (SentencePiece), Kudo 2018 (unigram). Short texts of plain BPE models are merged by
`piece_merges`; everything else the `sentencepiece` library encodes, with the same result. It is given a model put
together here out of checked values, never bytes of a file (model_proto, charsmap).
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.base import VocabularyTokenizer, refuse_surrogates
from infer.runtime.tokenizer.charsmap import check_charsmap
from infer.runtime.tokenizer.literals import LiteralMatcher
from infer.runtime.tokenizer.model_proto import BPE, UNIGRAM, ModelProto, serialize
from infer.runtime.tokenizer.piece_merges import SPACE, PieceMerges, PieceTable
from infer.runtime.tokenizer.vocabulary import PREFIX, TokenType, Vocabulary, numbers, read_list, read_scalar

if TYPE_CHECKING:
    import sentencepiece

logger = logging.getLogger(__name__)

MAX_PIECE = 1024  # characters

_AGAIN = "convert the model again"
_NAMES = {UNIGRAM: "unigram", BPE: "bpe"}
_NONE: frozenset[int] = frozenset()


# A text of so many characters is worth the library's tables, 0.35 s for 262,144 pieces; a shorter one is
# merged here, where a vocabulary needs neither.
LONG_TEXT = 1 << 16


class SentencePieceTokenizer(VocabularyTokenizer):
    """Pieces by a SentencePiece model.

    Control tokens match a text only where special is True, those that the model's makers defined always. Where
    the model begins texts with a space, the text after a control token begins with one too, and decoding takes
    the first one away. Characters without a piece become the unknown token, with one warning.
    """

    def __init__(self, vocabulary: Vocabulary, model: PieceModel) -> None:
        """model: of the same vocabulary. Raises TokenizerError where the library makes no tokenizer of it."""
        super().__init__(vocabulary, f"sentencepiece ({_NAMES[model.model_type]})")
        bpe = model.model_type == BPE
        self.add_bos = bpe if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_eos = not bpe if vocabulary.add_eos is None else vocabulary.add_eos
        self.strips_leading_space = model.add_dummy_prefix

        self._unknown = model.unknown_id
        self._control |= {model.unknown_id}
        self._special_ids = {self._tokens[token_id]: token_id for token_id in self._control}
        self._special = LiteralMatcher(self._special_ids)
        self._prefix = SPACE if model.add_dummy_prefix else ""
        self._model = model
        self._short = model.merges()
        self._processor = _build(model.proto()) if self._short is None else None
        self._warned = False

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        refuse_surrogates(text)
        if not special:
            return self._encode_plain(text)
        ids: list[int] = []
        for part, literal in self._special.split(text):
            if literal:
                ids.append(self._special_ids[part])
            else:
                ids.extend(self._encode_plain(part))
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        short = self._short
        if short is not None and len(text) < LONG_TEXT:
            return short.encode(self._prefix + text.replace(" ", SPACE)) if text else []
        if self._processor is None:
            self._processor, self._short = _build(self._model.proto()), None
        ids: list[int] = self._processor.encode(text)
        if not self._warned and self._unknown in ids:
            self._warned = True
            logger.warning(
                "some characters of the text have no token in this vocabulary; they become unknown"
            )
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        self._check(token_id)
        if token_id in self._control:
            return b""
        token = self._tokens[token_id]
        if self._types[token_id] == TokenType.BYTE:
            return byte_names()[token]
        if self._types[token_id] == TokenType.UNUSED and token == f"[EMPTY_{token_id}]":
            return b""
        return token.replace(SPACE, " ").encode()


@dataclass(frozen=True)
class PieceModel:
    """What a file says about its pieces, checked. scores: float32, by id. typed: ids by TokenType, but NORMAL."""

    vocabulary: Vocabulary
    scores: array[float]
    typed: Mapping[int, frozenset[int]]
    unknown_id: int
    model_type: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    def proto(self) -> ModelProto:
        """The same pieces under the same ids, as the library needs them."""
        pieces, types = list(self.vocabulary.tokens), list(self.vocabulary.types)
        for token_id, (piece, kind) in self._changed().items():
            pieces[token_id], types[token_id] = piece, kind
        return ModelProto(
            pieces=pieces,
            scores=self.scores,
            types=types,
            model_type=self.model_type,
            byte_fallback=TokenType.BYTE in self.typed,
            charsmap=self.charsmap,
            add_dummy_prefix=self.add_dummy_prefix,
            remove_extra_whitespaces=self.remove_extra_whitespaces,
        )

    def merges(self) -> PieceMerges | None:
        """The same without the library, for models where a text is only cut, merged and spelled in bytes."""
        byte_ids, unused = self.typed.get(TokenType.BYTE, _NONE), self.typed.get(TokenType.UNUSED, _NONE)
        tokens, ids = self.vocabulary.tokens, self.vocabulary.ids
        if self.model_type != BPE or self.charsmap or self.remove_extra_whitespaces or not byte_ids or unused:
            return None
        if b"\x00" in tokens.data:  # the library takes no such piece, and says so
            return None
        changed = self._changed()
        own = {
            token_id: (tokens[token_id], TokenType.USER_DEFINED)
            for token_id in self.typed.get(TokenType.USER_DEFINED, _NONE)
        }
        ours = [
            (piece, place)
            for place, (piece, kind) in sorted({**own, **changed}.items())
            if kind == TokenType.USER_DEFINED
        ]
        defined = dict(ours)
        if len(defined) < len(ours):  # nor one that is there twice
            return None
        table = PieceTable(
            pieces=tokens,
            index=ids,
            scores=self.scores,
            reserved=byte_ids
            | self.typed.get(TokenType.CONTROL, _NONE)
            | {place for place, (_, kind) in changed.items() if kind != TokenType.NORMAL},
            defined=defined,
            byte_ids=[ids[name] for name in byte_names()],
        )
        try:
            return PieceMerges(table)
        except ValueError:
            return None

    def _changed(self) -> dict[int, tuple[str, int]]:
        """Pieces and types, by id, that are others for the library, so that it matches what may match, nothing else.

        It wants one unknown piece, takes a control token of one character for that character, and looks for
        user-defined pieces where spaces are already U+2581. A piece that another one stands in the way of gets a
        name that no text can become.
        """
        tokens, ids = self.vocabulary.tokens, self.vocabulary.ids
        changed = {
            token_id: (tokens[token_id], int(TokenType.NORMAL)) for token_id in self.typed.get(0, _NONE)
        }
        hidden: set[int] = set()
        for kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            for token_id in self.typed.get(kind, _NONE):
                if kind == TokenType.UNKNOWN:
                    changed[token_id] = tokens[token_id], TokenType.CONTROL
                if len(tokens[token_id]) == 1:
                    hidden.add(token_id)
        for token_id in sorted(self.typed.get(TokenType.USER_DEFINED, _NONE)):
            if " " in tokens[token_id]:
                piece = tokens[token_id].replace(" ", SPACE)
                changed[token_id] = piece, TokenType.USER_DEFINED
                hidden.add(ids.get(piece, token_id))
                hidden.discard(token_id)
        changed[self.unknown_id] = tokens[self.unknown_id], TokenType.UNKNOWN
        for token_id in hidden - {self.unknown_id}:
            name = f"<control {token_id}>"
            while name in ids:
                name += ">"
            changed[token_id] = name, TokenType.CONTROL
        return changed


def load_sentencepiece(
    metadata: Mapping[str, object], vocabulary: Vocabulary, model_type: int
) -> SentencePieceTokenizer:
    """The tokenizer of a GGUF file of kind `llama` (BPE) or `t5` (UNIGRAM).

    Raises TokenizerError for scores, types, byte tokens or normalization rules that do not fit.
    """
    scores = _read_scores(metadata, len(vocabulary.tokens))
    if vocabulary.tokens.longest > MAX_PIECE and max(map(len, vocabulary.tokens)) > MAX_PIECE:
        raise TokenizerError(f"{PREFIX}tokens: a token has more than {MAX_PIECE} characters; {_AGAIN}")
    if metadata.get(PREFIX + "token_type") is None:
        vocabulary = _with_bytes_by_name(vocabulary)
    typed = vocabulary.ids_by_type()
    _check_types(vocabulary, typed)
    prefix = read_scalar(metadata, PREFIX + "add_space_prefix", bool)
    model = PieceModel(
        vocabulary=vocabulary,
        scores=scores,
        typed=typed,
        unknown_id=_find_unknown(metadata, vocabulary, typed),
        model_type=model_type,
        charsmap=_read_charsmap(metadata),
        add_dummy_prefix=True if prefix is None else prefix,
        remove_extra_whitespaces=bool(read_scalar(metadata, PREFIX + "remove_extra_whitespaces", bool)),
    )
    return SentencePieceTokenizer(vocabulary, model)


def _read_scores(metadata: Mapping[str, object], size: int) -> array[float]:
    key = PREFIX + "scores"
    values = read_list(metadata, key, float)
    if values is None:
        raise TokenizerError(f"{key} is missing: the file holds half a tokenizer; convert it again")
    if len(values) != size:
        raise TokenizerError(f"{key} has {len(values)} entries for {size} tokens; {_AGAIN}")
    scores = array("f", numbers(values))  # as the library holds them: what is too large becomes infinite
    if not all(map(math.isfinite, scores)):
        raise TokenizerError(f"{key} holds values that are not finite; {_AGAIN}")
    return scores


def _with_bytes_by_name(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with its byte tokens typed as such, where it has them all."""
    if not byte_names().keys() <= vocabulary.ids.keys():
        return vocabulary
    types = list(vocabulary.types)
    for name in byte_names():
        types[vocabulary.ids[name]] = TokenType.BYTE
    return replace(vocabulary, types=types)


def _check_types(vocabulary: Vocabulary, typed: Mapping[int, frozenset[int]]) -> None:
    if wrong := [kind for kind in typed if not 0 <= kind <= TokenType.BYTE]:
        raise TokenizerError(f"{PREFIX}token_type holds {wrong[0]}, which is no type of token; {_AGAIN}")
    named = {vocabulary.tokens[token_id] for token_id in typed.get(TokenType.BYTE, _NONE)}
    if named and named != byte_names().keys():
        raise TokenizerError(f"{PREFIX}tokens: the byte tokens are not <0x00> to <0xFF>; {_AGAIN}")


def _find_unknown(
    metadata: Mapping[str, object], vocabulary: Vocabulary, typed: Mapping[int, frozenset[int]]
) -> int:
    """The id of characters without a piece, which no model can do without."""
    key, size = PREFIX + "unknown_token_id", len(vocabulary.tokens)
    found = read_scalar(metadata, key, int)
    if found is not None and not 0 <= found < size:
        raise TokenizerError(f"{key} is {found}, outside the vocabulary of {size} tokens; {_AGAIN}")
    if found is None:
        found = min(typed.get(TokenType.UNKNOWN, _NONE), default=vocabulary.ids.get("<unk>"))
    if found is None:
        raise TokenizerError(f"{key} is missing and no token is typed unknown; {_AGAIN}")
    if vocabulary.types[found] == TokenType.BYTE:
        raise TokenizerError(f"{key} is {found}, a byte token; {_AGAIN}")
    return found


def _read_charsmap(metadata: Mapping[str, object]) -> bytes:
    """Normalization rules, checked; empty where there are none."""
    key = PREFIX + "precompiled_charsmap"
    value = metadata.get(key)
    if not isinstance(value, bytes):
        values = read_list(metadata, key, int) or []
        if not all(0 <= byte < 256 for byte in values):
            raise TokenizerError(f"{key} holds values that are not bytes; {_AGAIN}")
        value = bytes(values)
    if value:
        check_charsmap(value, key)
    return value


def _build(model: ModelProto) -> sentencepiece.SentencePieceProcessor:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(serialize(model))
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{PREFIX}tokens: no tokenizer comes of them: {reason[:200]}; {_AGAIN}"
        ) from error
    return processor


@cache
def byte_names() -> Mapping[str, bytes]:
    return {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
