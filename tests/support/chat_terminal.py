"""`infer chat` with a scripted model in a terminal, for the tests that drive it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terminal import Terminal

SCRIPTED = [sys.executable, str(Path(__file__).parent / "scripted_model.py")]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Start = Callable[..., Terminal]


@contextmanager
def chats(home: Path) -> Iterator[Start]:
    """start(*arguments, script={…}, env={…}, rows=…, columns=…): `infer chat` in a terminal of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    for name in ("NO_COLOR", "DISPLAY", "WAYLAND_DISPLAY", "COLUMNS", "LINES"):
        kept.pop(name, None)
    running = []

    def call(
        *arguments: str,
        script: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> Terminal:
        command = [*SCRIPTED, json.dumps({"template": CHATML, **(script or {})}), "chat", *arguments]
        environment = {**kept, "INFER_HOME": str(home), "TERM": "xterm-256color", **(env or {})}
        running.append(Terminal(command, environment, **options))
        return running[-1]

    try:
        yield call
    finally:
        for terminal in running:
            terminal.close()


def session(home: Path, name: str) -> list[dict[str, Any]]:
    lines = (home / "state" / "sessions" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def texts(home: Path, name: str) -> list[str]:
    return [line["content"] for line in session(home, name)[1:]]


def ask(terminal: Terminal, text: str, answer: str = "Hello there.") -> None:
    """Type a message and wait for the prompt after its answer."""
    seen = len(terminal.raw)
    terminal.send(text + "\r")
    terminal.wait(answer, since=seen)
    terminal.prompt()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
