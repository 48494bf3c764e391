"""Sizes as people write them."""

from __future__ import annotations

import re

from infer.runtime.errors import UsageError

_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*(?:([kmgt]?)(i?)b?)\s*", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST = 1 << 63


def parse_size(text: str, origin: str) -> int:
    """`20GB` → 20 · 10⁹ and `512MiB` → 512 · 2²⁰ bytes; a bare number is bytes, and `G` means `GB`.

    Raises UsageError, naming `origin`, for anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is not None and not (match[3] and not match[2]):
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])
        if size < _MOST:
            return size
    raise UsageError(f"{origin} must be a size such as 20GB, 512MiB or 0, not {text[:100]!r}")
