"""What a user says to a chat, and how it is typed."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT, CONTINUATION = "> ", ". "
BLOCK = '"""'


@dataclass(frozen=True)
class Message:
    """literal: never a command, whatever it looks like. fresh: begun again on an empty line, not from a draft."""

    text: str
    literal: bool = False
    fresh: bool = False


def in_block(text: str) -> bool:
    """Whether a block is open at the end of the text."""
    return text.startswith(BLOCK) and text.count(BLOCK) % 2 == 1


def typed(text: str, *, literal: bool = False, fresh: bool = False) -> Message | None:
    """The message of a typed text, which may be one block; None for a blank one.

    Bytes a terminal sent that are not UTF-8, surrogates by now, become U+FFFD.
    """
    body = text.strip()
    if not literal and body.startswith(BLOCK) and body.endswith(BLOCK) and body.count(BLOCK) == 2:
        text, literal = text[len(BLOCK) : -len(BLOCK)].strip("\n"), True
    text = text.rstrip("\n").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Message(text, literal, fresh) if text.strip() else None
