"""Ctrl-C and SIGTERM raise in the main thread, so that partial text is kept; a second one ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from infer.cli.render import animated

INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM arrived. A BaseException, as KeyboardInterrupt is: no `except Exception` may swallow it."""


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated


def install() -> None:
    """Make SIGTERM raise `Terminated` and a second SIGINT or SIGTERM end the process at once.

    Python runs signal handlers between bytecodes of the main thread, so a handler cannot end a long call into
    a kernel. The C level handler writes each signal number into a pipe as it arrives; a thread reads that.
    """
    signal.signal(signal.SIGTERM, _raise_terminated)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def _watch(reader: int) -> None:
    seen = 0
    while received := os.read(reader, 64):
        stopping = [number for number in received if number in _STOPPING]
        seen += len(stopping)
        if seen > 1:
            if animated():  # a bar that hid the cursor has no time left to show it again
                with suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), b"\x1b[?25h")
            leave(TERMINATED if stopping[-1] == signal.SIGTERM else INTERRUPTED)


def leave(code: int) -> None:
    """End the process now, waiting for no thread and no exit handler."""
    os._exit(code)


@contextmanager
def held() -> Iterator[None]:
    """Postpone SIGINT and SIGTERM to the end of the block: for "write, then note that it was written"."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    saved = {
        number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in _STOPPING
    }
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
            elif handler is not signal.SIG_IGN:
                signal.raise_signal(arrived[0])
