"""The thinking of a reasoning model on the command line: `--think`, `--think-budget`, and where it is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from infer.cli.options import ThinkOptions
from infer.cli.render import TerminalText, ansi, coloured, is_terminal
from infer.runtime.errors import UsageError

if TYPE_CHECKING:
    from infer.runtime.generation import Thinking
    from infer.runtime.tokenizer.chat_template import ChatTemplate


def check(options: ThinkOptions) -> None:
    """Raises UsageError."""
    if options.think is not None and not (options.think.isalnum() and options.think.isascii()):
        raise UsageError(
            f"{options.origin('think')} must be on, off or a level such as low, not {options.think!r}"
        )
    if options.think_budget is not None and options.think_budget < 0:
        raise UsageError(f"{options.origin('think_budget')} must be 0 or more, not {options.think_budget}")


def variables(options: ThinkOptions, template: ChatTemplate | None, model: str) -> dict[str, object]:
    """What the template is told. Raises UsageError where it has no such switch."""
    if template is None or options.think is None:
        return {}
    from infer.runtime.tokenizer.thinking import switch

    found = switch(template, options.think)
    if found is None:
        raise UsageError(
            f"{options.origin('think')} {options.think}: the chat template of {model} has no switch for that; drop it"
        )
    return found


def of(options: ThinkOptions, template: ChatTemplate | None) -> Thinking | None:
    """How the thinking is told from the answer; None for a model that does not think."""
    if template is None:
        return None
    from infer.runtime.generation import Thinking
    from infer.runtime.tokenizer.thinking import find_tags

    tags = find_tags(template)
    return None if tags is None else Thinking(tags, options.think_budget)


class ThoughtsOnTerminal:
    """Dim, and apart from the answer that follows."""

    def __init__(self, put: Callable[[str], None], plain: bool) -> None:
        self._put = put
        self._text: TerminalText | None = None
        self._dim = coloured(sys.stdout) and not plain

    def push(self, text: str) -> None:
        if self._text is None:
            self._text = TerminalText()
            self._put(self._dress("[thinking] "))
        self._put(self._dress(self._text.push(text)))

    def finish(self) -> None:
        if self._text is not None:
            self._put(self._dress(self._text.finish()) + "\n\n")
            self._text = None

    def _dress(self, text: str) -> str:
        return ansi("dim", text) if self._dim else text


class ThoughtsOnStderr(ThoughtsOnTerminal):
    """As on a terminal where stderr is one, else the text alone."""

    def __init__(self, plain: bool) -> None:
        super().__init__(_write, plain)
        self._dim = coloured() and not plain
        self._terminal = is_terminal(sys.stderr)

    def push(self, text: str) -> None:
        if self._terminal:
            super().push(text)
        else:
            self._text = self._text or TerminalText()
            self._put(text)

    def finish(self) -> None:
        if self._terminal:
            super().finish()
        elif self._text is not None:
            self._put("\n")
            self._text = None


def _write(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
