"""The flags that commands share, each declared once: its type, its help, and by its name the environment
variable (`INFER_TOP_K`) and the key in the config file (`top_k`).

A command declares a dataclass that inherits the groups it needs and is decorated with `takes`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

import typer

from infer.cli import config
from infer.cli.config import Exclusion

T = TypeVar("T", bound="Options")


def complete_model(incomplete: str) -> list[str]:
    """Catalog names, other models of the store, and .gguf files and folders once the word looks like a path."""
    from infer.runtime.errors import InferError
    from infer.runtime.store.catalog import CATALOG
    from infer.runtime.store.local import list_models

    known = [entry.name for entry in CATALOG]
    with contextlib.suppress(InferError):
        known += [model.name for model in list_models(config.data_dirs()) if model.name not in known]
    names = [name for name in known if name.startswith(incomplete)]
    if names and incomplete:
        return names
    folder, _, start = incomplete.rpartition("/")
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    try:
        found = sorted(Path(prefix or ".").expanduser().iterdir())
    except OSError:
        return names
    paths = [
        f"{prefix}{path.name}{'/' if path.is_dir() else ''}"
        for path in found
        if path.name.startswith(start) and (path.suffix == ".gguf" or (path.is_dir() and prefix))
    ]
    return names + paths


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of all option groups.

    origins: where each value that was given comes from, for error messages. given: the flags. exclusions: of the
    settings of this group. flags_only: its settings that are called like another command's and mean something else,
    so that no variable and no key stands for them.
    """

    exclusions: ClassVar[tuple[Exclusion, ...]] = ()
    flags_only: ClassVar[tuple[str, ...]] = ()
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    given: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def origin(self, name: str) -> str:
        """ "--temp", "INFER_TEMP" or "temp in …/config.toml"; the flag when the default is in force."""
        return self.origins.get(name, config.flag(name))

    def is_flag(self, name: str) -> bool:
        """Whether the value in force was given on the command line."""
        return self.origins.get(name) == config.flag(name)


