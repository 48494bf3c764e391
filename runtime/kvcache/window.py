"""Which KV blocks a model still reads whose layers all have a sliding window. Torch-free.

window: positions a query sees, itself included (`ModelConfig.cache_window`); 0 sees all of them.
"""

from __future__ import annotations

from infer.runtime.config import BLOCK_SIZE


def first_visible(position: int, window: int) -> int:
    """Index of the first block that the query at `position` reads, and all after it."""
    return max(0, position - window + 1) // BLOCK_SIZE if window else 0


def blocks_behind(window: int) -> int | None:
    """How many whole blocks, the last ones, it takes to go on after them: at least one; None for all."""
    return max(1, -(-(window - 1) // BLOCK_SIZE)) if window else None


def blocks_held(window: int, step: int, ctx: int) -> int:
    """Most blocks a sequence of up to ctx positions holds when each step computes up to `step` of them, 0 for all."""
    whole = -(-ctx // BLOCK_SIZE)
    if not window or not step:
        return whole
    return min(whole, -(-(window + step - 2) // BLOCK_SIZE) + 1)
