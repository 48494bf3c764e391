"""A model's name beside its entries: for people who look at the cache, never trusted."""

from __future__ import annotations

import os
from contextlib import suppress

from infer.runtime.kvcache.disk.folder import FILE_MODE, close_quietly

LABEL_NAME = "label"
LABEL_CHARACTERS = 4000  # JSON, see `kvcache.identity`


def write_label(model: int, label: str) -> None:
    """Leave the label in the folder open as `model`, if there is none yet. Nothing is raised."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):
        descriptor = os.open(LABEL_NAME, flags, FILE_MODE, dir_fd=model)
        try:
            os.write(descriptor, label[:LABEL_CHARACTERS].encode("utf-8", "replace"))
        finally:
            close_quietly(descriptor)


def read_label(version: int, model: str) -> str:
    """The label in a folder below `version`: printable characters only, "" where there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(f"{model}/{LABEL_NAME}", flags, dir_fd=version)
        try:
            text = os.read(descriptor, 4 * LABEL_CHARACTERS).decode("utf-8", "replace")
        finally:
            close_quietly(descriptor)
    except OSError:
        return ""
    return "".join(character for character in text if character.isprintable())[:LABEL_CHARACTERS]


def remove_label(version: int, model: str) -> None:
    """Nothing is raised."""
    with suppress(OSError):
        os.unlink(f"{model}/{LABEL_NAME}", dir_fd=version)
