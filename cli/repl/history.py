"""The lines a user has typed, across runs: a file of JSON lines that only the user can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import History

from infer.cli.render import Notes

_KEPT = 2000  # entries
_LARGEST = 4 << 20  # bytes: beyond that the file is cut to what is kept
_LONGEST = 64 << 10  # characters of an entry worth keeping


class HistoryFile(History):
    """Whatever is wrong with the file, the chat goes on without it, which is said once."""

    def __init__(self, path: Path, notes: Notes) -> None:
        super().__init__()
        self._path = path
        self._notes = notes
        self._broken = False

    def load_history_strings(self) -> Iterable[str]:
        """The latest first, as far as the lines are what was written."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LARGEST))
                data = file.read(_LARGEST)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._fail(error)
            return []
        entries: list[str] = []
        for line in reversed(data.split(b"\n")):
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str) and len(entries) < _KEPT:
                    entries.append(entry)
        if size > _LARGEST:
            self._replace(entries)
        return entries

    def store_string(self, string: str) -> None:
        if self._broken or len(string) > _LONGEST:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(self._path, os.O_APPEND, json.dumps(string).encode() + b"\n")
        except OSError as error:
            self._fail(error)

    def _replace(self, entries: list[str]) -> None:
        """Only the entries, oldest first."""
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        data = b"".join(json.dumps(entry).encode() + b"\n" for entry in reversed(entries))
        try:
            self._write(temporary, os.O_EXCL, data)
            temporary.replace(self._path)
        except OSError as error:
            self._fail(error)

    @staticmethod
    def _write(path: Path, flag: int, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flag
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)

    def _fail(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            self._notes.warning(f"{self._path}: no history of lines: {error.strerror or error}")
