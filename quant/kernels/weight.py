"""What every kernel's form of a matrix has in common. Imports no torch."""

from __future__ import annotations

import abc


class PackedWeight(abc.ABC):
    """A matrix [N, K] in a kernel's own layout."""

    shape: tuple[int, int]

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes read for one pass over the matrix."""
