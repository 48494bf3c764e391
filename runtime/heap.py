"""How the C library keeps memory that was freed. Imports no torch; where there is no glibc, nothing happens.

By itself glibc raises the size from which a block gets pages of its own, and gives them back when freed, up to 32 MiB
with each such block that is freed, and has an arena of its own for each thread. Loading allocates and frees megabytes
of headers and tables in several threads: what is left of them between small blocks stays. Measured with 49,152 tokens:
2 MiB; with 262,144: 6 MiB.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>
_LARGE = 256 << 10
_MOST = 32 << 20  # where glibc's own rise ends


def keep_little() -> None:
    """From now on blocks from 256 KiB are given back when they are freed, and threads share one arena."""
    _set(_M_MMAP_THRESHOLD, _LARGE)
    _set(_M_ARENA_MAX, 1)


def keep_much() -> None:
    """Give back what is free, and from now on keep what a step frees for the next one, which allocates it again."""
    _set(_M_MMAP_THRESHOLD, _MOST)
    _set(_M_TRIM_THRESHOLD, 2 * _MOST)
    if (trim := _function("malloc_trim")) is not None:
        trim(0)


def _set(parameter: int, value: int) -> None:
    if (mallopt := _function("mallopt")) is not None:
        mallopt(parameter, value)


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
