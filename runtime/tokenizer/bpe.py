"""Byte-level BPE: every text is bytes, every byte is one printable character, merges do the rest.

Source: Radford et al. 2019 (GPT-2), section 2.2. Which tokens may match in a text at all is decided here; what is
between them is cut into words, and the words are merged, by `ascii_words` and `word_merges` or, where the text asks for
it, by the `tokenizers` library, with the same result.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING

from infer.runtime.checkpoint.arrays import TextArray
from infer.runtime.errors import ContextLengthError, TokenizerError
from infer.runtime.tokenizer.ascii_words import ASCIIWords
from infer.runtime.tokenizer.base import VocabularyTokenizer, refuse_surrogates
from infer.runtime.tokenizer.literals import LiteralMatcher
from infer.runtime.tokenizer.pretokenizers import FAMILIES, PRETOKENIZERS, PreTokenizer
from infer.runtime.tokenizer.vocabulary import PREFIX, TokenType, Vocabulary, read_scalar, read_texts
from infer.runtime.tokenizer.word_merges import WordMerges

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

# Characters given to the library at once. Its regular expression engine gives up, with a panic, after ten
# million steps back inside one match, and every character of a run of blanks can cost one.
MAX_PART = 2_000_000

# Between a single line break and an ASCII letter no pre-tokenizer joins and no normalization looks across; between two
# words none that tells words apart, as `tells_words_apart` asks.
_LINES = re.compile(r"(?<=\S)\n(?=[A-Za-z])")
_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")

# A text of so many characters is worth the library's tables, 0.6 s for 150,000 tokens; a shorter one is
# merged here, where a vocabulary needs neither.
LONG_TEXT = 1 << 17


class BPETokenizer(VocabularyTokenizer):
    """A vocabulary with merges.

    Control and unknown tokens match a text only where special is True, those that the model's makers defined
    (TokenType.USER_DEFINED) always, unused ones never. Bytes without a token are left out, with one warning.
    """

    def __init__(self, vocabulary: Vocabulary, merges: TextArray, pre: PreTokenizer, name: str) -> None:
        """name: of the pre-tokenizer, for `kind`. Raises TokenizerError for merges that do not fit."""
        super().__init__(vocabulary, f"bpe ({name})")
        self.add_bos = pre.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_eos = bool(vocabulary.add_eos)
        self.warnings += tuple(self._missing_ends())

        self._silent = self._control | self._ids_of(TokenType.UNUSED)
        defined = {self._tokens[token_id]: token_id for token_id in self._ids_of(TokenType.USER_DEFINED)}
        self._special_ids = {self._tokens[token_id]: token_id for token_id in self._control} | defined
        try:
            self._always = LiteralMatcher(defined)
            self._with_special = LiteralMatcher(self._special_ids)
        except ValueError as error:
            raise TokenizerError(f"{PREFIX}tokens: {error}; convert the model again") from error
        self._pre = pre
        self._ascii = ASCIIWords(pre.steps, {byte: text for text, byte in _bytes_of_characters().items()})
        self._short: WordMerges | None = None
        if vocabulary.ids.holds_pairs(merges):
            self._short = WordMerges(vocabulary.ids, merges, self._silent, pre.ignore_merges)
        if self._short is None or self._short.crowded:
            self._use_library(merges)
        self._unencodable = bytes(
            byte
            for character, byte in _bytes_of_characters().items()
            if vocabulary.ids.find(character.encode()) in self._silent | {-1}
        )
        self._warned = False

    def _missing_ends(self) -> list[str]:
        missing = []
        if self.add_bos and self.bos_id is None:
            missing.append(f"the file asks for a BOS token but has no {PREFIX}bos_token_id; none is added")
        if self.add_eos and self.eos_id is None:
            missing.append(f"the file asks for an EOS token but has no {PREFIX}eos_token_id; none is added")
        return missing

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        matcher = self._with_special if special else self._always
        if not matcher:
            return self._encode_plain(text)
        ids: list[int] = []
        for part, literal in matcher.split(text):
            if literal:
                ids.append(self._special_ids[part])
            else:
                ids.extend(self._encode_plain(part))
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        short = self._short
        if short is not None and len(text) >= LONG_TEXT:
            self._use_library(short.merges)
            short = None
        if short is None:
            ids = self._encode_long(text)
        else:
            refuse_surrogates(text)
            words = self._ascii.cut(text) if text.isascii() else self._cut(text)
            ids = list(chain.from_iterable(map(short.encode, words)))
        if self._unencodable and not self._warned:
            data = text.encode()
            lost = len(data) - len(data.translate(None, self._unencodable))
            if lost:
                self._warned = True
                logger.warning("%d bytes of the text have no token in this vocabulary and are left out", lost)
        return ids

    @cached_property
    def _pipeline(self) -> tokenizers.Tokenizer:
        return self._pre.pipeline()

    def _encode_long(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in parts(text, words=tells_words_apart(self._pipeline)):
            ids.extend(self._pipeline.encode(part, add_special_tokens=False).ids)
        return ids

    def _cut(self, text: str) -> list[str]:
        """What the merging sees of a text, one word after the other."""
        pipeline = self._pipeline
        if pipeline.normalizer is not None:
            text = pipeline.normalizer.normalize_str(text)
        return [word for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(text)]

    def _use_library(self, merges: TextArray) -> None:
        """From now on the library merges. Raises TokenizerError for merges that do not fit."""
        from tokenizers import models

        ordinary = {token: place for place, token in enumerate(self._tokens) if place not in self._silent}
        silent = frozenset(self._tokens[token_id] for token_id in self._silent)
        self._pipeline.model = models.BPE(
            vocab=ordinary, merges=_pairs(ordinary, silent, merges), ignore_merges=self._pre.ignore_merges
        )
        self._short = None

    def token_bytes(self, token_id: int) -> bytes:
        self._check(token_id)
        if token_id in self._silent:
            return b""
        token = self._tokens[token_id]
        if self._types[token_id] == TokenType.USER_DEFINED:
            return token.encode()
        return spelled_bytes(token)


def parts(text: str, *, cut: bool = True, words: bool = False) -> Iterator[str]:
    """The text in parts that can be encoded apart. cut: whether it may be parted at all; words: also between words.

    Raises TokenizerError for half surrogate pairs, ContextLengthError where there is no place to part a long text.
    """
    refuse_surrogates(text)
    start = 0
    while cut and len(text) - start > MAX_PART:
        limits = start + MAX_PART // 8, start + MAX_PART
        place = _LINES.search(text, *limits) or (_WORDS.search(text, *limits) if words else None)
        if place is None:
            raise ContextLengthError(
                f"the text has more than {MAX_PART * 7 // 8} characters without a line break or a space between two "
                "words, too much to tokenize at once; break its lines"
            )
        yield text[start : place.end()]
        start = place.end()
    if text:
        yield text[start:]


def tells_words_apart(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether its pre-tokenizer cuts between a word and the space of the next one."""
    pre = tokenizer.pre_tokenizer
    return pre is not None and all(
        [place for _, place in pre.pre_tokenize_str(text)][:1] == [(0, 1)]
        for text in ("a b", "A B", "a B", "A b")
    )


