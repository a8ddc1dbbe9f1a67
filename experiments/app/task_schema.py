"""The settings of each task, checked before anything heavy is imported, and what a task needs of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.registry import available
from algorithms.runtime.backends.registry import backends
from algorithms.runtime.levels import GRAPH_LEVELS
from experiments.app.schema import RunConfig
from experiments.app.suggest import nearest
from experiments.data.prompts import JsonlData, datasets
from specdec_kernels.checks import expect_at_least, expect_between, expect_choice

HYBRID = {"prefill": "torch", "decode": "fa4", "verify": "prefill"}
"""Settings of `hybrid` where task.backends names it, chosen so that it uses two different backends."""


@dataclass
class TaskConfig:
    """What every task declares: the keys of a run that it ignores, and why it takes no number of pages, and cannot be
    resumed, if so."""

    IGNORED: ClassVar[tuple[str, ...]] = ()
    OWN_PAGES: ClassVar[str | None] = None
    NOT_RESUMED: ClassVar[str | None] = "it keeps no part of what it has measured"
    name: str = MISSING

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
        """The levels of capture that the task asks for on a device that can capture or cannot."""
        return [config.runtime.graph]


@dataclass
class GenerateTask(TaskConfig):
    """One algorithm over one prompt set, beside autoregressive decoding."""

    NOT_RESUMED: ClassVar[str | None] = None
    name: str = "generate"
    repeats: int | None = None
    """Rounds of baseline and method in turn, for intervals; null takes 3 where a round is short, else 1."""

    def __post_init__(self) -> None:
        expect_at_least("task.repeats", self.repeats, 1, nullable=True)


@dataclass
class MethodsTask(TaskConfig):
    """A task over several methods. `methods` maps a label to an algorithm and its settings."""

    methods: dict[str, Any] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    """Labels of the methods to run; empty runs all of them."""

    def __post_init__(self) -> None:
        self.chosen_methods()

    def chosen_methods(self) -> dict[str, Any]:
        """Label to configuration of the methods to run.

        Raises ValueError for an unknown label, an unknown algorithm and a setting that the algorithm does not have.
        """
        if not self.methods:
            raise ValueError("task.methods is empty: give at least one, such as +task.methods.mine.name=dflash")
        found = methods_by_label(self.methods)
        for label in self.only:
            expect_choice("task.only", label, tuple(found))
        return {label: method for label, method in found.items() if label in self.only or not self.only}

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        return self.chosen_methods()


@dataclass
class CompareTask(MethodsTask):
    """Several methods over several prompt sets."""

    IGNORED: ClassVar[tuple[str, ...]] = ("algo", "data", "baseline", "samples")
    NOT_RESUMED: ClassVar[str | None] = None
    name: str = "compare"
    data: list[str] = field(default_factory=lambda: ["arithmetic", "code"])
    """Prompt sets by name, and prompt files by path."""
    limit: int | None = None
    """Prompts of each set; null takes the set's own default."""
    skip_long: bool = False
    """Leave out prompts that are too long for the model, instead of refusing the run."""
    repeats: int | None = None
    """Rounds of all methods in turn, as in `GenerateTask`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_some("task.data", self.data)
        expect_at_least("task.limit", self.limit, 1, nullable=True)
        expect_at_least("task.repeats", self.repeats, 1, nullable=True)

    def data_of(self, config: RunConfig) -> list[Any]:
        return [prompt_set(name, self.limit, self.skip_long) for name in self.data]


@dataclass
class ThroughputTask(TaskConfig):
    """The run's algorithm, further methods and the baseline at several concurrencies."""

    IGNORED: ClassVar[tuple[str, ...]] = ("baseline", "samples", "runtime.max_batch")
    OWN_PAGES: ClassVar[str | None] = "each level of task.concurrency has as many pages as it needs"
    NOT_RESUMED: ClassVar[str | None] = None
    name: str = "throughput"
    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    requests: int = 2
    """Requests of a level per unit of concurrency, if that is more than there are prompts; they are taken in turn."""
    methods: dict[str, Any] = field(default_factory=dict)
    """Methods beside the run's algorithm: label to algorithm and its settings."""
    repeats: int | None = None
    """Rounds of all methods at each level, as in `GenerateTask`."""

    def __post_init__(self) -> None:
        _expect_some("task.concurrency", self.concurrency, least=1)
        expect_at_least("task.requests", self.requests, 1)
        expect_at_least("task.repeats", self.repeats, 1, nullable=True)
        methods_by_label(self.methods)

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        own = config.algo.name
        if own in self.methods:
            raise ValueError(f"task.methods.{own}: the run's algorithm has this label, expected another one")
        return {own: config.algo} | methods_by_label(self.methods)


