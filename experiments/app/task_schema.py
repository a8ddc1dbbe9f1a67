"""The settings of each task, checked before anything heavy is imported, and what a task needs of a run.

A task is a dataclass here and the subclass of `experiments.tasks.base.Task` that its `RUN` names, in a module of its
own; `task=NAME` takes its keys from the dataclass. Methods that a task runs by default are in configs/task/NAME.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.attention.backends import backends
from algorithms.checked import Between, Checked
from algorithms.engine.settings import GRAPH_LEVELS
from algorithms.registry import available
from experiments.app.errors import UserError, nearest
from experiments.app.schema import DRAFT_PATH, RunConfig
from experiments.data.prompts import JsonlData, PublicData, datasets
from experiments.data.public import WORDINGS
from specdec_kernels.checks import expect_choice

METHODS_HINT = "add a method by +task.methods.LABEL={name:ALGORITHM}; task.only=[LABEL] chooses among them"
HYBRID = {"prefill": "torch", "decode": "fa4", "verify": "prefill"}
"""Settings of `hybrid` where task.backends names it, chosen so that it uses two different backends."""


TASKS: dict[str, type[TaskConfig]] = {}  # every task by name


@dataclass
class TaskConfig(Checked):
    """The declarations of every task. A subclass with a name is registered."""

    GROUP = "task."
    RUN: ClassVar[str]
    """The program of the task, as module:class."""
    IGNORED: ClassVar[tuple[str, ...]] = ()
    """Keys of a run that the task does not use."""
    OWN_PAGES: ClassVar[str | None] = None
    """Why the task takes no `runtime.num_pages`."""
    NOT_RESUMED: ClassVar[str | None] = "it keeps no part of what it has measured"
    """Why the task cannot be resumed."""
    MAY_BE_EMPTY: ClassVar[tuple[str, ...]] = ("only", "graphs")
    """Lists that may be empty."""
    name: str = MISSING

    def __init_subclass__(cls) -> None:
        if "RUN" in vars(cls):
            TASKS[cls.name] = cls

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in vars(self).items():
            if value == [] and key not in self.MAY_BE_EMPTY:
                raise ValueError(f"task.{key}: expected at least one value, got none")
            if key == "temperature" and not 0 < value < float("inf"):
                raise ValueError(f"task.temperature: expected a finite number above 0, got {value}")

    def load(self) -> Any:
        """The class that runs the task."""
        module, _, name = self.RUN.partition(":")
        return getattr(import_module(module), name)

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        """Label to configuration of the algorithms that the task runs."""
        return {config.algo.name: config.algo}

    def backends_of(self, config: RunConfig) -> list[Any]:
        """Configurations of the attention backends that the task uses."""
        return [config.backend]

    def data_of(self, config: RunConfig) -> list[Any]:
        """Configurations of the prompt sets that the task decodes."""
        return [config.data]

    def graphs_of(self, config: RunConfig, can_capture: bool) -> list[str]:
        """The levels of capture of the task on a device that can capture or cannot."""
        return [config.runtime.graph]


@dataclass
class GenerateTask(TaskConfig):
    """One algorithm over one prompt set, compared with autoregressive decoding."""

    RUN = "experiments.tasks.generate:Generate"
    NOT_RESUMED = None
    name: str = "generate"
    repeats: Annotated[int | None, Between(1)] = None
    """Interleaved rounds of baseline and method, for intervals; null takes 3 where a round is short, else 1."""


@dataclass
class MethodsTask(TaskConfig):
    """A task over several methods. `methods` maps a label to an algorithm and its settings."""

    methods: dict[str, Any] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    """Labels of the methods to run; empty runs all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chosen_methods()

    def chosen_methods(self) -> dict[str, Any]:
        """Label to configuration of the methods to run. Raises ValueError for an unknown label, an unknown algorithm
        and a setting that the algorithm does not have."""
        if not self.methods:
            raise ValueError("task.methods is empty: give at least one, such as +task.methods.mine.name=dflash")
        found = methods_by_label(self.methods)
        if unknown := [label for label in self.only if label not in found]:
            raise ValueError(f"task.only: expected one of {', '.join(found)}, got {unknown[0]!r}\n{METHODS_HINT}")
        return {label: method for label, method in found.items() if label in self.only or not self.only}

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        return self.chosen_methods()


