"""A terminal of a given size with a program in it: what it shows, and what it was sent."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from typing import Any

import pyte

# A process that is alone in its session makes the terminal its own, then becomes the program.
_OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0);"
    "os.close(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


class Terminal:
    """Reads in `wait` only. `raw` is everything the program wrote, `screen` what is to be seen of it."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        rows: int = 40,
        columns: int = 100,
        seconds: float = 60,
        **popen: Any,
    ) -> None:
        self.raw = b""
        self.seconds = seconds
        self._screen = pyte.HistoryScreen(columns or 80, rows or 24, history=5000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        popen = {"stdin": slave, "stdout": slave, "stderr": slave, **popen}

        launch = [sys.executable, "-ISc", _OWN_TERMINAL, str(slave)]
        self.process = subprocess.Popen(
            [*launch, *command], env=dict(env), start_new_session=True, pass_fds=[slave], **popen
        )
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if self._screen.lines != rows or self._screen.columns != columns:
            self._screen.resize(rows or 24, columns or 80)

    def send(self, text: str | bytes) -> None:
        os.write(self.master, text if isinstance(text, bytes) else text.encode())

    def paste(self, text: str) -> None:
        """As a terminal does that brackets its pastes."""
        self.send("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def hang_up(self) -> None:
        """The window is closed: the kernel sends SIGHUP, reads end and writes fail."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.master)
        os.close(null)

    def interrupt(self) -> None:
        """Ctrl-C: a key where the program reads keys, else a signal."""
        self.send(b"\x03")

    @property
    def screen(self) -> str:
        """The lines, those scrolled away first, without blanks at their ends."""
        above = [
            "".join(line[column].data for column in range(self._screen.columns))
            for line in self._screen.history.top
        ]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display]).rstrip("\n")

    def wait(self, enough: str | Callable[[str], bool], *, since: int = 0) -> str:
        """Read until the text is on the screen (in `raw` from an offset, if given), or what else is asked for."""
        deadline = time.monotonic() + self.seconds
        while True:
            shown = self.raw[since:].decode("utf-8", "replace") if since else self.screen
            if (enough in shown) if isinstance(enough, str) else enough(shown):
                return shown
            if time.monotonic() > deadline:
                raise AssertionError(f"waited for {enough!r} in vain; the screen shows:\n{self.screen}")
            if not self._read(0.1) and self.process.poll() is not None and not self._read(0.2):
                shown = self.raw[since:].decode("utf-8", "replace") if since else self.screen
                if (enough in shown) if isinstance(enough, str) else enough(shown):
                    return shown
                raise AssertionError(f"it ended before {enough!r}; the screen shows:\n{self.screen}")

    def prompt(self) -> None:
        """Wait for a prompt with nothing typed yet."""
        self.wait(lambda shown: shown.endswith("\n>") or shown == ">")

    def end(self) -> int:
        """Read to the end of the program; its exit code, 128 + N for signal N."""
        deadline = time.monotonic() + self.seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"it does not end; the screen shows:\n{self.screen}")
            self._read(0.05)
        while self._read(0.1):
            pass
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.master)

    def _read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.master, 1 << 16)
        except OSError:  # Linux: nobody has the other side open any more
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)
