"""What decides the value of a key or a value in the cache, and its digest: the fingerprint of the disk tier."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

_VERSION = 1
LABEL_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class KVIdentity:
    """Everything that changes a K or V for the same tokens; two that are equal may share a cache.

    weights: sha256 of the model's files. rope: fields of RopeConfig. layout: what the cache holds of one position, in
    words. quantization: "as stored", or what float weights were quantized to on load. kernel and kernel_version: the
    code that computes. torch, numpy: versions of what else computes, "" for what does not. adapter: sha256 of an
    adapter's file, "" without one.
    """

    weights: str
    architecture: str
    rope: Mapping[str, object] = field(default_factory=dict)
    layout: str = ""
    quantization: str = "as stored"
    kv_type: str
    kernel: str
    kernel_version: str
    torch: str = ""
    numpy: str = ""
    adapter: str = ""

    def parts(self) -> dict[str, object]:
        """Name → value of every part, in order of declaration."""
        return {**asdict(self), "rope": dict(self.rope)}

    def fingerprint(self) -> bytes:
        """32 bytes: SHA-256 of the parts as JSON with sorted keys."""
        content = json.dumps({"infer_kv": _VERSION, **self.parts()}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode("ascii")).digest()

    def label(self, name: str, path: str) -> str:
        """The label of a model's folder in the store: JSON for people and listings, which nothing else relies on."""
        text = json.dumps({"name": name, "path": path, "parts": self.parts()})
        return text if len(text) <= LABEL_CHARACTERS else name[:200]


@dataclass(frozen=True)
class Label:
    """What a folder of the store says of itself. It may be wrong: for showing and for choosing what to delete."""

    name: str = ""
    path: str = ""
    parts: Mapping[str, object] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        return str(self.parts.get("weights", ""))


def parse_label(text: str) -> Label:
    """The label; text that is not of this form is taken for a name."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return Label(text)
    if not isinstance(fields, dict):
        return Label(text)
    name, path, parts = (fields.get(key) for key in ("name", "path", "parts"))
    return Label(
        name if isinstance(name, str) else "",
        path if isinstance(path, str) else "",
        parts if isinstance(parts, dict) else {},
    )
