"""Memory for weights, in huge pages where the system gives them. Imports no torch.

Decoding reads every weight once a token: with pages of 4 KiB a good part of that is spent on address translation
(measured 3 to 8 % of the bandwidth on 2 cores). Small planes share slabs, so that they profit as well.
"""

from __future__ import annotations

import math
import mmap

SLAB = 32 << 20
ALIGNMENT = 64


class Arena:
    """Hands out uninitialized memory. A slab is freed with the last view into it."""

    def __init__(self) -> None:
        self._slab = memoryview(b"")
        self._used = 0

    def take(self, size: int) -> memoryview:
        """`size` writable bytes, aligned to 64. Raises OSError when the system has none."""
        if size > SLAB // 4:
            return memoryview(huge_pages(size))[:size]
        if self._used + size > len(self._slab):
            self._slab, self._used = memoryview(huge_pages(SLAB)), 0
        part = self._slab[self._used : self._used + size]
        self._used += math.ceil(size / ALIGNMENT) * ALIGNMENT
        return part


def huge_pages(size: int) -> mmap.mmap:
    """Fresh pages, none of which costs memory before it is written. Raises OSError when the system has none."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
