"""Chat templates by name, and the choice of one: `--chat-template`, else the file's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.errors import ChatTemplateError, UsageError

TEMPLATE_KEY = "tokenizer.chat_template"
_LARGEST = 1 << 20  # bytes of a template file, so that an endless one (/dev/zero) ends in an error

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_LLAMA2 = (
    "{% set system = messages[0].content if messages and messages[0].role == 'system' else none %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}"
    "{{ m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}"
    "{% set system = messages[0].content + '\\n\\n' if messages and messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ (system if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\\n' }}"
    "{% else %}{{ 'Assistant: ' + m.content + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

BUILTIN: Mapping[str, str] = {
    "chatml": _CHATML,
    "gemma": _GEMMA,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "phi3": _PHI3,
    "plain": _PLAIN,
}


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template, and what to call it in messages."""

    source: str
    name: str


def resolve_template(
    metadata: Mapping[str, object], override: str | None = None, *, tools: bool = False
) -> TemplateSource | None:
    """The template to use; None where the file has none and nothing else was asked for.

    override: a name of BUILTIN or the path of a Jinja file. tools: prefer the file's template for tool use.
    Raises UsageError for an override that is neither, ChatTemplateError for metadata of the wrong type.
    """
    if override is not None:
        if override in BUILTIN:
            return TemplateSource(BUILTIN[override], f"built-in template {override!r}")
        try:
            return TemplateSource(_read(override), f"template {override}")
        except (OSError, ValueError) as error:
            reason = (
                getattr(error, "strerror", None) or f"it is not UTF-8 text of at most {_LARGEST >> 20} MiB"
            )
            raise UsageError(
                f"--chat-template {override}: {reason}; give the path of a Jinja file or one of: "
                + ", ".join(BUILTIN)
            ) from error
    keys = [f"{TEMPLATE_KEY}.tool_use", TEMPLATE_KEY] if tools else [TEMPLATE_KEY]
    for key in keys:
        source = metadata.get(key)
        if isinstance(source, str):
            return TemplateSource(source, "the model's chat template")
        if source is not None:
            raise ChatTemplateError(
                f"{key} is of type {type(source).__name__}, not text; use --chat-template"
            )
    return None


def _read(path: str) -> str:
    """The text of a template file. Raises OSError, and ValueError for too much of it or for bytes that are no text."""
    with Path(path).open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError("too large")
    return data.decode("utf-8")
