"""`infer tokenize`: the ids of a text, from the metadata of a model file alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from infer.cli import session
from infer.cli.input import STDIN, PromptInput, read_prompt
from infer.cli.options import JsonOptions, NoteOptions, SourceOptions, TokenizeOptions, takes
from infer.cli.output import Writer, json_line, open_writer
from infer.cli.prompt import PromptEncoder
from infer.cli.render import Notes
from infer.runtime.errors import UsageError

if TYPE_CHECKING:
    from infer.runtime.tokenizer.base import Tokenizer
    from infer.runtime.tokenizer.chat_template import ChatTemplate


@dataclass(frozen=True, kw_only=True)
class TokenizeCommandOptions(JsonOptions, TokenizeOptions, SourceOptions, NoteOptions):
    """Every flag of `infer tokenize`."""


@takes(TokenizeCommandOptions)
def tokenize(
    options: TokenizeCommandOptions,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT|-", help="The text; - or nothing reads stdin.")
    ] = None,
) -> None:
    """Print the token ids of a text, separated by spaces.

    Without --chat the text is taken byte for byte. Only the model file's metadata is read.

    Examples:
      infer tokenize "Hello, world"
      infer tokenize < text.txt | wc -w
      infer tokenize --chat --json "Hi"
    """
    if options.special and options.chat:
        raise UsageError(f"{options.origin('special')} has no effect with --chat: drop one of them")
    if options.chat_template and not options.chat:
        raise UsageError(f"{options.origin('chat_template')} needs --chat")
    notes = Notes(quiet=options.quiet, verbose=options.verbose)
    writer = open_writer(None)
    # stdin only where there is no text: scripts call this with whatever stdin they have.
    wanted = PromptInput(
        prompt=text, use_stdin=text in (None, STDIN), raw=not options.chat, may_be_empty=True, what="text"
    )
    content = read_prompt(wanted, notes)
    with session.logging_to(notes):
        tokenizer, template = open_tokenizer(options, notes)
        encoder = PromptEncoder(tokenizer, template, options.special)
        ids = encoder.encode(content)
    if options.no_bos and tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id]:
        del ids[0]
    write_ids(writer, tokenizer, ids, as_json=options.json)


def open_tokenizer(options: TokenizeCommandOptions, notes: Notes) -> tuple[Tokenizer, ChatTemplate | None]:
    """The file's tokenizer and, for --chat, its template. Raises ModelError, and UsageError without one."""
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.tokenizer.load import load_chat_template, load_tokenizer

    path = session.locate(options, notes)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.metadata, pre=options.pre)
        for warning in tokenizer.warnings:
            notes.warning(warning)
        if not options.chat:
            return tokenizer, None
        template = load_chat_template(checkpoint.metadata, tokenizer, options.chat_template)
    if template is None:
        raise UsageError(f"{path.name} has no chat template: drop --chat, or give --chat-template")
    return tokenizer, template


def write_ids(writer: Writer, tokenizer: Tokenizer, ids: list[int], *, as_json: bool) -> None:
    """One line: the ids, or an object of ids and pieces. Raises OutputError."""
    if as_json:
        writer.queue(json_line({"ids": ids, "pieces": [tokenizer.piece(token) for token in ids]}))
    else:
        writer.queue(" ".join(map(str, ids)).encode("ascii") + b"\n")
    writer.drain()
    writer.close()
