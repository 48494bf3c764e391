"""Finding the leftmost, longest of many literal strings in a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

MAX_LITERAL = 1024  # characters
_MOST_IN_CLASS = 256  # above U+FFFF the characters of a class are tried one after the other


class LiteralMatcher:
    """Splits texts at literals. Built once; a call costs no more for many literals than for few of as many lengths.

    A pattern of the possible first (two) characters finds candidates; each is looked up by length, the
    longest first. Raises ValueError for an empty literal or one longer than MAX_LITERAL.
    """

    most_lengths: int  # that literals with one first character have

    def __init__(self, literals: Collection[str]) -> None:
        self._literals = frozenset(literals)
        lengths: dict[str, set[int]] = {}
        for literal in self._literals:
            if not 0 < len(literal) <= MAX_LITERAL:
                raise ValueError(f"a special token of {len(literal)} characters (1 to {MAX_LITERAL} can be)")
            lengths.setdefault(literal[0], set()).add(len(literal))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self.most_lengths = max(map(len, lengths.values()), default=0)
        self._candidate: re.Pattern[str] | None = None
        if self._literals:
            pattern = _char_class(lengths)
            if all(len(literal) > 1 for literal in self._literals):
                pattern += f"(?={_char_class({literal[1] for literal in self._literals})})"
            self._candidate = re.compile(pattern)

    def __bool__(self) -> bool:
        return self._candidate is not None

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in order as (part, is a literal). Parts are never empty; joined they are the text."""
        done = 0
        for start, end in self.spans(text):
            if start > done:
                yield text[done:start], False
            yield text[start:end], True
            done = end
        if done < len(text):
            yield text[done:], False

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Non-overlapping (start, end) of the literals, leftmost first, the longest at each place."""
        if self._candidate is None:
            return
        position = 0
        while found := self._candidate.search(text, position):
            start = found.start()
            position = start + 1
            for length in self._lengths.get(text[start], ()):
                if text[start : start + length] in self._literals:
                    yield start, start + length
                    position = start + length
                    break


def _char_class(characters: Collection[str]) -> str:
    if len(characters) > _MOST_IN_CLASS:
        return r"(?s:.)"
    return "[" + "".join(re.escape(character) for character in sorted(characters)) + "]"