@dataclass
class LosslessnessTask(MethodsTask):
    """Whether each method on each backend writes what the target alone writes, or draws from its distribution."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        "algo", "baseline", "samples", "runtime.max_batch", "runtime.page_size", "sampling.temperature",
    )  # fmt: skip
    OWN_PAGES: ClassVar[str | None] = "each of task.page_sizes and task.batches has as many pages as it needs"
    name: str = "losslessness"
    backends: list[str] = field(default_factory=lambda: ["fa4", "torch"])
    page_sizes: list[int] = field(default_factory=lambda: [1, 16])
    batches: list[int] = field(default_factory=lambda: [1, 3])
    graphs: list[str] = field(default_factory=list)
    """Levels of capture; empty: that of the run. Without a GPU there is only none."""
    low_precision: str | None = "bfloat16"
    """Decode in this dtype too, and report the first difference and the gap of its logits; null skips it."""
    distribution_draws: int = 400
    """Draws of the first two tokens that are tested against the target's distribution; 0 skips the test."""
    temperature: float = 0.8
    min_tokens: int = 0
    """Repeat the prompts, sampled with other seeds each time, until this many tokens were compared for each method.
    Rules that draw their drafts are compared once, in greedy decoding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_some("task.backends", self.backends)
        _expect_some("task.page_sizes", self.page_sizes, least=1)
        _expect_some("task.batches", self.batches, least=1)
        for level in self.graphs:
            expect_choice("task.graphs", level, GRAPH_LEVELS)
        expect_at_least("task.distribution_draws", self.distribution_draws, 0)
        expect_at_least("task.min_tokens", self.min_tokens, 0)
        if self.low_precision is not None:
            expect_choice("task.low_precision", self.low_precision, ("bfloat16", "float16", "null"))
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"task.temperature: expected a finite number above 0, got {self.temperature}")

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

    IGNORED: ClassVar[tuple[str, ...]] = ("baseline", "samples", "runtime.graph")
    name: str = "graph_ablation"
    levels: list[str] = field(default_factory=lambda: ["none", "draft", "verify", "step"])

    def __post_init__(self) -> None:
        _expect_some("task.levels", self.levels)
        for level in self.levels:
            expect_choice("task.levels", level, GRAPH_LEVELS)

    def graphs_of(self, config: RunConfig, can_capture: bool) -> list[str]:
        return self.levels if can_capture else ["none"]


@dataclass
class KVScalesTask(TaskConfig):
    """Factors for a KV cache in float8, from the target's keys and values for the run's prompts."""

    IGNORED: ClassVar[tuple[str, ...]] = ("algo", "baseline", "samples", "runtime.kv_dtype", "runtime.kv_scales")
    name: str = "kv_scales"
    margin: float = 1.0
    """Factor of the largest magnitude that is seen: above 1 leaves room for text that is not among the prompts."""

    def __post_init__(self) -> None:
        expect_between("task.margin", self.margin, 1.0, 16.0)

    def methods_of(self, config: RunConfig) -> dict[str, Any]:
        return {"autoregressive": available()["autoregressive"].Config()}


@dataclass
class ReplayTask(MethodsTask):
    """How many tokens a step of each method would write, from one recorded text for all of them."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        "algo", "baseline", "samples", "runtime.adaptive", "runtime.adaptive_cost",
    )  # fmt: skip
    name: str = "replay"
    trace: str | None = None
    """Folder of an earlier run over the same prompts whose texts are taken; null decodes them autoregressively."""
    unions: list[list[str]] = field(default_factory=list)
    """Labels of methods whose trees are merged; each list is a row."""
    lengths: list[int] = field(default_factory=list)
    """Lengths to which chains are shortened; each is a row of every method that drafts a longer chain."""
    cost: str | None = None
    """Times of a step: a JSON file, or the folder of a run whose summary has them; null predicts no times."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for length in self.lengths:
            expect_at_least("task.lengths", length, 1)
        labels = tuple(self.chosen_methods())
        for parts in self.unions:
            if len(parts) < 2:
                raise ValueError(f"task.unions: expected at least two labels of methods in each list, got {parts}")
            for label in parts:
                expect_choice("task.unions", label, labels)


@dataclass
class VerificationRulesTask(MethodsTask):
    """How many drafts each acceptance rule accepts in expectation, on the same draws."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        "algo", "baseline", "samples", "sampling.temperature", "sampling.seed", "runtime.graph", "runtime.adaptive",
        "runtime.adaptive_cost",
    )  # fmt: skip
    name: str = "verification_rules"
    temperature: float = 1.0
    analytic: bool = True
    """Also over a vocabulary of four tokens, where every draw is enumerated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"task.temperature: expected a finite number above 0, got {self.temperature}")

    def graphs_of(self, config: RunConfig, can_capture: bool) -> list[str]:
        return ["none"]


@dataclass
class AdaptiveTask(CompareTask):
    """What `runtime.adaptive` gains over every fixed number of nodes, and over no draft."""

    IGNORED: ClassVar[tuple[str, ...]] = (
        "algo", "data", "baseline", "samples", "runtime.max_batch", "runtime.adaptive",
    )  # fmt: skip
    OWN_PAGES: ClassVar[str | None] = "each of task.batches has as many pages as it needs"
    NOT_RESUMED: ClassVar[str | None] = TaskConfig.NOT_RESUMED
    name: str = "adaptive"
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    """Requests at a time."""
    requests: int = 1
    """Requests per one of a batch, at least; prompts are taken in turn."""
    repeats: int | None = 1
    """Rounds of all settings in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_some("task.batches", self.batches, least=1)
        expect_at_least("task.requests", self.requests, 1)
        self.repeats = self.repeats or 1


