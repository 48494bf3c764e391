"""JSON files of a model, read strictly: of bounded size, names once, numbers finite."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path

from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_object(path: Path, most: int) -> dict[str, object]:
    """The object that a JSON file of at most `most` bytes holds. Raises as `read_text` and `parse_object`."""
    return parse_object(read_bytes(path, most), shown_path(path))


def read_bytes(path: Path, most: int) -> bytes:
    """The whole file. Raises CheckpointError when it is larger than `most` bytes or cannot be read, and
    ModelNotFoundError when there is none."""
    with contextlib.closing(ModelFile(path)) as file:
        if file.size > most:
            raise CheckpointError(
                f"{shown_path(path)}: has {file.size} bytes, the most that is read is {most}"
            )
        return file.read(0, file.size)


def parse_object(data: bytes, where: str) -> dict[str, object]:
    """The JSON object that UTF-8 `data` is. Raises CheckpointError that begins with `where` for anything else: a name
    given twice, NaN and infinities, numbers of endless digits, half surrogate pairs, nesting too deep."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise CheckpointError(f"{where}: is not UTF-8 text; download it again") from None
    except RecursionError:
        raise CheckpointError(f"{where}: its JSON is nested too deeply; download it again") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: is no valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds {type(value).__name__}, not a JSON object; download it again")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(n for n in found if names.count(n) > 1))} is there twice")
    return found


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value
