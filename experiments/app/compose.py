"""Hydra's part: schemas are registered, and the composed tree becomes checked objects. No torch is imported here."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.attention.backends import backends
from algorithms.engine.settings import RuntimeSettings
from algorithms.registry import available
from algorithms.step.sampling_params import SamplingParams
from experiments.app.errors import UserError, unknown_key_message, user_errors
from experiments.app.identity import job_id
from experiments.app.schema import CONFIG_FOLDER, REPO_ROOT, ModelConfig, PathsConfig, RunConfig, TrackerConfig
from experiments.app.task_schema import TASKS
from experiments.data.prompts import RUN_LIMITS, datasets

MAIN_CONFIG = "config"


def run_name(task: str, algo: str, backend: str, model: str) -> str:
    """The name of a run that was given none: what it measures."""
    parts = [] if task == "generate" else [task]
    if task not in TASKS or "algo" not in TASKS[task].IGNORED:
        parts.append(algo)
    if task != "losslessness":  # it has several backends
        parts.append(backend)
    return "_".join([*parts, model])


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


def run_folder(own: str, outputs: str, *, _root_: DictConfig) -> str:
    """The folder of a run: its `own`, or in a sweep the folder of its job, under `outputs`."""
    sweep = _root_.sweep.name
    return own if sweep is None else f"{outputs}/sweeps/{sweep}/{job_id(_root_)}"


def register() -> None:
    """Put every schema in Hydra's config store, under the group `schema`, which the YAML files extend. An option
    without a YAML file, such as a plugin, is its schema alone. Raises `UserError` for a plugin that cannot be used."""
    resolvers: dict[str, Any] = {"repo": lambda path: str(REPO_ROOT / path), "job_id": lambda *, _root_: job_id(_root_)}
    for name, resolver in {**resolvers, "run_name": run_name, "run_folder": run_folder}.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    store = ConfigStore.instance()
    with user_errors(ValueError):
        groups = option_schemas()
        # Hydra overrides the keys that are there: `model.drafts.eagle3=…` needs no `+` where the key is.
        drafters: dict[str, str | None] = {name: None for name, kind in available().items() if kind.needs_draft_model}
    sampling: DictConfig = OmegaConf.structured(SamplingParams)
    OmegaConf.set_struct(sampling.logit_bias, False)  # new entries need no `+` either
    fixed: dict[tuple[str, str], Any] = {
        ("schema", "run"): RunConfig,
        ("schema", "model"): ModelConfig(drafts=drafters),
        ("schema", "sampling"): sampling,
        ("schema", "tracker"): TrackerConfig,
        ("runtime", "default"): RuntimeSettings,
        ("tracker", "none"): TrackerConfig,
        ("paths", "default"): PathsConfig,
    }
    for (group, name), schema in fixed.items():
        store.store(group=group, name=name, node=schema)
    for group, options in groups.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)
            if not (CONFIG_FOLDER / group / f"{name}.yaml").is_file():
                own = {"limit": RUN_LIMITS[name]} if group == "data" and name in RUN_LIMITS else {}
                store.store(group=group, name=name, node=schema(**own) if own else schema)


def every_key(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig]]:
    """(key as it is typed on the command line, the node that holds it) of every key, the keys of a node first."""
    yield from ((f"{prefix}{key}", cfg) for key in list[Any](cfg))
    for key in list[Any](cfg):
        node = cfg._get_node(key)  # a key may be a number, so its text does not find it
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from every_key(node, f"{prefix}{key}.")


def unknown_keys(cfg: DictConfig) -> list[str]:
    """Dotted keys of `cfg` that its schemas do not have, which `+key=` adds past Hydra's own check. A mapping takes any
    key of its type."""
    schemas = ((key, OmegaConf.get_type(parent)) for key, parent in every_key(cfg))
    known = ((key, {f.name for f in fields(schema)}) for key, schema in schemas if is_dataclass(schema))
    return [key for key, names in known if key.rpartition(".")[2] not in names]


def build_config(cfg: DictConfig) -> Any:
    """The composed tree as checked dataclasses. Raises `UserError` naming the key and what it may be."""
    if unknown := unknown_keys(cfg):
        known = [key for key, _ in every_key(cfg) if not any(f"{key}.".startswith(f"{bad}.") for bad in unknown)]
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
