"""Times of a step by method, batch and nodes. `runtime.adaptive_cost` and `task.cost` name them.

The file is JSON with one list:

    {"steps": [{"method": "eagle3_tree", "batch": 8, "nodes": 32, "step_ms": 9.1, "rows": 7.6}, ...]}

    method    label of the method that was timed; null: every method that has no times of its own
    batch     most requests of a step (`runtime.max_batch`)
    nodes     nodes verified per request, the root included
    step_ms   mean time of a step, drafting included
    rows      mean requests of a step; by default the batch
    late      steps that are launched for a request before its end is read, mean over requests; by default 0

The summary of a run of `compare`, `generate` or `throughput` holds the same figures, so the folder of a run can replace
a file. A run with `runtime.adaptive` holds the times of each number of nodes that it measured before its first request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

_POSITIVE = sys.float_info.min
KEYS: dict[str, tuple[Any, float | None, str]] = {
    "method": ((str, type(None)), None, "a label or null"),
    "batch": (int, _POSITIVE, "a number above 0"),
    "nodes": (int, _POSITIVE, "a number above 0"),
    "step_ms": ((int, float), _POSITIVE, "a number above 0"),
    "rows": ((int, float), _POSITIVE, "a number above 0"),
    "late": ((int, float), 0, "a number of at least 0"),
}
"""Key to its type, its least value and what a message expects."""
TIMED_TASKS = ("compare", "generate", "throughput")


@dataclass(frozen=True)
class StepTime:
    """The time of a step of one method at one batch; see above."""

    method: str | None
    batch: int
    nodes: int
    step_ms: float
    rows: float
    late: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """All times of one file."""

    entries: tuple[StepTime, ...]

    @property
    def batches(self) -> list[int]:
        """Every batch that has a time."""
        return sorted({entry.batch for entry in self.entries})

    def of(self, method: str, batch: int, nodes: int) -> StepTime | None:
        """The time of a step of `method`, linear between two measured numbers of nodes; None outside of them."""
        entries = [entry for entry in self.entries if entry.batch == batch and entry.method in (method, None)]
        here = sorted([e for e in entries if e.method == method] or entries, key=lambda entry: entry.nodes)
        if not here or not here[0].nodes <= nodes <= here[-1].nodes:
            return None
        figures = ([getattr(entry, key) for entry in here] for key in ("step_ms", "rows", "late"))
        step_ms, rows, late = (float(np.interp(nodes, [e.nodes for e in here], each)) for each in figures)
        return StepTime(method, batch, nodes, step_ms, rows, late)

    def at_requests(self, step: StepTime, requests: float) -> float:
        """Milliseconds of a step like `step` of that many requests on average: linear to the nearest other batch on
        that side of it, or else on the other side; its own time where there is no other batch."""

        def distance(other: StepTime) -> tuple[bool, float]:
            return (other.rows < step.rows) != (requests < step.rows), abs(other.rows - step.rows)

        others = [self.of(step.method or "", batch, step.nodes) for batch in self.batches if batch != step.batch]
        other = min((each for each in others if each and each.rows != step.rows), key=distance, default=None)
        if other is None:
            return step.step_ms
        per_request = (other.step_ms - step.step_ms) / (other.rows - step.rows)
        return step.step_ms + per_request * (requests - step.rows)

    def kinds_of(self, method: str, baseline: str) -> list[StepTime]:
        """The times of steps of `method`, and of steps without a draft, which are the baseline's or of 1 node. A time
        of this very method replaces one of every method."""
        found: dict[tuple[int, int], StepTime] = {}
        for names in ((None, baseline), (method,)):
            found |= {(entry.batch, entry.nodes): entry for entry in self.entries if entry.method in names}
        return list(found.values())

    def to_json(self) -> str:
        """The content of a file."""
        return json.dumps({"steps": [asdict(entry) for entry in self.entries]}, indent=2) + "\n"


def read_step_times(path: str, key: str = "task.cost") -> StepTimes:
    """From a file, or from the summary of a run's folder, that the setting `key` names. Raises ValueError that says
    what is wrong with it."""
    place = Path(path)
    try:
        content = json.loads((place / "summary.json" if place.is_dir() else place).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: expected a JSON file or the folder of a finished run, got {path}: {error}") from error
    if place.is_dir():
        entries = tuple(_from_summary(content, path, key))
    elif not isinstance(content, dict) or not isinstance(content.get("steps"), list):
        raise ValueError(f'{key}: expected an object with a list "steps" in {path}')
    else:
        entries = tuple(_entry(entry, f"{key}: {path}: steps[{i}]") for i, entry in enumerate(content["steps"]))
    if not entries:
        raise ValueError(f"{key}: {path} has no times of steps")
    seen: set[tuple[Any, ...]] = set()
    for entry in entries:
        spot = entry.method, entry.batch, entry.nodes
        if spot in seen:
            raise ValueError(f"{key}: {path} has two times for method, batch, nodes = {spot}")
        seen.add(spot)
    return StepTimes(entries)


def _entry(entry: Any, where: str) -> StepTime:
    if not isinstance(entry, dict) or set(entry) - set(KEYS):
        raise ValueError(f"{where}: expected an object with {', '.join(KEYS)}, got {entry!r}")
    filled = {"method": None, "rows": entry.get("batch"), "late": 0, **entry}
    for key, (kind, least, expected) in KEYS.items():
        value: Any = filled.get(key)
        number = least is None or (isinstance(value, kind) and least <= value < float("inf"))
        if not isinstance(value, kind) or isinstance(value, bool) or not number:
            raise ValueError(f"{where}: {key}: expected {expected}, got {value!r}")
    return StepTime(**filled)


def _from_summary(summary: Mapping[str, Any], path: str, key: str) -> Iterator[StepTime]:
    """One entry for each method and batch of a run over one prompt set."""
    if summary.get("task") not in TIMED_TASKS:
        raise ValueError(f"{key}: expected a run of {', '.join(TIMED_TASKS)} in {path}, got task={summary.get('task')}")
    sets = sorted({result["data"] for result in summary["rows"]})
    if len(sets) > 1:
        raise ValueError(f"{key}: expected a run over one prompt set in {path}, got {', '.join(sets)}")
    for result in summary["rows"]:
        if result.get("adaptive"):
            for cost in result["adaptive"]["costs"]:
                yield StepTime(result["method"], cost["batch"], cost["nodes"], cost["step_ms"], cost["batch"])
        elif result["num_steps"] and result["step_ms"]["mean"]:
            batch, nodes = result.get("concurrency", summary["max_batch"]), result["num_nodes"]
            rows = result["row_steps"] / result["num_steps"]
            late = max(0, result["launched_rows"] - result["row_steps"]) / max(1, result["num_requests"])
            yield StepTime(result["method"], batch, nodes, result["step_ms"]["mean"], rows, late)
