"""Times of a step by method, batch and nodes, and the rate that they and tokens per step promise.

The file is JSON with one list:

    {"steps": [{"method": "eagle3_tree", "batch": 8, "nodes": 32, "step_ms": 9.1, "rows": 7.6}, ...]}

    method    label of the method that was timed; null stands for every method that has no times of its own
    batch     most requests of a step (`runtime.max_batch`)
    nodes     nodes verified per request, node 0 included
    step_ms   mean time of a step, drafting included
    rows      mean requests of a step; left out, it is the batch
    late      steps that are launched for a request before its end is read, mean over requests; left out, 0

The summary of a run of `compare`, `generate` or `throughput` holds the same figures, so the folder of a run can stand
in the place of a file. A run with `runtime.adaptive` holds the times that it measured before its first request, of each
number of nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.report.run_folder import SUMMARY
from experiments.report.run_folder import to_json as as_json

KEYS: dict[str, Any] = {
    "method": (str, type(None)),
    "batch": int,
    "nodes": int,
    "step_ms": (int, float),
    "rows": (int, float),
    "late": (int, float),
}
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
        """Every batch of which there is a time."""
        return sorted({entry.batch for entry in self.entries})

    def of(self, method: str, batch: int, nodes: int) -> StepTime | None:
        """The time of a step of `method`, between two measured numbers of nodes by a straight line; None outside."""
        for name in (method, None):
            here = sorted((e for e in self.entries if (e.method, e.batch) == (name, batch)), key=lambda e: e.nodes)
            if here:
                return _between(here, method, nodes)
        return None

    def at_rows(self, step: StepTime, rows: float) -> float:
        """Milliseconds of a step like `step` of so many requests on average: on the straight line to the nearest other
        batch on that side of it, or else on the other side; its own time where there is no other batch."""

        def distance(other: StepTime) -> tuple[bool, float]:
            return (other.rows < step.rows) != (rows < step.rows), abs(other.rows - step.rows)

        others = [self.of(step.method or "", batch, step.nodes) for batch in self.batches if batch != step.batch]
        other = min((each for each in others if each and each.rows != step.rows), key=distance, default=None)
        if other is None:
            return step.step_ms
        per_row = (other.step_ms - step.step_ms) / (other.rows - step.rows)
        return step.step_ms + per_row * (rows - step.rows)

    def kinds_of(self, method: str, baseline: str) -> list[StepTime]:
        """The times of steps of `method`, and those of a step without a draft, which are the baseline's or of 1 node. A
        time of this very method replaces one that stands for every method."""
        found: dict[tuple[int, int], StepTime] = {}
        for names in ((None, baseline), (method,)):
            found |= {(entry.batch, entry.nodes): entry for entry in self.entries if entry.method in names}
        return list(found.values())

    def to_json(self) -> str:
        """The content of a file."""
        return as_json({"steps": [asdict(entry) for entry in self.entries]}) + "\n"


def _between(entries: list[StepTime], method: str, nodes: int) -> StepTime | None:
    for entry in entries:
        if entry.nodes == nodes:
            return StepTime(method, entry.batch, nodes, entry.step_ms, entry.rows, entry.late)
    for low, high in pairwise(entries):
        if low.nodes < nodes < high.nodes:
            part = (nodes - low.nodes) / (high.nodes - low.nodes)
            pairs = ((low.step_ms, high.step_ms), (low.rows, high.rows), (low.late, high.late))
            step_ms, rows, late = (a + part * (b - a) for a, b in pairs)
            return StepTime(method, low.batch, nodes, step_ms, rows, late)
    return None


def read_step_times(path: str, key: str = "task.cost") -> StepTimes:
    """From a file, or from the summary of a run's folder, that the setting `key` names. Raises ValueError that says
    what is wrong with it."""
    place = Path(path)
    file = place / SUMMARY if place.is_dir() else place
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: expected a JSON file or the folder of a finished run, got {path}: {error}") from error
    if place.is_dir():
        entries = tuple(_from_summary(content, path, key))
    else:
        if not isinstance(content, dict) or not isinstance(content.get("steps"), list):
            raise ValueError(f'{key}: expected an object with a list "steps" in {path}')
        entries = tuple(_entry(entry, f"{key}: {path}: steps[{i}]") for i, entry in enumerate(content["steps"]))
    seen: set[tuple[Any, ...]] = set()
    for entry in entries:
        spot = entry.method, entry.batch, entry.nodes
        if spot in seen:
            raise ValueError(f"{key}: {path} has two times for method, batch, nodes = {spot}")
        seen.add(spot)
    if not entries:
        raise ValueError(f"{key}: {path} has no times of steps")
    return StepTimes(entries)


def _entry(entry: Any, where: str) -> StepTime:
    if not isinstance(entry, dict) or set(entry) - set(KEYS):
        raise ValueError(f"{where}: expected an object with {', '.join(KEYS)}, got {entry!r}")
    filled = {"method": None, "rows": entry.get("batch"), "late": 0, **entry}
    for key, kind in KEYS.items():
        value: Any = filled.get(key)
        fine = isinstance(value, kind) and not isinstance(value, bool)
        if fine and key != "method":
            fine = 0 <= value < float("inf") and (value > 0 or key == "late")
        if not fine:
            numbers = "a number of at least 0" if key == "late" else "a number above 0"
            expected = "a label or null" if key == "method" else numbers
            raise ValueError(f"{where}: {key}: expected {expected}, got {value!r}")
    return StepTime(**filled)


def _from_summary(summary: Mapping[str, Any], path: str, key: str) -> Iterator[StepTime]:
    """One entry for each method and batch of a run over one prompt set."""
    if summary.get("task") not in TIMED_TASKS:
        raise ValueError(f"{key}: expected a run of {', '.join(TIMED_TASKS)} in {path}, got task={summary.get('task')}")
    sets = sorted({row["data"] for row in summary["rows"]})
    if len(sets) > 1:
        raise ValueError(f"{key}: expected a run over one prompt set in {path}, got {', '.join(sets)}")
    for row in summary["rows"]:
        if "num_nodes" not in row:
            raise ValueError(f"{key}: {path} was written before rows had num_nodes: run it again")
        if row.get("adaptive"):
            for cost in row["adaptive"]["costs"]:
                yield StepTime(row["method"], cost["batch"], cost["nodes"], cost["step_ms"], cost["batch"])
            continue
        batch = row.get("concurrency", summary["max_batch"])
        if row["num_steps"] and row["step_ms"]["mean"]:
            rows = row["row_steps"] / row["num_steps"]
            # Rows of earlier runs do not have `launched_rows`.
            late = max(0, row.get("launched_rows", 0) - row["row_steps"]) / max(1, row["num_requests"])
            yield StepTime(row["method"], batch, row["num_nodes"], row["step_ms"]["mean"], rows, late)
