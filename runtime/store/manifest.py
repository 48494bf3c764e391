"""Where a file of the store came from: a small JSON file next to it, for people and listings only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from infer.runtime.store.files import SHA256, write_atomically

_SUFFIX = ".json"
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Manifest:
    """Where a file of the store came from. pulled: UTC, ISO 8601."""

    name: str
    source: str
    sha256: str
    license: str
    pulled: str


def manifest_path(file: Path) -> Path:
    """The manifest lies next to its file."""
    return file.with_name(file.name + _SUFFIX)


def write_manifest(file: Path, manifest: Manifest) -> None:
    """Raises OSError."""
    write_atomically(manifest_path(file), json.dumps(asdict(manifest), indent=2) + "\n")


def read_manifest(file: Path) -> Manifest | None:
    """None where there is none, or one that this version cannot make sense of."""
    try:
        with manifest_path(file).open("rb") as stream:
            fields = json.loads(stream.read(_LARGEST))
        manifest = Manifest(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    texts = all(isinstance(value, str) for value in asdict(manifest).values())
    return manifest if texts and SHA256.fullmatch(manifest.sha256) else None
