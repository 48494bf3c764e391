"""The disk tier as the engine sees it: find the longest chain of blocks of a prompt, offer new ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from infer.runtime.errors import InferError
from infer.runtime.kvcache.disk import reader
from infer.runtime.kvcache.disk.eviction import Quota
from infer.runtime.kvcache.disk.folder import close_quietly, open_own_folder, open_root
from infer.runtime.kvcache.disk.format import BLOCK_TOKENS, VERSION, VERSION_FOLDER, entry_name, model_folder
from infer.runtime.kvcache.disk.reader import Outcome, Payload, Wanted
from infer.runtime.kvcache.disk.stats import StoreStats
from infer.runtime.kvcache.disk.write_queue import PendingEntry
from infer.runtime.kvcache.disk.writer import BackgroundWriter, StoreFolder
from infer.runtime.kvcache.keys import KEY_BYTES, block_key, prefix_keys, root_key

_READERS = 2  # one reads while the other checks
_AHEAD = 2 * _READERS
_PROBE = 4  # entries before the rate of loading is judged: the first ones pay for threads and directories


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """root: the cache folder. limit_bytes: None for a tenth of the free disk, 20 GB at most; 0 stores nothing.

    free_floor_bytes: disk space left to others. queue_bytes: payloads that may wait to be written. load_bytes: most
    payload one `find` may bring into memory.
    """

    root: Path
    limit_bytes: int | None = None
    free_floor_bytes: int = 1 << 30
    read_only: bool = False
    queue_bytes: int = 256 << 20
    load_bytes: int = 4 << 30


@dataclass(frozen=True)
class ChainEntry:
    """One verified entry. payload: uint8 [tokens × bytes per token], as it was offered."""

    key: bytes
    parent: bytes
    tokens: int
    payload: Payload

    @property
    def name(self) -> str:
        return entry_name(self.parent, self.tokens, self.key)


@dataclass(frozen=True)
class Chain:
    """Entries that continue a prompt, in order; all but the last hold 64 tokens.

    passed: full blocks before them that were verified too, and not kept. tokens: how many of all these to take as
    computed. The last entry may hold one more: the prompt's last token is always computed, for its logits. nbytes of
    payload were read in `seconds`.
    """

    entries: tuple[ChainEntry, ...] = ()
    passed: int = 0
    tokens: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class PrefixStore:
    """KV blocks on disk, of one model computed in one way. One thread calls it.

    Whatever goes wrong is a miss or an entry less; the user hears of it once, through `warn`.
    """

    def __init__(
        self,
        config: StoreConfig,
        fingerprint: bytes,
        bytes_per_token: int,
        warn: Callable[[str], None],
        *,
        label: str = "",
    ) -> None:
        """fingerprint: 32 bytes over everything that decides a KV value. bytes_per_token: of payload.

        warn: gets one line at most, perhaps from another thread. label: the model's name, for people.
        Raises ValueError for a fingerprint of another length or bytes_per_token < 1.
        """
        if len(fingerprint) != KEY_BYTES:
            raise ValueError(f"a fingerprint has {KEY_BYTES} bytes, not {len(fingerprint)}")
        if bytes_per_token < 1:
            raise ValueError(f"bytes_per_token must be at least 1, not {bytes_per_token}")
        self.root = root_key(VERSION, fingerprint)
        self.stats = StoreStats()
        self._config = config
        self._fingerprint = fingerprint
        self._bytes_per_token = bytes_per_token
        self._warn = _Once(warn)
        self._folder = self._open_folder()
        self._writer: BackgroundWriter | None = None
        if self._folder is not None and self._may_write:
            self._writer = BackgroundWriter(
                self._folder,
                fingerprint,
                Quota(self._folder.version, config.limit_bytes, config.free_floor_bytes),
                self.stats,
                queue_bytes=config.queue_bytes,
                warn=self._warn,
                label=label,
            )

    @property
    def enabled(self) -> bool:
        """Whether there is a folder to read from."""
        return self._folder is not None

    def key(self, parent: bytes, ids: Sequence[int]) -> bytes:
        """Key of a block whose left neighbour has the key `parent` (`self.root` for the first)."""
        return block_key(parent, ids)

    def find(
        self,
        ids: Sequence[int],
        have_blocks: int = 0,
        *,
        prefill_token_s: float | None = None,
        last_blocks: int | None = None,
        memory: Callable[[int], Sequence[Payload]] | None = None,
    ) -> Chain:
        """The longest chain on disk that continues ids[: have_blocks × 64], verified as a whole.

        prefill_token_s: seconds to compute one token; as soon as loading turns out to be slower than that, it stops.
        last_blocks: how many to keep of the full blocks before the one where the prompt goes on; those further back
        are verified and let go. None for all.
        memory: asked once, if all are kept, for places to read so many full blocks to, or fewer. What is in them means
        nothing unless the chain has it.
        """
        folder = self._folder
        room = len(ids) - 1 - have_blocks * BLOCK_TOKENS
        if folder is None or room < 1:
            return Chain()
        started = time.perf_counter()
        parent = self.root
        for block in range(have_blocks):
            parent = block_key(parent, ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS])
        rest = ids[have_blocks * BLOCK_TOKENS :]
        try:
            row = self._full_blocks(folder, parent, rest, last_blocks)
            size = BLOCK_TOKENS * self._bytes_per_token
            # At most _AHEAD are being read beyond the last one verified: what they overwrite is no longer wanted.
            places = len(row) if last_blocks is None else min(len(row), last_blocks + 1 + _AHEAD)
            if memory is None or last_blocks is not None:
                parts: Sequence[Payload] = list(np.empty((places, size), dtype=np.uint8))
            else:
                parts = memory(places)
                row = row[: len(parts)]
            full, complete = self._load(folder, row, parts, started, prefill_token_s)
            if full:
                parent = full[-1].key
            rest = rest[len(full) * BLOCK_TOKENS :]
            tail = self._load_tail(folder, parent, rest) if complete else ()
        except MemoryError:
            return Chain()
        entries = (*full, *tail)
        tokens = min(room, sum(entry.tokens for entry in entries))
        if not entries:
            return Chain()
        whole = min(len(full), room // BLOCK_TOKENS)
        passed = 0 if last_blocks is None else max(0, whole - last_blocks)
        return self._found(entries, passed, tokens, time.perf_counter() - started)

    def needs(self, key: bytes, tokens: int) -> bool:
        """Whether offering that entry makes sense: it is neither known to be stored nor waiting, and would be taken.
        tokens: whose payload is copied for it, 0 for one to be lent."""
        return self._writer is not None and self._writer.queue.wants(key, tokens * self._bytes_per_token)

    def offer(self, parent: bytes, ids: Sequence[int], payload: Payload | memoryview | bytes) -> bytes:
        """Store the block of `ids` after `parent` in the background; its key.

        ids: 1 … 64 of them. payload: a contiguous buffer that the store owns from now on. Never waits: an entry too
        many is dropped. Parents come before their children. Raises ValueError for a payload of the wrong size.
        """
        entry = self._entry(parent, ids, payload)
        if self._writer is not None:
            self._writer.offer(entry)
        return entry.key

    def lend(
        self, parent: bytes, ids: Sequence[int], payload: Payload | memoryview | bytes
    ) -> PendingEntry | None:
        """Like `offer`, but the payload stays the caller's, who calls `revoke` with what this returns before changing
        a byte of it. None when the entry was not taken."""
        entry = self._entry(parent, ids, payload)
        entry.lent = True
        return entry if self._writer is not None and self._writer.offer(entry) else None

    def revoke(self, entry: PendingEntry) -> None:
        """Drop a lent entry unless it is stored by now. Never waits."""
        entry.revoked = True
        if self._writer is not None:
            self._writer.queue.withdraw(entry)

    def set_busy(self, busy: bool) -> None:
        """Whether somebody computes on the cores that storing takes its time from: then it takes 1/200 of one."""
        if self._writer is not None:
            self._writer.queue.set_busy(busy)

    def flush(self, timeout: float) -> bool:
        """Wait until everything offered is stored or dropped. False after `timeout` seconds."""
        return self._writer is None or self._writer.queue.drain(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Finish writing within `timeout` seconds, drop the rest. Nothing is found or taken afterwards."""
        folder, self._folder = self._folder, None
        ended = self._writer is None or self._writer.close(timeout)
        self._writer = None
        if folder is not None and ended:  # a thread that hangs in a system call still uses the descriptors
            folder.close()

    def _entry(
        self, parent: bytes, ids: Sequence[int], payload: Payload | memoryview | bytes
    ) -> PendingEntry:
        if not 1 <= len(ids) <= BLOCK_TOKENS:
            raise ValueError(f"an entry holds 1 to {BLOCK_TOKENS} tokens, not {len(ids)}")
        view = (payload.data if isinstance(payload, np.ndarray) else memoryview(payload)).cast("B")
        if len(view) != len(ids) * self._bytes_per_token:
            raise ValueError(f"the payload has {len(view)} bytes, not {len(ids) * self._bytes_per_token}")
        return PendingEntry(block_key(parent, ids), parent, len(ids), view)

    @property
    def _may_write(self) -> bool:
        return not self._config.read_only and self._config.limit_bytes != 0

    def _open_folder(self) -> StoreFolder | None:
        root, name = self._config.root, model_folder(self._fingerprint)
        version: int | None = None
        try:
            version = open_root(root, create=self._may_write)
            if version is None:
                return None
            shown = root / VERSION_FOLDER / name
            model = open_own_folder(name, version, shown, create=self._may_write)
            if model is not None:
                return StoreFolder(root, version, model, name)
        except InferError as error:
            self._warn(f"{error}; the prompt cache is off")
        if version is not None:
            close_quietly(version)
        return None

    def _full_blocks(
        self, folder: StoreFolder, parent: bytes, ids: Sequence[int], last: int | None
    ) -> list[Wanted]:
        """The unbroken row of full blocks that seem to be there."""
        size = BLOCK_TOKENS * self._bytes_per_token
        found: list[Wanted] = []
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = block_key(parent, ids[start : start + BLOCK_TOKENS])
            wanted = Wanted(key, parent, BLOCK_TOKENS, size)
            kept = len(found) + 1 if last is None else min(len(found) + 1, last)
            if kept * size > self._config.load_bytes or not reader.exists(folder.model, wanted):
                break
            found.append(wanted)
            parent = key
        return found

    def _load(
        self,
        folder: StoreFolder,
        row: list[Wanted],
        parts: Sequence[Payload],
        started: float,
        token_s: float | None,
    ) -> tuple[list[ChainEntry], bool]:
        """The verified beginning of the row, read to `parts` in turn, so that only the last of them have payloads that
        are valid if there are fewer; False when loading was given up for being slow."""
        if len(row) < 2:
            return [
                ChainEntry(wanted.key, wanted.parent, wanted.tokens, parts[0])
                for wanted in row
                if self._read(folder, wanted, parts[0]) is Outcome.VERIFIED
            ], True
        loaded: list[ChainEntry] = []
        pending: list[tuple[Wanted, Payload, Future[Outcome]]] = []
        with ThreadPoolExecutor(_READERS, thread_name_prefix="kv-reader") as pool:
            for place in range(len(row) + _AHEAD):
                if place < len(row):
                    part = parts[place % len(parts)]
                    future = pool.submit(self._read, folder, row[place], part)
                    pending.append((row[place], part, future))
                if not pending or place < min(_AHEAD, len(row)) - 1:
                    continue
                wanted, part, future = pending.pop(0)
                if future.result() is not Outcome.VERIFIED:
                    break
                loaded.append(ChainEntry(wanted.key, wanted.parent, wanted.tokens, part))
                spent = time.perf_counter() - started
                slow = token_s is not None and spent > token_s * len(loaded) * BLOCK_TOKENS
                if slow and pending and len(loaded) >= _PROBE:
                    return loaded, False
        return loaded, True

    def _load_tail(self, folder: StoreFolder, parent: bytes, ids: Sequence[int]) -> tuple[ChainEntry, ...]:
        """The longest shorter block after `parent` that is a beginning of ids. Names are computed, not listed."""
        if len(ids) < 2:
            return ()
        for count, key in reversed(list(prefix_keys(parent, ids[: BLOCK_TOKENS - 1]))):
            wanted = Wanted(key, parent, count, count * self._bytes_per_token)
            if not reader.exists(folder.model, wanted):
                continue
            payload = np.empty(wanted.size, dtype=np.uint8)
            if self._read(folder, wanted, payload) is Outcome.VERIFIED:
                return (ChainEntry(key, parent, count, payload),)
        return ()

    def _read(self, folder: StoreFolder, wanted: Wanted, out: Payload) -> Outcome:
        clean = not self._config.read_only
        outcome = reader.read_entry(folder.model, self._fingerprint, wanted, out, clean=clean)
        if outcome is Outcome.DAMAGED:
            self.stats.damaged_entries += 1
        return outcome

    def _found(self, entries: tuple[ChainEntry, ...], passed: int, tokens: int, seconds: float) -> Chain:
        nbytes = sum(entry.payload.nbytes for entry in entries)
        self.stats.loaded_entries += len(entries)
        self.stats.loaded_tokens += tokens
        self.stats.loaded_bytes += nbytes
        self.stats.loaded_seconds += seconds
        if self._writer is not None:
            self._writer.found([entry.key for entry in entries], tuple(entry.name for entry in entries))
        return Chain(entries[passed:], passed, tokens, nbytes, seconds)


class _Once:
    """Passes on the first line only."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn: Callable[[str], None] | None = warn
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        with self._lock:
            warn, self._warn = self._warn, None
        if warn is not None:
            warn(line)
