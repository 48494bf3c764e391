"""One chat: asks the model, shows the answers and keeps them. Commands (`commands`) change it between two questions."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from infer.cli import config, input, log, report, session, thinking
from infer.cli.output import Answer, ReaderGone, Relay
from infer.cli.prompt import PromptEncoder, Turn, answer_room, refuse_hopeless, turns_to_drop
from infer.cli.render import Notes, say
from infer.cli.repl.display import Display
from infer.cli.repl.message import Message
from infer.cli.repl.talk import Talk
from infer.cli.repl.worker import Answering, Worker
from infer.cli.sampling import draw_seed, sampling_params
from infer.cli.signals import Terminated, dealt_with, held, patient
from infer.runtime.errors import ContextLengthError, InferError, OutputError, SessionError

if TYPE_CHECKING:
    from infer.cli.chat import ChatOptions
    from infer.runtime.generation import Generation, Thinking
    from infer.runtime.loader import LoadedModel
    from infer.runtime.request import Request

STOP, DROP_OLDEST = "stop", "drop-oldest"
_PATIENCE_S = 0.4  # before something that goes on is shown
# With drop-oldest, the part of the context a conversation is cut to: the next turns then find a prefix that stays.
_KEEP = 3 / 4


class Source(Protocol):
    """Where messages come from. default: a text to begin with, where the user can change it; None: no more."""

    def next(self, default: str = "") -> Message | None: ...


class Chat:
    """options: as they are now, with the `changes` that `/set` made. files: contents that go before the next message.

    draft: what the next line begins with. replacing: whether it takes the place of the last question.
    """

    def __init__(
        self,
        options: ChatOptions,
        notes: Notes,
        display: Display,
        talk: Talk,
    ) -> None:
        self.options, self.notes, self.display, self.talk = options, notes, display, talk
        self.changes: dict[str, object] = {}
        self.worker = Worker()
        self.files: list[str] = []
        self.draft = ""
        self.replacing = False
        self.ended = False
        self._failure = ""
        self._left_out = 0
        self._last: tuple[Generation, int] | None = None

    def converse(self, source: Source) -> None:
        """Answer what comes, until there is no more, `ended` is set, or Ctrl-C is pressed twice."""
        while not self.ended and (message := source.next(self.draft)) is not None:
            replacing = self.replacing and not message.fresh
            self.draft, self.replacing = "", False
            try:
                self._handle(message, replacing)
            except InferError as error:
                loading = self.worker.loading
                if not self.display.interactive or (loading.done() and loading.exception() is not None):
                    raise
                say(f"infer: error: {error}")
            except KeyboardInterrupt:
                if self.ended or not self.display.interactive:
                    raise
                dealt_with()
                say("infer: interrupted")

    def _handle(self, message: Message, replacing: bool) -> None:
        from infer.cli.repl import commands

        if commands.is_command(message.text) and not message.literal:
            commands.run(self, message.text)
            return
        if commands.is_known(message.text) and not self.display.interactive:
            self.notes.note(f"a piped line is a message, never a command: {message.text.split()[0]} too")
        self.ask(message.text, instead=replacing)

    def load_model(self, spec: str) -> None:
        """Begin to load a model, as `-m` takes it. Raises ModelError; `worker.loading` tells how it goes on."""
        path = self.locate(spec)
        self.talk.model = spec
        self.begin_loading(path)

    def locate(self, spec: str) -> Path:
        """Where a model lies, downloaded if need be. Raises ModelError."""
        return session.locate(replace(self.options, model=spec), self.notes)

    def begin_loading(self, path: Path) -> None:
        """Returns at once. Raises UsageError for what the config file says of the model."""
        options = config.for_model(self.options, self.talk.model)
        self.worker.load(
            path,
            session.engine_config(options),
            chat_template=options.chat_template,
            pre=options.pre,
            notes=self.notes,
        )

    def wait_for_model(self) -> LoadedModel:
        """Raises what loading failed with."""
        with self.display.waiting():
            self.display.wait("loading the model …")
            return self.worker.loading.result()

    def ask(self, text: str, *, instead: bool = False) -> None:
        """Ask, show the answer and keep the turn. instead: of the last one.

        Raises InferError for what went wrong, KeyboardInterrupt when it was pressed twice (or nobody is at the
        keyboard) and `Terminated`; what there is of an answer is kept before that.
        """
        text = text if instead else input.join([*self.files, text], raw=False)
        history = self.talk.history[:-1] if instead else self.talk.history
        seed = draw_seed() if self.options.seed is None else self.options.seed

        def build(model: LoadedModel, notices: list[str]) -> tuple[Request, Thinking | None, float]:
            return self._request(model, notices, text, history, seed)

        answer = self.display.answer()
        showing = _Showing(Answering(self.worker, build), answer, self.display)
        with self.notes.after(answer.terminal):
            self._ask(text, seed, showing, instead)

    def _ask(self, text: str, seed: int, showing: _Showing, instead: bool) -> None:
        stop = showing.run()
        generation = showing.answering.generation
        kept = False
        try:
            if generation is not None:
                self._last = generation, seed
                with held():
                    kept = self._keep(text, generation, instead)
                    if kept and not instead:
                        self.files.clear()
        finally:
            showing.finish(kept=kept)
            if self._failure:
                say(f"infer: error: {self._failure}")
                self._failure = ""
        if showing.ended:
            showing.answering.check()
        if kept and generation is not None:
            self._log(text, seed, generation)
            if not isinstance(stop, ReaderGone):
                self._report(generation, seed)
        if stop is not None:
            self.ended = showing.pressed_again or not isinstance(stop, KeyboardInterrupt)
            if self.ended or not self.display.interactive:
                raise stop
            dealt_with()
            if not kept:
                self.display.start_line()
                say("infer: stopped before the answer began: nothing is kept of it")

    def _keep(self, text: str, generation: Generation, instead: bool) -> bool:
        """False for an answer that is not worth a turn. A session that cannot be saved is said once."""
        lost = self.talk.unsaved
        try:
            kept = self.talk.add(text, generation, instead=instead)
        except SessionError as error:
            if not lost:
                self._failure = f"{error}; it is in memory, and the next turn tries again"
            return True
        if lost and not self.talk.unsaved:
            self.notes.note(f"session {self.talk.name} is kept again")
        return kept

    def stats(self) -> list[str]:
        """Of the last answer, one fact a line; [] before the first."""
        model = self.worker.model
        if model is None or self._last is None:
            return []
        return report.stats_lines(model, *self._last)

    def forget_left_out(self) -> None:
        """Another conversation begins, or another model with its own context."""
        self._left_out = 0

    def _log(self, text: str, seed: int, generation: Generation) -> None:
        model = self.worker.model
        if not self.options.log or model is None:
            return
        exchange = log.exchange(
            generation,
            command="chat",
            model=model.name,
            prompt=text,
            seed=seed,
            system=self.talk.session.system,
            session=self.talk.name,
        )
        log.record(exchange, self.notes)

    def _report(self, generation: Generation, seed: int) -> None:
        model = self.worker.model
        if model is None:
            return
        context, stats = model.engine.ctx, generation.stats
        self.display.status(generation, context)
        if self.options.stats:
            for line in report.stats_lines(model, generation, seed):
                say(line)
        if (
            str(generation.finish_reason) == "length"
            and stats.prompt_tokens + stats.completion_tokens >= context
        ):
            self.notes.warning(f"the answer ends here: {_full(context)}")

    def _request(
        self, model: LoadedModel, notices: list[str], text: str, history: tuple[Turn, ...], seed: int
    ) -> tuple[Request, Thinking | None, float]:
        from infer.cli.run import empty_system
        from infer.runtime.request import Request

        started = time.perf_counter()
        system = self.talk.session.system
        if system == "" and model.chat_template is not None:
            said = Notes(quiet=True) if self.talk.history else self.notes
            system = empty_system(model.chat_template, self.options.origin("system"), said)
        encoder = PromptEncoder(
            model.tokenizer,
            model.chat_template,
            system=system,
            history=history,
            variables=thinking.variables(self.options, model.chat_template, model.name),
        )
        sampling = sampling_params(self.options, model.sampling_defaults, seed=seed)
        ids = self._fit(encoder, text, model.engine.ctx, notices)
        request = Request("chat", tuple(ids), sampling, model.tokenizer.stop_ids)
        return request, thinking.of(self.options, model.chat_template), time.perf_counter() - started

    def _fit(self, encoder: PromptEncoder, text: str, context: int, notices: list[str]) -> list[int]:
        """The prompt's ids, fewer than the context. Raises ContextLengthError."""
        refuse_hopeless(encoder, text, context)
        turns = encoder.history
        if self.options.context == DROP_OLDEST:
            encoder = replace(encoder, history=turns[self._left_out :])
        ids = encoder.encode(text)
        room = answer_room(self.options.max_tokens, context)
        if self.options.context == DROP_OLDEST and len(ids) > context - room and encoder.history:
            dropped = turns_to_drop(encoder, text, int((context - room) * _KEEP))
            self._left_out = len(turns) - len(encoder.history) + dropped
            notices.append(
                f"context full: the oldest {self._left_out} of {len(turns)} turns are left out from now on "
                f"(context holds {context} tokens)"
            )
            encoder = replace(encoder, history=turns[self._left_out :])
            ids = encoder.encode(text)
        if len(ids) < context:
            return ids
        if encoder.history:
            raise ContextLengthError(f"the conversation has {len(ids)} tokens: {_full(context)}")
        raise ContextLengthError(
            f"the message has {len(ids)} tokens, context holds {context}; shorten it or use a larger --ctx"
        )


