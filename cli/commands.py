"""Which commands there are: a line for each, which is all that `infer --help` needs of them.

The module behind a line is imported once its command runs, is asked for help or completes an argument.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
import typer.core
import typer.main

from infer.cli.words import attach_language, values_last

_EXAMPLES = "Examples:\n"


@dataclass(frozen=True)
class Line:
    """target: module of infer.cli and function in it. help: the first paragraph of its docstring, on one line."""

    target: str
    help: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


@dataclass(frozen=True)
class Group:
    """`infer NAME COMMAND`. Without a command it prints its help."""

    help: str
    lines: Mapping[str, Line]


COMMANDS: Mapping[str, Line | Group] = {
    "run": Line("run:run", "Answer one prompt."),
    "chat": Line("chat:chat", "Talk with a model."),
    "tokenize": Line("tokenize:tokenize", "Print the token ids of a text, separated by spaces."),
    "bench": Line(
        "bench:bench",
        "Measure prefill and decode in tokens per second, and the memory that decoding reads.",
    ),
    "perplexity": Line("perplexity:perplexity", "Measure a model's perplexity on a text."),
    "pull": Line("pull:pull", "Download a model and print its path."),
    "ls": Line("ls:ls", "List the catalog, what of it is here, and other models on this machine."),
    "show": Line("show:show", "Show what a model is: sizes, quantization, tokenizer, license, fingerprint."),
    "rm": Line("rm:rm", "Delete a model of the store, or what an interrupted download of it left."),
    "log": Line("log:log", "Search the log of answers, the newest first; switch it on or off."),
    "config": Group(
        "Settings: what is set, where it comes from, and changing the config file.",
        {
            "get": Line("configure:get", "Print the value in force for a key."),
            "set": Line(
                "configure:set_",
                "Set a key in the config file, for all models or for one; comments and other keys stay.",
            ),
            "unset": Line("configure:unset", "Remove a key from the config file."),
            "list": Line("configure:list_", "List what is set, for the model in use."),
            "path": Line("configure:path", "Print the path of the config file, which need not exist."),
        },
    ),
    "man": Line("reference:man", "Print the manual page of all commands."),
    "template": Group(
        "Named prompt templates with variables, for `infer run -t`.",
        {
            "ls": Line("templates:ls", "List the templates and their variables."),
            "show": Line("templates:show", "Print a template."),
            "set": Line("templates:set_", "Make a template, or replace one."),
            "rm": Line("templates:rm", "Delete a template."),
        },
    ),
    "cache": Group(
        "The disk cache of earlier prompts: what it holds, and how to check, trim and empty it.",
        {
            "ls": Line(
                "cache:ls", "List what is stored, per model and way of computing, the one used last first."
            ),
            "info": Line(
                "cache:info",
                "Show where the cache lies, its limit and use; with -m also everything that a model's entries "
                "depend on.",
            ),
            "verify": Line(
                "cache:verify",
                "Read every entry and compare it with its checksums; damaged ones are removed on request.",
            ),
            "prune": Line(
                "cache:prune", "Bring the cache below its limit now, the least recently used first."
            ),
            "clear": Line("cache:clear", "Delete everything that is stored, or what is stored of one model."),
        },
    ),
    "session": Group(
        "Conversations kept by `infer chat NAME` and `infer run --session NAME`.",
        {
            "ls": Line("sessions:ls", "List sessions, the one used last first."),
            "show": Line("sessions:show", "Print a conversation."),
            "search": Line("sessions:search", "Find sessions by what was said in them."),
            "rename": Line("sessions:rename", "Give a conversation another name."),
            "rm": Line("sessions:rm", "Delete a conversation."),
            "export": Line("sessions:export", "Print a conversation as Markdown, JSON lines or JSON."),
        },
    ),
}


_PLAIN = {int: re.compile(r"-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")}


class _AsItIs:
    """In place of typer's converter of a parameter, as far as there is nothing to convert or a plain number."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        multiple = param.multiple or param.nargs == -1
        if value is None:
            return () if multiple else None
        texts = value if multiple and isinstance(value, list | tuple) else (value,)
        if param.type_descriptor.annotation in (str, list[str]) and all(isinstance(t, str) for t in texts):
            return list(value) if multiple else value
        number = _number(value, param.type_descriptor.annotation)
        if number is not None and not multiple:
            return number
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _number(value: Any, kind: Any) -> int | float | None:
    """value as an int or a float, whichever `kind` is; None for what typer has to judge."""
    if kind not in (int, float) or type(value) not in (kind, str):
        return None
    if isinstance(value, str) and not _PLAIN[kind].fullmatch(value):
        return None
    found: int | float = kind(value)
    return found


class _Switches:
    """typer imports pydantic (0.15 s) to convert texts, numbers, and the None of what was not given: spare it that."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
            if getattr(parameter, "_runtime_param", self) is None:
                parameter._runtime_param = _AsItIs()
        return params


class Command(_Switches, typer.core.TyperCommand):
    """A command of `infer`, with its parameters."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {
            word: not item.is_flag
            for item in self.get_params(ctx)
            if item.param_type_name == "option"
            for word in item.opts
        }
        if "--extract" in options:
            args = attach_language(args, options)
        return super().parse_args(ctx, values_last(args, options))


class CommandGroup(_Switches, typer.core.TyperGroup):
    """`infer` itself, and its groups of commands."""


class _LazyCommand(typer.core.TyperCommand):
    """Stands in lists for a command whose module is not imported yet."""

    def __init__(self, name: str, line: Line) -> None:
        super().__init__(name, short_help=line.help)
        self._line = line

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        return load(self.name or "", self._line).make_context(info_name, args, parent, **extra)


def import_all() -> None:
    """Import the modules of all commands, so that their options are known."""
    for entry in COMMANDS.values():
        for line in [entry] if isinstance(entry, Line) else entry.lines.values():
            importlib.import_module(f"infer.cli.{line.module}")


def load(name: str, line: Line) -> Command:
    """The command itself. The examples of its docstring come last in its help, with their lines as they are."""
    function = line.target.partition(":")[2]
    callback = getattr(importlib.import_module(f"infer.cli.{line.module}"), function)
    text, _, examples = (inspect.getdoc(callback) or "").partition(_EXAMPLES)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    epilog = f"\b\n{_EXAMPLES}{examples}" if examples else None
    app.command(name, cls=Command, help=text, epilog=epilog)(callback)
    command = typer.main.get_command(app)
    if not isinstance(command, Command):
        raise TypeError(f"{line.target} makes a {type(command).__name__}")
    return command


def lazy(name: str, entry: Line | Group) -> typer.core.TyperCommand | CommandGroup:
    """What a list of commands holds for a line or a group."""
    if isinstance(entry, Line):
        return _LazyCommand(name, entry)

    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True, help=entry.help, short_help=entry.help)(print_help)
    return with_commands(app, entry.lines, name)


def with_commands(app: typer.Typer, entries: Mapping[str, Line | Group], name: str) -> CommandGroup:
    """The group that `app` declares, with these commands in it."""
    group = typer.main.get_command(app)
    if not isinstance(group, CommandGroup):
        raise TypeError(f"{name} makes a {type(group).__name__}")
    group.name = name
    group.commands.update({key: lazy(key, entry) for key, entry in entries.items()})
    return group
