"""`-s ""`: which templates write a system message of their own, and what becomes of it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_model import Script, ScriptedModel, install, stub_engine

from infer.cli.main import invoke
from infer.runtime.tokenizer.builtin_templates import BUILTIN
from infer.runtime.tokenizer.chat_template import ChatTemplate
from infer.runtime.tokenizer.default_system import DefaultSystem, default_system

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
DEFAULT = "{% if messages[0].role != 'system' %}<system>Be kind.\n{% endif %}" + TURNS
# Llama 3.1's form: a system turn in any case, with a date in it.
ALWAYS = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set s = '' %}{% endif %}<system>Today.\n{{ s }}\n" + TURNS
)
IF_EMPTY = (
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}<system>{{ s or 'Be kind.' }}\n"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
IGNORES = "{% for m in messages if m.role == 'user' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (TURNS, DefaultSystem.NONE),
        (DEFAULT, DefaultSystem.REPLACED),
        (ALWAYS, DefaultSystem.FIXED),
        (IF_EMPTY, DefaultSystem.FIXED),
        (REFUSES, DefaultSystem.NONE),
        (IGNORES, DefaultSystem.NONE),
        *((source, DefaultSystem.NONE) for source in BUILTIN.values()),
    ],
)
def test_what_a_template_does(source: str, kind: DefaultSystem) -> None:
    assert default_system(ChatTemplate(source, bos_token="<s>")) is kind


@pytest.fixture
def prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[str, str]]:
    """The prompt that `infer run …` makes of "hi", and stderr."""
    stub_engine(monkeypatch)
    monkeypatch.setenv("INFER_HOME", str(tmp_path))

    def call(template: str, *arguments: str) -> tuple[str, str]:
        model = ScriptedModel(Script(template=template))
        install(model, monkeypatch.setattr)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        assert invoke(["run", *arguments, "hi"]) == 0
        text = bytes(token for token in model.engine.requests[0].prompt_ids if token < 256).decode()
        return text, capsys.readouterr().err

    return call


def test_an_empty_system_message(prompt: Callable[..., tuple[str, str]]) -> None:
    assert prompt(DEFAULT) == ("<system>Be kind.\n<user>hi\n<assistant>", "")
    assert prompt(DEFAULT, "-s", "") == ("<system>\n<user>hi\n<assistant>", "")
    assert prompt(TURNS, "-s", "") == ("<user>hi\n<assistant>", "")
    assert prompt(REFUSES, "-s", "") == ("<user>hi\n<assistant>", "")
    text, err = prompt(ALWAYS, "-s", "")
    assert text == "<system>Today.\n\n<user>hi\n<assistant>"
    assert err == (
        "infer: warning: --system is empty, but the model's chat template writes a system message of its own, "
        "which stays\n"
    )


def test_a_session_remembers_it(prompt: Callable[..., tuple[str, str]]) -> None:
    prompt(DEFAULT, "--session", "s", "-s", "")
    again, _ = prompt(DEFAULT, "--session", "s")
    assert again.startswith("<system>\n<user>hi\n<assistant>Hello there.")


@pytest.mark.model
def test_smollm2(smollm2_path: Path) -> None:
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.tokenizer.load import load_chat_template, load_tokenizer

    with open_checkpoint(smollm2_path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.metadata)
        template = load_chat_template(checkpoint.metadata, tokenizer, None)
    assert template is not None
    assert default_system(template) is DefaultSystem.REPLACED
