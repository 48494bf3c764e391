"""Which KV blocks are free, shared or kept for reuse. Ids and counts only: no tensors, no torch."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class BlockPool:
    """Reference-counted blocks 0 … size - 1.

    A block is free, held (count ≥ 1), or kept: count 0, but its contents are worth finding again. Kept blocks
    are given out only when none is free, least recently used first. All of `on_allocate` hear of every block that is
    given out, before anybody can write to it: what it held is gone then.
    """

    def __init__(self, size: int) -> None:
        """Raises ValueError when size < 1."""
        if size < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {size}")
        self.size = size
        self.on_allocate: list[Callable[[int], None]] = []
        self._counts = [0] * size
        self._free = deque(range(size))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free) + len(self._kept)

    def allocate(self) -> int | None:
        """A block with count 1, or None when every block is held."""
        if self._free:
            block = self._free.popleft()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
        else:
            return None
        self._counts[block] = 1
        for hear in self.on_allocate:
            hear(block)
        return block

    def hold(self, block: int) -> None:
        """One more holder of a held or kept block. Raises ValueError when it is free."""
        if self._counts[block] == 0:
            if block not in self._kept:
                raise ValueError(f"block {block} is free and cannot be shared")
            del self._kept[block]
        self._counts[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One holder less; the last one leaves it kept or free. Raises ValueError when nobody holds it."""
        if self._counts[block] == 0:
            raise ValueError(f"block {block} is released more often than it was held")
        self._counts[block] -= 1
        if self._counts[block] == 0:
            if keep:
                self._kept[block] = None
            else:
                self._free.append(block)

    def check(self) -> None:
        """Raise RuntimeError unless every block is in exactly one state."""
        states = [0] * self.size
        for block in [*self._free, *self._kept]:
            states[block] += 1
        for block, count in enumerate(self._counts):
            if states[block] + (count > 0) != 1:
                raise RuntimeError(f"block {block} is in {states[block] + (count > 0)} states")
