"""Picks an attention backend by name."""

from __future__ import annotations

import importlib

from infer.runtime.attention.base import AttentionBackend
from infer.runtime.errors import UsageError

BACKENDS = {"torch": ("dense", "DenseAttention"), "reference": ("reference", "ReferenceAttention")}


def create_attention(name: str) -> AttentionBackend:
    """Raises UsageError listing the choices."""
    if name not in BACKENDS:
        raise UsageError(f"there is no attention backend {name!r}; choose from {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name]
    backend: AttentionBackend = getattr(
        importlib.import_module(f"infer.runtime.attention.{module}"), attribute
    )()
    return backend
