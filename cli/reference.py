"""The help of all commands as one page: `infer man`, and docs/cli.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from infer.cli import render
from infer.cli.output import write_result

EXIT_CODES = {
    0: "done",
    1: "failed while running",
    2: "usage",
    3: "the model cannot be loaded",
    4: "the prompt does not fit the context",
    130: "interrupted",
    141: "the reader went away",
    143: "terminated or hung up",
}
ABOUT = "Run language models locally: quantized weights, exact results, nothing computed twice."
SETTINGS = (
    "Every flag has an environment variable, `INFER_TOP_K` for `--top-k`, and a key in the config file, `top_k`. A "
    "flag beats the variable, that the config file's table of the model in use, that the rest of the config file. "
    "`infer config list --origin` says where each value comes from. `INFER_HOME` moves all files of infer."
)


@dataclass(frozen=True)
class Page:
    """One command. usage: behind its name. paragraphs: of its description. examples: lines. arguments and options:
    how they are written, and what they mean."""

    name: str
    usage: str
    paragraphs: list[str]
    examples: list[str]
    arguments: list[tuple[str, str]]
    options: list[tuple[str, str]]


def man(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, as in docs/cli.md, instead of a manual page.")
    ] = False,
) -> None:
    """Print the manual page of all commands.

    Examples:
      infer man | man -l -
      infer man > ~/.local/share/man/man1/infer.1
    """
    found = pages()
    write_result(as_markdown(found) if markdown else as_manual(found))


def pages() -> list[Page]:
    """`infer` itself, then every command in the order of its help, groups as what is in them."""
    from infer.cli.commands import COMMANDS, with_commands
    from infer.cli.main import app

    root = with_commands(app, COMMANDS, "infer")
    return list(_walk(root, root.make_context("infer", [], resilient_parsing=True)))


def _walk(command: Any, context: Any) -> Iterator[Page]:
    names = getattr(command, "commands", {})
    if not names or context.parent is None:
        yield _page(command, context)
    for name in names:
        inner = names[name].make_context(name, [], parent=context, resilient_parsing=True)
        yield from _walk(inner.command, inner)


def _page(command: Any, context: Any) -> Page:
    records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            records[parameter.param_type_name].append((record[0], " ".join(record[1].split())))
    help_text, epilog = command.help or "", command.epilog or ""
    return Page(
        name=context.command_path,
        usage=" ".join(command.collect_usage_pieces(context)),
        paragraphs=[" ".join(part.split()) for part in help_text.split("\n\n") if part.strip()],
        examples=[line.strip() for line in epilog.split("\n")[2:] if line.strip()],
        arguments=records["argument"],
        options=records["option"],
    )


def as_markdown(found: list[Page]) -> str:
    """docs/cli.md."""
    parts = [
        "# Commands\n\n<!-- Generated: infer man --markdown > docs/cli.md -->\n",
        f"{ABOUT}\n\n{SETTINGS}\n",
        "Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".\n",
    ]
    for page in found:
        parts.append(f"## {page.name}\n\n```text\n{page.name} {page.usage}\n```\n")
        parts += [f"{paragraph}\n" for paragraph in page.paragraphs]
        if page.examples:
            parts.append("```console\n" + "".join(f"$ {line}\n" for line in page.examples) + "```\n")
        for rows in (page.arguments, page.options):
            if rows:
                parts.append("".join(f"- `{written}`: {_plain(meaning)}\n" for written, meaning in rows))
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Words of the help, of which Markdown may take no `[default: …]` for a link and no `<x>` for a tag."""
    return re.sub(r"([\[\]<>*_])", r"\\\1", text) if "`" not in text else text


def as_manual(found: list[Page]) -> str:
    """A page for `man`, in the man(7) macros."""
    from importlib.metadata import version

    from infer.cli.main import DISTRIBUTION

    lines = [
        f'.TH INFER 1 "" "infer {version(DISTRIBUTION)}"',
        ".SH NAME",
        f"infer \\- {_roff(ABOUT.rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B infer",
        f"{_roff(found[0].usage)}",
        ".SH COMMANDS",
    ]
    for page in found[1:]:
        lines += [f".SS {_roff(page.name)} {_roff(page.usage)}"]
        for number, paragraph in enumerate(page.paragraphs):
            lines += [*([".PP"] if number else []), _roff(paragraph)]
        for written, meaning in [*page.arguments, *page.options]:
            lines += [".TP", f".B {_roff(written)}", _roff(meaning) or "\\&"]
        if page.examples:
            lines += [
                ".PP",
                "Examples:",
                ".PP",
                ".nf",
                *(f"    {_roff(line)}" for line in page.examples),
                ".fi",
            ]
    lines += [".SH ENVIRONMENT", _roff(SETTINGS), ".SH EXIT STATUS"]
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", _roff(meaning)]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    """Text that no macro, escape or hyphenation of roff changes."""
    escaped = render.one_line(text).replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
