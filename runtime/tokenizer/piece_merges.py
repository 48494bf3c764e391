"""SentencePiece's BPE on the file's own arrays: no trie, no table of pieces, no second copy of the vocabulary.

Source: Kudo & Richardson 2018 (arXiv 1808.06226). Of neighbours that joined are a piece, those of the highest score
come first. The result is that of the `sentencepiece` library, which takes 0.35 s to be made for 262,144 pieces; this
looks up what a text asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from infer.runtime.checkpoint.arrays import TextArray
from infer.runtime.tokenizer.literals import LiteralMatcher
from infer.runtime.tokenizer.merging import Pair, merge, remember
from infer.runtime.tokenizer.token_index import TokenIndex

SPACE = "▁"  # U+2581 stands for a space in pieces

_WORD_END = re.compile(f"(?<=[^{SPACE}])(?={SPACE})")
_LEAST = 5e-324  # smaller than any score, which is a float32
_MOST_LENGTHS = 64


@dataclass(frozen=True)
class PieceTable:
    """pieces, scores: by id. index: of the pieces. reserved: ids that no text is merged into.

    defined: pieces that stand for themselves wherever they are, in place of what `index` says of the same text.
    byte_ids: the token of each byte, for characters without a piece.
    """

    pieces: TextArray
    index: TokenIndex
    scores: Sequence[float]
    reserved: Collection[int]
    defined: Mapping[str, int]
    byte_ids: Sequence[int]

    def find(self, piece: str) -> int:
        """The id of what a text may become, -1 where it is nothing."""
        found = self.defined.get(piece)
        if found is None:
            found = self.index.find(piece.encode())
            if found in self.reserved:
                return -1
        return found


class PieceMerges:
    """Token ids of texts whose spaces are U+2581 already."""

    def __init__(self, table: PieceTable) -> None:
        """Raises ValueError for defined pieces that are too long, or of too many lengths to be found in time."""
        self._table = table
        self._defined = LiteralMatcher(table.defined)
        if self._defined.most_lengths > _MOST_LENGTHS:
            raise ValueError(f"defined pieces of {self._defined.most_lengths} lengths")
        self._inside = _before_spaces([*_with_spaces_inside(table.pieces), *table.defined])
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part, is_defined in self._defined.split(text):
            if is_defined:
                ids.append(self._table.defined[part])
            else:
                for word in self._cut(part):
                    ids.extend(self._word(word))
        return ids

    def _cut(self, text: str) -> Iterator[str]:
        """The words of a text: before a space, unless a piece may reach across."""
        start = 0
        for found in _WORD_END.finditer(text):
            place = found.start()
            if text[place - 1] not in self._inside:
                yield text[start:place]
                start = place
        yield text[start:]

    def _word(self, word: str) -> tuple[int, ...]:
        found = self._words.get(word)
        if found is None:
            found = remember(self._words, word, self._merged(word), len(word))
        return found

    def _merged(self, word: str) -> tuple[int, ...]:
        """The ids of text that no defined piece is in."""
        ids: list[int] = []
        for text in merge(list(word), self._pair):
            token_id = self._table.find(text)
            ids.extend(
                [token_id] if token_id >= 0 else [self._table.byte_ids[byte] for byte in text.encode()]
            )
        return tuple(ids)

    def _pair(self, left: str, right: str) -> Pair | None:
        token_id = self._table.find(left + right)
        if token_id < 0:
            return None
        score = self._table.scores[token_id]
        # the library ranks -0.0 below 0.0
        return -score or (_LEAST if math.copysign(1.0, score) < 0 else 0.0), token_id


def _with_spaces_inside(pieces: TextArray) -> list[str]:
    """Those that have a space after another character."""
    import numpy as np

    data = np.frombuffer(pieces.data, dtype=np.uint8)
    starts = np.frombuffer(pieces.starts, dtype=np.uint32)
    first, second, third = SPACE.encode()
    begins = np.zeros(len(data) + 1, dtype=np.bool_)
    begins[starts] = True
    spaces = np.flatnonzero((data[:-2] == first) & (data[1:-1] == second) & (data[2:] == third))
    begins[spaces + 3] = True  # what follows a space is no place to look at either
    inside = spaces[~begins[spaces]]
    return [pieces[place] for place in np.unique(np.searchsorted(starts, inside, side="right") - 1).tolist()]


def _before_spaces(pieces: Sequence[str]) -> set[str]:
    """Characters that a piece goes on after with a space: a text is not cut there, anywhere else a word ends."""
    inside = re.compile(f"([^{SPACE}]){SPACE}", re.DOTALL)
    return {character for piece in pieces for character in inside.findall(piece)}
