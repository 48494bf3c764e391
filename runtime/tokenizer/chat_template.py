"""Messages to a prompt, by the Jinja template a model brings.

The template is untrusted code (template_sandbox) and the messages are untrusted text (message_guard): only
the template's own words become control tokens, so a file that says "<|im_end|>" ends no turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from infer.runtime.errors import ChatTemplateError
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.literals import LiteralMatcher
from infer.runtime.tokenizer.message_guard import MessageGuard, all_texts, plain_copy, protect_all

ROLES = frozenset(
    {
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "function",
        "ipython",
        "model",
        "documents",
        "document",
        "context",
        "chatbot",
        "thinking",
    }
)
MAX_SOURCE = 1 << 16  # characters; the longest templates in use have some 20,000
_MAX_MESSAGE = 300
_SURROGATE = re.compile(r"[\ud800-\udfff]")

Message = Mapping[str, object]


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. special: the text is exactly one control token; else none may match in it."""

    text: str
    special: bool


class ChatTemplate:
    """A compiled template. Rendering takes at most template_limits.TIME_LIMIT and an account of memory.

    variables: the names it reads. fields: the attributes it looks up, and its other constant texts.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Iterable[str] = (),
        name: str = "the model's chat template",
    ) -> None:
        """control_tokens: the pieces that must come from the template alone. name: for error messages.

        Raises ChatTemplateError where the source is no template.
        """
        import jinja2
        from jinja2 import nodes

        from infer.runtime.tokenizer.template_sandbox import create_environment

        self.name, self.source = name, source
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"{name} has {len(source)} characters; {MAX_SOURCE} is the most that is used"
            )
        if _SURROGATE.search(source):
            raise ChatTemplateError(f"{name} is not UTF-8 text; choose another with --chat-template")
        environment = create_environment()
        try:
            tree = environment.parse(source)
            literals = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            self.fields = frozenset(literals) | {node.attr for node in tree.find_all(nodes.Getattr)}
            self.variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            literals += [node.data for node in tree.find_all(nodes.TemplateData)]
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise self._error(f"line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise self._error(f"it is nested too deeply or broken ({type(error).__name__})") from error
        tokens = frozenset(control_tokens) - {""}
        self._control = LiteralMatcher(tokens)
        self._guard = MessageGuard([*literals, bos_token, eos_token], tokens)
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ) -> list[Segment]:
        """The prompt as segments in order; plain ones are never adjacent, so each is tokenized as one run.

        messages: JSON-like objects with a known "role" and "content" that is text, a list of typed parts or
        absent. tools: JSON schemas. extra: more variables for the template. now: what strftime_now tells.
        Raises ChatTemplateError for malformed messages, for what the template raises, and for its limits.
        """
        plain = _plain_messages(messages)
        given = plain_copy(list(tools), "the tool list") if tools is not None else None
        more = plain_copy(dict(extra or {}), "the template's variables")
        mark = self._guard.choose_mark(all_texts([plain, given, more]))
        text = self._run(plain, given, more, mark, add_generation_prompt, now)
        segments: list[Segment] = []
        for part, special in self._control.split(text):
            cleaned = part if special else part.replace(mark, "")
            if cleaned:
                segments.append(Segment(cleaned, special))
        return segments

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        extra: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ) -> str:
        """`render` as one text, to show: in it a message's "<|im_end|>" and the template's look the same."""
        segments = self.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra, now=now
        )
        return "".join(segment.text for segment in segments)

    def _run(
        self,
        messages: list[dict[str, object]],
        tools: object,
        extra: object,
        mark: str,
        add_generation_prompt: bool,
        now: datetime | None,
    ) -> str:
        import jinja2

        from infer.runtime.tokenizer.template_limits import Meter, TemplateLimitError, metered
        from infer.runtime.tokenizer.template_sandbox import UNTRACED

        moment = now if now is not None else datetime.now().astimezone()

        def strftime_now(pattern: str) -> str:
            if len(pattern) > 64:
                raise TemplateLimitError("it asks for a date of more than 64 characters")
            return moment.strftime(pattern)

        # Roles are words from a fixed list that templates compare and build control tokens of: never marked.
        guarded = [
            {
                key: value if key == "role" else protect_all(value, self._guard, mark)
                for key, value in message.items()
            }
            for message in messages
        ]
        variables = {
            "documents": None,
            **_object(protect_all(extra, self._guard, mark)),
            **self._constants,
            "messages": guarded,
            "tools": protect_all(tools, self._guard, mark),
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": strftime_now,
        }
        size = sum(4 * len(text) + 64 for text in all_texts([messages, tools, extra]))
        try:
            with metered(Meter(size, mark), UNTRACED):
                return self._template.render(variables)
        except TemplateLimitError as error:
            raise self._error(f"{error}; choose another with --chat-template") from error
        except jinja2.TemplateError as error:
            reason = str(error) or type(error).__name__
            raise self._error(f"it does not take these messages: {reason}") from error
        except MemoryError as error:
            raise self._error(
                "it needs more memory than there is; choose another with --chat-template"
            ) from error
        except Exception as error:
            raise self._error(f"it failed with {type(error).__name__}: {error}") from error

    def _error(self, reason: str) -> ChatTemplateError:
        flat = " ".join(reason.split())
        return ChatTemplateError(
            f"{self.name}: {flat if len(flat) <= _MAX_MESSAGE else flat[:_MAX_MESSAGE] + '…'}"
        )


def control_pieces(tokenizer: Tokenizer) -> list[str]:
    """Every control token of a vocabulary: what ChatTemplate takes as control_tokens."""
    return list(map(tokenizer.piece, tokenizer.control_ids()))


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment], *, bos: bool = True) -> list[int]:
    """Ids of a rendered prompt, after a BOS where the file asks for one, the template gave none and bos is
    set."""
    ids = tokenizer.encode_parts((segment.text, segment.special) for segment in segments)
    if bos and tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    extra: Mapping[str, object] | None = None,
    now: datetime | None = None,
) -> list[int]:
    """Ids of a conversation: `template.render`, then `encode_segments`."""
    segments = template.render(
        messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra, now=now
    )
    return encode_segments(tokenizer, segments)


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    checked: list[dict[str, object]] = []
    for number, message in enumerate(messages, 1):
        what = f"message {number}"
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f"{what} is of type {type(message).__name__}, not an object with role and content"
            )
        # Absent and null mean the same; templates only test for absent.
        plain = {key: value for key, value in _object(plain_copy(message, what)).items() if value is not None}
        role = plain.get("role")
        if not isinstance(role, str) or role not in ROLES:
            known = ", ".join(sorted(ROLES))
            raise ChatTemplateError(f"{what} has the role {str(role)[:40]!r}; roles are {known}")
        content = plain.get("content", "")
        if not isinstance(content, str) and not (
            isinstance(content, list)
            and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
        ):
            raise ChatTemplateError(
                f"{what} has content that is neither text nor a list of parts with a type"
            )
        checked.append(plain)
    return checked


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