@dataclass
class CompareTask(MethodsTask):
    """Several methods over several prompt sets."""

    RUN = "experiments.tasks.compare:Compare"
    IGNORED: ClassVar[tuple[str, ...]] = ("algo", "data", "baseline", "samples")
    NOT_RESUMED: ClassVar[str | None] = None
    name: str = "compare"
    data: list[str] = field(default_factory=lambda: ["arithmetic", "code"])
    """Prompt sets by name, and prompt files by path."""
    limit: Annotated[int | None, Between(1)] = None
    """Prompts of each set; null takes the set's own default."""
    skip_long: bool = False
    """Leave out prompts that are too long for the model, instead of refusing the run."""
    wording: Annotated[str, WORDINGS] = "own"
    """As `data.wording`, of the sets that have one."""
    repeats: Annotated[int | None, Between(1)] = None
    """Interleaved rounds of all methods, as in `GenerateTask`."""

    def data_of(self, config: RunConfig) -> list[Any]:
        return [prompt_set(name, self.limit, self.skip_long, self.wording) for name in self.data]


@dataclass
class ThroughputTask(TaskConfig):
    """The run's algorithm, further methods and the baseline at several concurrencies."""

    RUN = "experiments.tasks.throughput:Throughput"
    IGNORED = ("baseline", "samples", "runtime.max_batch")
    OWN_PAGES = "each level of task.concurrency has as many pages as it needs"
    NOT_RESUMED = None
    name: str = "throughput"
    concurrency: Annotated[list[int], Between(1)] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    requests: Annotated[int, Between(1)] = 2
    """Least requests of a level per unit of concurrency; prompts repeat in their order."""
    methods: dict[str, Any] = field(default_factory=dict)
    """Further methods than the run's algorithm: label to algorithm and its settings."""
    repeats: Annotated[int | None, Between(1)] = None
    """Rounds of all methods at each level, as in `GenerateTask`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        methods_by_label(self.methods)

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        own = config.algo.name
        if own in self.methods:
            raise ValueError(f"task.methods.{own}: the run's algorithm has this label, expected another one")
        return {own: config.algo} | methods_by_label(self.methods)


@dataclass
class PaperTableTask(CompareTask):
    """The table of a paper: methods by prompt sets at several temperatures, and throughput."""

    RUN: ClassVar[str] = "experiments.tasks.paper_table:PaperTable"
    IGNORED: ClassVar[tuple[str, ...]] = (*CompareTask.IGNORED, "sampling.temperature", "sampling.seed")
    OWN_PAGES: ClassVar[str | None] = "each of task.concurrency has as many pages as it needs"
    MAY_BE_EMPTY: ClassVar[tuple[str, ...]] = (*CompareTask.MAY_BE_EMPTY, "concurrency")
    name: str = "paper_table"
    temperatures: Annotated[list[float], Between(0)] = field(default_factory=lambda: [0.0, 1.0])
    seeds: Annotated[list[int], Between(0)] = field(default_factory=lambda: [0, 1, 2])
    """Seeds at temperatures above 0; cells are means over them."""
    concurrency: Annotated[list[int], Between(1)] = field(default_factory=lambda: [1, 4, 8, 16, 32])
    """Requests at a time, for the throughput of the first prompt set at the first temperature; empty: none."""
    requests: Annotated[int, Between(1)] = 2
    """Least requests of a throughput per unit of concurrency; prompts repeat in their order."""


@dataclass
class LosslessnessTask(MethodsTask):
    """Whether each method on each backend writes what the target alone writes, or draws from its distribution."""

    RUN = "experiments.tasks.losslessness:Losslessness"
    IGNORED = ("algo", "baseline", "samples", "runtime.max_batch", "runtime.page_size", "sampling.temperature")
    OWN_PAGES = "each of task.page_sizes and task.batches has as many pages as it needs"
    name: str = "losslessness"
    backends: list[str] = field(default_factory=lambda: ["fa4", "torch", "hybrid"])
    page_sizes: Annotated[list[int], Between(1)] = field(default_factory=lambda: [1, 16])
    batches: Annotated[list[int], Between(1)] = field(default_factory=lambda: [1, 3])
    graphs: Annotated[list[str], GRAPH_LEVELS] = field(default_factory=list)
    """Levels of capture; empty takes the level of the run. Without a GPU there is only none."""
    low_precision: Annotated[str | None, ("bfloat16", "float16", "null")] = "bfloat16"
    """Decode in this dtype too, and report the first difference and the gap of its logits; null skips it."""
    distribution_draws: Annotated[int, Between(0)] = 400
    """Draws of the first two tokens that are tested against the target's distribution; 0 skips the test."""
    temperature: float = 0.8
    min_tokens: Annotated[int, Between(0)] = 0
    """Repeat the prompts, sampled with other seeds each time, until this many tokens were compared for each method.
    Rules that draw their drafts are compared once, in greedy decoding."""

    def graphs_of(self, config: RunConfig, can_capture: bool) -> list[str]:
        return (self.graphs if can_capture else ["none"]) if self.graphs else [config.runtime.graph]

    def backends_of(self, config: RunConfig) -> list[Any]:
        """The named backends; the run's own backend keeps the run's settings."""
        found: dict[str, Any] = backends()
        for name in self.backends:
            expect_choice("task.backends", name, tuple(found))
        own, settings = config.backend, {"hybrid": HYBRID}
        return [own if name == own.name else found[name].Config(**settings.get(name, {})) for name in self.backends]


