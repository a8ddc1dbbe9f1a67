"""Reading single keys of a `config.json` mapping."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from specdec_kernels.checks import expect_between

LARGEST = 2**31 - 1


def required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"model config: key '{key}' is missing")
    return config[key]


def read_size(key: str, value: Any, most: int = LARGEST) -> int:
    """`value` as a whole number from 1 to `most`; ValueError names `key`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        raise ValueError(f"{key}: expected a whole number, got {value!r}")
    expect_between(key, value, 1, most)
    return int(value)


def read_sizes(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """By field, the required size under its key; `keys` maps fields to keys."""
    return {field: read_size(key, required(config, key)) for field, key in keys.items()}


def expect_only(config: Mapping[str, Any], **supported: tuple[Any, ...]) -> None:
    """ValueError where `config` has a value for a key that is none of those supported."""
    for key, values in supported.items():
        if config.get(key) is not None and config[key] not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"{key} {config[key]!r} is not supported, expected {expected}")


def write_fields(held: object, keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `held` by key; `keys` maps fields to keys."""
    return {key: getattr(held, field) for field, key in keys.items()}


def check_layer_kinds(key: str, kinds: Sequence[str], known: Collection[str], num_layers: int) -> None:
    """Raise ValueError unless every layer has one of the `known` kinds."""
    if isinstance(kinds, str) or len(kinds) != num_layers:
        raise ValueError(f"{key}: expected {num_layers} of {list(known)}, got {kinds!r}")
    if unknown := sorted(set(kinds) - set(known)):
        raise ValueError(f"{key} {unknown} are not supported, expected {list(known)}")


def one_kind(what: str, layers: Iterable[Any]) -> Any:
    """The sizes that all layers with any have; ValueError where they differ, or no layer has any."""
    kinds = {layer for layer in layers if layer is not None}
    if len(kinds) != 1:
        raise ValueError(f"expected the same {what} in all layers that have it")
    return kinds.pop()


def nested(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under `key`, empty where it is absent or null; ValueError where it is something else."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}: expected a mapping, got {value!r}")
    return value or {}


def read_eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, which is absent, one id, or a list; ValueError for anything else."""
    eos = config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if wrong := [token for token in ids if type(token) is not int]:
        raise ValueError(f"eos_token_id: expected token ids, got {wrong[0]!r}")
    return tuple(ids)


def write_eos(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None
