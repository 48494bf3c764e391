"""Times the disk prefix cache alone: storing and finding a prompt of SmolLM2's size. Run it on a quiet machine.

python benchmarks/disk_cache.py [TOKENS] [BYTES_PER_TOKEN] [FOLDER]
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from infer.runtime.kvcache.disk.checksum import payload_digest
from infer.runtime.kvcache.disk.store import PrefixStore, StoreConfig

BLOCK = 64


def fail(line: str) -> None:
    raise RuntimeError(line)


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    per_token = int(sys.argv[2]) if len(sys.argv) > 2 else 23040
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as folder:
        ids = [random.Random(1).randrange(49152) for _ in range(tokens)]
        pieces = [ids[at : at + BLOCK] for at in range(0, tokens, BLOCK)]
        payloads = [np.frombuffer(os.urandom(len(piece) * per_token), np.uint8) for piece in pieces]
        total = sum(payload.nbytes for payload in payloads)

        def store() -> PrefixStore:
            return PrefixStore(StoreConfig(root=Path(folder) / "cache"), bytes(32), per_token, fail)

        started = time.thread_time()
        for payload in payloads:
            payload_digest(payload)
        print(f"checksum  {1e3 * (time.thread_time() - started):6.1f} ms of CPU for {total / 1e6:.1f} MB")

        writer = store()
        wall, cpu = time.perf_counter(), time.process_time()
        parent = writer.root
        for piece, payload in zip(pieces, payloads, strict=True):
            parent = writer.offer(parent, piece, payload)
        queued = time.perf_counter() - wall
        writer.flush(60)
        report("write", wall, cpu, f"{1e3 * queued:.1f} ms of it in the caller's thread; {writer.stats}")
        writer.close()
        for _ in range(5):
            reader = store()
            wall, cpu = time.perf_counter(), time.process_time()
            chain = reader.find(ids)
            report("find", wall, cpu, f"{chain.tokens} tokens")
            reader.close()


def report(name: str, wall: float, cpu: float, more: str) -> None:
    wall, cpu = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
    print(f"{name:9} {wall:6.1f} ms, {cpu:.1f} ms of CPU; {more}")


if __name__ == "__main__":
    main()
