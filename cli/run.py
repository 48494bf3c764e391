"""`infer run`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from infer.cli import conversation, log, report, session, thinking
from infer.cli.config import Exclusion
from infer.cli.conversation import Conversation, ConversationOptions
from infer.cli.input import STDIN, PromptInput, checked_argument
from infer.cli.log import LogOptions
from infer.cli.options import (
    EngineOptions,
    InputOptions,
    NoteOptions,
    OutputOptions,
    PromptOptions,
    SamplingOptions,
    ThinkOptions,
    takes,
)
from infer.cli.output import Answer, CodeAnswer, JsonAnswer, JsonLinesAnswer, Relay, TextAnswer, open_writer
from infer.cli.prompt import HEAD, TAIL, PromptEncoder, Turn, answer_room, fit
from infer.cli.render import Notes, say
from infer.cli.sampling import draw_seed, sampling_params
from infer.cli.signals import Terminated, held, patient
from infer.cli.templates import TemplateOptions, read_with_template
from infer.runtime.errors import InferError, UsageError

if TYPE_CHECKING:
    from infer.runtime.generation import Generation, Thinking
    from infer.runtime.loader import LoadedModel
    from infer.runtime.request import Request
    from infer.runtime.tokenizer.chat_template import ChatTemplate

# After an interrupt, seconds to wait for a reader that has stopped reading.
_PATIENCE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RunOptions(
    OutputOptions,
    InputOptions,
    TemplateOptions,
    ConversationOptions,
    PromptOptions,
    ThinkOptions,
    SamplingOptions,
    EngineOptions,
    LogOptions,
    NoteOptions,
):
    """Every flag of `infer run`."""

    exclusions: ClassVar[tuple[Exclusion, ...]] = tuple(
        Exclusion("extract", name, "{first} prints code alone, and {second} an object: drop one of them")
        for name in ("json", "jsonl")
    )
    extract: Annotated[
        str | None,
        typer.Option(
            "-x",
            "--extract",
            metavar="[LANG]",
            help="Print only the first fenced code block, or the first one of a language; without one, exit with 1.",
        ),
    ] = None


@takes(RunOptions)
def run(
    options: RunOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from stdin.", show_default=False),
    ] = None,
) -> None:
    """Answer one prompt.

    The prompt is the content of -f FILES in order, then stdin if it is not a terminal, then the argument,
    with a blank line between them. The answer goes to stdout and nothing else does. With --session NAME it is
    the next turn of a conversation that is kept.

    Examples:
      infer run "Write a haiku about the sea."
      git diff | infer run "Write a commit message." | tee msg
      infer run -f manual.txt "Which port does it listen on?"
      infer run -x bash "Count the lines of all C files." > count.sh
      infer run --json --seed 1 "One word." | jq .usage
      infer run --session trip -s "Be brief." "Plan a day in Rome."
      infer run -t summarize --var lang=English -f text.txt
    """
    check(options)
    options = checked_texts(options)
    notes = Notes(quiet=options.quiet, verbose=options.verbose)
    engine = session.engine_config(options)
    seed = draw_seed() if options.seed is None else options.seed
    sampling_params(options, {}, seed=seed, logprobs=options.logprobs)
    answer = open_answer(options)
    wanted = PromptInput(options.file or (), prompt, use_stdin=uses_stdin(options, prompt), raw=options.raw)
    text = read_with_template(wanted, options, notes)
    with session.logging_to(notes), conversation.opened(options, notes) as talk:
        history: tuple[Turn, ...] = ()
        if talk is not None:
            options, history = checked_texts(talk.applied(options)), talk.history
            engine = session.engine_config(options)
            seed = seed if options.seed is None else options.seed
        path = session.locate(options, notes)
        with session.open_model(
            path,
            engine,
            chat_template=False if options.raw else options.chat_template,
            pre=options.pre,
            notes=notes,
        ) as model:
            request, tokenize_s = make_request(model, options, text, seed, notes, history)
            keeper = _Keeper(talk, text, options.prefill)
            continues = options.raw or bool(options.prefill) or model.chat_template is None
            thoughts = None if options.raw else thinking.of(options, model.chat_template)
            try:
                with notes.after(answer.terminal):
                    answer_request(
                        model,
                        request,
                        options,
                        answer,
                        tokenize_s,
                        keeper,
                        continues=continues,
                        thoughts=thoughts,
                    )
            finally:
                if options.log and keeper.generation is not None:
                    kept = log.exchange(
                        keeper.generation,
                        command="run",
                        model=model.name,
                        prompt=text,
                        seed=seed,
                        system=options.system,
                        session=options.session,
                        prefill=options.prefill,
                    )
                    log.record(kept, notes)
    if peak := report.peak_memory():
        notes.detail(f"peak memory {peak / 2**20:.0f} MiB")


def uses_stdin(options: InputOptions, prompt: str | None) -> bool:
    """Whether stdin may be read: a `-` on the command line beats what the environment or the config file say."""
    asked = prompt == STDIN or (options.is_flag("file") and STDIN in (options.file or ()))
    return not options.no_stdin or (asked and not options.is_flag("no_stdin"))


def check(options: RunOptions) -> None:
    """Raise UsageError for flags that do not go together, naming where each came from."""

    def clash(name: str, why: str) -> UsageError:
        return UsageError(f"{options.origin(name)} {why}")

    if options.logprobs is not None and not (options.json or options.jsonl):
        raise clash("logprobs", "needs --json or --jsonl")
    if options.special and not options.raw:
        raise clash("special", "needs --raw: a chat's text never holds control tokens")
    if options.truncate not in (None, HEAD, TAIL):
        raise clash("truncate", f"must be {HEAD} or {TAIL}, not {options.truncate!r}")
    conversation.check(options)
    thinking.check(options)


def checked_texts(options: RunOptions) -> RunOptions:
    """The options with texts that are UTF-8. Raises UsageError."""
    texts = {name: getattr(options, name) for name in ("system", "prefill") if getattr(options, name)}
    texts = {name: checked_argument(options.origin(name), text) for name, text in texts.items()}
    return dataclasses.replace(options, **texts)


def open_answer(options: RunOptions) -> Answer:
    """Where and how the answer is written. Raises OutputError."""
    writer = open_writer(options.output)
    if options.json:
        return JsonAnswer(writer)
    if options.jsonl:
        return JsonLinesAnswer(writer)
    thoughts = not options.hide_thinking and (writer.terminal or not options.quiet)
    stream = not options.no_stream
    if options.extract is not None:
        return CodeAnswer(writer, stream=stream, language=options.extract, thoughts=thoughts)
    return TextAnswer(writer, stream=stream, thoughts=thoughts)


def make_request(
    model: LoadedModel,
    options: RunOptions,
    text: str,
    seed: int,
    notes: Notes,
    history: tuple[Turn, ...] = (),
) -> tuple[Request, float]:
    """The prompt, after the turns of a history, as ids that fit, with its sampling, and the seconds that took.

    Raises ContextLengthError, ChatTemplateError, UsageError and ModelError.
    """
    from infer.runtime.request import Request

    started = time.perf_counter()
    template = None if options.raw else model.chat_template
    if template is None and not options.raw:
        for name in ("session", "continue_", "system", "prefill"):
            if getattr(options, name):
                raise UsageError(
                    f"{options.origin(name)} needs a chat template, and {model.name} has none: "
                    "put the text in the prompt, or give --chat-template"
                )
        notes.warning(f"{model.name} has no chat template: the text is continued as it is (--raw says so)")
    system = options.system
    if system == "" and template is not None:
        system = empty_system(template, options.origin("system"), notes)
    encoder = PromptEncoder(
        model.tokenizer,
        template,
        options.special,
        system,
        options.prefill,
        history,
        thinking.variables(options, template, model.name),
    )
    sampling = sampling_params(options, model.sampling_defaults, seed=seed, logprobs=options.logprobs)
    context = model.engine.ctx
    fitted = fit(encoder, text, context, side=options.truncate, room=answer_room(options.max_tokens, context))
    if not fitted.ids:
        raise UsageError("the prompt has no tokens: this model's vocabulary knows nothing of it")
    uncut = len(fitted.ids) + fitted.dropped
    if fitted.turns:
        notes.warning(
            f"conversation of {fitted.tokens} tokens without its oldest {fitted.turns} of {len(history)} turns: "
            f"{uncut} tokens; context holds {context}"
        )
    if fitted.dropped:
        notes.warning(
            f"prompt cut from {uncut} to {len(fitted.ids)} tokens at its {options.truncate}: "
            f"context holds {context}"
        )
    notes.detail(f"prompt of {len(fitted.ids)} tokens, context {context}, seed {seed}")
    notes.detail(f"device {model.device}, kernel {model.kernel}, exact: {str(model.exact).lower()}")
    notes.detail(f"sampling {sampling}")
    request = Request("run", tuple(fitted.ids), sampling, model.tokenizer.stop_ids)
    return request, time.perf_counter() - started


def empty_system(template: ChatTemplate, origin: str, notes: Notes) -> str | None:
    """What an explicitly empty system message is in a prompt: "" where that keeps the template from writing one of its
    own, else none. Raises ChatTemplateError."""
    from infer.runtime.tokenizer.default_system import DefaultSystem, default_system

    kind = default_system(template)
    if kind is DefaultSystem.FIXED:
        notes.warning(
            f"{origin} is empty, but {template.name} writes a system message of its own, which stays"
        )
    return "" if kind is DefaultSystem.REPLACED else None


class _Keeper:
    """Keeps the turn of a conversation, if there is one. What fails then is said or raised once the answer is out."""

    def __init__(self, talk: Conversation | None = None, text: str = "", prefill: str | None = None) -> None:
        self._talk, self._text, self._prefill = talk, text, prefill
        self.generation: Generation | None = None

    def keep(self, generation: Generation) -> InferError | None:
        self.generation = generation
        if self._talk is not None:
            try:
                with held():
                    self._talk.keep(self._text, self._prefill, generation)
            except InferError as error:
                return error
        return None


def answer_request(
    model: LoadedModel,
    request: Request,
    options: RunOptions,
    answer: Answer,
    tokenize_s: float,
    keeper: _Keeper,
    *,
    continues: bool,
    thoughts: Thinking | None = None,
) -> None:
    """Generate and write. An interrupt writes what there is and goes on upwards; so does an error.

    continues: the answer goes on where the prompt stops, mid-sentence maybe.
    """
    from infer.runtime.generation import TextStream

    stream = TextStream(model.engine, model.tokenizer, request, continues=continues, thinking=thoughts)
    generation = stream.generation
    generation.stats.load_s, generation.stats.tokenize_s = model.load_s, tokenize_s
    stop: KeyboardInterrupt | Terminated | None = None
    relay = Relay(generation, answer)
    try:
        if not answer.wants_report:
            # Until the first text there is nothing to keep.
            next(stream, None)
            relay.forward()
        with patient():
            for _ in stream:
                relay.forward()
    except (KeyboardInterrupt, Terminated) as interrupt:
        stop = interrupt
        stream.cancel()
    except Exception:
        stream.cancel()
        if failure := keeper.keep(generation):
            say(f"infer: warning: {failure}")
        relay.forward()
        answer.abandon()
        answer.drain(_PATIENCE_S)
        raise
    failure = keeper.keep(generation)
    seed = request.sampling.seed
    shown = not options.hide_thinking
    result = report.report_object(model, generation, seed, thinking=shown) if answer.wants_report else None
    with held():
        relay.take()
        answer.finish(result)
    answer.drain(None if stop is None else _PATIENCE_S)
    answer.close()
    if options.stats:
        for line in report.stats_lines(model, generation, seed):
            say(line)
    if stop is not None and failure is not None:
        say(f"infer: warning: {failure}")
    if stop is not None:
        raise stop
    if failure is not None or (failure := answer.failure()) is not None:
        raise failure
