"""Identity of a model by content: sha256 of its files, remembered so that it is computed once.

The memo trusts (device, inode, size, mtime_ns, ctime_ns): ctime cannot be set from user space, so a change
that keeps size and mtime is still seen. Anything odd about the memo means that the hash is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from infer.runtime.errors import ModelError, ModelNotFoundError
from infer.runtime.store.files import SHA256, Progress, hash_stream, ignore_progress, write_atomically

MEMO_NAME = "fingerprints.json"
_MEMO_ENTRIES = 512
_MEMO_BYTES = 1 << 20
# ctime advances in steps of the kernel's tick (10 ms at most): a file changed more recently than this could
# change again without a trace, so its hash is not remembered yet.
_SETTLED_NS = 50_000_000


def fingerprint(paths: Sequence[Path], memo_dir: Path, *, progress: Progress = ignore_progress) -> str:
    """Content hash of a model, 64 hex digits.

    One file: its sha256. Several (shards, in order): the sha256 of their sha256 digests, one hex line each,
    so that neither names nor places matter. Raises ModelNotFoundError or ModelError when a file cannot be
    read.
    """
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.stat().st_size
    hashes: list[str] = []
    done = 0
    for path in paths:
        digest, size = _file_hash(path, memo_dir, progress, done, total)
        hashes.append(digest)
        done += size
    if not hashes:
        raise ModelError("a model without files has no fingerprint")
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in hashes).encode()).hexdigest()


def remembered(path: Path, memo_dir: Path) -> str | None:
    """sha256 of the file as computed earlier, None where the file is not known in its present state."""
    try:
        return _read_memo(memo_dir).get(_key(path.stat()))
    except OSError:
        return None


def remember(path: Path, digest: str, memo_dir: Path) -> None:
    """Record the sha256 of a file that was just verified. A memo that cannot be written is no error."""
    with suppress(OSError):
        age = time.time_ns() - path.stat().st_ctime_ns
        if 0 <= age < _SETTLED_NS:
            time.sleep((_SETTLED_NS - age) / 1e9)
        _record(_key(path.stat()), digest, memo_dir)


def _file_hash(path: Path, memo_dir: Path, progress: Progress, before: int, total: int) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            known = _read_memo(memo_dir).get(_key(stat))
            if known is not None:
                return known, stat.st_size
            settled = time.time_ns() - stat.st_ctime_ns >= _SETTLED_NS
            digest, done = hash_stream(
                file, stat.st_size, lambda done: progress(before + done, total, f"hashing {path.name}")
            )
            if settled and done == stat.st_size and _key(os.fstat(file.fileno())) == _key(stat):
                with suppress(OSError):
                    _record(_key(stat), digest, memo_dir)
            return digest, done
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


def _key(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _read_memo(memo_dir: Path) -> dict[str, str]:
    try:
        with (memo_dir / MEMO_NAME).open("rb") as file:
            text = file.read(_MEMO_BYTES + 1)
        memo = json.loads(text) if len(text) <= _MEMO_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(memo, dict):
        return {}
    return {key: value for key, value in memo.items() if isinstance(value, str) and SHA256.fullmatch(value)}


def _record(key: str, digest: str, memo_dir: Path) -> None:
    memo_dir.mkdir(parents=True, exist_ok=True)
    memo = _read_memo(memo_dir)
    memo.pop(key, None)
    memo[key] = digest
    newest = dict(list(memo.items())[-_MEMO_ENTRIES:])
    write_atomically(memo_dir / MEMO_NAME, json.dumps(newest, indent=0))