def _full(context: int) -> str:
    return (
        f"context full ({context} tokens); `/set context drop-oldest` (--context drop-oldest) leaves out the oldest "
        "turns, /undo the last one, /clear begins again"
    )


class _Showing:
    """An answer on its way to the display. pressed_again: whether Ctrl-C came while it was being stopped."""

    def __init__(self, answering: Answering, answer: Answer, display: Display) -> None:
        self.answering = answering
        self.pressed_again = False
        self.ended = False
        self._lost = False
        self._answer, self._display = answer, display
        self._relay: Relay | None = None

    def run(self) -> BaseException | None:
        """To the end, or to an interrupt or a reader that went away, which is returned when the answer has stopped;
        without any text nothing is waited for."""
        with self._display.waiting(), patient():
            try:
                self._until_end()
            except (KeyboardInterrupt, Terminated) as stop:
                self.answering.cancel()
                generation = self.answering.generation
                try:
                    dealt_with()
                    if generation is not None and (generation.text or generation.thinking):
                        self._until_end()
                except (KeyboardInterrupt, Terminated):
                    self.pressed_again = True
                return stop
            except (ReaderGone, OutputError) as failure:
                self._lost = True
                self.answering.cancel()
                while self.answering.wait():
                    pass
                return failure
        return None

    def finish(self, *, kept: bool) -> None:
        """The rest of the text, and the end of its line."""
        if self._lost:
            return
        if self._relay is not None:
            with held():
                self._relay.take()
        with held():
            self._answer.finish(None)
        self._answer.drain()
        if kept and self._relay is not None:
            self._display.end_line(self._relay.text)

    def _until_end(self) -> None:
        started = time.monotonic()
        while not self.ended:
            more = self.answering.wait(_PATIENCE_S)
            if more is not None:
                self.ended = not more
                self._forward()
            if self._relay is None and not self.ended and time.monotonic() - started >= _PATIENCE_S:
                self._display.wait("one moment …")

    def _forward(self) -> None:
        generation = self.answering.generation
        if generation is None:
            return
        if self._relay is None and (generation.text or generation.thinking or self.ended):
            self._display.stop_waiting()
            for notice in self.answering.notices:
                say(f"infer: note: {notice}")
            self._relay = Relay(generation, self._answer)
        if self._relay is not None:
            self._relay.forward()
