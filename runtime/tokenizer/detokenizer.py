"""Text from tokens as they come: never half a character, never part of a stop string.

Stop strings are found by an Aho-Corasick automaton (Aho & Corasick 1975) over the characters of the text.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from infer.runtime.errors import UsageError
from infer.runtime.tokenizer.base import Tokenizer


class IncrementalDetokenizer:
    """Turns one answer's token ids into text, piece by piece. Amortized O(1) per token.

    What `push` and `finish` return, joined, is `tokenizer.decode` of all ids, cut before the first stop
    string: the one that is complete first, and of several complete at the same character, the longest. That
    depends on the text alone, not on how it is cut into tokens. `push` returns all the text that no later
    token can change or cut away, and no more.

    stop: non-empty strings (else UsageError). strip_leading_space: leave out one space at the very start; None:
    where `tokenizer.decode` does. shown: what stands in the text for some tokens, by id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        strip_leading_space: bool | None = None,
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        if not all(stop):
            raise UsageError(
                "a stop string is empty and would end every answer before it begins; leave it out"
            )
        self.stopped: str | None = None  # the stop string found; nothing is returned after it
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._automaton = _Automaton(stop) if stop else None
        self._state = 0  # its prefix is the text that is held back
        self._strip = tokenizer.strips_leading_space if strip_leading_space is None else strip_leading_space

    def push(self, token_id: int) -> str:
        """The text that this token made certain, often "". Raises IndexError for an id out of range."""
        if self.stopped is not None:
            return ""
        if token_id in self._shown:
            return self._scan(self._decoder.decode(self._shown[token_id].encode()))
        return self._scan(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest: bytes of an unfinished character as U+FFFD, and what was held back as a possible stop."""
        if self.stopped is not None:
            return ""
        text = self._scan(self._decoder.decode(b"", final=True))
        if self.stopped is None and self._automaton is not None:
            text += self._automaton.prefix(self._state)
            self._state = 0
        return text

    def _scan(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        automaton = self._automaton
        if automaton is None or not text:
            return text
        certain: list[str] = []
        for character in text:
            held, depth = self._state, automaton.depths[self._state]
            self._state = automaton.step(held, character)
            found = automaton.matches[self._state]
            # Held text plus this character, less what is held from now on or belongs to the stop string.
            keep = depth + 1 - (len(found) if found else automaton.depths[self._state])
            if keep > depth:
                certain.append(automaton.prefix(held) + character)
            elif keep:
                certain.append(automaton.prefix(held, keep))
            if found:
                self.stopped = found
                break
        return "".join(certain)


class _Automaton:
    """States are the prefixes of the patterns; 0 is the empty one."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the longest proper suffix that is a state
        self._owner = [""]  # a pattern that begins with this state's prefix
        self.depths = [0]
        self.matches: list[str | None] = [None]  # the longest pattern that ends here
        for pattern in patterns:
            state = 0
            for depth, character in enumerate(pattern, 1):
                following = self._next[state].get(character)
                if following is None:
                    following = len(self.depths)
                    self._next[state][character] = following
                    self._next.append({})
                    self._fallback.append(0)
                    self._owner.append(pattern)
                    self.depths.append(depth)
                    self.matches.append(None)
                state = following
            self.matches[state] = pattern
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                self.matches[following] = self.matches[following] or self.matches[self._fallback[following]]
                waiting.append(following)

    def step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._fallback[state]
        return self._next[state][character]

    def prefix(self, state: int, length: int | None = None) -> str:
        """The state's prefix, or that many of its characters."""
        return self._owner[state][: self.depths[state] if length is None else length]
