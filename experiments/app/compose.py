"""Hydra's part: schemas are registered, and the composed tree becomes checked objects. No torch is imported here."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.registry import available
from algorithms.runtime.backends.registry import backends
from algorithms.runtime.sampling_params import SamplingParams
from experiments.app.errors import UserError, user_errors
from experiments.app.identity import row_id
from experiments.app.schema import (
    CONFIG_FOLDER,
    REPO_ROOT,
    ModelConfig,
    PathsConfig,
    RunConfig,
    RuntimeConfig,
    TrackerConfig,
)
from experiments.app.suggest import unknown_key_message
from experiments.app.task_schema import TASKS
from experiments.data.prompts import datasets


def run_name(task: str, algo: str, backend: str, model: str) -> str:
    """The name of a run that was given none: what it measures."""
    measured = {"generate": [algo, backend], "compare": ["compare", backend], "losslessness": ["losslessness"]}
    return "_".join([*measured.get(task, [task, algo, backend]), model])


def option_schemas() -> dict[str, dict[str, type]]:
    """Dataclasses of the groups whose keys depend on the option: group to option to schema."""
    return {
        "task": TASKS,
        "algo": {name: algorithm.Config for name, algorithm in available().items()},
        "backend": {name: cast(Any, backend).Config for name, backend in backends().items()},
        "data": datasets(),
    }


def option_keys() -> dict[str, str]:
    """Dotted key to `group=option` that has it, for the groups of `option_schemas`."""
    keys: dict[str, str] = {}
    for group, options in option_schemas().items():
        for option, schema in options.items():
            for item in fields(schema):
                keys.setdefault(f"{group}.{item.name}", f"{group}={option}")
    return keys


def run_folder(outputs: str, name: str, time: str, *, _root_: DictConfig) -> str:
    """Where a run goes: a folder of its own, or its row's folder in the sweep that it is a row of."""
    sweep = _root_.sweep.name
    return f"{outputs}/{name}/{time}" if sweep is None else f"{outputs}/sweeps/{sweep}/{row_id(_root_)}"


def register_resolvers() -> None:
    """Make the functions known that YAML files call."""
    OmegaConf.register_new_resolver("repo", lambda path: str(REPO_ROOT / path), replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("row_id", lambda *, _root_: row_id(_root_), replace=True)


def register() -> None:
    """Put every schema in Hydra's config store, under the group `schema`, which the YAML files extend.

    An algorithm without a YAML file, such as a plugin, becomes an option by its schema alone. Raises `UserError` for a
    plugin that cannot be used.
    """
    register_resolvers()
    store = ConfigStore.instance()
    with user_errors(ValueError):
        groups = option_schemas()
        # Hydra overrides the keys that are there: `model.drafts.eagle3=…` needs no `+` where the key is.
        drafters: dict[str, str | None] = {
            name: None for name, algorithm in available().items() if algorithm.needs_draft_model
        }
    fixed: dict[str, Any] = {
        "run": RunConfig,
        "model": ModelConfig(drafts=drafters),
        "sampling": _open(SamplingParams, "logit_bias"),
        "runtime": RuntimeConfig,
        "tracker": TrackerConfig,
        "paths": PathsConfig,
    }
    for name, schema in fixed.items():
        store.store(group="schema", name=name, node=schema)
    for group, options in groups.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
    for name, schema in groups["algo"].items():
        if not (CONFIG_FOLDER / "algo" / f"{name}.yaml").is_file():
            store.store(group="algo", name=name, node=schema)


def _open(schema: type, key: str) -> DictConfig:
    """`schema` whose mapping `key` takes new entries from the command line without a `+`."""
    node = OmegaConf.structured(schema)
    OmegaConf.set_struct(node._get_node(key), False)
    return cast(DictConfig, node)


def unknown_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Dotted keys of `cfg` that its schema does not have: `+key=` passes Hydra's own check."""
    schema = OmegaConf.get_type(cfg)
    if not is_dataclass(schema):
        return []  # a mapping takes any key of its type
    known = {f.name for f in fields(schema)}
    found = [f"{prefix}{key}" for key in list[Any](cfg) if key not in known]
    groups = [(key, node) for key, node in _groups(cfg) if key in known]
    return found + [name for key, node in groups for name in unknown_keys(node, f"{prefix}{key}.")]


def dotted_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every key of `cfg` as it is typed on the command line, groups first."""
    names = [f"{prefix}{key}" for key in list[Any](cfg)]
    return names + [name for key, node in _groups(cfg) for name in dotted_keys(node, f"{prefix}{key}.")]


def _groups(cfg: DictConfig) -> list[tuple[Any, DictConfig]]:
    """The keys of `cfg` that hold keys of their own."""
    nodes = [(key, cfg._get_node(key)) for key in cfg]  # a key may be a number, so its text does not find it
    return [(k, n) for k, n in nodes if isinstance(n, DictConfig) and not n._is_none() and not n._is_missing()]


def build_config(cfg: DictConfig) -> Any:
    """The composed tree as checked dataclasses. Raises `UserError` naming the key and what it may be."""
    if unknown := unknown_keys(cfg):
        known = [key for key in dotted_keys(cfg) if not any(f"{key}.".startswith(f"{bad}.") for bad in unknown)]
        elsewhere = option_keys() if OmegaConf.get_type(cfg) is RunConfig else {}
        raise UserError("\n".join(unknown_key_message(key, known, elsewhere) for key in unknown))
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError("\n".join(f"{key} has no value: give it as {key}=…" for key in missing))
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise UserError(str(error.__cause__ or error).splitlines()[0]) from error
    except ValueError as error:
        raise UserError(str(error)) from error
