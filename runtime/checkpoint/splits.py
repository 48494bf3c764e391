"""File names of a model split over several files: STEM-00001-of-00003.gguf."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class SplitName:
    """One shard's name. index counts from 0, as the file's own split.no does; the name counts from 1."""

    stem: str
    index: int
    count: int

    @classmethod
    def parse(cls, name: str) -> SplitName | None:
        """The parts of a file name (no folders), or None when it is not of that form."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        number, count = int(match["number"]), int(match["count"])
        if not 1 <= number <= count:
            return None
        return cls(match["stem"], number - 1, count)

    def sibling(self, index: int) -> str:
        """Name of shard `index`, counted from 0."""
        return f"{self.stem}-{index + 1:05d}-of-{self.count:05d}.gguf"