def load_bpe(metadata: Mapping[str, object], vocabulary: Vocabulary, pre: str | None = None) -> BPETokenizer:
    """The tokenizer of a GGUF file with byte-level BPE. pre overrides the file's `tokenizer.ggml.pre`.

    Raises TokenizerError for a pre-tokenizer this version does not know and for merges that do not fit.
    """
    merges = read_texts(metadata, PREFIX + "merges")
    if merges is None:
        raise TokenizerError(f"{PREFIX}merges is missing: the file holds half a tokenizer; convert it again")
    name = pre or read_scalar(metadata, PREFIX + "pre", str)
    warnings: tuple[str, ...] = ()
    if not name:
        name = "gpt-2"
        warnings = (
            f"{PREFIX}pre is missing: {name!r} is used, answers may be worse; name another with --pre",
        )
    family = PRETOKENIZERS.get(name)
    if family is None:
        raise TokenizerError(
            f"pre-tokenizer {name[:60]!r} is not known to this version; choose one with --pre NAME: "
            + ", ".join(FAMILIES)
        )
    tokenizer = BPETokenizer(vocabulary, merges, family, name)
    tokenizer.warnings += warnings
    return tokenizer


def _pairs(
    vocabulary: Mapping[str, int], silent: frozenset[str], merges: Iterable[str]
) -> list[tuple[str, str]]:
    """The merges as the library takes them. vocabulary: what a text may become; silent: the other tokens."""
    pairs = [(left, right) for left, _, right in [merge.partition(" ") for merge in merges]]
    pieces = chain(chain.from_iterable(pairs), map("".join, pairs))
    if all(map(vocabulary.__contains__, pieces)):
        return pairs
    # The rare cases: raw spaces inside pieces, and merges that lead to control tokens, which no text becomes. The
    # library panics for some of them.
    pairs = [_split_merge(merge, vocabulary, silent) for merge in merges]
    pairs = [pair for pair in pairs if silent.isdisjoint((*pair, "".join(pair)))]
    for pair in pairs:
        if "".join(pair) not in vocabulary:
            raise TokenizerError(
                f"{PREFIX}merges: {' '.join(pair)[:60]!r} makes no token; convert the model again"
            )
    return pairs


def _split_merge(merge: str, vocabulary: Mapping[str, int], silent: frozenset[str]) -> tuple[str, str]:
    """The two pieces of a merge, cut at the first space that leaves two tokens."""
    for position, character in enumerate(merge):
        left, right = merge[:position], merge[position + 1 :]
        if character == " " and all(piece in vocabulary or piece in silent for piece in (left, right)):
            return left, right
    raise TokenizerError(f"{PREFIX}merges: {merge[:60]!r} is not two tokens; convert the model again")


def spelled_bytes(token: str) -> bytes:
    """What a piece spells, a character for each byte; its UTF-8 where it holds other characters."""
    table = _bytes_of_characters()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode()


@cache
def _bytes_of_characters() -> Mapping[str, int]:
    """GPT-2's 256 printable characters: bytes that are printable in Latin-1 stand for themselves, the other
    68 for U+0100 and following, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }
