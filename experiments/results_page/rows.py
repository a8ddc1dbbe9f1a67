"""Measured rows: one JSON object a line in experiments/results, and what a table shows of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from experiments.app.provenance import short_revision
from experiments.app.schema import REPO_ROOT
from experiments.report.tables import DASH, Row, figure

FOLDER = REPO_ROOT / "experiments" / "results"
POSITIONS = 8
"""Drafts whose acceptance a table shows."""
PHASES = ("draft", "verify", "accept", "commit", "host")
BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, None))
"""First and last number of accepted drafts that a table of the histogram puts together."""


@cache
def read(name: str) -> tuple[Row, ...]:
    """The rows of the file `name`, with what is derived from them. Raises ValueError where there is none."""
    path = FOLDER / name
    if not path.is_file():
        raise ValueError(f"{name}: no such file in {FOLDER}")
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(row | derived(row) for row in map(json.loads, filter(None, lines)))


def read_all(names: str | Sequence[str]) -> list[Row]:
    """The rows of one file or of several."""
    return [row for name in ([names] if isinstance(names, str) else names) for row in read(name)]


def matching(rows: Sequence[Row], where: Mapping[str, Any]) -> list[Row]:
    """The rows that have the values in `where`; of a list any. Keys may lead into mappings: `sampling/temperature`."""
    wanted = {key: value if isinstance(value, list) else [value] for key, value in where.items()}
    return [row for row in rows if all(value_at(row, key) in values for key, values in wanted.items())]


def value_at(row: Row, path: str) -> Any:
    """The value under a path such as `step_ms/median`; None where a part is missing."""
    found: Any = row
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def derived(row: Row) -> dict[str, Any]:
    """What tables show of a row beside its own fields; a dash where the row does not have what it takes."""
    return {
        "tokens_per_step_text": _with_interval(row, "tokens_per_step"),
        "speedup_decode_text": _with_interval(row, "speedup_decode", "×"),
        "speedup_wall_text": _with_interval(row, "speedup_wall", "×"),
        "acceptance_text": _acceptance(row),
        "histogram": _histogram(row),
        "lossless_text": _lossless(row),
        "phase": _phases(row),
        "revision_text": short_revision(str(row.get("revision") or row.get("git_revision") or "unknown")),
    }


def _with_interval(row: Row, key: str, suffix: str = "") -> str:
    value, found = row.get(key), row.get(f"{key}_interval")
    if value is None:
        return DASH
    half = f" ± {figure(found[1] - value, 2)}" if found else ""
    return figure(value, 2) + suffix + half


def _acceptance(row: Row) -> str:
    shares = (row.get("acceptance_at") or [])[:POSITIONS]
    return " ".join(DASH if share is None else f"{100 * share:.0f}" for share in shares) or DASH


def _histogram(row: Row) -> dict[int, str]:
    """First number of a bucket to the share of the steps with so many accepted drafts, in percent."""
    counts = row.get("num_accepted_histogram") or []
    total = sum(counts)
    found = {}
    for first, last in BUCKETS:
        inside = sum(counts[first : None if last is None else last + 1])
        found[first] = f"{100 * inside / total:.0f}" if len(counts) > first and total else DASH
    return found


def _lossless(row: Row) -> str:
    comparison = row.get("lossless") or {"checked": 0}
    if row.get("method") == "autoregressive":
        return "reference"
    if not comparison["checked"]:
        return DASH
    ties = f", {comparison['near_ties']} near ties" if comparison.get("near_ties") else ""
    return f"{comparison['identical']}/{comparison['checked']}{ties}"


def _phases(row: Row) -> dict[str, str]:
    """Milliseconds of a step by phase."""
    steps, ledger = row.get("num_steps"), row.get("ledger_ms") or {}
    return {name: f"{ledger[name] / steps:.2f}" if steps and name in ledger else DASH for name in PHASES}
