"""Memory for weights, in huge pages where the system gives them. Imports no torch.

Decoding reads every weight once a token: with pages of 4 KiB a good part of that is spent on address translation
(measured 3 to 8 % of the bandwidth on 2 cores). Small planes share slabs, so that they profit as well.
"""

from __future__ import annotations

import math
import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

SLAB = 32 << 20
ALIGNMENT = 64
_SMALL = 1 << 16

Number = TypeVar("Number", bound=np.generic)


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


def empty(shape: tuple[int, ...], dtype: type[Number]) -> npt.NDArray[Number]:
    """An uninitialized array, aligned to 64 bytes, whose pages cost no memory before they are written: where most rows
    are seldom used, not in huge ones (numpy asks for those from 4 MiB on). Raises OSError when the system has none."""
    count = math.prod(shape)
    size = count * np.dtype(dtype).itemsize
    if size > _SMALL:
        return np.frombuffer(fresh_pages(size), dtype=dtype, count=count).reshape(shape)
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def fresh_pages(size: int) -> mmap.mmap:
    """Pages of the usual size, none of which costs memory before it is written. Raises OSError when the system has
    none."""
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_pages(size: int) -> mmap.mmap:
    """The same in huge pages, where the system gives them."""
    memory = fresh_pages(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
