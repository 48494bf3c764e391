"""The conversation of a chat: in memory until it has a name, from then on in the file of its session."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TYPE_CHECKING

from infer.cli import config, conversation
from infer.cli.conversation import ConversationOptions
from infer.cli.prompt import Turn
from infer.cli.render import Notes
from infer.cli.signals import held
from infer.runtime.errors import SessionError

if TYPE_CHECKING:
    from infer.runtime.generation import Generation
    from infer.runtime.store.session_format import Message
    from infer.runtime.store.sessions import SessionStore


class Talk:
    """What has been said so far. model: the one that answers, as `-m` takes it.

    A session is locked as long as it is this conversation. Each change is on disk when its method returns; where it
    raises SessionError instead, it is in memory only, and the next change tries again. stored: what the disk has.
    """

    def __init__(self, options: ConversationOptions, notes: Notes) -> None:
        """The session that the options name, or a new conversation without a name. Raises as `conversation.opened`."""
        from infer.runtime.store.session_format import Session, now
        from infer.runtime.store.sessions import SessionStore

        self.store: SessionStore = SessionStore(config.data_dirs())
        self._lock = ExitStack()
        opened = self._lock.enter_context(conversation.opened(options, notes))
        if opened is not None:
            self.session, self.model = opened.session, opened.model
        else:
            self.model = conversation.model_spec(options.model)
            self.session = Session("", self.model, now(), options.system)
        self.stored = self.session

    @property
    def unsaved(self) -> bool:
        """Whether a session is not on disk as it is here."""
        there = self.stored.messages, self.stored.system
        return bool(self.name) and (self.session.messages, self.session.system) != there

    @property
    def name(self) -> str:
        """ "" while the conversation is kept in memory only."""
        return self.session.name

    @property
    def history(self) -> tuple[Turn, ...]:
        return conversation.turns_of(self.session)

    def add(self, question: str, generation: Generation, *, instead: bool = False) -> bool:
        """Add a turn, or put it in place of the last one; False for an answer that is not worth one."""
        turn = conversation.as_turn(question, None, generation, self.model)
        if turn is None:
            return False
        messages = self.session.messages[:-2] if instead else self.session.messages
        self._change((*messages, *turn), self.session.system)
        return True

    def undo(self) -> Turn:
        """Take the last turn out. Raises IndexError where there is none."""
        turn = self.history[-1]
        self._change(self.session.messages[:-2], self.session.system)
        return turn

    def set_system(self, text: str | None) -> None:
        self._change(self.session.messages, text)

    def clear(self) -> None:
        """Begin again without a name; a session stays as it is."""
        from infer.runtime.store.session_format import Session, now

        self.close()
        self.session = self.stored = Session("", self.model, now(), self.session.system)

    def save(self, name: str) -> None:
        """Keep the conversation under a new name from now on. Raises SessionError and UsageError."""
        with ExitStack() as lock:
            lock.enter_context(self.store.locked(name))
            if self.store.read(name) is not None:
                raise SessionError(f"there is a session {name} already: `/load {name}` goes on with it")
            fresh = dataclasses.replace(self.session, name=name, messages=(), data=b"", stamp=None)
            with held():
                self.session = self.stored = self.store.write(
                    fresh, self.session.messages, self.session.system
                )
            self.close()
            self._lock = lock.pop_all()

    def load(self, name: str) -> None:
        """Go on with a session. Raises SessionError and UsageError, and then stays where it was."""
        if name == self.name:
            return
        with ExitStack() as lock:
            if self.store.read(name) is not None:
                lock.enter_context(self.store.locked(name))
            session = self.store.read(name)
            if session is None:
                raise SessionError(f"there is no session {name!r}; /sessions lists them")
            self.close()
            self.session = self.stored = session
            self._lock = lock.pop_all()

    def close(self) -> None:
        """Let go of the session."""
        self._lock.close()

    def _change(self, messages: tuple[Message, ...], system: str | None) -> None:
        self.session = dataclasses.replace(self.session, messages=messages, system=system)
        if self.unsaved:
            with held():
                self.session = self.stored = self.store.write(self.stored, messages, system, what="this turn")