TASKS: dict[str, type[TaskConfig]] = {
    task.name: task
    for task in (
        GenerateTask,
        CompareTask,
        ThroughputTask,
        LosslessnessTask,
        GraphAblationTask,
        KVScalesTask,
        ReplayTask,
        AdaptiveTask,
        VerificationRulesTask,
    )
}


def ignored_overrides(task: TaskConfig, overrides: Sequence[str]) -> list[str]:
    """Those of the command line's `overrides` that `task` does not use."""
    keys = [(override, override.split("=")[0].split("@")[0].lstrip("+~")) for override in overrides]
    return [text for text, key in keys if any(f"{key}.".startswith(f"{name}.") for name in task.IGNORED)]


def prompt_set(name: str, limit: int | None, skip_long: bool) -> Any:
    """The configuration of `data=NAME`, or of the prompt file NAME, with these settings; ValueError for neither."""
    if name not in datasets() and (Path(name).suffix or "/" in name):
        return JsonlData(name=Path(name).name, path=name, limit=limit, skip_long=skip_long)
    expect_choice("task.data", name, tuple(datasets()))
    settings = datasets()[name](skip_long=skip_long)
    return settings if limit is None else replace(settings, limit=limit)


def methods_by_label(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Label to configuration of the algorithms in `methods`, as `method_config` makes it."""
    return {label: method_config(f"task.methods.{label}", settings) for label, settings in methods.items()}


def method_config(key: str, settings: Any) -> Any:
    """The algorithm's own configuration from a mapping with `name`. Raises ValueError naming what does not fit."""
    found = available()
    if not isinstance(settings, Mapping) or "name" not in settings:
        raise ValueError(f"{key}: expected a mapping with name=ALGORITHM, got {settings!r}")
    name = str(settings["name"])
    expect_choice(f"{key}.name", name, tuple(sorted(found)))
    schema = found[name].Config
    known = [item.name for item in fields(schema)]
    unknown = [str(setting) for setting in settings if setting not in known]
    if unknown:
        close = nearest(unknown[0], known, count=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{key}: algo={name} has no setting {unknown[0]!r}{guess}; it has {', '.join(known)}")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), dict(settings)))
    except OmegaConfBaseException as error:
        where = f"{key}.{error.full_key}" if error.full_key else key
        raise ValueError(f"{where}: {str(error.__cause__ or error).splitlines()[0]}") from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _expect_some(name: str, values: Sequence[Any], least: float | None = None) -> None:
    """Raise ValueError unless there are `values`, each of at least `least`."""
    if not values:
        raise ValueError(f"{name}: expected at least one value, got none")
    if least is not None:
        for value in values:
            expect_at_least(name, value, least)
