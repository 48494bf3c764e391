"""Where a setting comes from: flag, else `INFER_…` in the environment, else config file, else default.

The names, types and defaults are those of the option dataclasses (`cli.options`); nothing is listed twice.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from infer.runtime.errors import UsageError
from infer.runtime.store.paths import DataDirs

if TYPE_CHECKING:
    from infer.cli.options import Options

T = TypeVar("T", bound="Options")

HOME = "INFER_HOME"
FILE_NAME = "config.toml"
_LARGEST = 1 << 20  # bytes of a config file
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_MAY_BE_EMPTY = ("system", "prefill", "samplers")
_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list of texts",
}


@dataclass(frozen=True)
class Setting:
    """One flag: flag_type is what typer parses (list[str] for repeatable ones), info its typer.Option."""

    name: str
    flag_type: Any
    info: Any

    @property
    def kind(self) -> type:
        """str, int, float, bool or list."""
        return typing.get_origin(self.flag_type) or self.flag_type  # type: ignore[no-any-return]


def key(name: str) -> str:
    """The name in the config file: that of the field, less the `_` that keeps `continue_` off the keyword."""
    return name.rstrip("_")


def flag(name: str) -> str:
    """`top_k` → `--top-k`."""
    return "--" + key(name).replace("_", "-")


def variable(name: str) -> str:
    """`top_k` → `INFER_TOP_K`."""
    return "INFER_" + key(name).upper()


def settings(group: type[Options]) -> Mapping[str, Setting]:
    """All settings of an option dataclass, by name, in order of declaration."""
    found: dict[str, Setting] = {}
    for base in group.__mro__:
        found = {**_own_settings(base), **found}
    order = [item.name for item in dataclasses.fields(group)]
    return {name: found[name] for name in order if name in found}


@functools.cache
def _own_settings(group: type) -> dict[str, Setting]:
    """Those declared by this class itself: evaluated once, whichever commands share it."""
    found = {}
    hints: dict[str, Any] = inspect.get_annotations(group, eval_str=True)
    for name, hint in hints.items():
        if typing.get_origin(hint) is not typing.Annotated:
            continue
        inner, info = typing.get_args(hint)
        options = [part for part in typing.get_args(inner) if part is not types.NoneType]
        optional = typing.get_origin(inner) in (types.UnionType, typing.Union)
        found[name] = Setting(name, options[0] if optional else inner, info)
    return found


def data_dirs(environ: Mapping[str, str] | None = None) -> DataDirs:
    """The user's folders, moved by INFER_HOME."""
    home = (os.environ if environ is None else environ).get(HOME)
    return DataDirs.from_home(Path(home) if home else None)


def resolve(
    group: type[T],
    given: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> T:
    """The options in force. `given` holds the flags; None, False or an empty list: it was not given.

    Raises UsageError for a variable or key with a value of the wrong type, for an empty flag (`--session "$UNSET"`)
    that switches off no variable or key, for an unknown key in the config file and for a file that is not TOML.
    """
    environ = os.environ if environ is None else environ
    path = data_dirs(environ).config / FILE_NAME if path is None else path
    table = read_config(path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, setting in settings(group).items():
        flag_value = given.get(name)
        if flag_value == "" and name not in _MAY_BE_EMPTY:
            if not (environ.get(variable(name)) or table.get(key(name))):
                raise UsageError(f"{flag(name)} is empty: give it a value, or leave it out")
        elif flag_value is not None and flag_value is not False and flag_value not in ([], ()):
            values[name] = list(flag_value) if isinstance(flag_value, (list, tuple)) else flag_value
            origins[name] = flag(name)
        elif environ.get(variable(name)):
            values[name] = parse(setting, environ[variable(name)], variable(name))
            origins[name] = variable(name)
        elif key(name) in table:
            values[name] = _from_toml(setting, table[key(name)], path)
            origins[name] = f"{key(name)} in {path}"
    return group(origins=types.MappingProxyType(origins), **values)


def parse(setting: Setting, text: str, where: str) -> object:
    """The value that a text stands for. Raises UsageError, which says where it is."""
    try:
        if setting.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if setting.kind is list:  # one value per line: stop strings may hold spaces and commas
            return text.splitlines()
        return setting.kind(text)
    except ValueError:
        raise UsageError(f"{where}: must be {_WORDS[setting.kind]}, not {text!r}") from None


def _from_toml(setting: Setting, value: object, path: Path) -> object:
    kind = setting.kind
    if kind is list and isinstance(value, str):
        return [value]
    if kind is list and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is not list and type(value) is kind:
        return value
    raise UsageError(f"{path}: {key(setting.name)} must be {_WORDS[kind]}, not {value!r}")


def read_config(path: Path) -> dict[str, Any]:
    """The config file's keys, checked to be known ones; {} where there is no file."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot read the config file: {error.strerror or error}") from None
    if len(data) > _LARGEST:
        raise UsageError(f"{path}: larger than {_LARGEST} bytes; a config file holds one line per flag")
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None
    known = _known()
    unknown = [name for name in table if name not in known]
    if unknown:
        raise UsageError(
            f"{path}: unknown key {unknown[0]!r}; keys are flag names with _ for -, such as top_k"
        )
    return table


def _known() -> set[str]:
    """Keys of every group of flags: a key that only another command has is no mistake."""
    from infer.cli.options import Options

    names: set[str] = set()
    groups = [Options]
    while groups:
        group = groups.pop()
        names.update(key(name) for name in settings(group))
        groups.extend(group.__subclasses__())
    return names
