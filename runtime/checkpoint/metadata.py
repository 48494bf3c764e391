"""Typed access to metadata: the value, the default, or one line that names the key.

bool is not int here: a flag where a number belongs is an error, and the other way round.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar, cast, overload

from infer.runtime.checkpoint.arrays import NumberArray, TextArray
from infer.runtime.checkpoint.base import ValueType
from infer.runtime.checkpoint.printable import shown
from infer.runtime.errors import CheckpointError


class _Required(enum.Enum):
    """The default of a key that must be there."""

    REQUIRED = enum.auto()


_REQUIRED: Final = _Required.REQUIRED

Metadata = Mapping[str, object]
D = TypeVar("D")
T = TypeVar("T", int, float, bool, str)

_TYPES: dict[type, ValueType] = {
    bool: ValueType.BOOL,
    int: ValueType.INT,
    float: ValueType.FLOAT,
    str: ValueType.STR,
    list: ValueType.ARRAY,
    TextArray: ValueType.ARRAY,
    NumberArray: ValueType.ARRAY,
}


def value_type(value: object) -> ValueType:
    """Type of a metadata value. Raises TypeError for what no metadata holds."""
    found = _TYPES.get(type(value))
    if found is None:
        raise TypeError(f"{type(value).__name__} is no metadata type")
    return found


@overload
def get_int(metadata: Metadata, key: str) -> int: ...
@overload
def get_int(metadata: Metadata, key: str, *, default: D) -> int | D: ...
def get_int(metadata: Metadata, key: str, *, default: object = _REQUIRED) -> object:
    """The integer under `key`. CheckpointError when it is of another type, or missing without a default."""
    return _get(metadata, key, int, default)


@overload
def get_bool(metadata: Metadata, key: str) -> bool: ...
@overload
def get_bool(metadata: Metadata, key: str, *, default: D) -> bool | D: ...
def get_bool(metadata: Metadata, key: str, *, default: object = _REQUIRED) -> object:
    """The flag under `key`. CheckpointError when it is of another type, or missing without a default."""
    return _get(metadata, key, bool, default)


@overload
def get_str(metadata: Metadata, key: str) -> str: ...
@overload
def get_str(metadata: Metadata, key: str, *, default: D) -> str | D: ...
def get_str(metadata: Metadata, key: str, *, default: object = _REQUIRED) -> object:
    """The text under `key`. CheckpointError when it is of another type, or missing without a default."""
    return _get(metadata, key, str, default)


@overload
def get_float(metadata: Metadata, key: str) -> float: ...
@overload
def get_float(metadata: Metadata, key: str, *, default: D) -> float | D: ...
def get_float(metadata: Metadata, key: str, *, default: object = _REQUIRED) -> object:
    """The finite number under `key`; an integer becomes a float where that is exact.

    CheckpointError when it is of another type, infinite or NaN, or missing without a default.
    """
    value = metadata.get(key)
    if type(value) is int and _is_exact(value):
        return float(value)
    value = _get(metadata, key, float, default)
    if key in metadata and isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"metadata key {shown(key)} is {value}, not a finite number; use another file")
    return value


@overload
def get_list(metadata: Metadata, key: str, kind: type[T]) -> list[T]: ...
@overload
def get_list(metadata: Metadata, key: str, kind: type[T], *, default: D) -> list[T] | D: ...
def get_list(metadata: Metadata, key: str, kind: type[T], *, default: object = _REQUIRED) -> object:
    """The array under `key`, every element of type `kind`; not to be changed.

    CheckpointError when it is no array, holds another type, or is missing without a default.
    """
    value = _get(metadata, key, list, default)
    if key not in metadata:
        return value
    items = value if isinstance(value, list) else list(cast(Sequence[object], value))
    others = set(map(type, items)) - {kind}
    if others:
        found = " and ".join(
            sorted(_TYPES[other].value if other in _TYPES else other.__name__ for other in others)
        )
        raise _wrong_type(key, f"array of {_TYPES[kind].value}", f"array of {found}")
    return items


def _get(metadata: Metadata, key: str, kind: type, default: object) -> object:
    if key not in metadata:
        if default is _REQUIRED:
            raise CheckpointError(
                f"metadata key {shown(key)} is missing; the file is incomplete, use another one"
            )
        return default
    value = metadata[key]
    if value_type(value) is not _TYPES[kind]:
        raise _wrong_type(key, _TYPES[kind].value, value_type(value).value)
    return value


def _wrong_type(key: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"metadata key {shown(key)} holds {found} where {expected} belongs; use another file"
    )


def _is_exact(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False
