"""File work the store's parts share: durable writes, hashes, human sizes, names safe to join to a folder."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from infer.runtime.errors import DownloadError

# (bytes done, bytes in all, what is being done)
Progress = Callable[[int, int, str], None]
# One line for the user.
Notify = Callable[[str], None]

CHUNK = 1 << 20
SHA256 = re.compile(r"[0-9a-f]{64}")
_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f\\:*?"<>|\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]')


def ignore_progress(done: int, total: int, label: str) -> None:
    """A Progress for callers who show none."""


def ignore_notice(line: str) -> None:
    """A Notify for callers who show none."""


def human_size(size: int) -> str:
    """Decimal units, as download pages and disks are labelled: 98.4 MB, 1.12 GB."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            break
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def check_remote_name(name: str) -> str:
    """The name, if it is a relative path of plain components that stays below the folder it is joined to.

    Raises DownloadError for absolute names, `..`, `.`, empty components, drive letters, backslashes, control
    and direction-changing characters, and components longer than 255 bytes.
    """
    parts = name.split("/")
    if _UNSAFE.search(name) or any(
        part in ("", ".", "..") or part != part.strip() or len(part.encode()) > 255 for part in parts
    ):
        raise DownloadError(f"refusing the unsafe file name {name[:200]!r} offered by the source")
    return name


def sync_folder(folder: Path) -> None:
    """Make renames in the folder durable, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by the text: readers see the old file or the whole new one. The mode stays. Raises OSError."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def hash_stream(file: BinaryIO, size: int, progress: Callable[[int], None] | None = None) -> tuple[str, int]:
    """sha256 in hex of the next `size` bytes, and how many there were. `progress` gets the count so far."""
    digest = hashlib.sha256()
    done = 0
    while done < size:
        chunk = file.read(min(CHUNK, size - done))
        if not chunk:
            break
        digest.update(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done)
    return digest.hexdigest(), done
