"""The identity of a row: a hash of the resolved configuration that can change its figures.

Two jobs with the same identity are one row. Names, folders and trackers do not count, nor do keys that the task
ignores. Paths inside of the repository count relative to it, so that two machines agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.app.schema import REPO_ROOT
from experiments.app.task_schema import TASKS

NEUTRAL = ("hydra", "name", "samples", "tracker", "paths", "sweep", "resume", "resume_force")
"""Keys that change no figure."""
TARGET_KEYS = ("model", "runtime/device", "runtime/dtype", "runtime/impl", "runtime/forward", "runtime/tensor_parallel")
"""What decides which weights a process holds, where, and how its kernels run."""
DIGITS = 12


def what_matters(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration without what changes no figure. Raises OmegaConf's errors where a key has no value."""
    found = {str(key): _plain(cfg[key]) for key in cfg if key not in NEUTRAL}
    if "task" in found:
        for key in TASKS[found["task"]["name"]].IGNORED:
            _remove(found, key.split("."))
    return found


def _plain(value: Any) -> Any:
    """A value of a configuration as plain numbers, text, lists and mappings."""
    if OmegaConf.is_config(value):
        return _portable(OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True))
    return _portable(value)


def digest(values: Any) -> str:
    """A short hash of plain values; the order of keys does not matter."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def row_id(cfg: DictConfig) -> str:
    """The name of the row that `cfg` is: 12 hexadecimal digits."""
    return digest(what_matters(cfg))


def target_id(matters: Mapping[str, Any]) -> str:
    """The same for all rows whose jobs may share one loaded target."""
    return digest([at(matters, key) for key in TARGET_KEYS])


def at(values: Mapping[str, Any], path: str) -> Any:
    """The value under a path such as `algo/topk`; None where there is none. A group stands for its name."""
    found: Any = values
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _remove(values: dict[str, Any], path: Sequence[str]) -> None:
    for key in path[:-1]:
        values = values.get(key, {})
    values.pop(path[-1], None)


def _portable(value: Any) -> Any:
    """`value` with paths inside of the repository relative to it."""
    if isinstance(value, Mapping):
        return {str(key): _portable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(inner) for inner in value]
    if isinstance(value, str) and value.startswith(f"{REPO_ROOT}/"):
        return f"repo:{value.removeprefix(f'{REPO_ROOT}/')}"
    return value
