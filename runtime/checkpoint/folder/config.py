"""Typed reading of config.json: every key is read, known to change nothing, or an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from infer.runtime.checkpoint.printable import shown
from infer.runtime.errors import CheckpointError, UnsupportedModelError

MAX_LAYERS = 4096


class ConfigReader:
    """The object under `where`. null counts as a key that is not there. Methods raise CheckpointError for values of
    another type or out of range, and where a key without a default is missing."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.where = where
        self._values = {key: value for key, value in values.items() if value is not None}
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 27) -> int:
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0) -> float:
        """A float above `low`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > low:
            raise self._wrong(key, value, f"a number above {low:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of numbers above 0."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) in (int, float) and item > 0 for item in value):
            raise self._wrong(key, value, "a list of numbers above 0")
        return [float(item) for item in value]

    def items(self, key: str) -> list[object] | None:
        value = self._get(key, False)
        if value is False:
            return None
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def classes(self) -> set[str]:
        """Of `auto_map`: the classes of configuration and model, without their modules."""
        named = [value for key, value in self._values.items() if key.startswith(("AutoConfig", "AutoModel"))]
        return {str(value).rpartition(".")[2] for value in named}

    def section(self, key: str) -> ConfigReader | None:
        """The object under `key`, None where there is none."""
        value = self._get(key, False)
        if value is False:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def ignore(self, keys: Iterable[str]) -> None:
        self._known.update(keys)

    def require(self, key: str, *accepted: object) -> None:
        """Raise UnsupportedModelError where the key is there with a value that is not one of the accepted."""
        value = self._get(key, accepted[0])
        if not any(type(value) is type(one) and value == one for one in accepted):
            choices = " or ".join(str(one) for one in accepted)
            raise UnsupportedModelError(
                f"{self.where}: {key} is {shown(str(value))}; this version runs {choices} only"
            )

    def finish(self) -> None:
        """Raise UnsupportedModelError naming the keys that nobody read."""
        unknown = sorted(self._values.keys() - self._known)
        if unknown:
            more = f" ({len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise UnsupportedModelError(
                f"{self.where}: {shown(unknown[0])} is not known to this version of infer{more}; "
                "running without it would be a guess"
            )

    def _get(self, key: str, default: object) -> object:
        self._known.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.where}: {key} is missing; download the file again")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {shown(str(value))}, expected {expected}")
