"""What logit bias and penalties share: new logits for a few tokens of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infer.samplers.ranking import FloatArray, IntArray

_LIMIT = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class LogitEdit:
    """`change(values, which)` gives the new logits of the tokens ids[which].

    ids: int64 [n], distinct. values: float64 [m], their logits. which: int64 [m], positions in ids.
    exclusive: the tokens not in ids are banned as well.
    """

    ids: IntArray
    change: Callable[[FloatArray, IntArray], FloatArray]
    exclusive: bool = False


def bounded(changed: FloatArray, values: FloatArray) -> FloatArray:
    """`changed` within float32's finite range; what was banned (−infinity in `values`) stays banned."""
    return np.where(np.isneginf(values), values, np.clip(changed, -_LIMIT, _LIMIT))
