"""`--session` and `--continue`: the conversation a run goes on with, locked from reading it to keeping its turn.

A session keeps the system message and the model it was begun with. `-m` on the command line changes the model for
one answer; what the environment or the config file say is for new sessions. Another `-s` is an error, as the
answers so far were given under the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from infer.cli import config
from infer.cli.config import Exclusion
from infer.cli.options import SessionOptions, SourceOptions, SystemOptions
from infer.cli.prompt import Turn
from infer.cli.render import Notes
from infer.runtime.errors import InferError, SessionError, UsageError, did_you_mean

if TYPE_CHECKING:
    from infer.runtime.generation import Generation
    from infer.runtime.store.session_format import Message, Session
    from infer.runtime.store.sessions import SessionStore


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(SessionOptions, SystemOptions, SourceOptions):
    """The flags that matter to a conversation."""

    exclusions: ClassVar[tuple[Exclusion, ...]] = tuple(
        Exclusion(name, "raw", "{first} keeps a chat, and {second} is none: drop one of them")
        for name in ("session", "continue_")
    )


T = TypeVar("T", bound=ConversationOptions)


@dataclass(frozen=True)
class Conversation:
    """A session held by this run. model: the one that answers this time, as `-m` takes it."""

    store: SessionStore
    session: Session
    model: str

    @property
    def history(self) -> tuple[Turn, ...]:
        return turns_of(self.session)

    def applied(self, options: T) -> T:
        """The options with the model and the system message of this conversation."""
        system = self.session.system
        if system is None and options.system == "":
            system = ""  # not even the template's own
        return dataclasses.replace(config.for_model(options, self.model), model=self.model, system=system)

    def keep(self, text: str, prefill: str | None, generation: Generation) -> None:
        """Add the turn; a failure before any output leaves the session as it was. Raises SessionError."""
        turn = as_turn(text, prefill, generation, self.model)
        if turn:
            self.store.append(self.session, *turn)


def turns_of(session: Session) -> tuple[Turn, ...]:
    return tuple(
        Turn(question.content, answer.content, answer.thinking) for question, answer in session.turns
    )


def as_turn(
    text: str, prefill: str | None, generation: Generation, model: str
) -> tuple[Message, Message] | None:
    """A question with its answer as they are kept, an interrupted one as "cancelled".

    None for an answer without any text that the model did not end itself.
    """
    from infer.runtime.store.session_format import Message, now

    finish = str(generation.finish_reason or "cancelled")
    if not generation.text and finish != "stop":
        return None
    answer = Message(
        "assistant", (prefill or "") + generation.text, now(), model, finish, generation.thinking
    )
    return Message("user", text, now()), answer


def check(options: ConversationOptions) -> None:
    """Raise UsageError for a bad name."""
    if options.session:
        from infer.runtime.store.sessions import check_name

        check_name(options.session)


@contextmanager
def opened(options: ConversationOptions, notes: Notes) -> Iterator[Conversation | None]:
    """The conversation that the options ask for, None without one; no other process can write it meanwhile.

    Raises SessionError for one that is damaged or in use and where there is none to continue, UsageError for
    another system message than the session has, ModelError for a new session's model that does not exist.
    """
    if not (options.session or options.continue_):
        yield None
        return
    from infer.runtime.store.sessions import SessionStore

    store = SessionStore(config.data_dirs())
    go_on = options.continue_
    name = options.session or _latest(store)
    with store.locked(name):
        session = store.read(name)
        if session is None and go_on:
            raise SessionError(f"session {name} was removed meanwhile; --session NAME begins one")
        if session is None:
            others = (file.name for file in store.files())
            notes.note(f"new session {name}{did_you_mean(name, others, cutoff=0.8)}")
            yield _begin(store, name, options)
            return
        if go_on:
            notes.note(f"session {name}, {len(session.turns)} turns so far")
        _check_system(session, options, notes)
        yield Conversation(store, session, _model_of(session, options, notes))


def _latest(store: SessionStore) -> str:
    files = store.files()
    if not files:
        raise SessionError("there is no session to continue; --session NAME begins one")
    return files[0].name


def _begin(store: SessionStore, name: str, options: ConversationOptions) -> Conversation:
    from infer.runtime.store.session_format import Session, now

    model = model_spec(options.model)
    return Conversation(store, Session(name, model, now(), options.system), model)


def _check_system(session: Session, options: ConversationOptions, notes: Notes) -> None:
    if options.system is None or (options.system or None) == (session.system or None):
        return
    which = "another system message" if session.system else "no system message"
    origin = options.origin("system")
    if options.is_flag("system"):
        raise UsageError(
            f"session {session.name} was begun with {which}, which stays: drop {origin}, or use another session"
        )
    notes.note(f"session {session.name} keeps what it was begun with, {which}: {origin} is for new ones")


def _model_of(session: Session, options: ConversationOptions, notes: Notes) -> str:
    if options.model is None:
        return session.model
    if options.is_flag("model"):
        model = model_spec(options.model)
        if model != session.model:
            notes.note(f"session {session.name} was begun with {session.model}; {model} answers this time")
        return model
    try:
        differs = model_spec(options.model) != session.model
    except InferError:
        differs = True
    if differs:
        notes.note(f"session {session.name} goes on with {session.model}, not with {options.origin('model')}")
    return session.model


def model_spec(model: str | None) -> str:
    """What `-m` says in a form that means the same in any folder: an absolute path, a catalog or a hub name.

    Raises ModelNotFoundError and UsageError.
    """
    from infer.runtime.store.resolve import LocalPath, resolve

    source = resolve(model, config.data_dirs())
    return str(Path(source.path).absolute()) if isinstance(source, LocalPath) else str(source)
