"""Where a setting comes from: flag, else `INFER_…` in the environment, else what the config file says of the model in
use (`[models."NAME"]`), else what it says of all, else default.

The names, types and defaults are those of the option dataclasses (`cli.options`); nothing is listed twice. Of two
settings that exclude each other the one from the stronger source wins; two from one source are an error.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import stat
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from infer.runtime.errors import UsageError, did_you_mean
from infer.runtime.store.paths import DataDirs

if TYPE_CHECKING:
    from infer.cli.options import Options

T = TypeVar("T", bound="Options")

HOME = "INFER_HOME"
FILE_NAME = "config.toml"
MODELS = "models"  # the table of tables with the settings of one model each
_LARGEST = 1 << 20  # bytes of a config file or a template
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_MAY_BE_EMPTY = ("system", "prefill", "samplers")
WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list of texts",
}


class Rank(enum.IntEnum):
    """How strong a source is."""

    CONFIG = 0
    MODEL = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True)
class Found:
    """A value, and the place that an error message names."""

    value: Any
    origin: str
    rank: Rank


@dataclass(frozen=True)
class Exclusion:
    """Two settings that cannot both be in force. reason: for messages, `{first}` and `{second}` are origins."""

    first: str
    second: str
    reason: str = "{first} and {second} contradict each other: drop one"


@dataclass(frozen=True)
class Setting:
    """One flag: flag_type is what typer parses (list[str] for repeatable ones), info its typer.Option."""

    name: str
    flag_type: Any
    info: Any
    default: Any

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
    found = {}
    hints = typing.get_type_hints(group, include_extras=True)
    for item in dataclasses.fields(group):
        hint = hints[item.name]
        if typing.get_origin(hint) is not typing.Annotated:
            continue
        inner, info = typing.get_args(hint)
        options = [part for part in typing.get_args(inner) if part is not types.NoneType]
        optional = typing.get_origin(inner) in (types.UnionType, typing.Union)
        found[item.name] = Setting(item.name, options[0] if optional else inner, info, item.default)
    return found


def data_dirs(environ: Mapping[str, str] | None = None) -> DataDirs:
    """The user's folders, moved by INFER_HOME."""
    home = (os.environ if environ is None else environ).get(HOME)
    return DataDirs.from_home(Path(home) if home else None)


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """The config file, which need not exist."""
    return data_dirs(environ).config / FILE_NAME


def resolve(
    group: type[T],
    given: Mapping[str, object],
    *,
    model: str | None = None,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> T:
    """The options in force. `given` holds the flags; None, False or an empty list: it was not given.

    model: whose table of the config file counts; by default that of the model in force.
    Raises UsageError for a variable or key with a value of the wrong type, for an empty flag (`--session "$UNSET"`)
    that switches off no variable or key, for settings of one source that exclude each other, for an unknown key in
    the config file and for a file that is not TOML.
    """
    sources = Sources.read(environ, path)
    named = settings(group)
    if model is None and "model" in named:
        flag_value = given.get("model")
        found = sources.find(named["model"])
        model = str(flag_value) if flag_value else found.value if found else None
    if "model" in named:
        sources = sources.of_model(model)
    chosen: dict[str, Found] = {}
    for name, setting in named.items():
        value = given.get(name)
        found = None if name in group.flags_only else sources.find(setting)
        if value == "" and name not in _MAY_BE_EMPTY:
            if found is None:
                raise UsageError(f"{flag(name)} is empty: give it a value, or leave it out")
        elif value is not None and value is not False and value not in ([], ()):
            value = list(value) if isinstance(value, (list, tuple)) else value
            chosen[name] = Found(value, flag(name), Rank.FLAG)
        elif found is not None:
            chosen[name] = found
    for exclusion in exclusions(group):
        _exclude(chosen, exclusion)
    origins = types.MappingProxyType({name: found.origin for name, found in chosen.items()})
    return group(
        origins=origins,
        given=types.MappingProxyType(dict(given)),
        **{name: found.value for name, found in chosen.items()},
    )


def for_model(options: T, model: str) -> T:
    """The options as they are with another model: its table of the config file counts."""
    return resolve(type(options), {**options.given, "model": model}, model=model)


def exclusions(group: type[Options]) -> Iterator[Exclusion]:
    """Those of a group and all it inherits from."""
    for part in group.__mro__:
        yield from part.__dict__.get("exclusions", ())


def _exclude(chosen: dict[str, Found], exclusion: Exclusion) -> None:
    first, second = chosen.get(exclusion.first), chosen.get(exclusion.second)
    if first is None or second is None or not first.value or not second.value:
        return
    if first.rank == second.rank:
        raise UsageError(exclusion.reason.format(first=first.origin, second=second.origin))
    del chosen[exclusion.first if first.rank < second.rank else exclusion.second]


@dataclass(frozen=True)
class Sources:
    """The environment and the config file. model: the table of the model in use, by the name it has there."""

    environ: Mapping[str, str]
    path: Path
    table: Mapping[str, Any]
    model: tuple[str, Mapping[str, Any]] | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, path: Path | None = None) -> Sources:
        """Raises UsageError (see `read_config`)."""
        environ = os.environ if environ is None else environ
        path = config_path(environ) if path is None else path
        return cls(environ, path, read_config(path))

    def of_model(self, spec: str | None) -> Sources:
        """With the table of what `-m` says (None: the default model): under that very name, else under its last part,
        such as the file name of a path."""
        from infer.runtime.store.catalog import DEFAULT_MODEL

        spec = os.path.expanduser(spec or DEFAULT_MODEL)
        tables = {os.path.expanduser(name).casefold(): name for name in self.table.get(MODELS, ())}
        for candidate in (spec.casefold(), os.path.basename(spec).casefold()):
            if candidate in tables:
                name = tables[candidate]
                return dataclasses.replace(self, model=(name, self.table[MODELS][name]))
        return dataclasses.replace(self, model=None)

    def find(self, setting: Setting) -> Found | None:
        """What is said of a setting, flags apart. Raises UsageError for a value of the wrong type."""
        name, word = setting.name, key(setting.name)
        if text := self.environ.get(variable(name)):
            return Found(from_text(setting, text, variable(name)), variable(name), Rank.ENVIRONMENT)
        if self.model is not None and word in self.model[1]:
            of = f"{word} of {self.model[0]}"
            value = _from_toml(setting, self.model[1][word], f"{self.path}: {of}")
            return Found(value, f"{of} in {self.path}", Rank.MODEL)
        if word in self.table:
            value = _from_toml(setting, self.table[word], f"{self.path}: {word}")
            return Found(value, f"{word} in {self.path}", Rank.CONFIG)
        return None


