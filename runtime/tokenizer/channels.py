"""The channels of gpt-oss' answers: analysis is its thinking, final is its answer, commentary is for tools.

An answer is messages, `<|channel|>NAME<|message|>TEXT`, the second and later ones after `<|end|><|start|>assistant`,
the last one before `<|return|>`. Only control tokens count: the same words spelled out are text.
Format: https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infer.runtime.tokenizer.base import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
# Before each control token in a decoded text: a noncharacter, which Unicode keeps for such use.
MARK = "\ufdd0"
_TAGS = tuple(MARK + tag for tag in (START, CHANNEL, MESSAGE, END))


@dataclass(frozen=True)
class Channels:
    """The form of gpt-oss' thinking, as `thinking.Tags` is that of others."""

    closing = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
    answer_opening = ((CHANNEL, True), ("final", False), (MESSAGE, True))

    def shown(self, tokenizer: Tokenizer) -> dict[int, str]:
        """What control tokens are in a decoded text."""
        found = {tag: tokenizer.encode(tag, special=True) for tag in (START, CHANNEL, MESSAGE, END)}
        return {ids[0]: MARK + tag for tag, ids in found.items() if len(ids) == 1}

    def splitter(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> ChannelSplitter:
        """For the text after a prompt, which ends before the first message or inside the final one."""
        return ChannelSplitter()


class ChannelSplitter:
    """Tells thinking and answer apart in a text that comes in pieces; any way of cutting it gives the same.

    What stands before the first tag is answer, and so is a message that names no channel. Thinking is every message
    of another channel than final, with a blank line between two.
    """

    def __init__(self) -> None:
        self.inside = False
        self._held = ""
        self._header = False
        self._thought = False  # whether there was any thinking
        self._apart = False  # whether a blank line comes before the next

    def push(self, text: str) -> tuple[str, str]:
        """More text: (thinking, answer), as far as both are certain."""
        self._held += text
        thinking = answer = ""
        while self._held:
            if self._header and not self._read_header():
                break
            said, mark, _ = self._held.partition(MARK)
            self._held = self._held[len(said) :]
            if self._held.startswith(_TAGS):
                self._header = True
            elif mark and any(tag.startswith(self._held) for tag in _TAGS):
                mark = ""
            else:
                said += mark
                self._held = self._held.removeprefix(mark)
            if self.inside and said:
                thinking += "\n\n" + said if self._apart else said
                self._thought, self._apart = True, False
            elif said:
                answer += said
            if self._header:
                self.inside = False
            elif not mark:
                break
        return thinking, answer

    def finish(self) -> tuple[str, str]:
        """What was held back at the end of the text; of the words between two messages nothing."""
        held, self._held = self._held, ""
        if self._header:
            return "", ""
        return (held, "") if self.inside else ("", held)

    def _read_header(self) -> bool:
        """Whether it is complete."""
        head, tag, rest = self._held.partition(MARK + MESSAGE)
        if tag:
            _, named, name = head.partition(MARK + CHANNEL)
            self.inside = bool(named) and name.split()[:1] != ["final"]
            self._held, self._header, self._apart = rest, False, self._thought
        return bool(tag)
