"""Text to the clipboard: by the desktop's own program where there is one, else by the terminal (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys

from infer.cli.render import is_terminal
from infer.runtime.errors import UsageError

# variable that must be set ("" for none), command
_PROGRAMS = (
    ("WAYLAND_DISPLAY", ["wl-copy"]),
    ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("", ["pbcopy"]),
)
_LONGEST = 1 << 16  # bytes that terminals take


def copy(text: str) -> str:
    """Put it there; by what, for the message. Raises UsageError where there is no way."""
    data = text.encode("utf-8", "replace")
    for variable, command in _PROGRAMS:
        if (not variable or os.environ.get(variable)) and shutil.which(command[0]):
            try:
                subprocess.run(
                    command,
                    input=data,
                    timeout=5,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, subprocess.SubprocessError):
                continue
            return command[0]
    terminal = next((stream for stream in (sys.stdout, sys.stderr) if is_terminal(stream)), None)
    if terminal is None:
        raise UsageError("there is no clipboard here: neither a terminal nor wl-copy, xclip or pbcopy")
    if len(data) > _LONGEST:
        raise UsageError(f"{len(data)} bytes are more than a terminal takes into its clipboard ({_LONGEST})")
    terminal.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    terminal.flush()
    return "the terminal"
