"""The thread of a chat that loads the model and drives its engine.

The main thread reads and shows meanwhile. Signals reach only that one, so that an interrupt never leaves a step of the
engine half done: it is a wish to stop, heeded between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from infer.cli import session
from infer.cli.render import Notes
from infer.runtime.errors import UsageError

if TYPE_CHECKING:
    from infer.runtime.config import EngineConfig
    from infer.runtime.generation import Generation, Thinking
    from infer.runtime.loader import LoadedModel
    from infer.runtime.request import Request

T = TypeVar("T")


class Worker:
    """Does one job after the other in a thread of its own. loading: the model, as far as it is there."""

    def __init__(self) -> None:
        self.loading: Future[LoadedModel] = Future()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = ExitStack()
        self._thread: Thread | None = None

    @property
    def started(self) -> bool:
        """Whether there was anything to do yet."""
        return self._thread is not None

    @property
    def model(self) -> LoadedModel | None:
        """The model once it is loaded."""
        loading = self.loading
        return loading.result() if loading.done() and loading.exception() is None else None

    def load(
        self, path: Path, engine: EngineConfig, *, chat_template: str | None, pre: str | None, notes: Notes
    ) -> Future[LoadedModel]:
        """Load a model in place of the one there is. The future raises ModelError, UsageError for one without a
        chat template."""

        def work() -> LoadedModel:
            self._open.close()
            opened = session.open_model(
                path, engine, chat_template=chat_template, pre=pre, notes=notes, bar=False
            )
            model = self._open.enter_context(opened)
            if model.chat_template is None:
                raise UsageError(
                    f"a chat needs a chat template, and {model.name} has none: give --chat-template, "
                    "or continue texts with `infer run`"
                )
            return model

        self.loading = self.submit(work)
        return self.loading

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have it done after what was submitted before."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
                future.set_exception(error)

        self._jobs.put(job)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()
        return future

    def close(self, timeout: float) -> bool:
        """Close the model; False where the thread is too busy for that."""
        if self._thread is None:
            return True
        if not self.loading.done():
            return False
        try:
            self.submit(self._open.close).result(timeout)
        except TimeoutError:
            return False
        return True

    def _work(self) -> None:
        while True:
            self._jobs.get()()


class Answering:
    """One answer in the making. build gives the request; it runs in the worker, as everything about the model does.

    notices: what build has to say, complete once `generation` is there.
    """

    def __init__(
        self,
        worker: Worker,
        build: Callable[[LoadedModel, list[str]], tuple[Request, Thinking | None, float]],
    ) -> None:
        self.generation: Generation | None = None
        self.notices: list[str] = []
        self._build = build
        self._events: SimpleQueue[bool] = SimpleQueue()
        self._cancelled = Event()
        self._loading = worker.loading
        self._done = worker.submit(self._work)
        self._done.add_done_callback(lambda _: self._events.put(False))

    def wait(self, timeout: float | None = None) -> bool | None:
        """True when there may be more text, None after `timeout` seconds, False at the end of the answer."""
        try:
            return self._events.get(timeout=timeout)
        except Empty:
            return None

    def check(self) -> None:
        """After the end: raise what it failed with."""
        self._done.result()

    def cancel(self) -> None:
        """Ask it to stop at the next step."""
        self._cancelled.set()

    def _work(self) -> None:
        model = self._loading.result()
        if self._cancelled.is_set():
            return
        from infer.runtime.generation import TextStream

        request, thinking, tokenize_s = self._build(model, self.notices)
        stream = TextStream(model.engine, model.tokenizer, request, thinking=thinking)
        stream.generation.stats.load_s, stream.generation.stats.tokenize_s = model.load_s, tokenize_s
        self.generation = stream.generation
        self._events.put(True)
        while stream.generation.finish_reason is None:
            if self._cancelled.is_set():
                stream.cancel()
            else:
                stream.step()
            self._events.put(True)
