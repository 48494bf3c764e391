"""`infer config`: what is set, where it comes from, and changing the config file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from typing import Annotated

import typer

from infer.cli import config, render, toml_edit
from infer.cli.input import checked_argument
from infer.cli.options import JsonOptions, SourceOptions, complete_model, takes
from infer.cli.output import write_path, write_result
from infer.runtime.errors import UsageError, did_you_mean


def complete_key(incomplete: str) -> list[str]:
    """Keys of the config file."""
    return sorted(name for name in config.known() if name.startswith(incomplete))


_Key = Annotated[
    str,
    typer.Argument(metavar="KEY", help="A flag's name, such as top_k or top-k.", autocompletion=complete_key),
]
# No setting like the -m of other commands: INFER_MODEL must not decide which table is changed.
_For = Annotated[
    str | None,
    typer.Option(
        "--for", metavar="MODEL", help="Only when this model is in use.", autocompletion=complete_model
    ),
]


@dataclass(frozen=True, kw_only=True)
class _ListOptions(JsonOptions, SourceOptions):
    """Flags of `infer config list`."""


@takes(SourceOptions)
def get(options: SourceOptions, name: _Key) -> None:
    """Print the value in force for a key.

    That is what its INFER_… variable says, else the config file of the model in use, else the config file, else the
    default. It is printed as `set` takes it, a list as TOML writes it. Ends with 1 where there is none.

    Examples:
      infer config get temp
      infer config get -m qwen2.5-coder-1.5b-instruct temp
      infer config set stop "$(infer config get stop)" --for smollm2-135m-instruct
    """
    setting = _setting(name)
    found = config.Sources.read().of_model(options.model).find(setting)
    value = found.value if found else setting.default
    if value is None:
        raise typer.Exit(1)
    write_result((value if isinstance(value, str) else toml_edit.literal(value)) + "\n")


def set_(
    name: _Key, values: Annotated[list[str], typer.Argument(metavar="VALUE")], model: _For = None
) -> None:
    """Set a key in the config file, for all models or for one; comments and other keys stay.

    A list is one value for each of its texts, or as TOML writes it: '["a", "b"]'. Flags of a command line and INFER_…
    variables beat the config file.

    Examples:
      infer config set model qwen2.5-coder-1.5b-instruct
      infer config set temp 0.2 --for smollm2-135m-instruct
      infer config set stop '</answer>' '###'
    """
    setting = _setting(name)
    key = config.key(setting.name)
    if setting.kind is not list and len(values) > 1:
        raise UsageError(f"{key} takes one value, not {len(values)}: put it in quotes")
    values = [checked_argument(f"the value of {key}", text) for text in values]
    value = _list(values) if setting.kind is list else config.from_text(setting, values[0], key)
    if value != value:  # NaN
        raise UsageError(f"{key}: must be {config.WORDS[setting.kind]}, not {values[0]!r}")
    if model is not None and key == "model":
        raise UsageError("model --for MODEL: a model cannot choose another")
    _change(setting, model, value)


def unset(name: _Key, model: _For = None) -> None:
    """Remove a key from the config file.

    Examples:
      infer config unset temp
      infer config unset temp --for smollm2-135m-instruct
    """
    _change(_setting(name), model, None)


@takes(_ListOptions)
def list_(
    options: _ListOptions,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Also what is at its default.")] = False,
) -> None:
    """List what is set, for the model in use.

    A flag beats a variable, that the config file's table of the model, that the rest of the config file.

    Examples:
      infer config list --origin
      infer config list --all -m smollm2-135m-instruct
    """
    sources = config.Sources.read().of_model(options.model)
    rows = []
    for key, setting in sorted(config.known().items()):
        found = sources.find(setting)
        if found is not None or every:
            value = found.value if found else setting.default
            rows.append((key, value, found.origin if found else "default"))
    if options.json:
        objects = [{"key": key, "value": value, "origin": where} for key, value, where in rows]
        render.emit(json.dumps({"path": str(sources.path), "settings": objects}))
        return
    lines = [
        (key, "=", "" if value is None else toml_edit.literal(value), where) for key, value, where in rows
    ]
    for line in render.columns(lines if origin else [line[:3] for line in lines]) if lines else []:
        render.emit(line)


def path() -> None:
    """Print the path of the config file, which need not exist.

    Examples:
      $EDITOR "$(infer config path)"
    """
    write_path(config.config_path())


def _setting(name: str) -> config.Setting:
    known = config.known()
    key = name.lstrip("-").replace("-", "_")
    if key not in known:
        raise UsageError(
            f"no key is called {name!r}{did_you_mean(key, known)}; keys are flag names, such as top_k"
        )
    return known[key]


def _list(values: list[str]) -> list[str]:
    """The texts themselves, or those of one TOML array."""
    try:
        found = tomllib.loads(f"list = {values[0]}")["list"] if len(values) == 1 else None
    except tomllib.TOMLDecodeError:
        return values
    return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else values


def _change(setting: config.Setting, model: str | None, value: object | None) -> None:
    """Raises UsageError where the file is no config file or this place in it needs an editor."""
    key = config.key(setting.name)
    model = None if model is None else checked_argument("--for", model)
    config.write_value((key,) if model is None else (config.MODELS, model, key), value)
