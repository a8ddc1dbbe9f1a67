"""What each task can be asked, checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.app.suggest import nearest


@dataclass
class TaskConfig:
    """What every task declares of itself: keys of a run that it has no use for, and why it cannot be given the number
    of pages, if it cannot."""

    NAME: ClassVar[str]
    IGNORED: ClassVar[tuple[str, ...]] = ()
    OWN_PAGES: ClassVar[str | None] = None


@dataclass
class GenerateTask(TaskConfig):
    """One algorithm over one prompt set, beside autoregressive decoding."""

    NAME: ClassVar[str] = "generate"
    name: str = "generate"


@dataclass
class CompareTask(TaskConfig):
    """Several methods over several prompt sets. `methods` maps a label to an algorithm and its settings."""

    NAME: ClassVar[str] = "compare"
    IGNORED: ClassVar[tuple[str, ...]] = ("algo", "data", "baseline", "samples")
    name: str = "compare"
    methods: dict[str, Any] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    """Labels of the methods to run; all of them where empty."""
    data: list[str] = field(default_factory=lambda: ["arithmetic", "code"])
    limit: int | None = None
    """Prompts of each set; null takes the set's own default."""

    def __post_init__(self) -> None:
        chosen_methods(self)
        _expect_some("task.data", self.data)
        _expect_at_least("task.limit", [self.limit], 1)


@dataclass
class ThroughputTask(TaskConfig):
    """The run's algorithm and the baseline at several concurrencies."""

    NAME: ClassVar[str] = "throughput"
    IGNORED: ClassVar[tuple[str, ...]] = ("baseline", "samples", "runtime.max_batch")
    OWN_PAGES: ClassVar[str | None] = "each level of task.concurrency has as many pages as it needs"
    name: str = "throughput"
    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    requests: int = 2
    """Requests of a level for each of its places; prompts are taken in turn."""

    def __post_init__(self) -> None:
        _expect_some("task.concurrency", self.concurrency)
        _expect_at_least("task.concurrency", self.concurrency, 1)
        _expect_at_least("task.requests", [self.requests], 1)


@dataclass
class LosslessnessTask(TaskConfig):
    """Whether each method on each backend writes what the target alone writes, and draws from its law."""

    NAME: ClassVar[str] = "losslessness"
    IGNORED: ClassVar[tuple[str, ...]] = (
        "algo", "baseline", "samples", "runtime.max_batch", "runtime.page_size", "sampling.temperature",
    )  # fmt: skip
    OWN_PAGES: ClassVar[str | None] = "each of task.page_sizes and task.batches has as many pages as it needs"
    name: str = "losslessness"
    methods: dict[str, Any] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    """Labels of the methods to run; all of them where empty."""
    backends: list[str] = field(default_factory=lambda: ["fa4", "torch"])
    page_sizes: list[int] = field(default_factory=lambda: [1, 16])
    batches: list[int] = field(default_factory=lambda: [1, 3])
    low_precision: str | None = "bfloat16"
    """Also decode in this dtype and say where it first departs, by which gap of logits; null skips it."""
    law_draws: int = 400
    """Draws of the first two tokens that are held against the target's law; 0 skips it."""
    temperature: float = 0.8
    min_tokens: int = 0
    """Go on over the prompts, sampled with other seeds each time, until so many tokens were compared for each method;
    rules that draw their drafts are compared where they are greedy, once."""

    def __post_init__(self) -> None:
        chosen_methods(self)
        for name in ("backends", "page_sizes", "batches"):
            _expect_some(f"task.{name}", getattr(self, name))
        _expect_at_least("task.page_sizes", self.page_sizes, 1)
        _expect_at_least("task.batches", self.batches, 1)
        _expect_at_least("task.law_draws", [self.law_draws], 0)
        _expect_at_least("task.min_tokens", [self.min_tokens], 0)
        if self.low_precision not in (None, "bfloat16", "float16"):
            raise ValueError(f"task.low_precision must be bfloat16, float16 or null, got {self.low_precision!r}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"task.temperature must be above 0 and finite, got {self.temperature}")


@dataclass
class GraphAblationTask(TaskConfig):
    """The same run with nothing, the draft, draft and verify, and the whole step captured in CUDA graphs."""

    NAME: ClassVar[str] = "graph_ablation"
    IGNORED: ClassVar[tuple[str, ...]] = ("baseline", "samples", "runtime.graph")
    name: str = "graph_ablation"
    levels: list[str] = field(default_factory=lambda: ["none", "draft", "verify", "step"])

    def __post_init__(self) -> None:
        from experiments.app.schema import GRAPH_LEVELS, expect_choice

        _expect_some("task.levels", self.levels)
        for level in self.levels:
            expect_choice("task.levels", level, GRAPH_LEVELS)


def ignored_overrides(task: TaskConfig, overrides: Sequence[str]) -> list[str]:
    """Those of the command line's `overrides` that `task` has no use for."""
    keys = [(override, override.split("=")[0].split("@")[0].lstrip("+~")) for override in overrides]
    return [text for text, key in keys if any(f"{key}.".startswith(f"{name}.") for name in task.IGNORED)]


def chosen_methods(task: CompareTask | LosslessnessTask) -> dict[str, Any]:
    """Label to configuration of the methods a task runs. Raises ValueError for a label that is not there, and for a
    method that names no algorithm or a setting its algorithm does not have."""
    if not task.methods:
        raise ValueError("task.methods is empty: give at least one, such as +task.methods.mine.name=dflash")
    methods = {label: method_config(f"task.methods.{label}", settings) for label, settings in task.methods.items()}
    strangers = [label for label in task.only if label not in methods]
    if strangers:
        raise ValueError(f"task.only must be among {', '.join(methods)}, got {strangers[0]!r}")
    return {label: method for label, method in methods.items() if label in task.only or not task.only}


def method_config(key: str, settings: Any) -> Any:
    """The algorithm's own configuration from a mapping with `name`; ValueError names what does not fit."""
    from algorithms.registry import available

    found = available()
    if not isinstance(settings, Mapping) or "name" not in settings:
        raise ValueError(f"{key}: expected a mapping with name=ALGORITHM, got {settings!r}")
    name = str(settings["name"])
    if name not in found:
        raise ValueError(f"{key}.name must be one of {', '.join(sorted(found))}, got {name!r}")
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


def _expect_some(name: str, values: Any) -> None:
    if not values:
        raise ValueError(f"{name} must not be empty")


def _expect_at_least(name: str, values: Any, least: int) -> None:
    wrong = [value for value in values if value is not None and value < least]
    if wrong:
        raise ValueError(f"{name} must be at least {least}, got {wrong[0]}")
