"""The schema of a generation run: every key a user can type, its type, its default and its range.

Hydra composes YAML files over these dataclasses, so a misspelt key fails while composing. Values are
checked in `__post_init__` when `build_config` turns the composed tree into objects, before anything heavy is
imported: this module and everything it imports stay free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.runtime.sampling_params import SamplingParams
from experiments.app.errors import UserError

REPO_ROOT = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = REPO_ROOT / "configs"
LARGEST_INT32 = 2**31 - 1
GRAPH_LEVELS = ("none", "draft", "verify", "step")


def expect_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def expect_at_least(name: str, value: float | None, least: float) -> None:
    """Raise ValueError unless `value` is None or at least `least`."""
    if value is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def expect_between(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raise ValueError unless low <= value <= high, or low < value with `above`."""
    if not (low < value if above else low <= value) or not value <= high:
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {low} and at most {high}, got {value}")


@dataclass
class ModelConfig:
    """Folders in the Hugging Face layout, or hub names such as `org/model`.

    `drafts` names the drafter of each algorithm; `draft_path` replaces it for the algorithm of this run.
    """

    name: str = MISSING
    path: str = MISSING
    draft_path: str | None = None
    drafts: dict[str, str] = field(default_factory=dict)

    def drafter_of(self, algo: str) -> str | None:
        """Where the drafter of `algo` is, if anywhere."""
        return self.draft_path or self.drafts.get(algo)


@dataclass
class RuntimeConfig:
    """`impl` auto: compiled kernels on a GPU, the same kernels in Triton's interpreter without one.

    `graph`: how much of a step is captured in CUDA graphs; auto is all of it on a GPU. `overlap`: steps the host
    reads behind the device. `tensor_parallel`: processes that share the target, see `experiments.app.distributed`.
    `num_pages` and `max_length` null: as many as `max_batch` requests of the longest prompt need.
    """

    device: str = "auto"
    dtype: str = "auto"
    impl: str = "auto"
    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    graph: str = "auto"
    overlap: int | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        expect_choice("runtime.device", self.device, ("auto", "cpu", "cuda"))
        expect_choice("runtime.dtype", self.dtype, ("auto", "float32", "float16", "bfloat16"))
        expect_choice("runtime.impl", self.impl, ("auto", "triton", "reference"))
        expect_choice("runtime.graph", self.graph, ("auto", *GRAPH_LEVELS))
        expect_at_least("runtime.tensor_parallel", self.tensor_parallel, 1)
        expect_at_least("runtime.page_size", self.page_size, 1)
        expect_at_least("runtime.max_batch", self.max_batch, 1)
        if self.num_pages is not None:
            expect_between("runtime.num_pages", self.num_pages, 1, LARGEST_INT32)
        expect_at_least("runtime.max_length", self.max_length, 2)
        expect_at_least("runtime.overlap", self.overlap, 0)
        if self.graph not in ("auto", "none") and self.device == "cpu":
            raise ValueError(f"runtime.graph={self.graph} captures CUDA graphs: expected runtime.device=cuda, got cpu")
        if self.device == "cpu" and self.dtype == "bfloat16" and self.impl != "reference":
            raise ValueError(
                "runtime.dtype=bfloat16 on the CPU: Triton's interpreter computes bfloat16 wrongly; "
                "use runtime.dtype=float32, or runtime.impl=reference"
            )


@dataclass
class TrackerConfig:
    """Where the summary goes besides the run folder. `mode` offline keeps it inside that folder."""

    name: str = "none"
    mode: str = "disabled"
    project: str = "specdec-kernels"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        expect_choice("tracker.name", self.name, ("wandb", "none"))
        expect_choice("tracker.mode", self.mode, ("online", "offline", "disabled"))


@dataclass
class PathsConfig:
    """`assets`: shipped models. `outputs`: where run folders go, relative to the working directory."""

    assets: str = MISSING
    outputs: str = "outputs"


