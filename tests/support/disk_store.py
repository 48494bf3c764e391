"""What a correct writer of the disk prefix cache stores, and what a reader may get back."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infer.runtime.kvcache.disk.store import Chain, PrefixStore, StoreConfig

FINGERPRINT = bytes(range(32))
PER_TOKEN = 64
BLOCK = 64
ENTRY = 160 + BLOCK * PER_TOKEN  # 4,256 bytes, 8,192 on disk


def ids_of(seed: int, count: int) -> list[int]:
    """Token ids that differ from the first on for every seed."""
    stream = hashlib.shake_256(b"ids%d" % seed).digest(4 * count)
    return [value % 50_000 for value in struct.unpack(f"<{count}I", stream)]


def payload_of(
    ids: Sequence[int], start: int, end: int, per_token: int = PER_TOKEN, salt: bytes = b""
) -> bytes:
    """KV of positions start … end - 1 of a prompt: each depends on every id up to it, like the real one."""
    pieces = []
    running = hashlib.sha256(salt)
    for place, token in enumerate(ids[:end]):
        running.update(struct.pack("<q", token))
        if place >= start:
            pieces.append(hashlib.shake_256(running.digest()).digest(per_token))
    return b"".join(pieces)


def fail(line: str) -> None:
    raise AssertionError(f"warned: {line}")


def open_store(root: Path, warn: Callable[[str], None] = fail, **options: Any) -> PrefixStore:
    fingerprint = options.pop("fingerprint", FINGERPRINT)
    per_token = options.pop("per_token", PER_TOKEN)
    label = options.pop("label", "")
    config = replace(StoreConfig(root=root, limit_bytes=1 << 30, free_floor_bytes=0), **options)
    return PrefixStore(config, fingerprint, per_token, warn, label=label)


def offer_prompt(
    store: PrefixStore, ids: Sequence[int], per_token: int = PER_TOKEN, salt: bytes = b""
) -> list[bytes]:
    """Offer all full blocks and the tail; their keys."""
    parent, keys = store.root, []
    for start in range(0, len(ids), BLOCK):
        end = min(start + BLOCK, len(ids))
        parent = store.offer(parent, ids[start:end], payload_of(ids, start, end, per_token, salt))
        keys.append(parent)
    return keys


def save(root: Path, prompts: Iterable[Sequence[int]], **options: Any) -> None:
    """One run that stores the prompts."""
    store = open_store(root, **options)
    for ids in prompts:
        offer_prompt(store, ids)
    assert store.flush(30)
    store.close()


def load(root: Path, ids: Sequence[int], have: int = 0, **options: Any) -> Chain:
    """One run that looks the prompt up; whatever it finds has been checked."""
    store = open_store(root, **options)
    chain = store.find(ids, have)
    check_chain(chain, ids, have)
    store.close()
    return chain


def check_chain(
    chain: Chain, ids: Sequence[int], have: int = 0, per_token: int = PER_TOKEN, salt: bytes = b""
) -> None:
    """The chain is exactly what was computed for these ids, and leaves one to compute."""
    at = have * BLOCK
    for entry in chain.entries:
        assert entry.payload.tobytes() == payload_of(ids, at, at + entry.tokens, per_token, salt)
        at += entry.tokens
    assert all(entry.tokens == BLOCK for entry in chain.entries[:-1])
    assert at <= len(ids)
    assert chain.tokens == (min(at, len(ids) - 1) - have * BLOCK if chain.entries else 0)
    assert chain.nbytes == sum(entry.payload.nbytes for entry in chain.entries)


def files_in(root: Path, pattern: str = "*.kv") -> list[Path]:
    return sorted(root.glob(f"kv-v1/*/{pattern}"))


def entry_of(root: Path, key: bytes) -> Path:
    (path,) = root.glob(f"kv-v1/*/*-{key.hex()}.kv")
    return path


def bytes_in(root: Path) -> int:
    """Bytes of every file, temporaries too; files that vanish meanwhile count nothing."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total
