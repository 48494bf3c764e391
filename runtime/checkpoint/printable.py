"""Text of files and paths inside one-line messages."""

from __future__ import annotations

import os

_LONGEST = 100


def shown(text: str) -> str:
    """The text in quotes, cut to 100 characters; what cannot be printed is escaped."""
    return repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")


def shown_path(path: str | os.PathLike[str]) -> str:
    """The whole path as it is, or escaped in quotes where it holds what cannot be printed on one line."""
    text = os.fspath(path)
    return text if text.isprintable() and text else repr(text)