@dataclass
class GraphAblationTask(TaskConfig):
    """The same run with nothing, the draft, draft and verify, and the whole step captured in CUDA graphs."""

    RUN = "experiments.tasks.graph_ablation:GraphAblation"
    IGNORED = ("baseline", "samples", "runtime.graph")
    name: str = "graph_ablation"
    levels: Annotated[list[str], GRAPH_LEVELS] = field(default_factory=lambda: ["none", "draft", "verify", "step"])

    def graphs_of(self, config: RunConfig, can_capture: bool) -> list[str]:
        return self.levels if can_capture else ["none"]


@dataclass
class KVScalesTask(TaskConfig):
    """Factors for a KV cache in float8, from the target's keys and values for the run's prompts."""

    RUN = "experiments.tasks.kv_scales:KVScales"
    IGNORED = ("algo", "baseline", "samples", "runtime.kv_dtype", "runtime.kv_scales")
    name: str = "kv_scales"
    margin: Annotated[float, Between(1.0, 16.0)] = 1.0
    """Factor of the largest magnitude that is seen: above 1 leaves room for text that is not among the prompts."""

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        return {"autoregressive": available()["autoregressive"].Config()}


@dataclass
class ReplayTask(MethodsTask):
    """How many tokens a step of each method would write, from one recorded text for all of them."""

    RUN = "experiments.studies.replay.task:Replay"
    IGNORED = ("algo", "baseline", "samples", "runtime.adaptive")
    name: str = "replay"
    trace: str | None = None
    """Folder of an earlier run over the same prompts whose texts are taken; null decodes them autoregressively."""


@dataclass
class VerificationRulesTask(MethodsTask):
    """How many drafts each acceptance rule accepts in expectation, on the same draws."""

    RUN = "experiments.studies.rules:VerificationRules"
    IGNORED = (
        "algo", "baseline", "samples", "sampling.temperature", "sampling.seed", "runtime.graph", "runtime.adaptive",
    )  # fmt: skip
    name: str = "verification_rules"
    temperature: float = 1.0

    def graphs_of(self, config: RunConfig, can_capture: bool) -> list[str]:
        return ["none"]


