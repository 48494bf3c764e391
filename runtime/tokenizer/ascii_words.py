"""The cutting of `pretokenizers` for ASCII texts, in Python's own regular expressions: prompts that hold nothing else
need no library, whose code takes 5 MiB of memory.

The library's expressions are Oniguruma's. What they mean for ASCII characters is written in place of their classes:
`\\p{L}` becomes A-Za-z, and so on. Everything else in them means the same to both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

_BLANK = r"\t\n\x0b\f\r "
_NONE = r"^\x00-\x7f"
_PUNCTUATION = r"!-#%-*,-/:;?@\[-\]_{}"
_SYMBOL = r"$+<=>\^`|~"
#: what stands in a class, for what the library's expression has inside or outside of one
_CLASSES = {
    r"\p{L}": "A-Za-z", r"\p{N}": "0-9", r"\p{M}": "", r"\p{P}": _PUNCTUATION, r"\p{S}": _SYMBOL,
    r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{Lt}": "", r"\p{Lm}": "", r"\p{Lo}": "", r"\s": _BLANK,
}  # fmt: skip
_PART = re.compile(r"\\p\{\w+\}|\\x\{(?P<code>[0-9A-F]+)\}|\\.|.", re.DOTALL)

_DIGIT = "[0-9]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NAMED = {"digits": _DIGIT, "numbers": _DIGIT + "+", "punctuation": r"[!-/:-@\[-`{-~]+", "gpt2": _GPT2}


class ASCIIWords:
    """Cuts ASCII texts into words as the merging sees them, a character for each byte."""

    def __init__(self, steps: Sequence[str], spelling: Mapping[int, str]) -> None:
        """steps: of a PreTokenizer. spelling: byte → character, for `str.translate`."""
        spell: Callable[[str], str] = lambda text: text.translate(spelling)  # noqa: E731
        self._steps: list[re.Pattern[str] | Callable[[str], str]] = []
        for step in steps:
            self._steps.append(re.compile(_for_ascii(_NAMED.get(step, step)), re.MULTILINE))
            if step == "gpt2":
                self._steps.append(spell)
        if "gpt2" not in steps:
            self._steps.append(spell)

    def cut(self, text: str) -> list[str]:
        words = [text] if text else []
        for step in self._steps:
            if isinstance(step, re.Pattern):
                words = [part for word in words for part in _isolated(step, word)]
            else:
                words = [step(word) for word in words]
        return words


def _isolated(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """The matches, and what is between them."""
    done = 0
    for found in pattern.finditer(text):
        start, end = found.span()
        if start > done:
            yield text[done:start]
        if end > start:
            yield text[start:end]
        done = end
    if done < len(text):
        yield text[done:]


def _for_ascii(expression: str) -> str:
    written: list[str] = []
    inside = False
    for found in _PART.finditer(expression):
        part = found[0]
        if found["code"]:
            part = re.escape(chr(int(found["code"], 16)))
        elif part in _CLASSES:
            part = _CLASSES[part] if inside else f"[{_CLASSES[part] or _NONE}]"
        elif part == r"\S":
            part = f"[^{_BLANK}]"
        elif part == "[":
            inside = True
        elif part == "]":
            inside = False
        written.append(part)
    return "".join(written)
