"""Hands a finished run to a tracker. The run folder is the record: a tracker that fails costs one line."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.app.distributed import is_main_process
from experiments.app.schema import TrackerConfig

FLAT = (int, float, str, bool)


def track(
    tracker: TrackerConfig, folder: Path, name: str, config: Mapping[str, Any], summary: Mapping[str, Any]
) -> str | None:
    """Log `config` and `summary`; returns a warning where that failed, else None."""
    if tracker.name == "none" or tracker.mode == "disabled" or not is_main_process():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _log_to_wandb(tracker, folder, name, config, summary)
    except Exception as error:  # a tracker must not cost the results of a run, whatever goes wrong in it
        return _failed(error)
    return None


def track_rows(tracker: TrackerConfig, folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Log a table of results; returns a warning where that failed, else nothing."""
    if tracker.name == "none" or tracker.mode == "disabled" or not is_main_process():
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _log_table(tracker, folder, name, [flatten(row) for row in rows])
    except Exception as error:  # as in `track`
        return [_failed(error)]
    return []


def _failed(error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return f"the tracker failed, the run folder is complete: {reason}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as `ledger_ms/draft`; lists are left out, they become tables."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, FLAT):
            flat[f"{prefix}{key}"] = value
    return flat


def _log_to_wandb(
    tracker: TrackerConfig, folder: Path, name: str, config: Mapping[str, Any], summary: Mapping[str, Any]
) -> None:
    import wandb

    tags = [summary["algo"], summary["backend"], summary["model"]]
    with _started(wandb, tracker, folder, name, "generate", tags, config) as run:
        run.summary.update(flatten(summary))
        run.log(_tables(wandb, summary))


def _log_table(tracker: TrackerConfig, folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    import wandb

    columns: list[str | int] = list(dict.fromkeys(key for row in rows for key in row))
    data = [[row.get(str(column)) for column in columns] for row in rows]
    with _started(wandb, tracker, folder, name, "table", [], {}) as run:
        run.log({"rows": wandb.Table(columns=columns, data=data, allow_mixed_types=True)})


def _started(
    wandb: Any,
    tracker: TrackerConfig,
    folder: Path,
    name: str,
    job_type: str,
    tags: Sequence[str],
    config: Mapping[str, Any],
) -> Any:
    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        disable_git=True,
        disable_code=True,
        init_timeout=30,
    )
    return wandb.init(
        project=tracker.project,
        entity=tracker.entity,
        group=tracker.group,
        mode=tracker.mode,
        name=name,
        dir=str(folder),
        job_type=job_type,
        tags=list(dict.fromkeys([*tracker.tags, *tags])),
        config=dict(config),
        settings=settings,
    )


def _tables(wandb: Any, summary: Mapping[str, Any]) -> dict[str, Any]:
    positions = [[i + 1, rate] for i, rate in enumerate(summary["acceptance_at"]) if rate is not None]
    histogram = list(summary["num_accepted_histogram"])
    ledger = [[phase, spent] for phase, spent in summary["ledger_ms"].items()]
    bins = [k - 0.5 for k in range(len(histogram) + 1)]
    return {
        "acceptance_at": wandb.Table(columns=["position", "acceptance"], data=positions),
        "num_accepted": wandb.Histogram(np_histogram=(histogram, bins)),
        "ledger_ms": wandb.Table(columns=["phase", "ms"], data=ledger),
    }
