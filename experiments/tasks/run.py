"""One run: plan, measure, write the run folder, show the results. The same for every task.

The command line imports this module, so torch and the tasks are imported only when a run begins.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.schema import RunConfig
from experiments.app.task_schema import ignored_overrides

if TYPE_CHECKING:
    from experiments.report.tracking import Identity
    from experiments.tasks.base import Task

OWN_KEYS = ("name", "task", "objective", "failures", "rows")
"""Of a summary, what is no condition of the run."""


def task_named(name: str) -> type[Task]:
    """The task that `task=NAME` runs."""
    from experiments.tasks.adaptive import Adaptive
    from experiments.tasks.compare import Compare
    from experiments.tasks.generate import Generate
    from experiments.tasks.graph_ablation import GraphAblation
    from experiments.tasks.kv_scales import KVScalesTask
    from experiments.tasks.losslessness import Losslessness
    from experiments.tasks.replay import Replay
    from experiments.tasks.throughput import Throughput
    from experiments.tasks.verification_rules import VerificationRules

    tasks: tuple[type[Task], ...] = (
        Generate, Compare, Throughput, Losslessness, GraphAblation, KVScalesTask, Replay, Adaptive, VerificationRules,
    )  # fmt: skip
    return {task.name: task for task in tasks}[name]


def command(typed: Sequence[str]) -> str:
    """The command line that asks for one run with the settings `typed`."""
    return " ".join(["python run.py", *map(shlex.quote, typed)])


def own_name(overrides: Sequence[str]) -> str:
    """A row's name among those of its sweep: what was typed for it."""
    neutral = ("sweep.", "tracker", "paths.", "name=", "samples=")
    return " ".join(text for text in overrides if not text.lstrip("+").startswith(neutral))


def run_task(config: RunConfig, composed: DictConfig) -> float:
    """Run the configured task. Returns the figure that a sweep maximises.

    Raises NotLossless, after everything is written and shown, where texts are not what they must be.
    """
    from experiments.app.distributed import output_folder
    from experiments.app.errors import NotLossless
    from experiments.app.plan import resolve
    from experiments.app.provenance import git_revision, run_conditions
    from experiments.app.resume import CONFIG, check_unchanged, own_words
    from experiments.report.console import plain_console
    from experiments.report.metrics import NOT_A_GPU
    from experiments.report.run_folder import REPORT, open_run_folder
    from experiments.report.tables import console_table
    from experiments.report.tracking import tracking
    from experiments.tasks.baselines import FOLDER as BASELINES
    from experiments.tasks.baselines import BaselineStore

    console = plain_console()

    def tell(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    typed = own_words(HydraConfig.get().overrides.task)
    if ignored := ignored_overrides(config.task, typed):
        tell(f"warning: task={config.task.name} does not use {', '.join(ignored)}", "yellow")
    if config.resume is not None:
        check_unchanged(Path(config.resume), composed, config.resume_force)
    plan = resolve(config)
    task = task_named(config.task.name)(plan, plan.load_target(), console)
    hardware, resolved = plan.hardware, cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    tell(f"{task.title} · {hardware.device} {hardware.dtype} · {hardware.label}")
    about = {"overrides": typed, "cwd": os.getcwd(), "revision": git_revision()}
    path = output_folder(Path(HydraConfig.get().runtime.output_dir))
    with (
        open_run_folder(path, about, config.resume is not None, config.task.NOT_RESUMED is None) as folder,
        tracking(config.tracker, folder.path, resolved, _identity(config, typed, path), task.name) as tracker,
    ):
        if config.resume is None:
            folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        task.folder, task.tracker = folder, tracker
        if config.sweep.name is not None and config.sweep.share_baseline:
            task.baselines = BaselineStore(folder.path.parent / BASELINES)
        rows = task.measure()
        folder.replace_requests(task.requests_in_order())
        notes, failures = task.warnings(rows), task.failures(rows)
        summary: dict[str, Any] = {"name": config.name, "task": task.name, "objective": task.objective}
        summary |= run_conditions(config, hardware, plan.model_label)
        summary |= {"command": command(typed), "failures": failures, "rows": rows}
        folder.write_results(_files(task, notes, summary), summary)
        notes += tracker.finish(summary, task.best(rows))
    console.print(console_table(task.title, task.columns, rows))
    task.show(rows)
    if hardware.device == "cpu":
        tell(NOT_A_GPU[hardware.label], "yellow")
    for warning in notes:
        tell(f"warning: {warning}", "yellow")
    tell(f"report: {folder.path / REPORT}")
    if failures:
        raise NotLossless("\n".join(["not lossless", *failures]))
    return task.value(rows)


def _identity(config: RunConfig, typed: Sequence[str], path: Path) -> Identity:
    """What a tracker calls the run: by its own name, or as the row of a sweep that `path` is."""
    from experiments.report.tracking import Identity

    if config.sweep.name is None:
        return Identity(config.name)
    return Identity(own_name(typed) or config.name, config.sweep.name, path.name)


def _files(task: Task, notes: Sequence[str], summary: Mapping[str, Any]) -> dict[str, str]:
    """Names and contents of the files of results, the page among them."""
    from experiments.app.resume import CONFIG
    from experiments.report.page import render
    from experiments.report.run_folder import DECODINGS, REPORT, REQUESTS, SUMMARY

    rows, failures = summary["rows"], summary["failures"]
    conditions = {key: value for key, value in summary.items() if key not in OWN_KEYS}
    results = task.files(rows, conditions)
    links = sorted({*results, REQUESTS, DECODINGS, CONFIG, SUMMARY})
    shown = notes, task.headline(rows), task.sections(rows), failures
    return {**results, REPORT: render(task.title, task.columns, rows, conditions, task.settings(), *shown, files=links)}