@dataclass(frozen=True, kw_only=True)
class NoteOptions(Options):
    exclusions: ClassVar[tuple[Exclusion, ...]] = (Exclusion("quiet", "verbose"),)
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors (and --stats, if asked for).")
    ] = False
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Say which files, settings and memory are used.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="A .gguf path, a safetensors folder, a catalog name (see `infer ls`) or hf:org/repo[:file].",
            autocompletion=complete_model,
        ),
    ] = None
    pre: Annotated[
        str | None,
        typer.Option(
            "--pre", metavar="NAME", help="Pre-tokenizer, for a file that names none or a wrong one."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Options):
    """Where the disk cache lies and how large it may be."""

    cache_dir: Annotated[
        str | None,
        typer.Option(
            "--cache-dir", metavar="DIR", help="Folder of the disk cache. [default: the user's cache]"
        ),
    ] = None
    cache_limit: Annotated[
        str | None,
        typer.Option(
            "--cache-limit",
            metavar="SIZE",
            help="Most the disk cache may take, such as 20GB or 512MiB; 0: no disk cache. "
            "[default: 10 % of the free disk, at most 20GB]",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SourceOptions, CacheOptions):
    exclusions: ClassVar[tuple[Exclusion, ...]] = (Exclusion("no_cache", "cache_read_only"),)
    ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="N", help="Tokens of context. [default: the model's]")
    ] = None
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto"
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="CPU threads. [default: physical cores]")
    ] = None
    quant: Annotated[
        str | None, typer.Option("--quant", help="Quantize float weights on load: int8, int4 or nf4.")
    ] = None
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            help="auto, native (compiled, exact), torch (inexact), reference (slow, exact), float32 (dequantized) "
            "or bnb (bitsandbytes' own).",
        ),
    ] = "auto"
    isa: Annotated[
        str | None,
        typer.Option("--isa", help="Instruction set of the native kernels. [default: the best there is]"),
    ] = None
    kv_type: Annotated[str, typer.Option("--kv-type", help="KV cache: auto, f16, bf16, f32 or int8.")] = (
        "auto"
    )
    prefill_chunk: Annotated[
        int, typer.Option("--prefill-chunk", metavar="N", help="Prompt tokens per step, 0 for all at once.")
    ] = 512
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Reuse nothing of earlier prompts and keep nothing, memory or disk."),
    ] = False
    cache_read_only: Annotated[
        bool,
        typer.Option("--cache-read-only", help="Reuse what the disk cache holds, but write nothing to it."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """None: the model's own default, else that of `SamplingParams`."""

    temp: Annotated[
        float | None, typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.")
    ] = None
    top_k: Annotated[int | None, typer.Option("--top-k", help="Keep the K likeliest tokens; 0: all.")] = None
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Keep tokens at least this likely, relative to the best.")
    ] = None
    typical_p: Annotated[
        float | None, typer.Option("--typical-p", help="Locally typical sampling; 1: off.")
    ] = None
    repeat_penalty: Annotated[
        float | None, typer.Option("--repeat-penalty", help="Divide logits of tokens seen; 1: off.")
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option("--presence-penalty", help="Subtract from tokens already answered.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option("--frequency-penalty", help="The same, times how often they came.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=VALUE", help="Add to a token's logit (ID+V and ID-V too)."),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Same seed, same answer. [default: random]")
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", metavar="N", help="Stop after N tokens.")
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="Stop before this text, taken literally. Repeatable."),
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-turn token.")
    ] = False
    samplers: Annotated[
        str | None, typer.Option("--samplers", metavar="A,B,…", help="Which samplers run, in this order.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions(Options):
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", metavar="NAME|FILE", help="Instead of the model's own template."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TextOptions(ChatTemplateOptions):
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the text byte for byte.")] = False
    special: Annotated[
        bool,
        typer.Option("--special", help="Without a chat: control tokens written in the text take effect."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class SystemOptions(Options):
    system: Annotated[
        str | None,
        typer.Option(
            "-s",
            "--system",
            metavar="TEXT",
            help="The system message; empty: none, not even the template's own.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions(TextOptions, SystemOptions):
    exclusions: ClassVar[tuple[Exclusion, ...]] = tuple(
        Exclusion(name, "raw", "{first} belongs to a chat, and {second} is none: drop one of them")
        for name in ("system", "prefill", "chat_template")
    )
    prefill: Annotated[
        str | None,
        typer.Option("--prefill", metavar="TEXT", help="How the answer begins; it is not printed again."),
    ] = None
    truncate: Annotated[
        str | None,
        typer.Option(
            "--truncate",
            metavar="head|tail",
            help="Cut the beginning (head) or the end (tail) of a prompt that does not fit, leaving room for "
            "-n tokens, else for a quarter of the context up to 256. Of a session, the oldest turns go first.",
        ),
    ] = None


def complete_session(incomplete: str) -> list[str]:
    """Names of sessions, the one used last first."""
    from infer.runtime.errors import InferError
    from infer.runtime.store.sessions import SessionStore

    try:
        files = SessionStore(config.data_dirs()).files()
    except InferError:
        return []
    return [file.name for file in files if file.name.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class SessionOptions(Options):
    exclusions: ClassVar[tuple[Exclusion, ...]] = (Exclusion("session", "continue_"),)
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Begin or go on with a conversation that is kept under this name.",
            autocompletion=complete_session,
        ),
    ] = None
    continue_: Annotated[
        bool, typer.Option("--continue", help="Go on with the session that was used last.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ThinkOptions(Options):
    """For reasoning models."""

    exclusions: ClassVar[tuple[Exclusion, ...]] = tuple(
        Exclusion(name, "raw", "{first} belongs to a chat, and {second} is none: drop one of them")
        for name in ("think", "think_budget")
    )
    think: Annotated[
        str | None,
        typer.Option(
            "--think",
            metavar="on|off|LEVEL",
            help="Whether, or how hard (low, medium, high), a reasoning model thinks, as far as its template lets "
            "one choose. [default: as the template does]",
        ),
    ] = None
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Do not show the thinking.")] = False
    think_budget: Annotated[
        int | None,
        typer.Option("--think-budget", metavar="N", help="End the thinking after N tokens."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DialogOptions(Options):
    """How `infer chat` talks."""

    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="stop|drop-oldest",
            help="When the context is full: stop, or leave out the oldest turns.",
        ),
    ] = "stop"
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Answers as they are: no Markdown styles, no colours, nothing that moves."
        ),
    ] = False
    then_tty: Annotated[
        bool, typer.Option("--then-tty", help="After the messages of a pipe, go on at the terminal.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(TextOptions):
    exclusions: ClassVar[tuple[Exclusion, ...]] = (Exclusion("raw", "chat"),)
    chat: Annotated[
        bool, typer.Option("--chat", help="Render the text as a user message with the chat template.")
    ] = False
    no_bos: Annotated[bool, typer.Option("--no-bos", help="No beginning-of-sequence token in front.")] = False


@dataclass(frozen=True, kw_only=True)
class InputOptions(Options):
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", metavar="FILE", help="Put a file before the prompt. Repeatable."),
    ] = None
    no_stdin: Annotated[bool, typer.Option("--no-stdin", help="Never read stdin.")] = False


@dataclass(frozen=True, kw_only=True)
class JsonOptions(Options):
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False


@dataclass(frozen=True, kw_only=True)
class StatsOptions(Options):
    stats: Annotated[bool, typer.Option("--stats", help="Tokens, speed and times on stderr.")] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions(JsonOptions, StatsOptions):
    exclusions: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion("json", "jsonl"),
        Exclusion("no_stream", "jsonl"),
    )
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='Stream {"delta": …} lines, then the JSON object.')
    ] = False
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer when it is complete.")] = (
        False
    )
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", metavar="N", help="With --json: log-probabilities and N alternatives."),
    ] = None
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write the answer to a file.")
    ] = None


def _parameter(setting: config.Setting) -> inspect.Parameter:
    """What typer sees of a setting: its default says "not given", so that environment and config file count.

    For a switch that is False: typer imports pydantic (0.15 s) to convert anything else, None included.
    """
    switch = setting.kind is bool
    hint = (
        Annotated[setting.flag_type, setting.info]
        if switch
        else Annotated[setting.flag_type | None, setting.info]
    )
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=False if switch else None, annotation=hint
    )


def takes(group: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `f(options: group, …)` the flags of `group`, resolved by `config.resolve`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        settings = config.settings(group)
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        flags = [_parameter(setting) for setting in settings.values()]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in settings}
            function(config.resolve(group, given), **values)

        # typer reads the signature; __wrapped__ would lead it back to the undecorated function.
        del command.__wrapped__
        command.__annotations__ = {}
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + flags
        )
        return command

    return decorate
