"""What a reasoning model thinks, told from what it answers, by the tags its chat template knows.

Models differ in three things: the tags around the thinking (or gpt-oss' `channels`), whether the template opens them at
the end of the prompt (DeepSeek-R1) or the model does (Qwen3), and the variables that switch it. All three are read off
the template, so a model whose template says nothing of thinking is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.channels import CHANNEL, MESSAGE, Channels
from infer.runtime.tokenizer.chat_template import ChatTemplate

OFF, ON = "off", "on"
_SWITCHES = ("enable_thinking", "thinking")  # Qwen3, SmolLM3, GLM · Granite, DeepSeek-V3.1
_LEVEL = "reasoning_effort"
_HISTORY = ("reasoning_content", "thinking")  # where templates look for it in a message of the assistant
_TAIL = 16  # tokens at the end of a prompt among which an open tag can be


@dataclass(frozen=True)
class Tags:
    """The form of most models' thinking. closing: what ends it where the model does not. answer_opening: what a chat's
    template leaves to the model before an answer without thinking, as (text, whether it is a control token)."""

    open: str
    close: str
    answer_opening: tuple[tuple[str, bool], ...] = ()

    @property
    def closing(self) -> str:
        return f"\n{self.close}\n\n"

    def shown(self, tokenizer: Tokenizer) -> dict[int, str]:
        """The tags that are control tokens, which a decoded text would lack, by id."""
        found = {tag: tokenizer.encode(tag, special=True) for tag in (self.open, self.close)}
        return {ids[0]: tag for tag, ids in found.items() if len(ids) == 1 and tokenizer.is_control(ids[0])}

    def splitter(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> ThinkingSplitter:
        """For the text after a prompt."""
        return ThinkingSplitter(self, inside=begun(self, tokenizer, prompt))


TAGS = (
    Tags("<think>", "</think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<thought>", "</thought>"),
    Tags("<reasoning>", "</reasoning>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("Here is my thought process:", "Here is my response:"),
)


def find_tags(template: ChatTemplate) -> Tags | Channels | None:
    """The tags a template knows, None where the model does not think."""
    if CHANNEL in template.source and MESSAGE in template.source:
        return Channels()
    return next((tags for tags in TAGS if tags.close in template.source), None)


def switch(template: ChatTemplate, wanted: str) -> dict[str, object] | None:
    """The variables that tell a template "on", "off" or a level, such as "low".

    {} where it thinks anyway, None where it cannot be told.
    """
    named = {name: wanted != OFF for name in _SWITCHES if name in template.variables}
    if wanted == OFF:
        return dict(named) or None
    if wanted == ON:
        return dict(named) if named or find_tags(template) or _LEVEL in template.variables else None
    return {**named, _LEVEL: wanted} if _LEVEL in template.variables else None


def in_history(template: ChatTemplate, thinking: str) -> dict[str, str]:
    """What a message of the assistant holds beside its content, for a template that wants past thinking."""
    return {name: thinking for name in _HISTORY if thinking and name in template.fields}


def begun(tags: Tags, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends inside the thinking: its last word is the open tag."""
    end = b"".join(
        tokenizer.token_bytes(token) or tokenizer.piece(token).encode() for token in prompt[-_TAIL:]
    )
    return end.decode("utf-8", "replace").rstrip().endswith(tags.open)


class ThinkingSplitter:
    """Tells the two apart in a text that comes in pieces; any way of cutting it gives the same.

    Thinking is what stands between the tags at the very start of the text; line breaks at its ends, and at the start of
    the answer after it, belong to neither. Later tags are text like any other.
    """

    def __init__(self, tags: Tags, *, inside: bool) -> None:
        """inside: the text begins within the thinking."""
        self._tags = tags
        self._held = ""
        self._step = self._thinking if inside else self._start
        self._trim = True
        self.inside = inside

    def push(self, text: str) -> tuple[str, str]:
        """More text: (thinking, answer), as far as both are certain."""
        self._held += text
        thinking = answer = ""
        while True:
            step = self._step
            more, said = step()
            thinking += more
            answer += said
            if self._step == step:
                return thinking, answer

    def finish(self) -> tuple[str, str]:
        """What was held back at the end of the text."""
        held, self._held = self._held, ""
        if self.inside:
            return held.rstrip("\n"), ""
        return "", held

    def _start(self) -> tuple[str, str]:
        body = self._held.lstrip()
        if body.startswith(self._tags.open):
            self._held, self.inside, self._step = body[len(self._tags.open) :], True, self._thinking
        elif not self._tags.open.startswith(body):
            self._trim, self._step = False, self._answer
        return "", ""

    def _thinking(self) -> tuple[str, str]:
        if self._trim:
            self._held = self._held.lstrip("\n")
            self._trim = not self._held
        before, close, after = self._held.partition(self._tags.close)
        if close:
            self._held, self.inside, self._step, self._trim = after, False, self._answer, True
            return before.rstrip("\n"), ""
        certain = before
        for length in range(min(len(before), len(close := self._tags.close) - 1), 0, -1):
            if close.startswith(before[-length:]):
                certain = before[:-length]
                break
        certain = certain.rstrip("\n")
        self._held = before[len(certain) :]
        return certain, ""

    def _answer(self) -> tuple[str, str]:
        text, self._held = self._held, ""
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return "", text
