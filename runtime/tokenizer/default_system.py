"""What an empty system message does to a template that writes one of its own where it is given none."""

from __future__ import annotations

import enum
from datetime import datetime

from infer.runtime.errors import ChatTemplateError
from infer.runtime.tokenizer.chat_template import ChatTemplate

_SYSTEM, _USER = "a-system-message", "a-question"


class DefaultSystem(enum.Enum):
    """NONE: the template writes no system message of its own. REPLACED: it does, unless it is given an empty one.
    FIXED: it does in any case."""

    NONE = enum.auto()
    REPLACED = enum.auto()
    FIXED = enum.auto()


def default_system(template: ChatTemplate) -> DefaultSystem:
    """Found out by rendering, as no template says it. Raises ChatTemplateError for one that fails without any system
    message."""
    now = datetime.now().astimezone()
    question = {"role": "user", "content": _USER}

    def render(system: str) -> str:
        return template.render_text([{"role": "system", "content": system}, question], now=now)

    plain = template.render_text([question], now=now)
    before = plain.partition(_USER)[0]
    try:
        marked, empty = render(_SYSTEM), render("")
    except ChatTemplateError:  # it takes no system message
        return DefaultSystem.NONE
    head, found, rest = marked.partition(_SYSTEM)
    between = rest.partition(_USER)[0]
    # A system turn that nobody asked for: what surrounds the message when there is one is there without it.
    own = before.startswith(head) and before.endswith(between) and len(before) >= len(head) + len(between)
    if not found or not between or not own:
        return DefaultSystem.NONE
    return DefaultSystem.FIXED if empty == plain else DefaultSystem.REPLACED
