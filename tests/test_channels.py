"""gpt-oss' channels: analysis is thinking, final is the answer, in `run`, `chat` and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Answer, Infer
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import make_tokenizer

from infer.runtime.tokenizer.channels import MARK, Channels, ChannelSplitter
from infer.runtime.tokenizer.chat_template import ChatTemplate
from infer.runtime.tokenizer.thinking import find_tags, in_history, switch

CONTROL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
# What the published template does with messages that call no tools.
TEMPLATE = """\
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>Reasoning: " + reasoning_effort + "\\n\\n# Valid channels: analysis, final.<|end|>" }}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- "<|start|>developer<|message|># Instructions\\n\\n" + message.content + "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {%- if "<|channel|>analysis<|message|>" in message.content %}
            {{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}
        {%- endif %}
        {%- if loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == "user" -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
ANSWER = f"{ANALYSIS}hm{FINAL}Yes."
SYSTEM = "<|start|>system<|message|>Reasoning: {}\n\n# Valid channels: analysis, final.<|end|>"


def shown(text: str) -> str:
    """As control tokens stand in a decoded text."""
    for tag in CONTROL[:4]:
        text = text.replace(tag, MARK + tag)
    return text


def split(pieces: list[str]) -> tuple[str, str]:
    splitter = ChannelSplitter()
    found = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(thinking for thinking, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        (ANSWER, "hm", "Yes."),
        ("<|channel|>final<|message|>\n Yes.\n", "", "\n Yes.\n"),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b{FINAL}c", "a\n\nb", "c"),
        ("<|channel|>commentary to=functions.f json<|message|>{}<|end|>", "{}", ""),
        (f"{ANALYSIS}a{FINAL}b{FINAL}c", "a", "bc"),
        (f"{ANALYSIS}a<|end|>{ANALYSIS}<|end|>{ANALYSIS}b{FINAL}", "a\n\nb", ""),
        (f"{ANALYSIS}a<|channel|>final<|message|>b", "a", "b"),
        ("<|channel|>final json<|message|>{}", "", "{}"),
        ("<|message|>Yes.", "", "Yes."),
        ("Yes.", "", "Yes."),
        (f"{ANALYSIS}cut short", "cut short", ""),
        (f"{ANALYSIS}cut<|end|><|start|>assis", "cut", ""),
        ("<|channel|>analysis", "", ""),
        ("", "", ""),
    ],
)
def test_splitting(text: str, thinking: str, answer: str) -> None:
    assert split([shown(text)]) == (thinking, answer)
    assert split(list(shown(text))) == (thinking, answer)


def test_tags_spelled_out_are_text() -> None:
    assert split([shown(ANALYSIS) + ANSWER + shown(FINAL) + ANSWER]) == (ANSWER, ANSWER)
    for stray in (MARK, MARK * 2, f"{MARK}<", f"{MARK}<|en", f"a{MARK}b"):
        assert split(list(stray)) == ("", stray)
        assert split(list(shown(ANALYSIS) + stray)) == (stray, "")


@given(
    st.lists(
        st.sampled_from(
            [*map(shown, CONTROL[:4]), ANALYSIS, shown(ANALYSIS), shown(FINAL), MARK, "<", "a", "\n"]
        ),
        max_size=10,
    ),
    st.data(),
)
def test_any_cutting_gives_the_same(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces) == split([text])


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_character_is_lost(thinking: str, answer: str) -> None:
    assert split([shown(ANALYSIS) + thinking + shown(FINAL) + answer]) == (thinking, answer)


def test_what_is_read_off_the_template() -> None:
    template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
    assert find_tags(template) == Channels()
    assert [switch(template, wanted) for wanted in ("on", "off", "low", "high")] == [
        {}, None, {"reasoning_effort": "low"}, {"reasoning_effort": "high"},
    ]  # fmt: skip
    assert in_history(template, "hm") == {"thinking": "hm"}
    tokenizer = make_tokenizer(CONTROL)
    assert Channels().shown(tokenizer) == {
        tokenizer.encode(tag, special=True)[0]: MARK + tag for tag in CONTROL[:4]
    }
    assert Channels().shown(make_tokenizer()) == {}


# -- commands


@pytest.fixture
def home(scripted_infer: Infer) -> Infer:
    """home(*arguments, stdin="", text="…") runs `infer` with a gpt-oss; home.prompts() is what it got."""

    def run(*arguments: str, stdin: str = "", text: str = ANSWER) -> Answer:
        script = {"template": TEMPLATE, "control": CONTROL, "text": text, "ctx": 4096}
        return scripted_infer(*arguments, stdin=stdin.encode(), script=script)

    run.prompts = lambda: scripted_infer.model.prompts  # type: ignore[attr-defined]
    return run


def test_stdout_is_the_final_message(home: Infer) -> None:
    assert home("run", "hi") == (0, "Yes.", "hm\n")
    assert home.prompts() == [SYSTEM.format("medium") + "<|start|>user<|message|>hi<|end|><|start|>assistant"]
    assert home("run", "--hide-thinking", "hi") == (0, "Yes.", "")
    assert home("run", "hi", text="<|channel|>final<|message|>Yes.") == (0, "Yes.", "")
    report = json.loads(home("run", "--json", "hi")[1])
    assert (report["text"], report["thinking"]) == ("Yes.", "hm")
    lines = home("run", "--jsonl", "hi")[1].splitlines()
    assert "".join(json.loads(line)["delta"] for line in lines[:-1]) == "Yes."
    assert home("run", "--raw", "hi", text="Yes.") == (0, "Yes.", "")


@pytest.mark.parametrize("level", ["low", "medium", "high"])
def test_levels(home: Infer, level: str) -> None:
    assert home("run", "--think", level, "hi")[:2] == (0, "Yes.")
    assert home.prompts()[0].startswith(SYSTEM.format(level))


def test_it_cannot_be_switched_off(home: Infer) -> None:
    assert home("run", "--think", "on", "hi")[0] == 0
    code, out, err = home("run", "--think", "off", "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_budget_ends_the_analysis(home: Infer) -> None:
    """The model here begins to think again and again, which costs tokens but never the budget."""
    assert split([shown(ANALYSIS), "ab", shown(Channels.closing), "Yes."]) == ("ab", "Yes.")
    code, out, err = home("run", "--think-budget", "3", "-n", "60", "hi", text=f"{ANALYSIS}abcdef")
    assert home.prompts()[1] == f"{home.prompts()[0]}{ANALYSIS}ab{FINAL}"
    assert home.prompts()[2] == f"{home.prompts()[1]}{ANALYSIS}{FINAL}"
    assert (code, out, err) == (0, "", "ab\n")


def test_a_prefill_begins_the_final_message(home: Infer) -> None:
    assert home("run", "--prefill", "Well, ", "hi", text="yes.") == (0, "yes.", "")
    assert home.prompts()[0].endswith("<|start|>assistant<|channel|>final<|message|>Well, ")


def test_the_history_has_final_messages_only(home: Infer, tmp_path: Path) -> None:
    assert home("chat", "s", "-q", "--hide-thinking", stdin=f"one {FINAL}\ntwo\n") == (0, "Yes.\nYes.\n", "")
    said = [f"one {FINAL}", "Yes."]
    assert home.prompts()[1] == (
        SYSTEM.format("medium")
        + f"<|start|>user<|message|>{said[0]}<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
        + "<|start|>user<|message|>two<|end|><|start|>assistant"
    )
    lines = (tmp_path / "home" / "state" / "sessions" / "s.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines[2::2]]
    assert [(answer["content"], answer["thinking"]) for answer in answers] == [("Yes.", "hm")] * 2
    assert home("run", "--session", "s", "-q", "three")[:2] == (0, "Yes.")


def test_the_same_answer_with_a_real_engine(tmp_path: Path, tiny_llama: Callable[..., Path]) -> None:
    """Ending the analysis by a second request goes on exactly as one prompt with the tags in it would."""
    from infer.runtime.config import EngineConfig
    from infer.runtime.generation import TextStream, Thinking
    from infer.runtime.loader import load_model
    from infer.runtime.request import Request
    from infer.samplers.params import SamplingParams

    model: Any = load_model(tiny_llama(quant="Q8_0"), EngineConfig(threads=1), memo_dir=tmp_path)
    prompt = tuple(model.tokenizer.encode("The fox"))
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
    tags = Channels()
    stream = TextStream(
        model.engine, model.tokenizer, Request("a", prompt, sampling), thinking=Thinking(tags, budget=8)
    )
    for _ in stream:
        pass
    plain = TextStream(model.engine, model.tokenizer, Request("b", prompt, sampling))
    assert "".join(plain) == stream.generation.text
    assert plain.generation.ids == stream.generation.ids
    model.close()
