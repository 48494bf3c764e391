"""Prompt text to token ids, as a chat or raw, and what happens when there are more of them than context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer.runtime.errors import ContextLengthError

if TYPE_CHECKING:
    from infer.runtime.tokenizer.base import Tokenizer
    from infer.runtime.tokenizer.chat_template import ChatTemplate

HEAD, TAIL = "head", "tail"
_MOST_ROOM = 256


@dataclass(frozen=True)
class PromptEncoder:
    """template None: the text as it is, with BOS as the file asks. special: control tokens in it take effect.

    system and prefill belong to a chat; prefill is where the answer begins.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    special: bool = False
    system: str | None = None
    prefill: str | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of the whole prompt. Raises ChatTemplateError."""
        if self.template is None:
            return self.tokenizer.encode_prompt(text, special=self.special)
        from infer.runtime.tokenizer.chat_template import Segment, encode_segments

        messages = [{"role": "user", "content": text}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        segments = self.template.render(messages)
        if self.prefill:
            # One run with the text before it, as an assistant's message is tokenized in training.
            before = segments.pop().text if segments and not segments[-1].special else ""
            segments.append(Segment(before + self.prefill, special=False))
        return encode_segments(self.tokenizer, segments)


@dataclass(frozen=True)
class Fitted:
    """ids of a prompt that fits; tokens: how many it had; dropped: how many of them were cut."""

    ids: list[int]
    tokens: int
    dropped: int = 0


def answer_room(max_tokens: int | None, context: int) -> int:
    """Tokens a truncated prompt leaves for the answer: -n, else a quarter of the context up to 256."""
    wanted = min(_MOST_ROOM, context // 4) if max_tokens is None else max_tokens
    return max(1, min(wanted, context - 1))


def fit(encoder: PromptEncoder, text: str, context: int, *, side: str | None, room: int = 1) -> Fitted:
    """The prompt's ids, at most `context` of them; with a side to cut, at most `context - room` if possible.

    Cut is the user's text, at its beginning (head) or end (tail): a chat's template and system message stay.
    Raises ContextLengthError with both numbers when the prompt is too long and may not be, or cannot be, cut.
    """
    ids = encoder.encode(text)
    tokens = len(ids)
    if tokens <= context - (room if side else 0):
        return Fitted(ids, tokens)
    if side is None:
        raise ContextLengthError(
            f"prompt has {tokens} tokens, context holds {context}; use --truncate head|tail or a larger --ctx"
        )
    limit = context - room
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
