"""The account of time and bytes that a chat template runs on, and what each operation is charged.

Bytes are counted when something is made, never given back: what lives at once is at most what was charged.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

TIME_LIMIT = 1.5  # seconds of one render
BYTE_LIMIT = 32 << 20  # for one render, beside BYTES_PER_INPUT_BYTE times its input
BYTES_PER_INPUT_BYTE = 64
MAX_WIDTH = 1024  # characters of padding or indentation
MAX_INTEGER_BITS = 4096
SMALL = 64  # bytes of an object with next to nothing in it

_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{4})")
_FORMAT_WIDTH = re.compile(r"[:.][^{}]*([0-9]{4}|\{)")


class TemplateLimitError(Exception):
    """A template ran too long or grew too large."""


class Meter:
    """What one render may still use."""

    def __init__(self, input_bytes: int, mark: str = "") -> None:
        """mark: the character that guards control tokens in messages (see chat_template)."""
        self.mark = mark
        self.deadline = time.monotonic() + TIME_LIMIT
        self.left = BYTE_LIMIT + BYTES_PER_INPUT_BYTE * input_bytes

    def charge(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TemplateLimitError("it makes more text than its input can need")

    def kept(self, value: Any) -> Any:
        """The value, after charging what it holds. A container is charged for itself alone, but must not be
        larger than what is left, shared parts counted as often as they appear."""
        if isinstance(value, str):
            self.charge(text_bytes(value))
        elif isinstance(value, list | tuple | dict):
            self.charge(SMALL + 8 * len(value))
            self.tree_bytes(value)
        return value

    def tree_bytes(self, value: Any) -> int:
        """Bytes of a value as if nothing in it were shared. Raises when that is more than is left."""
        size = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                size += text_bytes(item)
            elif isinstance(item, Mapping):
                waiting.extend(item.keys())
                waiting.extend(item.values())
            elif isinstance(item, list | tuple):
                waiting.extend(item)
            size += SMALL
            if size > self.left:
                raise TemplateLimitError("it makes lists larger than its input can need")
        return size

    def charge_as_text(self, value: Any, factor: int = 1) -> None:
        """Charge for str(value), which may write a character as up to ten."""
        if isinstance(value, str):
            self.charge(factor * text_bytes(value))
        else:
            self.charge(4 * factor * self.tree_bytes(value))

    def join_charged(self, parts: Iterable[str]) -> str:
        """The parts joined, each charged as it comes."""
        texts = []
        for part in parts:
            self.charge(text_bytes(part))
            texts.append(part)
        return "".join(texts)


def text_bytes(text: str) -> int:
    return SMALL + len(text) * (1 if text.isascii() else 4)


def width(value: Any) -> int:
    """Characters to pad or indent with, given as a number or as text. Raises above MAX_WIDTH."""
    size = len(value) if isinstance(value, str) else value
    if isinstance(size, int) and size > MAX_WIDTH:
        raise TemplateLimitError(
            f"it asks for a width, precision or number of more than {MAX_WIDTH} characters"
        )
    return size if isinstance(size, int) else 0


def charge_binary(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Charge for `left operator right` before it is computed."""
    if isinstance(left, int) and isinstance(right, int):
        _check_integers(operator, left, right)
    elif operator == "%" and isinstance(left, str):
        if _PERCENT_WIDTH.search(left):
            raise TemplateLimitError("it formats with a width that is too large or not constant")
        charge_format(meter, left, left.count("%"), [right])
    elif operator == "*" and isinstance(left, int):
        _charge_repeat(meter, right, left)
    elif operator == "*" and isinstance(right, int):
        _charge_repeat(meter, left, right)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        meter.charge(text_bytes(left) + text_bytes(right))


def _check_integers(operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = left.bit_length() * max(abs(right), 1)
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it computes with integers of more than {MAX_INTEGER_BITS} bits")


def _charge_repeat(meter: Meter, value: Any, times: int) -> None:
    if isinstance(value, str):
        meter.charge(text_bytes(value) * max(times, 0))
    elif isinstance(value, list | tuple):
        meter.charge(meter.tree_bytes(value) * max(times, 0))


def charge_format(meter: Meter, pattern: str, fields: int, values: list[Any]) -> None:
    largest = max((meter.tree_bytes(value) for value in values), default=0)
    meter.charge(text_bytes(pattern) + 4 * fields * largest)


def charge_brace_format(meter: Meter, pattern: str, values: list[Any]) -> None:
    if _FORMAT_WIDTH.search(pattern):
        raise TemplateLimitError("it formats with a width that is too large or not constant")
    charge_format(meter, pattern, pattern.count("{"), values)


def charge_replace(meter: Meter, text: Any, old: Any, new: Any, count: Any = -1) -> None:
    meter.charge_as_text(text)
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        meter.charge(found * text_bytes(new))
    else:
        # Of other kinds only the largest thinkable number of places is known.
        meter.charge(meter.tree_bytes(text) * 4 * meter.tree_bytes(new))


def charge_join(meter: Meter, separator: Any, items: list[Any]) -> None:
    meter.charge_as_text(separator, max(len(items), 1))
    for item in items:
        meter.charge_as_text(item)


def charge_split(meter: Meter, text: str, separator: Any = None, maxsplit: Any = -1) -> None:
    pieces = text.count(separator) + 1 if isinstance(separator, str) and separator else len(text) // 2 + 1
    meter.charge(text_bytes(text) + SMALL * pieces)


_current = threading.local()


def meter() -> Meter:
    """The meter of the render that runs in this thread, or a new one where none does."""
    found: Meter | None = getattr(_current, "meter", None)
    return found if found is not None else Meter(0)


@contextmanager
def metered(limits: Meter, untraced: frozenset[str]) -> Iterator[None]:
    """Run what is inside on this account. Code of the files in `untraced` is not looked at line by line."""

    def on_line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if time.monotonic() > limits.deadline:
            raise TemplateLimitError(f"it runs for more than {TIME_LIMIT} s")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if time.monotonic() > limits.deadline:
            raise TemplateLimitError(f"it runs for more than {TIME_LIMIT} s")
        return None if frame.f_code.co_filename in untraced else on_line

    before, traced = getattr(_current, "meter", None), sys.gettrace()
    _current.meter = limits
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(traced)
        _current.meter = before
