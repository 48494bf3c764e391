"""`infer config`: values with their origins, and a config file that keeps everything that was not changed."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Infer
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.cli import config
from infer.cli.main import invoke
from infer.cli.toml_edit import edited

Call = Callable[..., tuple[int, str, str]]

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FULL = """\
# head

temp = 0.5 # warm
"top_k"  =  40
stop = [
  "a", # first
  "# no comment",
]
system = '''
[models.fake]
temp = 1
'''

# the small one
[models."a b"] # here
temp = 0.1
top_k = 3 # three

[models]
x.temp = 0.9
"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    monkeypatch.setenv("INFER_HOME", str(tmp_path))
    for name in ("INFER_MODEL", "INFER_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = invoke(["config", *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        (("temp",), 1.5, "temp = 0.5 # warm", "temp = 1.5 # warm"),
        (("top_k",), 7, '"top_k"  =  40', '"top_k" = 7'),
        (("stop",), ["#"], 'stop = [\n  "a", # first\n  "# no comment",\n]', 'stop = ["#"]'),
        (
            ("system",),
            'a "b"\n\x7f',
            "system = '''\n[models.fake]\ntemp = 1\n'''",
            'system = "a \\"b\\"\\n\\u007f"',
        ),
        (("models", "a b", "top_k"), 4, "top_k = 3 # three", "top_k = 4 # three"),
        (("models", "a b", "seed"), 4, "top_k = 3 # three\n", "top_k = 3 # three\nseed = 4\n"),
        (("models", "x", "temp"), 0.0, "x.temp = 0.9", "x.temp = 0.0"),
        (("models", "y", "temp"), 2.0, "x.temp = 0.9\n", "x.temp = 0.9\n\n[models.y]\ntemp = 2.0\n"),
        (("quiet",), True, "temp = 1\n'''\n", "temp = 1\n'''\nquiet = true\n"),
        (("temp",), None, "temp = 0.5 # warm\n", ""),
        (("models", "a b", "temp"), None, "temp = 0.1\n", ""),
        (("seed",), None, "", ""),
    ],
)
def test_only_one_value_changes(path: tuple[str, ...], value: object, old: str, new: str) -> None:
    assert old in FULL
    for text in (FULL, FULL.replace("\n", "\r\n")):
        expected = FULL.replace(old, new, 1)
        assert edited(text, path, value).replace("\r\n", "\n") == expected


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", "temp = 1.0\n"),
        ("# only a comment", "# only a comment\ntemp = 1.0\n"),
        ("# about a\n[models.a]\nseed = 1\n", "temp = 1.0\n\n# about a\n[models.a]\nseed = 1\n"),
        ("seed = 1 # one\n\n[models.a]\n", "seed = 1 # one\ntemp = 1.0\n\n[models.a]\n"),
    ],
)
def test_a_new_value_finds_its_place(text: str, result: str) -> None:
    assert edited(text, ("temp",), 1.0) == result


@pytest.mark.parametrize(
    "text", ["models = {a = {temp = 1.0}}", "[models]\na.seed = 1\n", "models.a = {temp = 2.0}"]
)
def test_what_a_line_cannot_change_is_refused_or_right(text: str) -> None:
    try:
        result = edited(text, ("models", "a", "temp"), 3.0)
    except ValueError:
        return
    assert tomllib.loads(result)["models"]["a"]["temp"] == 3.0


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
VALUES = st.one_of(
    st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False), TEXTS, st.lists(TEXTS, max_size=3)
)
KEYS = st.sampled_from(["temp", "seed", "stop", "a b", "é"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(KEYS, st.booleans(), st.one_of(st.none(), VALUES)), max_size=12))
def test_any_sequence_of_changes_means_what_it_says(changes: list[tuple[str, bool, object]]) -> None:
    text, top, of_model = "", {}, {}
    for key, own, value in changes:
        text = edited(text, ("models", "m", key) if own else (key,), value)
        place = of_model if own else top
        place.pop(key, None)
        if value is not None:
            place[key] = value
    found = tomllib.loads(text)
    assert found.pop("models", {}).get("m", {}) == of_model
    assert found == top


