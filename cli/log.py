"""`infer log`, and keeping an answer in it: off until `infer log on`, and never a reason for an answer to fail."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from infer.cli import config, render
from infer.cli.config import Exclusion
from infer.cli.input import checked_argument
from infer.cli.options import JsonOptions, NoteOptions, Options, takes
from infer.cli.output import write_path, write_result
from infer.cli.signals import held
from infer.runtime.errors import LogError, UsageError

if TYPE_CHECKING:
    from infer.runtime.generation import Generation
    from infer.runtime.store.log import Exchange

_SWITCHES = {"on": True, "off": None}
_SHOWN_LINES = 6  # of a prompt; answers are shown whole


@dataclass(frozen=True, kw_only=True)
class LogOptions(Options):
    """Whether an answer is kept."""

    exclusions: ClassVar[tuple[Exclusion, ...]] = (Exclusion("log", "no_log"),)
    log: Annotated[bool, typer.Option("--log", help="Keep this answer in the log (see `infer log`).")] = False
    no_log: Annotated[bool, typer.Option("--no-log", help="Do not keep this answer in the log.")] = False


@dataclass(frozen=True, kw_only=True)
class _LogCommandOptions(JsonOptions, NoteOptions):
    """Flags of `infer log`."""


def exchange(
    generation: Generation,
    *,
    command: str,
    model: str,
    prompt: str,
    seed: int,
    system: str | None,
    session: str | None,
    prefill: str | None = None,
) -> Exchange:
    """What the log keeps of an answer, an interrupted one as "cancelled"."""
    from infer.runtime.store.log import Exchange
    from infer.runtime.store.session_format import now

    return Exchange(
        time=now(),
        command=command,
        model=model,
        system=system or "",
        prompt=prompt,
        answer=(prefill or "") + generation.text,
        finish=str(generation.finish_reason or "cancelled"),
        session=session or "",
        prompt_tokens=generation.stats.prompt_tokens,
        completion_tokens=len(generation.ids),
        seed=str(seed),
    )


def record(exchange: Exchange, notes: render.Notes) -> None:
    """Keep an answer. What goes wrong is one warning."""
    from infer.runtime.store.log import AnswerLog

    try:
        with held():
            AnswerLog(config.data_dirs()).add(exchange)
    except LogError as error:
        notes.warning(f"{error}; this answer is not in the log")


@takes(_LogCommandOptions)
def log(
    options: _LogCommandOptions,
    query: Annotated[
        list[str] | None,
        typer.Argument(metavar="on|off|path|QUERY", help='Words that must occur; a "phrase" as one.'),
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", help="At most N answers.")] = 20,
) -> None:
    """Search the log of answers, the newest first; switch it on or off.

    The log is one SQLite file for you alone. It is off until `infer log on`. To forget everything, delete the file.

    Examples:
      infer log on
      infer log regex -n 3
      infer log '"carriage return"' --json
      rm -f "$(infer log path)"
    """
    from infer.runtime.store.log import AnswerLog

    store = AnswerLog(config.data_dirs())
    words = query or []
    if words == ["path"]:
        write_path(store.path)
        return
    if len(words) == 1 and words[0] in _SWITCHES:
        config.write_value(("log",), _SWITCHES[words[0]])
        if not options.quiet:
            render.say(f"infer: the log is {words[0]}: {store.path}")
        return
    if limit < 1:
        raise UsageError(f"--limit must be at least 1, not {limit}")
    found = store.find(checked_argument("the query", " ".join(words)), limit=limit)
    if options.json:
        write_result({"log": str(store.path), "exchanges": [dataclasses.asdict(item) for item in found]})
        return
    write_result("\n".join(map(_text, found)))


def _text(item: Exchange) -> str:
    about = [item.time, item.command, item.model, *([f"session {item.session}"] if item.session else [])]
    if item.finish != "stop":
        about.append(item.finish)
    lines = item.prompt.split("\n")
    shown = lines[:_SHOWN_LINES] + (
        [f"… {len(lines) - _SHOWN_LINES} lines more"] if len(lines) > _SHOWN_LINES else []
    )
    prompt = "\n".join(f"> {line}" for line in shown)
    return f"{render.one_line('  '.join(about))}\n{prompt}\n{item.answer.rstrip()}\n"
