"""The identity of a job: a hash of the resolved configuration that can change its figures.

Runs with the same identity are one job. Names, folders, trackers, drafters of other algorithms and keys that the task
ignores do not count. Paths inside of the repository count relative to it, so that two machines agree.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.app.schema import REPO_ROOT
from experiments.app.task_schema import TASKS
from experiments.report.tables import at

NEUTRAL = ("hydra", "name", "samples", "tracker", "paths", "sweep", "resume", "resume_force", "out_dir")
"""Keys that change no figure."""
TARGET_KEYS = (
    "model", "runtime/device", "runtime/dtype", "runtime/weight_dtype", "runtime/impl", "runtime/forward",
    "runtime/tensor_parallel",
)  # fmt: skip
"""Keys that decide which weights a process holds, where, and how its kernels run."""
DIGITS = 12
SHARE_TARGET = "SPECDEC_SHARE_TARGET"
"""Environment variable that is 1 in a process that runs one job of a sweep after the other."""


def what_matters(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration without what changes no figure. Raises OmegaConf's errors where a key has no value."""
    found = {str(key): _portable(cfg[key]) for key in cfg if key not in NEUTRAL}
    if "task" in found:
        for key in TASKS[found["task"]["name"]].IGNORED:
            group, _, leaf = key.rpartition(".")
            (found.get(group, {}) if group else found).pop(leaf, None)
    if isinstance(found.get("model"), dict):
        used, drafts = set(_names([found.get("algo"), found.get("task")])), found["model"].get("drafts") or {}
        found["model"] = {key: value for key, value in found["model"].items() if key != "obtain"}
        found["model"]["drafts"] = {name: draft for name, draft in drafts.items() if name in used}
    if at(cfg, "sweep/share_baseline") is False:
        found["share_baseline"] = False  # a baseline that other jobs decoded does not alternate with the method
    return found


def _names(values: Any) -> Iterator[str]:
    """The names of everything configured in `values`, the algorithms among them."""
    if isinstance(values, Mapping):
        yield str(values.get("name"))
        values = list(values.values())
    for value in values if isinstance(values, list) else ():
        yield from _names(value)


def digest(values: Any) -> str:
    """A short hash of plain values; the order of keys does not matter."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def job_id(cfg: DictConfig) -> str:
    """The name of the job that `cfg` is: 12 hexadecimal digits."""
    return digest(what_matters(cfg))


def target_id(matters: Mapping[str, Any]) -> str:
    """The same for all jobs whose processes may share one loaded target."""
    return digest([at(matters, key) for key in TARGET_KEYS])


def _portable(value: Any) -> Any:
    """`value` as plain numbers, text, lists and mappings, with paths inside of the repository relative to it."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
    if isinstance(value, Mapping):
        return {str(key): _portable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(inner) for inner in value]
    if isinstance(value, str) and value.startswith(f"{REPO_ROOT}/"):
        return f"repo:{value.removeprefix(f'{REPO_ROOT}/')}"
    return value
