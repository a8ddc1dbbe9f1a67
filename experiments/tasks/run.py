"""One run: plan, measure, write the run folder, show the results. The same for every task.

The command line imports this module, so torch and the tasks are imported only when a run begins.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.identity import NEUTRAL, what_matters
from experiments.app.schema import RunConfig
from experiments.app.task_schema import ignored_overrides

if TYPE_CHECKING:
    from experiments.report.tables import Result
    from experiments.tasks.base import Task

OWN_KEYS = ("name", "task", "objective", "failures", "rows")  # keys of a summary that are no conditions of the run


def run_task(config: RunConfig, composed: DictConfig) -> float:
    """Run the configured task. Returns the figure for the table of a sweep. Raises NotLossless, after everything is
    written and shown, where outputs are wrong."""
    from experiments.app.errors import NotLossless
    from experiments.app.hardware import output_folder
    from experiments.app.plan import resolve
    from experiments.app.provenance import git_revision
    from experiments.app.resume import CONFIG, check_unchanged
    from experiments.report.checks import NOT_A_GPU
    from experiments.report.console import plain_console
    from experiments.report.run_folder import REPORT, open_run_folder
    from experiments.report.tables import console_table
    from experiments.report.tracking import tracking
    from experiments.tasks.resumed import BASELINES, BaselineStore

    console = plain_console()

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    words, resumed = HydraConfig.get().overrides.task, config.resume is not None
    typed = [word for word in words if not word.startswith(("resume=", "resume_force="))]
    if ignored := ignored_overrides(config.task, typed):
        say(f"warning: task={config.task.name} does not use {', '.join(ignored)}", "yellow")
    if config.resume is not None:
        check_unchanged(Path(config.resume), composed, config.resume_force)
    plan = resolve(config)
    task = config.task.load()(plan, plan.load_target(), console)
    hardware, resolved = plan.hardware, cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    say(f"{task.title} · {hardware.device} {hardware.dtype} · {hardware.label}")
    about = {"overrides": typed, "cwd": os.getcwd(), "revision": git_revision()}
    path = output_folder(Path(HydraConfig.get().runtime.output_dir))
    with ExitStack() as stack:
        folder = stack.enter_context(open_run_folder(path, about, resumed, config.task.NOT_RESUMED is None))
        if config.resume is None:
            folder.write(CONFIG, OmegaConf.to_yaml(composed, resolve=True))
        sweep = config.sweep.name
        own = " ".join(word for word in typed if re.split(r"[.=]", word.lstrip("+"))[0] not in NEUTRAL) if sweep else ""
        run = config.task.name, own or config.name, sweep
        tracker = stack.enter_context(tracking(config.tracker, folder.path, resolved, *run))
        task.folder, task.tracker = folder, tracker
        if sweep is not None and config.sweep.share_baseline and config.runtime.tensor_parallel == 1:
            task.baselines = BaselineStore(folder.path.parent / BASELINES)
        results = task.measure()
        folder.requests.replace(task.requests_in_order())
        notes = task.warnings(results)
        summary = _write(task, composed, typed, results, notes)
        best = task.best(results)
        notes += tracker.finish(summary, best)
    console.print(console_table(task.title, task.columns, results), crop=False)
    task.show(results)
    if hardware.device == "cpu":
        say(NOT_A_GPU[hardware.label], "yellow")
    for warning in notes:
        say(f"warning: {warning}", "yellow")
    say(f"report: {folder.path / REPORT}")
    if summary["failures"]:
        raise NotLossless("\n".join(["not lossless", *summary["failures"]]))
    return float(best.get(task.objective) or 0.0)


def _write(
    task: Task, composed: DictConfig, typed: Sequence[str], results: Sequence[Result], notes: list[str]
) -> dict[str, Any]:
    """Write the files of a finished run with the settings `typed`; returns its summary."""
    from experiments.app.provenance import run_conditions
    from experiments.app.resume import CONFIG
    from experiments.report.html_page import render
    from experiments.report.run_folder import DECODINGS, REPORT, REQUESTS, SUMMARY

    plan, failures = task.plan, task.failures(results)
    summary: dict[str, Any] = {"name": plan.config.name, "task": plan.config.task.name, "objective": task.objective}
    summary |= run_conditions(plan.config, plan.hardware, plan.model_label)
    summary |= {"command": shlex.join(["python", "run.py", *typed]), "failures": failures, "rows": results}
    conditions = {key: value for key, value in summary.items() if key not in OWN_KEYS}
    files = task.files(results, conditions)
    links = sorted({*files, REQUESTS, DECODINGS, CONFIG, SUMMARY})
    settings = what_matters(composed) | {"algo": {label: asdict(algo) for label, algo in plan.methods.items()}}
    shown = settings, notes, task.headline(results), task.sections(results), failures, links
    page = render(task.title, task.columns, results, conditions, *shown)
    task.folder.write_results({**files, REPORT: page}, summary)
    return summary
