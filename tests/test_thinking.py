"""Thinking of reasoning models: told from the answer, switched by the template, shown or not, kept in the history."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import Script, ScriptedModel, install, make_tokenizer

from infer.cli.main import invoke
from infer.runtime.tokenizer.chat_template import ChatTemplate
from infer.runtime.tokenizer.thinking import (
    TAGS,
    Tags,
    ThinkingSplitter,
    begun,
    find_tags,
    in_history,
    switch,
)

THINK = TAGS[0]
# As Qwen3 does: a switch that closes the thinking in the prompt, past thinking wanted in a field of its own.
QWEN3 = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As DeepSeek-R1 does: the prompt opens the thinking, which has no switch and is no part of the history.
R1 = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
EFFORT = (
    "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}[THINK][/THINK]"
)
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def split(pieces: list[str], *, inside: bool = False, tags: Tags = THINK) -> tuple[str, str]:
    splitter = ThinkingSplitter(tags, inside=inside)
    found = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(thinking for thinking, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("text", "inside", "thinking", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
        ("\n <think>a\n\nb</think>c", False, "a\n\nb", "c"),
        ("hm</think>Yes.", True, "hm", "Yes."),
        ("\n\n</think>\n\nYes.", True, "", "Yes."),
        ("<think>cut short", False, "cut short", ""),
        ("<think>cut</thi", False, "cut</thi", ""),
        ("Use <think> and </think>.", False, "", "Use <think> and </think>."),
        ("<think>a</think>b</think><think>c", False, "a", "b</think><think>c"),
        ("  \n", False, "", "  \n"),
        ("<thin", False, "", "<thin"),
        ("", False, "", ""),
        ("a < b </think", True, "a < b </think", ""),
    ],
)
def test_splitting(text: str, inside: bool, thinking: str, answer: str) -> None:
    assert split([text], inside=inside) == (thinking, answer)
    assert split(list(text), inside=inside) == (thinking, answer)


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", " ", "a", "é", "</"]), max_size=12
    ),
    st.booleans(),
    st.data(),
)
def test_any_cutting_gives_the_same(words: list[str], inside: bool, data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, inside=inside) == split([text], inside=inside)


@given(st.text(alphabet="a\n</think> ", max_size=30), st.text(max_size=30))
def test_no_character_is_lost(thinking: str, answer: str) -> None:
    """But for the line breaks at the seams."""
    found = split([f"<think>{thinking}</think>{answer}"])
    whole = thinking + "</think>" + answer
    first, _, rest = whole.partition("</think>")
    assert found == (first.strip("\n"), rest.lstrip("\n"))


def test_tags_and_switches_are_read_off_the_template() -> None:
    qwen3, r1, effort, plain = map(ChatTemplate, (QWEN3, R1, EFFORT, PLAIN))
    assert [find_tags(template) for template in (qwen3, r1, plain)] == [THINK, THINK, None]
    assert find_tags(effort) == Tags("[THINK]", "[/THINK]")
    assert switch(qwen3, "on") == {"enable_thinking": True}
    assert switch(qwen3, "off") == {"enable_thinking": False}
    assert switch(qwen3, "low") is None
    assert (switch(r1, "on"), switch(r1, "off"), switch(r1, "high")) == ({}, None, None)
    assert (switch(plain, "on"), switch(plain, "off")) == (None, None)
    assert switch(effort, "low") == {"reasoning_effort": "low"}
    assert in_history(qwen3, "hm") == {"reasoning_content": "hm"}
    assert in_history(effort, "hm") == {"thinking": "hm"}
    assert in_history(r1, "hm") == in_history(qwen3, "") == {}


def test_whether_the_prompt_has_begun_it() -> None:
    tokenizer = make_tokenizer()
    assert begun(THINK, tokenizer, list(b"<|assistant|><think>\n"))
    assert not begun(THINK, tokenizer, list(b"<think>\n\n</think>\n\n"))
    assert not begun(THINK, tokenizer, list(b"think>"))


# -- infer run


class Home:
    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.path, self._monkeypatch, self._capsys = path, monkeypatch, capsys

    def run(self, *arguments: str, **script: Any) -> tuple[int, str, str]:
        model = ScriptedModel(
            Script(**{"template": QWEN3, "text": "<think>\nhm\n</think>\n\nYes.", **script})
        )
        install(model, self._monkeypatch.setattr)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = invoke(["run", *arguments])
        self.prompts = model.prompts
        return code, *self._capsys.readouterr()


@pytest.fixture
def home(scripted_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Home:
    return Home(scripted_home, monkeypatch, capsys)


def test_thinking_is_no_part_of_stdout(home: Home) -> None:
    assert home.run("hi") == (0, "Yes.", "hm\n")
    assert home.run("--hide-thinking", "hi") == (0, "Yes.", "")
    assert home.run("-q", "hi") == (0, "Yes.", "")
    assert home.run("--no-stream", "hi") == (0, "Yes.", "hm\n")


def test_models_that_do_not_think_and_raw_texts_are_left_alone(home: Home) -> None:
    whole = "<think>\nhm\n</think>\n\nYes."
    assert home.run("hi", template=PLAIN) == (0, whole, "")
    assert home.run("--raw", "hi") == (0, whole, "")


def test_a_prompt_that_begins_the_thinking(home: Home) -> None:
    assert home.run("hi", template=R1, text="hm</think>Yes.") == (0, "Yes.", "hm\n")
    assert home.prompts[0].endswith("<think>\n")


def test_the_report_holds_it(home: Home) -> None:
    code, out, err = home.run("--json", "hi")
    report = json.loads(out)
    assert (code, report["text"], report["thinking"], err) == (0, "Yes.", "hm", "")
    assert "thinking" not in json.loads(home.run("--json", "--hide-thinking", "hi")[1])
    assert "thinking" not in json.loads(home.run("--json", "hi", template=PLAIN)[1])


def test_switching_it_off(home: Home) -> None:
    assert home.run("--think", "off", "hi", text="Yes.") == (0, "Yes.", "")
    assert home.prompts[0].endswith("<think>\n\n</think>\n\n")
    for wanted, template in (("off", R1), ("low", QWEN3), ("on", PLAIN)):
        code, out, err = home.run("--think", wanted, "hi", template=template)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--think {wanted}: the chat template of scripted has no switch for that" in err
    for arguments in (["--think", "a b"], ["--think-budget", "-1"], ["--raw", "--think", "on"]):
        assert home.run(*arguments, "hi")[0] == 2


def test_a_budget_ends_it(home: Home) -> None:
    """The tag is put in the prompt of a second request, from which the answer goes on."""
    code, out, err = home.run("--think-budget", "3", "--json", "hi", template=R1, text="abcdefgh")
    report = json.loads(out)
    assert (code, report["thinking"], report["text"], err) == (0, "abc", "abcdefgh", "")
    assert home.prompts[1] == home.prompts[0] + "abc\n</think>\n\n"
    assert report["usage"]["completion_tokens"] == len("abc\n</think>\n\nabcdefgh") + 1
    code, out, _ = home.run("--think-budget", "3", "-n", "5", "hi", template=R1, text="abcdefgh")
    assert (code, out) == (0, "")


def test_the_history_has_what_the_template_expects(home: Home) -> None:
    home.run("--session", "s", "one")
    lines = (home.path / "state" / "sessions" / "s.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(lines[2])[key] for key in ("content", "thinking")] == ["Yes.", "hm"]
    home.run("--session", "s", "two")
    assert home.prompts[0] == "<|user|>one\n<|assistant|><think>hm</think>Yes.\n<|user|>two\n<|assistant|>"
    home.run("--session", "s", "three", template=R1)
    assert "hm" not in home.prompts[0]


def test_the_same_answer_with_a_real_engine(tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:
    """Closing the thinking by a second request goes on exactly as one prompt with the tag in it would."""
    from infer.runtime.config import EngineConfig
    from infer.runtime.generation import TextStream, Thinking
    from infer.runtime.loader import load_model
    from infer.runtime.request import Request
    from infer.samplers.params import SamplingParams

    model = load_model(tiny_llama(quant="Q8_0"), EngineConfig(threads=1), memo_dir=tmp_path)
    prompt = tuple(model.tokenizer.encode("The fox <think>\n"))
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
    stream = TextStream(
        model.engine, model.tokenizer, Request("a", prompt, sampling), thinking=Thinking(THINK, budget=8)
    )
    for _ in stream:
        pass
    found = stream.generation
    closed = model.tokenizer.encode("\n</think>\n\n")
    assert (len(found.ids), found.ids[8 : 8 + len(closed)]) == (40, closed)
    before = (*prompt, *found.ids[: 8 + len(closed)])
    rest = TextStream(
        model.engine,
        model.tokenizer,
        Request(
            "b", before, SamplingParams(temperature=0.9, seed=3, max_tokens=32 - len(closed), ignore_eos=True)
        ),
    )
    assert "".join(rest).lstrip("\n") == found.text
    assert rest.generation.ids == found.ids[8 + len(closed) :]
    model.close()
