"""From a text to its place in an array of texts, in 8 bytes per text: a dict takes 100 and more.

A text of bytes t hashes to the number that they are in base 256, highest first, modulo a prime: one `int.from_bytes`
for one text, a few passes of numpy for a vocabulary. The hash of two texts joined follows from theirs. The prime is
2^31 - 19: modulo 2^31 - 1, bytes 31 apart weigh the same, and runs of one character hash alike.
Hashes are kept sorted, with the places beside them; what a hash finds is compared byte by byte.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from infer.runtime.checkpoint.arrays import TextArray

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Places = npt.NDArray[np.int32]

_PRIME = (1 << 31) - 19
_LONG = 1024  # bytes; longer texts are hashed one by one
_SPACE = 0x20
_MOST_ALIKE = 16


class TokenIndex(Mapping[str, int]):
    """Where each text stands in `texts`; of equal ones the last."""

    def __init__(self, texts: TextArray) -> None:
        import numpy as np

        self._texts = texts
        starts = _starts(texts)
        found = _hashes(texts.data, starts[:-1], starts[1:])
        order = np.argsort(found, kind="stable").astype(np.uint32)
        self._hashes = array("I", found[order].astype(np.uint32).tobytes())
        self._places = array("I", order.tobytes())

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __getitem__(self, text: str) -> int:
        place = self.find(text.encode("utf-8", "surrogateescape"))
        if place < 0:
            raise KeyError(text)
        return place

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.find(text.encode("utf-8", "surrogateescape")) >= 0

    def find(self, text: bytes) -> int:
        """The place of a text in UTF-8, -1 where there is none."""
        key = int.from_bytes(text, "big") % _PRIME
        hashes, data, starts = self._hashes, self._texts.data, self._texts.starts
        at, found = bisect_left(hashes, key), -1
        while at < len(hashes) and hashes[at] == key:
            place = self._places[at]
            if data[starts[place] : starts[place + 1]] == text:
                found = place
            at += 1
        return found

    @property
    def crowded(self) -> bool:
        """Whether so many texts share a hash that finding one takes long: no vocabulary does that by chance."""
        import numpy as np

        hashes = np.frombuffer(self._hashes, dtype=np.uint32)
        return len(hashes) > _MOST_ALIKE and bool((hashes[_MOST_ALIKE:] == hashes[:-_MOST_ALIKE]).any())

    def repeated(self) -> str | None:
        """One of the texts that are there twice. Not for crowded hashes."""
        import numpy as np

        hashes = np.frombuffer(self._hashes, dtype=np.uint32)
        for at in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
            text = self._texts.encoded(self._places[at])
            later = at + 1
            while later < len(hashes) and self._hashes[later] == self._hashes[at]:
                if self._texts.encoded(self._places[later]) == text:
                    return text.decode("utf-8", "surrogateescape")
                later += 1
        return None

    def holds_pairs(self, pairs: TextArray) -> bool:
        """Whether each of `pairs` is two texts of this index with one space between, which joined are a third.

        False may also mean that this is hard to tell. By hashes alone: true of a text that is not there in one case of
        some ten thousand.
        """
        import numpy as np

        if not len(pairs):
            return True
        starts, ends = _starts(pairs)[:-1], _starts(pairs)[1:]
        spaces = np.flatnonzero(np.frombuffer(pairs.data, dtype=np.uint8) == _SPACE).astype(np.int32)
        if len(spaces) != len(pairs) or int((ends - starts).max()) > _LONG:
            return False
        if not ((starts < spaces) & (spaces + 1 < ends)).all():
            return False
        left = _hashes(pairs.data, starts, spaces)
        right = _hashes(pairs.data, spaces + 1, ends)
        powers = np.array([pow(256, size, _PRIME) for size in range(_LONG + 1)], dtype=np.uint64)
        joined = (left * powers[ends - spaces - 1] + right) % np.uint64(_PRIME)
        known = np.frombuffer(self._hashes, dtype=np.uint32)
        return all(_all_in(part, known) for part in (left, right, joined))


def _starts(texts: TextArray) -> Places:
    import numpy as np

    return np.frombuffer(texts.starts, dtype=np.int32)


def _all_in(values: npt.NDArray[np.uint64], known: npt.NDArray[np.uint32]) -> bool:
    """known: ascending."""
    import numpy as np

    if not len(known):
        return False
    wanted = values.astype(np.uint32)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return bool((known[at] == wanted).all())


def _hashes(data: bytes, starts: Places, ends: Places) -> npt.NDArray[np.uint64]:
    """uint64 [n] below the prime: the hash of each data[start:end]."""
    import numpy as np

    octets = np.frombuffer(data, dtype=np.uint8)
    sizes = ends - starts
    order = np.argsort(-sizes, kind="stable")
    begins, lengths = starts[order], sizes[order]
    sums = np.zeros(len(order), dtype=np.uint64)
    long = int(np.count_nonzero(lengths > _LONG))
    # how many texts, from the first on, have a byte at each place
    counts = np.searchsorted(-lengths, -np.arange(1, _LONG + 1), side="right")
    for place, count in enumerate(counts.tolist()):
        if count <= long:
            break
        part = sums[:count]
        part *= np.uint64(256)
        part += octets[begins[:count] + place]
        if place % 4 == 3:  # four more bytes keep a sum below 2^63
            part %= np.uint64(_PRIME)
    sums %= np.uint64(_PRIME)
    for at in range(long):
        start = int(begins[at])
        sums[at] = int.from_bytes(data[start : start + int(lengths[at])], "big") % _PRIME
    found = np.empty_like(sums)
    found[order] = sums
    return found
