"""Typed getters: the value, the default, or one line that names the key and both types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from infer.runtime.checkpoint.base import ValueType
from infer.runtime.checkpoint.metadata import get_bool, get_float, get_int, get_list, get_str, value_type
from infer.runtime.errors import CheckpointError

VALUES: dict[str, object] = {"int": 7, "float": 0.5, "bool": True, "str": "x", "array": [1, 2]}
GETTERS: dict[str, Callable[..., Any]] = {
    "int": get_int,
    "float": get_float,
    "bool": get_bool,
    "str": get_str,
    "array": lambda metadata, key, **options: get_list(metadata, key, int, **options),
}


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("kind", GETTERS)
def test_own_type_and_no_other(kind: str, key: str) -> None:
    if kind == key:
        assert GETTERS[kind](VALUES, key) is VALUES[key]
        assert value_type(VALUES[key]) is ValueType(kind)
    elif (kind, key) == ("float", "int"):
        assert GETTERS[kind](VALUES, key) == 7.0
        assert type(GETTERS[kind](VALUES, key)) is float
    else:
        for options in ({}, {"default": None}):
            with pytest.raises(CheckpointError, match=f"'{key}' holds {key} where {kind} belongs"):
                GETTERS[kind](VALUES, key, **options)


@pytest.mark.parametrize("kind", GETTERS)
def test_missing_keys(kind: str) -> None:
    with pytest.raises(CheckpointError, match=r"metadata key 'a\\nb' is missing"):
        GETTERS[kind]({}, "a\nb")
    default = object()
    assert GETTERS[kind]({}, "a", default=default) is default
    assert GETTERS[kind]({}, "a", default=None) is None


def test_element_types() -> None:
    metadata = {"mixed": [1, True, 2.0], "none": [], "bools": [True]}
    with pytest.raises(
        CheckpointError, match="'mixed' holds array of bool and float where array of int belongs"
    ):
        get_list(metadata, "mixed", int)
    with pytest.raises(CheckpointError, match="array of bool where array of int"):
        get_list(metadata, "bools", int)
    assert get_list(metadata, "none", str) == []
    assert get_list(metadata, "bools", bool) is metadata["bools"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_float_must_be_finite(value: float) -> None:
    with pytest.raises(CheckpointError, match="not a finite number"):
        get_float({"x": value}, "x")
    assert get_float({}, "x", default=math.inf) == math.inf


@pytest.mark.parametrize("value", [2**53 + 1, 10**400])
def test_integers_that_no_float_holds(value: int) -> None:
    with pytest.raises(CheckpointError, match="holds int where float belongs"):
        get_float({"x": value}, "x")
