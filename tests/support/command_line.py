"""One command line of `infer` in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence

import pytest

Answer = tuple[int, str, str]
Infer = Callable[..., Answer]


def call(
    arguments: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stdin: bytes = b"",
) -> Answer:
    """Exit code, stdout and stderr."""
    from infer.cli.main import invoke

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return invoke(arguments), *capsys.readouterr()


def prompt_text(infer: Infer) -> str:
    """The text of the prompt that the model of `scripted_infer` got last, without control tokens."""
    ids = infer.model.engine.requests[-1].prompt_ids  # type: ignore[attr-defined]
    return bytes(token for token in ids if token < 256).decode()