def from_text(setting: Setting, text: str, where: str) -> object:
    """Raises UsageError, which begins with `where`."""
    try:
        if setting.kind is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if setting.kind is list:  # one value per line: stop strings may hold spaces and commas
            return text.splitlines()
        return setting.kind(text)
    except ValueError:
        raise UsageError(f"{where}: must be {WORDS[setting.kind]}, not {text!r}") from None


def _from_toml(setting: Setting, value: object, where: str) -> object:
    kind = setting.kind
    if kind is list and isinstance(value, str):
        return [value]
    if kind is list and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is not list and type(value) is kind:
        return value
    raise UsageError(f"{where} must be {WORDS[kind]}, not {value!r}")


def read_config(path: Path) -> dict[str, Any]:
    """The config file, checked to hold known keys only; {} where there is no file. Raises UsageError."""
    return parse_config(read_settings_text(path, "config file"), path)


def read_settings_text(path: Path, what: str) -> str:
    """The text of a small file of settings, "" where there is none. Raises UsageError, also for what is no file."""
    try:
        # Without blocking: a pipe that nobody writes to opens too.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"{path}: cannot read the {what}: {error.strerror or error}") from None
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path}: cannot read the {what}: it is no file; move it away")
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the {what}: {error.strerror or error}") from None
    if len(data) > _LARGEST:
        raise UsageError(f"{path}: larger than {_LARGEST} bytes, too large for a {what}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: the {what} is not UTF-8 text: {error.reason} at offset {error.start}"
        ) from None


def parse_config(text: str, path: Path) -> dict[str, Any]:
    """See `read_config`."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file: {error}") from None
    models = table.get(MODELS, {})
    if not isinstance(models, dict) or not all(isinstance(item, dict) for item in models.values()):
        raise UsageError(f'{path}: {MODELS} must hold a table for each model, such as [{MODELS}."NAME"]')
    _check_keys([name for name in table if name != MODELS], path)
    for name, item in models.items():
        if "model" in item:
            raise UsageError(f"{path}: model in the table of {name!r}: a model cannot choose another")
        _check_keys(list(item), path)
    return table


def _check_keys(names: list[str], path: Path) -> None:
    for name in names:
        if name not in known(loaded_only=True) and name not in known():
            raise UsageError(
                f"{path}: unknown key {name!r}{did_you_mean(name, known())}; keys are flag names with _ for -, "
                "such as top_k"
            )


def known(*, loaded_only: bool = False) -> dict[str, Setting]:
    """Settings of every command by key: one that only another command has is no mistake. loaded_only: of the commands
    imported so far."""
    from infer.cli import commands
    from infer.cli.options import Options

    if not loaded_only:
        commands.import_all()
    found: dict[str, Setting] = {}
    groups: list[type[Options]] = [Options]
    for group in groups:
        named = settings(group)
        found.update({key(name): named[name] for name in named if name not in group.flags_only})
        groups.extend(group.__subclasses__())
    return found


def write_value(place: tuple[str, ...], value: object | None) -> None:
    """Set a value in the config file, None to remove it. Readers see the old file or the whole new one.

    Raises UsageError where the file cannot be read or written, or the change needs an editor.
    """
    from infer.cli import toml_edit
    from infer.runtime.store.files import write_atomically
    from infer.runtime.store.lock import exclusive

    # A link to a file elsewhere, as people keep their settings under version control, stays one.
    path = Path(os.path.realpath(config_path()))
    busy = f"{path}: another process is changing it; try again"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_name(f".{path.name}.lock"), busy=busy, notify=None, error=UsageError):
            text = read_settings_text(path, "config file")
            table = parse_config(text, path)
            if len(place) == 3:  # of a model that has a table under another spelling
                spelled = {name.casefold(): name for name in table.get(MODELS, ())}
                place = (place[0], spelled.get(place[1].casefold(), place[1]), place[2])
            try:
                changed = toml_edit.edited(text, place, value)
            except ValueError:
                raise UsageError(f"{path}: {'.'.join(place)} is where only an editor can change it") from None
            parse_config(changed, path)
            if changed != text:
                write_atomically(path, changed)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
