"""Flag, then INFER_…, then config file, then default; every wrong value is named with its place."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from infer.cli import config
from infer.cli.run import RunOptions
from infer.cli.sampling import parse_logit_bias, sampling_params
from infer.cli.session import engine_config
from infer.runtime.errors import ModelError, UsageError
from infer.samplers.params import SamplingParams


def resolve(
    tmp_path: Path,
    *,
    flags: dict[str, object] | None = None,
    env: dict[str, str] | None = None,
    toml: str = "",
) -> RunOptions:
    path = tmp_path / "config.toml"
    path.write_text(toml, encoding="utf-8")
    return config.resolve(RunOptions, flags or {}, environ=env or {}, path=path)


def test_precedence(tmp_path: Path) -> None:
    toml = "temp = 0.1\n"
    env = {"INFER_TEMP": "0.2"}
    assert resolve(tmp_path).temp is None
    assert resolve(tmp_path, toml=toml).temp == 0.1
    assert resolve(tmp_path, toml=toml, env=env).temp == 0.2
    options = resolve(tmp_path, toml=toml, env=env, flags={"temp": 0.0})
    assert options.temp == 0.0
    assert options.origin("temp") == "--temp"
    assert resolve(tmp_path, env=env).origin("temp") == "INFER_TEMP"
    assert resolve(tmp_path, toml=toml).origin("temp") == f"temp in {tmp_path / 'config.toml'}"


MODEL_TABLES = """
temp = 0.1
[models."Some-Model"]
temp = 0.2
top_k = 7
[models."a.gguf"]
seed = 1
"""


def test_a_model_has_settings_of_its_own(tmp_path: Path) -> None:
    def of(model: str, **env: str) -> RunOptions:
        return resolve(tmp_path, toml=MODEL_TABLES, flags={"model": model}, env=env)

    assert (of("some-model").temp, of("some-model").top_k) == (0.2, 7)
    assert of("some-model").origin("temp") == f"temp of Some-Model in {tmp_path / 'config.toml'}"
    assert (of("other").temp, of("other").top_k, of("/x/a.gguf").seed) == (0.1, None, 1)
    assert of("some-model", INFER_TEMP="0.3").temp == 0.3
    assert resolve(tmp_path, toml=MODEL_TABLES, env={"INFER_MODEL": "some-model"}).top_k == 7
    toml = 'model = "some-model"' + MODEL_TABLES
    assert resolve(tmp_path, toml=toml).top_k == 7
    assert resolve(tmp_path, toml=toml, flags={"temp": 0.0}).temp == 0.0
    assert resolve(tmp_path, toml="[models.smollm2-135m-instruct]\ntemp = 0.5").temp == 0.5


def test_of_two_that_exclude_each_other_the_stronger_wins(tmp_path: Path) -> None:
    toml = "quiet = true\n[models.m]\nverbose = true"
    options = resolve(tmp_path, toml=toml, flags={"model": "m"})
    assert (options.quiet, options.verbose) == (False, True)
    options = resolve(tmp_path, toml=toml, flags={"model": "m"}, env={"INFER_QUIET": "1"})
    assert (options.quiet, options.verbose) == (True, False)
    options = resolve(tmp_path, flags={"session": "s"}, env={"INFER_RAW": "1", "INFER_CONTINUE": "1"})
    assert (options.session, options.raw, options.continue_) == ("s", False, False)
    assert resolve(tmp_path, env={"INFER_JSON": "0"}, toml="json = true").json is False
    with pytest.raises(UsageError, match=r"^--no-cache and --cache-read-only contradict"):
        resolve(tmp_path, flags={"no_cache": True, "cache_read_only": True})
    with pytest.raises(UsageError, match=r"^INFER_QUIET and INFER_VERBOSE contradict"):
        resolve(tmp_path, env={"INFER_QUIET": "1", "INFER_VERBOSE": "1"})


def test_every_flag_has_a_variable_and_a_key(tmp_path: Path) -> None:
    texts = {str: "x", int: "7", float: "0.5", bool: "yes", list: "a b\nc"}
    values = {str: "x", int: 7, float: 0.5, bool: True, list: ["a b", "c"]}
    toml = {str: '"x"', int: "7", float: "0.5", bool: "true", list: '["a b", "c"]'}
    settings = config.settings(RunOptions)
    assert {
        "model",
        "file",
        "stop",
        "top_k",
        "json",
        "kv_type",
        "prefill_chunk",
        "no_stdin",
        "continue_",
    } <= set(settings)
    for name, setting in settings.items():
        from_env = resolve(tmp_path, env={config.variable(name): texts[setting.kind]})
        from_file = resolve(tmp_path, toml=f"{config.key(name)} = {toml[setting.kind]}")
        assert getattr(from_env, name) == values[setting.kind] == getattr(from_file, name), name


def test_an_empty_variable_is_not_set(tmp_path: Path) -> None:
    assert resolve(tmp_path, env={"INFER_TOP_K": ""}).top_k is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"INFER_TEMP": "warm"}, "INFER_TEMP: must be a number, not 'warm'"),
        ({"INFER_TOP_K": "1.5"}, "INFER_TOP_K: must be a whole number"),
        ({"INFER_JSON": "maybe"}, "INFER_JSON: must be true or false"),
    ],
)
def test_bad_variables_are_named(tmp_path: Path, env: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(tmp_path, env=env)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("tempo = 1", "unknown key 'tempo'"),
        ('temp = "0.5"', "temp must be a number, not '0.5'"),
        ("top_k = 1.0", "top_k must be a whole number"),
        ("top_k = true", "top_k must be a whole number"),
        ("json = 1", "json must be true or false"),
        ("stop = [1]", "stop must be a list of texts"),
        ("[temp]\nx = 1", "temp must be a number"),
        ("models = 1", "models must hold a table for each model"),
        ("[models]\ntemp = 1", "models must hold a table for each model"),
        ("[models.x]\ntempo = 1", "unknown key 'tempo'"),
        ("[models.x]\nmodel = 'y'", "a model cannot choose another"),
        ("[models.smollm2-135m-instruct]\ntemp = 'x'", "temp of smollm2-135m-instruct must be a number"),
        ("temp = ", "not a TOML file"),
        ("x = " + "[" * 5000, "not a TOML file"),
    ],
)
def test_bad_config_files_are_named(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve(tmp_path, toml=toml)
    assert "config.toml" in str(caught.value)


def test_unreadable_config_files(tmp_path: Path) -> None:
    assert config.read_config(tmp_path / "missing.toml") == {}
    with pytest.raises(UsageError, match="cannot read the config file"):
        config.read_config(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(UsageError, match="it is no file"):
            config.read_config(path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        config.read_config(binary)
    binary.write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match="larger than"):
        config.read_config(binary)


def test_infer_home_moves_the_config_file(tmp_path: Path) -> None:
    folder = config.data_dirs({"INFER_HOME": str(tmp_path)}).config
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('model = "from-home"\n', encoding="utf-8")
    assert config.resolve(RunOptions, {}, environ={"INFER_HOME": str(tmp_path)}).model == "from-home"


def test_an_integer_is_a_number(tmp_path: Path) -> None:
    assert resolve(tmp_path, toml="temp = 1").temp == 1.0
    assert resolve(tmp_path, toml='stop = "x"').stop == ["x"]


def test_sampling_defaults_come_from_the_model(tmp_path: Path) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "unheard_of": 3}
    params = sampling_params(resolve(tmp_path, flags={"top_p": 0.5}), defaults, seed=7)
    assert (params.temperature, params.top_p, params.min_p) == (0.6, 0.5, SamplingParams().min_p)
    assert params.seed == 7


def test_all_sampling_flags_arrive(tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "temp": 0.1, "top_k": 2, "top_p": 0.3, "min_p": 0.4, "typical_p": 0.5, "repeat_penalty": 1.6,
        "presence_penalty": 0.7, "frequency_penalty": 0.8, "logit_bias": ["5=-1.5", "7+2", "8-inf"],
        "max_tokens": 9, "stop": ["a", "\\n"], "ignore_eos": True, "samplers": "top_k, temperature",
    }  # fmt: skip
    expected = SamplingParams(
        temperature=0.1, top_k=2, top_p=0.3, min_p=0.4, typical_p=0.5, repeat_penalty=1.6,
        presence_penalty=0.7, frequency_penalty=0.8, logit_bias={5: -1.5, 7: 2.0, 8: float("-inf")},
        seed=2**64 - 1, max_tokens=9, stop=("a", "\\n"), ignore_eos=True, order=("top_k", "temperature"),
        logprobs=3,
    )  # fmt: skip
    assert sampling_params(resolve(tmp_path, flags=flags), {}, seed=2**64 - 1, logprobs=3) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temp": -1.0}, "^--temp must be a finite number"),
        ({"temp": float("nan")}, "^--temp must be"),
        ({"top_p": 2.0}, "^--top-p must be between 0 and 1"),
        ({"max_tokens": -1}, "^--max-tokens must be"),
        ({"samplers": "top_k,top_k"}, "^samplers must be distinct|^--samplers must be distinct"),
        ({"samplers": "nope"}, "samplers must be distinct names out of"),
        ({"logit_bias": ["x"]}, "^--logit-bias: must be ID=VALUE"),
        ({"logit_bias": ["5=nan"]}, "logit"),
        ({"stop": ["\udcff"]}, "^--stop is not UTF-8"),
    ],
)
def test_values_out_of_range_name_the_flag(tmp_path: Path, flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampling_params(resolve(tmp_path, flags=flags), {}, seed=0)


def test_values_out_of_range_name_the_variable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^INFER_TEMP must be"):
        sampling_params(resolve(tmp_path, env={"INFER_TEMP": "-1"}), {}, seed=0)
    with pytest.raises(UsageError, match=r"^INFER_KV_TYPE must be auto, f16"):
        engine_config(resolve(tmp_path, env={"INFER_KV_TYPE": "q8"}))
    with pytest.raises(ModelError, match="the model's own sampling defaults"):
        sampling_params(resolve(tmp_path), {"top_p": 7}, seed=0)


def test_the_last_bias_of_a_token_wins() -> None:
    assert parse_logit_bias(["3=1", "3=2e-1", " 4 = +1"]) == {3: 0.2, 4: 1.0}


def test_engine_flags_arrive(tmp_path: Path) -> None:
    flags: dict[str, object] = {
        "ctx": 99, "device": "cpu", "threads": 3, "quant": "int8", "kv_type": "f32", "prefill_chunk": 0,
        "no_cache": True,
    }  # fmt: skip
    built = engine_config(resolve(tmp_path, flags=flags))
    expected = {
        "ctx": 99,
        "device": "cpu",
        "threads": 3,
        "quant": "int8",
        "kv_type": "f32",
        "prefill_chunk": 0,
    }
    assert dataclasses.asdict(built).items() >= {**expected, "prefix_cache": False}.items()


@pytest.mark.parametrize("name", ["session", "pre", "chat_template", "output", "model", "quant"])
def test_an_empty_flag_is_an_error_unless_it_switches_something_off(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"{config.flag(name)} is empty"):
        resolve(tmp_path, flags={name: ""})
    assert getattr(resolve(tmp_path, flags={name: ""}, env={config.variable(name): "x"}), name) is None
    assert getattr(resolve(tmp_path, flags={name: ""}, toml=f'{name} = "x"'), name) is None
    assert resolve(tmp_path, flags={"system": "", "prefill": ""}).system == ""
