"""Hands a run to a tracker while it goes on and when it is done. The run folder is the record: a tracker that fails
costs one warning.

In a sweep the runs of wandb are a group with the name of the sweep, and the id of a run is the id of its job: a job
that is run again continues its run instead of making another. Under `wandb agent` wandb itself names run and group.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from experiments.app.hardware import is_main_process
from experiments.app.schema import TrackerConfig
from experiments.report.tables import Result, flatten

if TYPE_CHECKING:
    from algorithms.engine.session import StepReport

LIVE_S = 2.0  # seconds between two figures of a run that goes on


@dataclass
class Tracker:
    """A run of wandb, or nothing. No method raises; `problems` says what went wrong, once."""

    run: Any = None
    problems: list[str] = field(default_factory=list)
    _last: float = 0.0

    def live(self, label: str, report: StepReport) -> None:
        """Log how fast the method `label` decodes at this moment, every `LIVE_S` seconds."""
        if self.run is None or time.monotonic() - self._last < LIVE_S:
            return
        self._last = time.monotonic()
        figures = {
            "tokens_per_s": report.emitted_tokens / report.elapsed_s if report.elapsed_s else 0.0,
            "tokens_per_step": report.tokens_per_step,
            "finished_requests": report.num_finished,
        }
        with self._kept():
            self.run.log({f"live/{label}/{name}": value for name, value in figures.items()})

    def finish(self, summary: Mapping[str, Any], best: Result) -> list[str]:
        """Log the content of summary.json, whose results become a table; `best` is compared between runs. Returns
        warnings."""
        if self.run is not None:
            with self._kept():
                kinds = [summary["task"], summary["backend"], summary["model"]]
                kinds += [best["algo"]] if "algo" in best else []
                self.run.tags = tuple(dict.fromkeys([*(self.run.tags or ()), *kinds]))
                self.run.summary.update(scalars({**summary, **best}))
                self.run.log(_tables([scalars(result) for result in summary["rows"]], best))
        return self.problems

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep an exception of the tracker as a warning, and log nothing from then on."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:  # a tracker must not cost the results of a run
            self.run = None
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.problems.append(f"the tracker failed, the run folder is complete: {reason}")


@contextmanager
def tracking(
    config: TrackerConfig, folder: Path, settings: Mapping[str, Any], task: str, name: str, sweep: str | None = None
) -> Iterator[Tracker]:
    """A tracker for the run `name` in `folder` with the resolved configuration `settings`; the run of wandb ends with
    it. In a sweep the folder has the name of the job."""
    tracker = Tracker()
    if config.name != "none" and config.mode != "disabled" and is_main_process():
        with tracker._kept():
            tracker.run = _wandb_run(config, folder, settings, task, name, sweep)
    started, failed = tracker.run, True
    try:
        yield tracker
        failed = False
    finally:
        if started is not None:
            with suppress(Exception):
                started.finish(exit_code=int(failed))


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested figures as `phase_times_ms/draft`; lists are left out, they become tables."""
    return {name: value for name, value in flatten(values).items() if isinstance(value, (int, float, str))}


def _wandb_run(
    config: TrackerConfig, folder: Path, settings: Mapping[str, Any], task: str, name: str, sweep: str | None
) -> Any:
    import wandb

    off: Any = dict(x_disable_stats=True, disable_git=True, disable_code=True)
    named: dict[str, Any] = {"group": config.group, "name": name}
    if sweep is not None and "WANDB_SWEEP_ID" not in os.environ:
        named |= {"id": f"{sweep}-{folder.name}", "resume": "allow", "group": config.group or sweep}
    return wandb.init(
        project=config.project,
        entity=config.entity,
        mode=cast(Any, config.mode),
        dir=str(folder),
        job_type=task,
        tags=config.tags,
        config=flatten(settings, by="."),
        settings=wandb.Settings(silent=True, console="off", init_timeout=30, **off),
        **named,
    )


def _tables(results: Sequence[Result], best: Result) -> dict[str, Any]:
    import wandb

    columns: list[str | int] = list(dict.fromkeys(key for result in results for key in result))
    data = [[result.get(str(column)) for column in columns] for result in results]
    found: dict[str, Any] = {"rows": wandb.Table(columns=columns, data=data, allow_mixed_types=True)}
    if "phase_times_ms" in best:
        histogram = list(best["num_accepted_histogram"])
        bins = [k - 0.5 for k in range(len(histogram) + 1)]
        positions = [[i + 1, rate] for i, rate in enumerate(best["acceptance_at"]) if rate is not None]
        phases = [[phase, spent] for phase, spent in best["phase_times_ms"].items()]
        found |= {
            "acceptance_at": wandb.Table(columns=["position", "acceptance"], data=positions),
            "num_accepted": wandb.Histogram(np_histogram=cast(Any, (histogram, bins))),
            "phase_times_ms": wandb.Table(columns=["phase", "ms"], data=phases),
        }
    return found
