"""Prompt text to token ids, as a chat or raw, and what happens when there are more of them than context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from infer.runtime.errors import ContextLengthError

if TYPE_CHECKING:
    from infer.runtime.tokenizer.base import Tokenizer
    from infer.runtime.tokenizer.chat_template import ChatTemplate

HEAD, TAIL = "head", "tail"
_MOST_ROOM = 256
_SAMPLE = 1 << 20  # characters, a second of work


class Turn(NamedTuple):
    """thinking: what a reasoning model said to itself before the answer."""

    question: str
    answer: str
    thinking: str = ""


@dataclass(frozen=True)
class PromptEncoder:
    """template None: the text as it is, with BOS as the file asks. special: control tokens in it take effect.

    system, prefill, history and variables belong to a chat: prefill is where the answer begins, history the turns
    before this one, variables what else the template is told.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    special: bool = False
    system: str | None = None
    prefill: str | None = None
    history: tuple[Turn, ...] = ()
    variables: Mapping[str, object] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Ids of the whole prompt. Raises ChatTemplateError."""
        if self.template is None:
            return self.tokenizer.encode_prompt(text, special=self.special)
        from infer.runtime.tokenizer.chat_template import Segment, encode_segments
        from infer.runtime.tokenizer.thinking import find_tags, in_history

        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.history:
            messages.append({"role": "user", "content": turn.question})
            thinking = in_history(self.template, turn.thinking)
            messages.append({"role": "assistant", "content": turn.answer, **thinking})
        messages.append({"role": "user", "content": text})
        segments = self.template.render(messages, extra=self.variables)
        if self.prefill:
            # One run with the text before it, as an assistant's message is tokenized in training.
            tags = find_tags(self.template)
            segments += [Segment(*part) for part in (tags.answer_opening if tags else ())]
            before = segments.pop().text if segments and not segments[-1].special else ""
            segments.append(Segment(before + self.prefill, special=False))
        return encode_segments(self.tokenizer, segments)


@dataclass(frozen=True)
class Fitted:
    """ids of a prompt that fits; tokens: how many it had with its whole history; turns: how many of that were left
    out; dropped: how many tokens were cut off the text besides."""

    ids: list[int]
    tokens: int
    dropped: int = 0
    turns: int = 0


def answer_room(max_tokens: int | None, context: int) -> int:
    """Tokens a truncated prompt leaves for the answer: -n, else a quarter of the context up to 256."""
    wanted = min(_MOST_ROOM, context // 4) if max_tokens is None else max_tokens
    return max(1, min(wanted, context - 1))


def fit(encoder: PromptEncoder, text: str, context: int, *, side: str | None, room: int = 1) -> Fitted:
    """The prompt's ids, at most `context` of them; with a side to cut, at most `context - room` if possible.

    Left out are the oldest turns of the history, as few as will do. Where that is not enough the user's text is
    cut, at its beginning (head) or end (tail): a chat's template and system message stay.
    Raises ContextLengthError with both numbers when the prompt is too long and may not be, or cannot be, cut.
    """
    if side is None:
        refuse_hopeless(encoder, text, context)
    ids = encoder.encode(text)
    tokens = len(ids)
    if tokens <= context - (room if side else 0):
        return Fitted(ids, tokens)
    if side is None and encoder.history:
        raise ContextLengthError(
            f"the conversation has {tokens} tokens with its {len(encoder.history)} earlier turns, context holds "
            f"{context}; use --truncate head to leave out the oldest turns, a larger --ctx or another session"
        )
    if side is None:
        raise ContextLengthError(
            f"prompt has {tokens} tokens, context holds {context}; use --truncate head|tail or a larger --ctx"
        )
    limit = context - room
    if encoder.history:
        turns = turns_to_drop(encoder, text, limit)
        rest = replace(encoder, history=encoder.history[turns:])
        return replace(fit(rest, text, context, side=side, room=room), tokens=tokens, turns=turns)
    kept = (
        cut_raw(encoder, ids, limit, side)
        if encoder.template is None
        else _cut_chat(encoder, text, tokens - limit, limit, side)
    )
    if kept is None and tokens <= context:
        return Fitted(ids, tokens)
    if kept is None:
        fixed = len(encoder.encode(""))
        raise ContextLengthError(
            f"prompt has {tokens} tokens, {fixed} of them template and system message; context holds "
            f"{context}, less {room} for the answer: use a larger --ctx or a smaller -n"
        )
    return Fitted(kept, tokens, tokens - len(kept))


def refuse_hopeless(encoder: PromptEncoder, text: str, context: int) -> None:
    """Raise ContextLengthError for a text whose beginning alone is too long by far: the rest, tens of megabytes maybe,
    would take a minute and gigabytes to count."""
    if len(text) > _SAMPLE:
        tokens = len(replace(encoder, history=()).encode(text[:_SAMPLE]))
        if tokens > 2 * context:
            raise ContextLengthError(
                f"prompt has {len(text)} characters, of which the first {_SAMPLE} are {tokens} tokens; context holds "
                f"{context}; cut it, or use a larger --ctx"
            )


def turns_to_drop(encoder: PromptEncoder, text: str, limit: int) -> int:
    """The fewest oldest turns to leave out for at most `limit` ids, all of them where that does not help."""
    turns = len(encoder.history)

    def fits(dropped: int) -> bool:
        return len(replace(encoder, history=encoder.history[dropped:]).encode(text)) <= limit

    return 1 + bisect_left(range(1, turns), True, key=fits)


def cut_raw(encoder: PromptEncoder, ids: list[int], limit: int, side: str) -> list[int] | None:
    """The first or last `limit` ids; a BOS in front stays. None where no text would be left."""
    front = ids[:1] if ids[0] == encoder.tokenizer.bos_id else []
    body = ids[len(front) :]
    keep = limit - len(front)
    if keep < 1:
        return None
    return front + (body[-keep:] if side == HEAD else body[:keep])


def _cut_chat(encoder: PromptEncoder, text: str, excess: int, limit: int, side: str) -> list[int] | None:
    """Cut `excess` tokens off the text and render again, until it fits: a new seam may add some."""
    tokenizer = encoder.tokenizer
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    while pieces and excess > 0:
        pieces = pieces[excess:] if side == HEAD else pieces[: max(0, len(pieces) - excess)]
        # A cut inside a character leaves a part of it, which is dropped with the rest.
        shorter = b"".join(pieces).decode("utf-8", "ignore")
        ids = encoder.encode(shorter)
        excess = len(ids) - limit
        if excess <= 0 and shorter:
            return ids
    return None
