"""Keeps the text of messages from becoming control tokens inside a rendered chat template.

A template builds one text out of its own words and the messages', and which part came from where is lost. So
a mark, a character that occurs nowhere else, is put into the messages wherever a control token could begin.
No control token can then form out of a message's text, whatever the template cuts away or joins, while the
template's own stay whole. The marks are taken out after the rendered text has been split at control tokens.

Where the template itself looks for a text in the messages (`'</think>' in content`), that text stays unmarked
inside, unless it holds a control token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from infer.runtime.errors import ChatTemplateError

MAX_DEPTH = 64  # of lists and objects in a message
_MAX_KEPT = 64  # texts the template looks for
# Noncharacters, which no text for interchange holds, then the end of the last private plane.
_MARKS = (range(0xFDD0, 0xFDF0), range(0x10F000, 0x10FFFE))
_MARK = re.compile("[" + "".join(f"{chr(codes[0])}-{chr(codes[-1])}" for codes in _MARKS) + "]")


class MessageGuard:
    """What must be marked for one template and one set of control tokens."""

    def __init__(self, literals: Iterable[str], control_tokens: Collection[str]) -> None:
        """literals: every constant text of the template."""
        literals = [literal for literal in literals if literal]
        tokens = [token for token in control_tokens if token]
        self._used = _marks_in(literals) | _marks_in(tokens)
        firsts = {token[0] for token in tokens}
        beginnings = {token[:length] for token in tokens for length in range(1, len(token))}
        longest = max(map(len, tokens), default=0)
        kept = {
            literal
            for literal in literals
            if 1 < len(literal) <= 256
            and not firsts.isdisjoint(literal)
            and not any(token in literal for token in tokens if token[0] in literal)
        }
        self._kept = {
            literal: any(
                literal[-length:] in beginnings for length in range(1, min(longest, len(literal)) + 1)
            )
            for literal in sorted(kept, key=len, reverse=True)[:_MAX_KEPT]
        }
        self._pattern: re.Pattern[str] | None = None
        if firsts:
            first = "[" + "".join(map(re.escape, sorted(firsts))) + "]"
            self._pattern = re.compile("|".join([*map(re.escape, self._kept), first]))
        # What a message would have to begin with to complete a control token that the template has begun.
        self._endings = {
            token[length:]
            for token in tokens
            for length in range(1, len(token))
            if any(literal.endswith(token[:length]) for literal in literals)
        }

    def choose_mark(self, texts: Iterable[str]) -> str:
        """A character that occurs neither in the texts nor in the template."""
        used = self._used | _marks_in(texts)
        for mark in map(chr, chain(*_MARKS)):
            if mark not in used:
                return mark
        raise ChatTemplateError("the messages use every private character there is; remove some of them")

    def protect(self, text: str, mark: str) -> str:
        """The text with the mark wherever a control token could begin in it or be completed by it."""
        if self._pattern is None:
            return text

        def marked(found: re.Match[str]) -> str:
            return found[0] + mark if self._kept.get(found[0], True) else found[0]

        guarded = self._pattern.sub(marked, text)
        if self._endings and (body := text.strip()):
            for ending in self._endings:
                if body.startswith(ending) or ending.startswith(body):
                    start = len(text) - len(text.lstrip())
                    return guarded[:start] + mark + guarded[start:]
        return guarded


def plain_copy(value: object, what: str, depth: int = 0) -> object:
    """The value rebuilt from None, bool, int, float, str, list and dict; ChatTemplateError for others."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"{what} is nested more than {MAX_DEPTH} levels deep; flatten it")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise ChatTemplateError(f"{what} has a key of type {type(key).__name__}; keys are strings")
        return {key: plain_copy(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item, what, depth + 1) for item in value]
    raise ChatTemplateError(f"{what} holds a value of type {type(value).__name__}, which JSON does not have")


def all_texts(value: object) -> Iterable[str]:
    """Every string of a plain value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from all_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from all_texts(item)


def protect_all(value: object, guard: MessageGuard, mark: str) -> object:
    """A plain value with every string protected, keys included."""
    if isinstance(value, str):
        return guard.protect(value, mark)
    if isinstance(value, dict):
        return {guard.protect(key, mark): protect_all(item, guard, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [protect_all(item, guard, mark) for item in value]
    return value


def _marks_in(texts: Iterable[str]) -> set[str]:
    return {mark for text in texts if not text.isascii() for mark in _MARK.findall(text)}
