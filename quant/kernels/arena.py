"""Memory for weights, in huge pages where the system gives them.

Decoding reads every weight once a token: with pages of 4 KiB a good part of that is spent on address translation
(measured 3 to 8 % of the bandwidth on 2 cores). Small planes share slabs, so that they profit as well.
"""

from __future__ import annotations

import math
import mmap

import torch

SLAB = 32 << 20
ALIGNMENT = 64


class Arena:
    """Hands out uninitialized tensors on the CPU. A slab is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] elements, aligned to 64 bytes."""
        size = count * dtype.itemsize
        if size > SLAB // 4:
            return huge_pages(size)[:size].view(dtype)
        if self._used + size > self._slab.numel():
            self._slab, self._used = huge_pages(SLAB), 0
        part = self._slab[self._used : self._used + size].view(dtype)
        self._used += math.ceil(size / ALIGNMENT) * ALIGNMENT
        return part


def huge_pages(size: int) -> torch.Tensor:
    """uint8 tensor over fresh pages; none of them costs memory before it is written."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