@dataclass
class GenerateConfig:
    """One run: decode `data` with `algo` and, when `baseline`, autoregressively too, to compare both.

    `samples` completions are printed at the end. What algo, backend and data hold depends on the option.
    """

    name: str = MISSING
    baseline: bool = True
    samples: int = 2
    task: Any = MISSING
    algo: Any = MISSING
    backend: Any = MISSING
    model: ModelConfig = MISSING
    data: Any = MISSING
    sampling: SamplingParams = MISSING
    runtime: RuntimeConfig = MISSING
    tracker: TrackerConfig = MISSING
    paths: PathsConfig = MISSING

    def __post_init__(self) -> None:
        expect_at_least("samples", self.samples, 0)
        if self.runtime.num_pages is not None and self.task.OWN_PAGES:
            raise ValueError(f"runtime.num_pages cannot be given to task={self.task.name}: {self.task.OWN_PAGES}")
        if not self.name or any(c in self.name for c in "/\\\0") or self.name.startswith("."):
            raise ValueError(f"name becomes a folder under outputs/: expected a plain name, got {self.name!r}")


def run_name(task: str, algo: str, backend: str, model: str) -> str:
    """What a run is called unless it is told: by what it measures."""
    measured = {"generate": [algo, backend], "compare": ["compare", backend], "losslessness": ["losslessness"]}
    return "_".join([*measured.get(task, [task, algo, backend]), model])


def option_schemas() -> dict[str, dict[str, type]]:
    """Dataclasses of the groups whose keys depend on the option: group to option to schema."""
    from algorithms.registry import available
    from algorithms.runtime.backends import backends
    from experiments.data.prompts import datasets
    from experiments.tasks import TASKS

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


def register() -> None:
    """Put every schema in Hydra's config store, under the group `schema`, which the YAML files extend."""
    OmegaConf.register_new_resolver("repo", lambda path: str(REPO_ROOT / path), replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)
    store = ConfigStore.instance()
    fixed = {
        "generate": GenerateConfig,
        "model": ModelConfig,
        "sampling": SamplingParams,
        "runtime": RuntimeConfig,
        "tracker": TrackerConfig,
        "paths": PathsConfig,
    }
    for name, schema in fixed.items():
        store.store(group="schema", name=name, node=schema)
    for group, options in option_schemas().items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


def unknown_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Dotted keys of `cfg` that its schema does not have; `+key=` puts them past Hydra's own check."""
    schema = OmegaConf.get_type(cfg)
    if not is_dataclass(schema):
        return []  # a mapping takes any key of its type
    known = {f.name for f in fields(schema)}
    found = []
    for key in list[Any](cfg):
        name = f"{prefix}{key}"
        if key not in known:
            found.append(name)
            continue
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found += unknown_keys(node, f"{name}.")
    return found


def dotted_keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every key of `cfg` as it is typed on the command line, groups first."""
    names = [f"{prefix}{key}" for key in list[Any](cfg)]
    for key in list[Any](cfg):  # a key may be a number, and is not found by its text then
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            names += dotted_keys(node, f"{prefix}{key}.")
    return names


def build_config(cfg: DictConfig) -> Any:
    """The composed tree as checked dataclasses. Raises `UserError` naming the key and what it may be."""
    from experiments.app.suggest import unknown_key_message

    if unknown := unknown_keys(cfg):
        known = [key for key in dotted_keys(cfg) if not any(f"{key}.".startswith(f"{bad}.") for bad in unknown)]
        elsewhere = option_keys() if OmegaConf.get_type(cfg) is GenerateConfig else {}
        raise UserError("\n".join(unknown_key_message(key, known, elsewhere) for key in unknown))
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError("\n".join(f"{key} has no value: give it as {key}=…" for key in missing))
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise UserError(str(error.__cause__ or error).splitlines()[0]) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def to_plain(cfg: DictConfig | ListConfig) -> Any:
    """The resolved configuration as plain dicts and lists."""
    return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
