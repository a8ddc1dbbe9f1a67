"""Reading single keys of a `config.json` mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def required(config: Mapping[str, Any], key: str) -> Any:
    """The value of `key`; ValueError where it is absent or null."""
    if config.get(key) is None:
        raise ValueError(f"model config: key '{key}' is missing")
    return config[key]


def read_eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, which is absent, one id, or a list."""
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return (int(eos),) if isinstance(eos, int) else tuple(int(token) for token in eos)


def write_eos(ids: tuple[int, ...]) -> int | list[int] | None:
    """Inverse of `read_eos`."""
    return ids[0] if len(ids) == 1 else list(ids) or None
