"""`infer perplexity`: how well a model predicts a text."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from infer.cli import report, session
from infer.cli.input import STDIN, PromptInput, read_prompt
from infer.cli.measuring import without_disk_cache
from infer.cli.options import EngineOptions, JsonOptions, NoteOptions, takes
from infer.cli.output import Writer, json_line, open_writer
from infer.cli.render import Notes, animated, say
from infer.runtime.errors import UsageError

if TYPE_CHECKING:
    from infer.runtime.loader import LoadedModel
    from infer.runtime.perplexity import PerplexityEstimate

CTX = 512


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(JsonOptions, EngineOptions, NoteOptions):
    """Every flag of `infer perplexity`."""

    flags_only = ("file",)

    ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="N", help=f"Tokens of a window. [default: {CTX}]")
    ] = None
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE|-", help="The text; - reads stdin.")
    ] = None
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="N", help="Use the first N windows. [default: all]")
    ] = None


@takes(PerplexityOptions)
def perplexity(options: PerplexityOptions) -> None:
    """Measure a model's perplexity on a text.

    The text is cut into windows of --ctx tokens and the second half of each is scored, as llama.cpp does it.
    Values so far go to a terminal, or to stderr with --verbose; the result goes to stdout.

    Examples:
      infer perplexity -f wiki.test.raw
      infer perplexity -f wiki.test.raw --chunks 20 --kv-type int8
      head -c 100000 book.txt | infer perplexity -f - --json
    """
    if options.file is None:
        raise UsageError("perplexity needs a text: give -f FILE (- for stdin)")
    if options.chunks is not None and options.chunks < 1:
        raise UsageError(f"{options.origin('chunks')} must be at least 1, not {options.chunks}")
    notes = Notes(quiet=options.quiet, verbose=options.verbose)
    ctx = CTX if options.ctx is None else options.ctx
    engine = without_disk_cache(session.engine_config(options), options, notes)
    engine = dataclasses.replace(engine, ctx=ctx, prefix_cache=False)  # no window begins like another
    writer = open_writer(None)
    wanted = PromptInput(files=(options.file,), use_stdin=options.file == STDIN, raw=True)
    text = read_prompt(wanted, notes)
    with session.logging_to(notes):
        path = session.locate(options, notes)
        with session.open_model(path, engine, chat_template=False, pre=options.pre, notes=notes) as model:
            measure(model, options, text, ctx, writer)


def measure(model: LoadedModel, options: PerplexityOptions, text: str, ctx: int, writer: Writer) -> None:
    """Run and print. Raises UsageError for a text that is too short, NumericalError and OutputError."""
    from infer.runtime.perplexity import cut_windows, measure_perplexity

    windows = cut_windows(model.tokenizer, text, ctx, options.chunks)
    running = options.verbose or (animated() and not options.quiet)
    started = time.perf_counter()
    for found in measure_perplexity(model.engine, windows):
        if running:
            say(f"infer: window {found.windows}/{len(windows)}: perplexity {found.perplexity:.4f}")
    rate = len(windows) * ctx / (time.perf_counter() - started)
    if options.json:
        writer.queue(json_line(report_object(model, found, ctx, rate)))
    else:
        error = "" if math.isnan(found.stderr) else f" ± {found.stderr:.4f}"
        count = f"{found.windows} {'windows' if found.windows > 1 else 'window'}"
        writer.queue(
            f"perplexity {found.perplexity:.4f}{error}; {found.tokens} tokens scored in {count} of {ctx}, "
            f"{rate:.1f} tok/s\n".encode()
        )
    writer.drain()
    writer.close()


def report_object(model: LoadedModel, found: PerplexityEstimate, ctx: int, rate: float) -> dict[str, object]:
    """What `--json` prints. perplexity and stderr are null where they are no finite number."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "perplexity": finite(found.perplexity),
        "stderr": finite(found.stderr),
        "tokens": found.tokens,
        "chunks": found.windows,
        "ctx": ctx,
        "tok_s": rate,
        "model": report.model_object(model),
        "kernel": model.kernel,
        "device": model.device,
        "exact": model.exact,
    }
