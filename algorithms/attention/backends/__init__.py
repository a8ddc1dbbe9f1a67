"""Attention backends, one file each, by name. `protocol` is their contract."""

from typing import Any

from algorithms.attention.backends.hybrid import SINGLE, HybridBackend


def backends() -> dict[str, Any]:
    return dict(sorted({**SINGLE, HybridBackend.name: HybridBackend}.items()))