def test_set_get_unset(call: Call, tmp_path: Path) -> None:
    path = Path(call("path")[1].strip())
    assert path == tmp_path / "config" / "config.toml"
    assert call("get", "temp") == (1, "", "")
    assert call("get", "kv-type") == (0, "auto\n", "")
    assert call("set", "temp", "-0.5") == (0, "", "")
    assert call("set", "--for", "Small", "--", "TEMP".lower(), "0.25") == (0, "", "")
    assert call("set", "--for", "small", "no-stream", "yes") == (0, "", "")
    assert path.read_text() == "temp = -0.5\n\n[models.Small]\ntemp = 0.25\nno_stream = true\n"
    assert call("get", "temp") == (0, "-0.5\n", "")
    assert call("get", "-m", "small", "temp") == (0, "0.25\n", "")
    assert call("set", "stop", "a b", "c") == (0, "", "")
    assert call("get", "stop") == (0, '["a b", "c"]\n', "")
    assert call("unset", "temp") == (0, "", "")
    assert call("get", "temp") == (1, "", "")
    assert call("unset", "temp") == (0, "", "")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("temp", ["-1e-05"]),
        ("presence_penalty", ["-1"]),
        ("top_k", ["-7"]),
        ("stats", ["off"]),
        ("system", ["Grüße\t\u2028\u0085\x1b[31m\n\n  'a' \"b\" \\n"]),
        ("system", [""]),
        ("system", ["- a list\n- of two"]),
        ("stop", ["\n\n", "a b", "", '"', "日本\u0085\x7f"]),
        ("stop", ["[INST]"]),
        ("stop", ['["a"]', "b"]),
        ("stop", ["[1]"]),
        ("logit_bias", ["5=-1"]),
    ],
)
def test_what_get_prints_is_what_set_takes(call: Call, tmp_path: Path, key: str, values: list[str]) -> None:
    assert call("set", "--for", "b", key, *values)[0] == 0
    code, out, _ = call("get", "-m", "b", key)
    assert (code, out[-1]) == (0, "\n")
    assert call("set", key, out[:-1]) == (0, "", "")
    table = tomllib.loads((tmp_path / "config" / "config.toml").read_text())
    assert table[key] == table["models"]["b"][key]
    if isinstance(table[key], (str, list)):
        assert table[key] == (values if isinstance(table[key], list) else values[0])
    shown = call("list")[1]
    assert tomllib.loads(shown) == {key: table[key]}


def test_list_says_where_values_come_from(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert call("list") == (0, "", "")
    call("set", "temp", "1")
    call("set", "--for", "smollm2-135m-instruct", "top_k", "5")
    monkeypatch.setenv("INFER_STATS", "1")
    path = tmp_path / "config" / "config.toml"
    assert call("list")[1].split() == ["stats", "=", "true", "temp", "=", "1.0", "top_k", "=", "5"]
    shown = {line.split()[0]: line.split(maxsplit=3)[3] for line in call("list", "--origin")[1].splitlines()}
    assert shown == {
        "stats": "INFER_STATS",
        "temp": f"temp in {path}",
        "top_k": f"top_k of smollm2-135m-instruct in {path}",
    }
    rows = json.loads(call("list", "--json", "--all")[1])["settings"]
    assert {row["key"] for row in rows} == set(config.known())
    assert next(row for row in rows if row["key"] == "top_p") == {
        "key": "top_p",
        "value": None,
        "origin": "default",
    }


def test_mistakes_are_one_line(call: Call, tmp_path: Path) -> None:
    for arguments, message in (
        (("set", "thread", "1"), "no key is called 'thread' (did you mean threads?)"),
        (("set", "temp", "warm"), "temp: must be a number, not 'warm'"),
        (("set", "temp", "nan"), "temp: must be a number, not 'nan'"),
        (("set", "temp", "1", "2"), "temp takes one value"),
        (("set", "system", "\udcff"), "the value of system is not UTF-8"),
        (("set", "stop", "a", "\udcff"), "the value of stop is not UTF-8"),
        (("set", "temp", "1", "--for", "\udcff"), "--for is not UTF-8"),
        (("unset", "temp", "--for", "\udcff"), "--for is not UTF-8"),
        (("set", "model", "x", "--for", "y"), "a model cannot choose another"),
        (("get", "nothing"), "no key is called 'nothing'"),
    ):
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    path = tmp_path / "config" / "config.toml"
    path.parent.mkdir()
    for text, message in (
        ("temp = ", "not a TOML file"),
        ("models = {a = {}}", "only an editor can change it"),
    ):
        path.write_text(text)
        code, out, err = call("set", "--for", "a", "temp", "1")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
        assert path.read_text() == text
    path.write_text("tempo = 1\n")
    assert "unknown key 'tempo' (did you mean temp" in call("list")[2]


def test_a_linked_file_keeps_its_link_and_mode(call: Call, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("# mine\nseed = 1\n")
    real.chmod(0o640)
    path = tmp_path / "config" / "config.toml"
    path.parent.mkdir()
    path.symlink_to(real)
    assert call("set", "seed", "2")[0] == 0
    assert path.is_symlink()
    assert real.read_text() == "# mine\nseed = 2\n"
    assert real.stat().st_mode & 0o777 == 0o640
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_what_another_command_calls_the_same_is_not_meant(call: Call) -> None:
    call("set", "prefill", "Sure,")
    assert config.known()["file"].kind is list
    assert invoke(["bench", "-m", "/no/such.gguf"]) == 3


def test_the_settings_of_a_sessions_model_come_with_it(scripted_infer: Infer, tmp_path: Path) -> None:
    model = tmp_path / "own.gguf"
    model.touch()
    scripted_infer("config", "set", "--for", "own.gguf", "top_k", "7")
    scripted_infer("config", "set", "--for", "own.gguf", "ctx", "99")
    assert scripted_infer("run", "--session", "s", "-m", str(model), "hi", script={"template": TURNS})[0] == 0
    assert scripted_infer("run", "--session", "s", "--temp", "0.5", "hi", script={"template": TURNS})[0] == 0
    sampling = scripted_infer.model.engine.requests[0].sampling  # type: ignore[attr-defined]
    assert (sampling.top_k, sampling.temperature) == (7, 0.5)
    assert scripted_infer.model.engine_config.ctx == 99  # type: ignore[attr-defined]
