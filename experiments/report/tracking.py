"""Hands a finished run to a tracker. The run folder is the record: a tracker that fails costs one warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from experiments.app.distributed import is_main_process
from experiments.app.schema import TrackerConfig
from experiments.report.tables import Row, flatten

LOGGED = (int, float, str, bool)


def track(
    tracker: TrackerConfig, folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any], best: Row
) -> list[str]:
    """Log a run; returns a warning where that failed.

    `config` is the resolved configuration and `summary` the content of summary.json, whose rows become a table. The
    figures of `best`, one of its rows, are what the tracker compares between runs.
    """
    if tracker.name == "none" or tracker.mode == "disabled" or not is_main_process():
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _log_to_wandb(tracker, folder, config, summary, best)
    except Exception as error:  # a tracker must not cost the results of a run, whatever goes wrong in it
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return [f"the tracker failed, the run folder is complete: {reason}"]
    return []


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested figures as `ledger_ms/draft`; lists are left out, they become tables."""
    return {name: value for name, value in flatten(values).items() if isinstance(value, LOGGED)}


def _log_to_wandb(
    tracker: TrackerConfig, folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any], best: Row
) -> None:
    import wandb

    tags = [summary["task"], summary["backend"], summary["model"], *([best["algo"]] if "algo" in best else [])]
    settings = wandb.Settings(
        silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True, init_timeout=30
    )
    with wandb.init(
        project=tracker.project,
        entity=tracker.entity,
        group=tracker.group,
        mode=cast(Any, tracker.mode),
        name=summary["name"],
        dir=str(folder),
        job_type=summary["task"],
        tags=list(dict.fromkeys([*tracker.tags, *tags])),
        config=dict(config),
        settings=settings,
    ) as run:
        run.summary.update(scalars({**summary, **best}))
        run.log(_tables(wandb, [scalars(row) for row in summary["rows"]], best))


def _tables(wandb: Any, rows: Sequence[Row], best: Row) -> dict[str, Any]:
    columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(str(column)) for column in columns] for row in rows]
    found = {"rows": wandb.Table(columns=columns, data=data, allow_mixed_types=True)}
    if "ledger_ms" in best:
        histogram = list(best["num_accepted_histogram"])
        bins = [k - 0.5 for k in range(len(histogram) + 1)]
        positions = [[i + 1, rate] for i, rate in enumerate(best["acceptance_at"]) if rate is not None]
        ledger = [[phase, spent] for phase, spent in best["ledger_ms"].items()]
        found |= {
            "acceptance_at": wandb.Table(columns=["position", "acceptance"], data=positions),
            "num_accepted": wandb.Histogram(np_histogram=(histogram, bins)),
            "ledger_ms": wandb.Table(columns=["phase", "ms"], data=ledger),
        }
    return found