@dataclass
class AdaptiveTask(CompareTask):
    """The gain of `runtime.adaptive` over every fixed number of nodes, and over no draft."""

    RUN = "experiments.studies.adaptive:Adaptive"
    IGNORED = ("algo", "data", "baseline", "samples", "runtime.max_batch", "runtime.adaptive")
    OWN_PAGES = "each of task.batches has as many pages as it needs"
    NOT_RESUMED = TaskConfig.NOT_RESUMED
    name: str = "adaptive"
    batches: Annotated[list[int], Between(1)] = field(default_factory=lambda: [1, 8, 32])
    """Requests at a time."""
    requests: Annotated[int, Between(1)] = 1
    """Requests per one of a batch, at least; prompts repeat in their order."""
    repeats: Annotated[int | None, Between(1)] = 1
    """Interleaved rounds of all settings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.repeats = self.repeats or 1


def ignored_overrides(task: TaskConfig, overrides: Sequence[str]) -> list[str]:
    """The command line's `overrides` that `task` does not use. Raises UserError for one that the task has as its own,
    such as `task.limit` for `data.limit`."""
    keys = [(override, override.split("=")[0].split("@")[0].lstrip("+~")) for override in overrides]
    ignored = [(text, key) for text, key in keys if any(f"{key}.".startswith(f"{name}.") for name in task.IGNORED)]
    own = {item.name for item in fields(task)}
    if whole := [text for text, key in keys if key == "task.methods" and not text.startswith("+")]:
        raise UserError(f"{whole[0]} leaves the other methods in place\n{METHODS_HINT}")
    for text, key in ignored:
        if (leaf := key.rpartition(".")[2]) in own:
            value = f"[{text.partition('=')[2]}]" if leaf == "data" else text.partition("=")[2]
            raise UserError(f"task={task.name} does not use {text}\nuse task.{leaf}={value}")
    return [text for text, _ in ignored]


def prompt_set(given: str, limit: int | None, skip_long: bool, wording: str = "own") -> Any:
    """The configuration of `data=NAME`, of a public set's file `NAME:FILE`, or of a prompt file, with these settings;
    ValueError for none of them."""
    name, _, path = given.partition(":")
    if name not in datasets() and (Path(given).suffix or "/" in given):
        return JsonlData(name=Path(given).name, path=given, limit=limit, skip_long=skip_long)
    expect_choice("task.data", name, tuple(datasets()))
    settings = datasets()[name](skip_long=skip_long)
    if isinstance(settings, PublicData):
        settings = replace(settings, path=path or None, wording=wording)
    elif path:
        raise ValueError(f"task.data: {name} is made here and takes no file, got {path}")
    return settings if limit is None else replace(settings, limit=limit)


def methods_by_label(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Label to configuration of the algorithms in `methods`, as `method_config` makes it."""
    return {label: method_config(f"task.methods.{label}", settings) for label, settings in methods.items()}


def method_config(key: str, settings: Any) -> Any:
    """The algorithm's own configuration from a mapping with `name`, and where it has a drafter of its own `draft_path`.
    Raises ValueError naming what does not fit."""
    found = available()
    if not isinstance(settings, Mapping) or "name" not in settings:
        raise ValueError(f"{key}: expected a mapping with name=ALGORITHM, got {settings!r}")
    name = str(settings["name"])
    expect_choice(f"{key}.name", name, tuple(sorted(found)))
    schema = found[name].Config
    if DRAFT_PATH in settings:
        schema = make_dataclass(schema.__name__, [(DRAFT_PATH, str | None, None)], bases=(schema,))
    known = [item.name for item in fields(schema)]
    unknown = [str(setting) for setting in settings if setting not in known]
    if unknown:
        close = nearest(unknown[0], known, count=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{key}: algo={name} has no setting {unknown[0]!r}{guess}; it has {', '.join(known)}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), dict(settings)))
        if DRAFT_PATH in settings and found[name].drafter_for(config) is None:
            raise ValueError(f"algo={name} with these settings takes no drafter, got draft_path")
        return config
    except OmegaConfBaseException as error:
        where = f"{key}.{error.full_key}" if error.full_key else key
        raise ValueError(f"{where}: {str(error.__cause__ or error).splitlines()[0]}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
