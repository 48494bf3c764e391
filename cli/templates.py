"""Named prompt templates: `infer run -t NAME --var k=v`, and `infer template`, which keeps them.

A template is a text file in the configuration folder. `{name}` in it is a variable, `{input}` the prompt that would
have been used without the template; `{{name}}` is the text `{name}`, and any other brace is a brace. What is put in
is not looked at again. A prompt for a template without `{input}` comes before it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infer.cli import render
from infer.cli.config import data_dirs, read_settings_text
from infer.cli.input import STDIN, PromptInput, checked_argument, join, read_prompt
from infer.cli.options import JsonOptions, NoteOptions, Options, takes
from infer.cli.output import write_result
from infer.runtime.errors import UsageError, did_you_mean

INPUT = "input"
_SUFFIX = ".txt"
_VARIABLE = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}", re.ASCII)


def complete_template(incomplete: str) -> list[str]:
    """Names of templates."""
    return [name for name in _names() if name.startswith(incomplete)]


_Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A name of `infer template ls`.", autocompletion=complete_template),
]


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(Options):
    template: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--template",
            metavar="NAME",
            help="Put the prompt into a template of `infer template ls`.",
            autocompletion=complete_template,
        ),
    ] = None
    var: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=TEXT", help="A variable of the template. Repeatable."),
    ] = None


def read_with_template(wanted: PromptInput, options: TemplateOptions, notes: render.Notes) -> str:
    """The prompt, in the template that the options name. Raises UsageError."""
    if options.template is None:
        if options.var:
            raise UsageError(f"{options.origin('var')} needs a template: give -t NAME")
        return read_prompt(wanted, notes)
    text = _read(options.template)
    names = set(variables(text))
    given = dict(_assignment(item, options.origin("var")) for item in options.var or ())
    if unknown := sorted(given.keys() - names):
        raise UsageError(
            f"template {options.template} has no variable {unknown[0]!r}{did_you_mean(unknown[0], names)}: "
            f"it has {', '.join(sorted(names)) or 'none'}"
        )
    if missing := sorted(names - given.keys() - {INPUT}):
        raise UsageError(f"template {options.template} needs {missing[0]!r}: give --var {missing[0]}=TEXT")
    if INPUT in names:
        return fill(text, {**given, INPUT: read_prompt(wanted, notes)})
    before = read_prompt(dataclasses.replace(wanted, optional=True), notes)
    return join([part for part in (before, fill(text, given)) if part], raw=wanted.raw)


def variables(text: str) -> list[str]:
    """Names of a template's variables, in order and without repetition."""
    return list(dict.fromkeys(name for _, name in _VARIABLE.findall(text) if name))


def fill(text: str, values: dict[str, str]) -> str:
    """The template with its variables replaced, all of which values must hold."""
    return _VARIABLE.sub(lambda match: f"{{{match[1]}}}" if match[1] else values[match[2]], text)


def _assignment(item: str, origin: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name:
        raise UsageError(f"{origin}: must be NAME=TEXT, not {item!r}")
    if name == INPUT:
        raise UsageError(f"{origin}: {INPUT} is the prompt itself: files, stdin and the argument")
    return name, checked_argument(origin, value)


@takes(JsonOptions)
def ls(options: JsonOptions) -> None:
    """List the templates and their variables.

    Examples:
      infer template ls
    """
    found = {name: variables(_read(name)) for name in _names()}
    if options.json:
        rows = [{"name": name, "path": str(_path(name)), "variables": names} for name, names in found.items()]
        render.emit(json.dumps({"folder": str(_folder()), "templates": rows}))
        return
    for line in render.columns([("NAME", "VARIABLES"), *((name, " ".join(found[name])) for name in found)]):
        render.emit(line)


def show(name: _Name) -> None:
    """Print a template.

    Examples:
      infer template show summarize
    """
    write_result(_read(name) + "\n")


@takes(NoteOptions)
def set_(
    options: NoteOptions,
    name: _Name,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT|-", help="The template; - or nothing reads stdin.")
    ] = None,
) -> None:
    """Make a template, or replace one.

    {name} in its text is a variable, {input} the prompt; {{name}} stands for {name}.

    Examples:
      infer template set summarize 'Summarize in {lang}, in one sentence: {input}'
      infer template set review < review.txt
      git diff | infer run -t summarize --var lang=English
    """
    from infer.runtime.store.files import write_atomically

    path = _path(name)
    notes = render.Notes(quiet=options.quiet, verbose=options.verbose)
    content = read_prompt(PromptInput(prompt=text, use_stdin=text in (None, STDIN), what="template"), notes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content + "\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    found = variables(content)
    notes.note(f"template {name}: {'variables ' + ', '.join(found) if found else 'no variables'}")


@takes(NoteOptions)
def rm(
    options: NoteOptions,
    name: _Name,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a template.

    Examples:
      infer template rm summarize
    """
    path = _path(name)
    if name not in _names():
        raise _unknown(name)
    if not yes and not render.confirm_deletion("template rm", str(path)):
        return
    path.unlink()
    if not options.quiet:
        render.say(f"deleted template {name}")


def _folder() -> Path:
    return data_dirs().config / "templates"


def _path(name: str) -> Path:
    """Raises UsageError for what is no name."""
    from infer.runtime.store.sessions import check_name

    return _folder() / (check_name(name, "a template") + _SUFFIX)


def _names() -> list[str]:
    try:
        return sorted(path.stem for path in _folder().iterdir() if path.suffix == _SUFFIX and path.is_file())
    except OSError:
        return []


def _read(name: str) -> str:
    path = _path(name)
    if not path.exists():
        raise _unknown(name)
    return read_settings_text(path, "template").rstrip("\n")


def _unknown(name: str) -> UsageError:
    return UsageError(
        f"no template is called {name!r}{did_you_mean(name, _names())}; `infer template set {name} TEXT` makes one"
    )
