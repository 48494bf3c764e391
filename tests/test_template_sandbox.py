"""A chat template is code out of a file: whatever it does, it ends soon, in little memory, with one line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from infer.runtime.errors import ChatTemplateError
from infer.runtime.tokenizer import template_limits
from infer.runtime.tokenizer.chat_template import ChatTemplate

USER: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


def doubling(step: str, start: str = "'aaaaaaaa'") -> str:
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
    )


HOSTILE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat list": "{{ [messages] * 10**8 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": doubling("{% set ns.x = ns.x * ns.x %}", "3"),
    "tilde": doubling("{% set ns.x = ns.x ~ ns.x %}"),
    "plus": doubling("{% set ns.x = ns.x + ns.x %}"),
    "block": doubling("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + doubling("{% set ns.x = d(ns.x) %}"),
    "output": "{% set x = 'a' * 10**6 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
    "list add": doubling("{% set ns.x = ns.x + ns.x %}", "['a']"),
    "lists": doubling("{% set ns.x = [ns.x, ns.x, ns.x] %}", "['a']"),
    "tuples": doubling("{% set ns.x = (ns.x, ns.x, ns.x) %}", "('a',)"),
    "dicts": doubling("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", "{'a': 1}"),
    "dict()": doubling("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{'a': 1}"),
    "map": doubling("{% set ns.x = [u, u, u] | map('default', ns.x) | list %}", "['a']"),
    "macro recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "block recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "loop recursion": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent many": "{{ ('%s' * 10**5) % (('a' * 10**5,) * 10**5) }}",
    "percent map": "{{ ('%(a)s' * 10**5) % {'a': 'a' * 10**5} }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "format many": "{{ ('{0}' * 10**5).format('a' * 10**5) }}",
    "format_map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'a' | center(10**10) }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "indent lines": "{{ ('\n' * 10**6) | indent(1000) }}",
    "replace": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "replace filter": "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
    "replace list": "{{ (['a' * 10**5] * 3) | replace('a', 'b' * 10**5) }}",
    "join": "{{ ('b' * 10**5).join(('a',) * 10**5) }}",
    "join filter": "{{ range(10**5) | join('b' * 10**5) }}",
    "split": "{{ ('a ' * 10**7).split(' ') | length }}",
    "splitlines": "{{ ('\n' * 10**7).splitlines() | length }}",
    "list of text": "{{ ('é' * 10**7) | list | length }}",
    "tojson indent": "{{ [1, [2]] | tojson(indent=10**9) }}",
    "tojson deep indent": "{{ range(99999) | list | tojson(indent=1000) }}",
    "tojson separators": "{{ (range(9999) | list) | tojson(separators=('a' * 10**5, 'b')) }}",
    "escape": "{{ ('<' * 10**7) | e }}",
    "round": "{{ 5 | round(-10**9, 'floor') }}",
    "int": "{{ ('9' * 10**6) | int(base=16) }}",
    "to_bytes": "{{ (1).to_bytes(10**9) }}",
    "fromkeys": "{{ {}.fromkeys(range(10**5)) }}",
    "classes": "{{ ''.__class__.__mro__ }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
    "include": "{% include 'x' %}",
    "slices": "{% set x = 'a' * 10**6 %}{% set ns = namespace(l=[]) %}{% for i in range(1000) %}"
    "{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "date": "{{ strftime_now('%c' * 1000) }}",
    "mutation": "{{ messages.append(1) }}",
    "types": "{{ 1 + 'a' }}",
    "zero": "{{ 1 / 0 }}",
}

ENDLESS = {
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "filters": "{% for i in range(99999) | map('string') %}{% for j in range(99999) | select('odd') %}"
    "{% endfor %}{% endfor %}",
    "straight": "{% set a = 'a' * 9999999 %}{% set b = a ~ 'b' %}" + "{% if b in a %}{% endif %}" * 2300,
    "cycler": "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(9999) %}"
    "{{ c.next() }}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_ends_with_an_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "TIME_LIMIT", 0.4)
    started = time.process_time()
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render(USER)
    assert time.process_time() - started < 1.5
    assert "\n" not in str(caught.value)
    assert sys.gettrace() is None or "pydevd" in sys.modules or "coverage" in sys.modules


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "TIME_LIMIT", 0.2)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"it runs for more than|more text than"):
        ChatTemplate(source).render(USER)
    assert time.monotonic() - started < 3


def test_a_trace_function_is_put_back_and_threads_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "TIME_LIMIT", 0.2)
    caught: list[BaseException] = []

    def render_in_thread() -> None:
        def tracer(frame: Any, event: str, argument: Any) -> None:
            return None

        sys.settrace(tracer)
        try:
            ChatTemplate(ENDLESS["nested"]).render(USER)
        except ChatTemplateError as error:
            caught.append(error)
        if sys.gettrace() is not tracer:
            caught.append(AssertionError("the trace function was lost"))
        sys.settrace(None)

    thread = threading.Thread(target=render_in_thread)
    thread.start()
    thread.join(timeout=20)
    assert [type(error) for error in caught] == [ChatTemplateError]


MEASURE = """
import json, resource, sys
from infer.runtime.errors import ChatTemplateError
from infer.runtime.tokenizer import template_limits
from infer.runtime.tokenizer.chat_template import ChatTemplate
template_limits.TIME_LIMIT = 0.5
messages = [{"role": "user", "content": "hi"}]
ChatTemplate("{{ messages }}").render(messages)
unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
grown = {}
for name, source in json.load(sys.stdin).items():
    before = peak()
    try:
        ChatTemplate(source).render(messages)
        grown[name] = "no error"
    except ChatTemplateError:
        grown[name] = peak() - before
print(json.dumps(grown))
"""


def test_hostile_templates_stay_within_memory() -> None:
    result = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        check=True,
    )
    grown = json.loads(result.stdout)
    assert grown.keys() == HOSTILE.keys()
    assert {name: size for name, size in grown.items() if not isinstance(size, int) or size > 64} == {}
