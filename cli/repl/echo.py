"""Keys pressed while an answer streams: kept for the next prompt, and not shown in the middle of the answer."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from infer.cli import signals

_LOCAL = 3  # place of the local modes in what tcgetattr returns


@contextmanager
def unechoed(source: TextIO) -> Iterator[None]:
    """The terminal shows no keys in the block, but where an editor takes it over, and is as before at its end, also
    where the process ends at once."""
    descriptor = source.fileno()
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        yield
        return

    def restore() -> None:
        _set(descriptor, before)

    quiet = [*before]
    quiet[_LOCAL] &= ~termios.ECHO
    with signals.at_leave(restore):
        _set(descriptor, quiet)
        try:
            yield
        finally:
            restore()


def _set(descriptor: int, attributes: list[Any]) -> None:
    """In the background the terminal is somebody else's, and asking for it would stop the process."""
    with suppress(OSError, termios.error):
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
            try:
                termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTTOU})
