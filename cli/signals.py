"""Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) raise in the main thread, so that partial text is kept; a
second one ends at once.

Two moments are no good for an exception. An import swallows it or is left half done (importlib's weakref
callbacks, numpy, torch), and a long call into a kernel, such as a prefill step of a large model, does not see it:
then there is nothing to keep either, and the process ends there and then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from infer.cli.render import animated, say

INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds the main thread has to notice a signal, unless it is `patient`.
_GRACE_S = 2.0
_pipes: list[int] = []  # the write end, once installed
_actions: list[Callable[[], None]] = []  # what is left to do before the process ends
_DEALT_WITH = b"\0"  # in the pipe after a signal: the next one is a first one again


class _State:
    """Plain values, no threading.Event: its lock would block a handler that interrupts another one for ever."""

    noticed = False
    patient = False


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. A BaseException, as KeyboardInterrupt is: no `except Exception` may swallow it."""


def _stop(number: int, frame: FrameType | None) -> None:
    _State.noticed = True
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # it comes twice: from the kernel and from the shell
    if _importing(frame):
        _end(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Make SIGINT raise KeyboardInterrupt, SIGTERM and SIGHUP `Terminated` (SIGINT and SIGHUP unless the shell or
    nohup had them ignored), and a second one, or one that goes unnoticed, end the process at once.

    Python runs signal handlers between bytecodes of the main thread, so a handler cannot end a long call into
    a kernel. The C level handler writes each signal number into a pipe as it arrives; a thread reads that.
    """
    for number in _STOPPING:
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _pipes[:] = [writer]
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def _watch(reader: int) -> None:
    last: int | None = None
    while True:
        if not select.select([reader], [], [], None if last is None else _GRACE_S)[0]:
            if last is not None and not _State.noticed and not _State.patient:
                _end(last)
            continue
        for number in os.read(reader, 64):
            if number == _DEALT_WITH[0]:
                last = None
            elif number in _STOPPING:
                if last is not None and number != signal.SIGHUP:
                    _show_cursor()
                    leave(_code(number))
                last = number


def dealt_with() -> None:
    """A signal has been answered and the process goes on: the next one is a first one again."""
    _State.noticed = False
    if _pipes:
        os.write(_pipes[0], _DEALT_WITH)


@contextmanager
def lent() -> Iterator[None]:
    """Leave the signals to an event loop of asyncio, and take them back at the end."""
    saved = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
        if _pipes:
            signal.set_wakeup_fd(_pipes[0], warn_on_full_buffer=False)
        dealt_with()


def _end(number: int) -> None:
    _show_cursor()
    say("infer: interrupted" if number == signal.SIGINT else "infer: terminated")
    leave(_code(number))


def _code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else TERMINATED


def _show_cursor() -> None:
    """A bar that hid the cursor has no time left to show it again."""
    if animated():
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), b"\x1b[?25h")


@contextmanager
def patient() -> Iterator[None]:
    """A signal waits for the main thread however long that takes: there is something to keep."""
    _State.patient = True
    try:
        yield
    finally:
        _State.patient = False


@contextmanager
def at_leave(action: Callable[[], None]) -> Iterator[None]:
    """In the block, `leave` does this first."""
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def leave(code: int) -> None:
    """End the process now, waiting for no thread and no exit handler."""
    for action in _actions:
        action()
    os._exit(code)


@contextmanager
def held() -> Iterator[None]:
    """Postpone SIGINT, SIGTERM and SIGHUP to the end of the block: for "write, then note that it was written"."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        _State.noticed = True
        arrived.append(number)

    heeded = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    saved = {number: signal.signal(number, note) for number in heeded}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
        if arrived:
            handler = saved[signal.Signals(arrived[0])]
            # Called, not raised again: the watching thread would count a second signal.
            if callable(handler):
                handler(arrived[0], None)
            else:
                signal.raise_signal(arrived[0])
