"""What every tokenizer does. Torch-free."""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Sequence

from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.vocabulary import TokenType, Vocabulary

_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Tokenizer(abc.ABC):
    """Ids from text and bytes from ids.

    bos_id/eos_id: None when the vocabulary names none. add_bos/add_eos: whether the file asks for them on a
    plain prompt. stop_ids: every id that ends a turn. warnings: one line each, for stderr.
    strips_leading_space: whether a text's first space is the tokenizer's own, which `decode` takes away.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    add_eos: bool
    stop_ids: frozenset[int]
    kind: str  # for `infer show`: "bpe (smollm)"
    warnings: tuple[str, ...] = ()
    strips_leading_space: bool = False

    @abc.abstractmethod
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text, without BOS or EOS. Control tokens are plain text unless special is True."""

    @abc.abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for in a text; b"" for control tokens. Raises IndexError out of range."""

    @abc.abstractmethod
    def piece(self, token_id: int) -> str:
        """The vocabulary entry as text, control tokens included: for people to read."""

    @abc.abstractmethod
    def is_control(self, token_id: int) -> bool: ...

    def control_ids(self) -> list[int]:
        """Ids of all control tokens, ascending."""
        return list(filter(self.is_control, range(self.vocab_size)))

    def encode_parts(self, texts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of one text in parts: what a template wrote (True: exactly one control token) and what it did not."""
        return [token_id for text, special in texts for token_id in self.encode(text, special=special)]

    def encode_prompt(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        """`encode` plus BOS and EOS as the file asks; a BOS that the text already begins with is not doubled."""
        ids = self.encode(text, special=special)
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, control tokens left out; bytes that are not UTF-8 become U+FFFD."""


class VocabularyTokenizer(Tokenizer):
    """One whose ids are positions in a Vocabulary. Control and unknown tokens stand for nothing in a text."""

    def __init__(self, vocabulary: Vocabulary, kind: str) -> None:
        self.kind = kind
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.warnings = vocabulary.warnings
        self._tokens, self._types = vocabulary.tokens, vocabulary.types
        self._typed = vocabulary.ids_by_type()
        self._control = self._ids_of(TokenType.CONTROL, TokenType.UNKNOWN)

    def piece(self, token_id: int) -> str:
        self._check(token_id)
        return self._tokens[token_id]

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control

    def control_ids(self) -> list[int]:
        return sorted(self._control)

    def decode(self, ids: Sequence[int]) -> str:
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def _ids_of(self, *kinds: TokenType) -> frozenset[int]:
        return frozenset().union(*(self._typed.get(kind, ()) for kind in kinds))

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")


def refuse_surrogates(text: str) -> None:
    """Raise TokenizerError for a text that UTF-8 cannot hold."""
    if not text.isascii() and (half := _SURROGATE.search(text)):
        raise TokenizerError(
            f"character {half.start()} of the text is half a surrogate pair, not possible in UTF-8; remove it"
        )
