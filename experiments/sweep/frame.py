"""The rows of one or several sweeps as one data frame: what was swept, what was measured, and where it was.

A row of the frame is a method of a job that is done, or a job that is not done with its state and reason. Rows of
autoregressive decoding are the baselines of the speedups beside them; they are left out where a job has other methods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import yaml

from experiments.app.errors import UserError
from experiments.app.identity import at
from experiments.app.suggest import listing, nearest
from experiments.report.tables import flatten
from experiments.sweep.folder import DONE, RowRecord, SweepFolder

BASELINE = "autoregressive"
INNER = ("data", "method", "concurrency", "level", "family", "case", "backend")
"""Figures that tell rows of one job apart."""
WHERE = ("machine", "revision")
"""Rows that differ here are not compared unless that is asked for."""
CONDITIONS = (*WHERE, "device", "impl", "dtype", "task")
METRICS = (
    "tokens_per_step", "request_tokens_per_s", "wall_tokens_per_s", "speedup_decode", "speedup_wall", "lossless",
    "median_us",
)  # fmt: skip
"""Figures that a table shows where nothing else is asked for, as far as rows have them."""


def read(folders: Sequence[SweepFolder], mix: bool = False) -> tuple[pd.DataFrame, list[str]]:
    """(the frame, names of the columns that tell its rows apart).

    Raises UserError for a folder without rows, and where rows of several machines or revisions meet without `mix`.
    """
    keys = list(dict.fromkeys(key for folder in folders for key in _swept(folder)))
    lines: list[dict[str, Any]] = []
    for folder in folders:
        if not (records := folder.records()):
            raise UserError(
                f"{folder.path} is no sweep: it has no rows/*.json\nmake one with python run.py -m sweep=NAME …"
            )
        for record in records:
            lines += _lines(folder, record, keys)
    frame = pd.DataFrame(_once(lines))
    if not mix:
        _expect_one_place(frame)
    several = [column for column in WHERE if column in frame and frame[column].nunique() > 1]
    inner = [column for column in INNER if column in frame and column not in keys and _varies(frame, column)]
    used = [key for key in keys if key in frame and frame[key].notna().any()]
    return frame, [*used, *inner, *several]


def _swept(folder: SweepFolder) -> list[str]:
    """The keys that were swept, and those whose values differ between rows that were started one by one."""
    values: dict[str, set[Any]] = {}
    for record in folder.records():
        for text in record.overrides:
            key = text.partition("=")[0].lstrip("+~")
            values.setdefault(key, set()).add(str(_setting(record, key)))
    return [*folder.settings()["keys"], *(key for key, found in values.items() if len(found) > 1)]


def _lines(folder: SweepFolder, record: RowRecord, keys: Sequence[str]) -> Iterable[dict[str, Any]]:
    """The lines of one job: its methods, or one line with its state."""
    state, summary = folder.state(record.id), folder.summary(record.id)
    values = {key: _setting(record, key) for key in keys}
    line: dict[str, Any] = {"row": record.id, **values, "state": state}
    if state != DONE or summary is None:
        yield line | {"reason": record.reason}
        return
    line |= {name: summary.get(name) for name in CONDITIONS} | {"wall_s": record.wall_s}
    rows = summary["rows"]
    methods = [row for row in rows if row.get("algo") != BASELINE] or rows
    for row in methods:
        figures = {name: value for name, value in flatten(row).items() if name not in values}
        yield line | figures | _intervals(figures) | _judged(row)


def _setting(record: RowRecord, key: str) -> Any:
    """The value of a swept key; a group is called by its option."""
    found = at(record.config, key.replace(".", "/").lstrip("+~"))
    if isinstance(found, Mapping):
        found = found.get("name", str(dict(found)))
    if found is None:
        typed = dict(text.lstrip("+~").split("=", 1) for text in record.overrides if "=" in text)
        found = yaml.safe_load(typed[key]) if key in typed else None
    return str(found) if isinstance(found, (list, dict)) else found


def _intervals(figures: Mapping[str, Any]) -> dict[str, float]:
    """`speedup_decode_interval` = [low, high] and others as `speedup_decode_low` and `speedup_decode_high`."""
    found = {name.removesuffix("_interval"): ends for name, ends in figures.items() if name.endswith("_interval")}
    pairs = {name: ends for name, ends in found.items() if isinstance(ends, list) and len(ends) == 2}
    return {f"{name}_{end}": ends[i] for name, ends in pairs.items() for i, end in enumerate(("low", "high"))}


def _judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the texts are the target's own, as identical/checked."""
    comparison = row.get("lossless")
    if not isinstance(comparison, Mapping) or not comparison.get("checked"):
        return {}
    return {"lossless": f"{comparison['identical']}/{comparison['checked']}"}


def _once(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row of several folders once: two shards of a sweep may both name it, and the one that is done counts."""
    done = {line["row"] for line in lines if line["state"] == DONE}
    seen: dict[Any, dict[str, Any]] = {}
    for line in lines:
        if line["state"] == DONE or line["row"] not in done:
            seen.setdefault((line["row"], *(line.get(name) for name in (*INNER, *WHERE))), line)
    return list(seen.values())


def _expect_one_place(frame: pd.DataFrame) -> None:
    for column in WHERE:
        found = [str(value) for value in frame[column].dropna().unique()] if column in frame else []
        if len(found) > 1:
            raise UserError(
                f"rows of {len(found)} {column}s meet: {', '.join(sorted(found))}\n"
                "mix=true puts them into one table with a column that tells them apart"
            )


def _varies(frame: pd.DataFrame, column: str) -> bool:
    """Whether rows of one job differ in a column."""
    return bool((frame.groupby("row")[column].nunique() > 1).any())


def chosen_metrics(frame: pd.DataFrame, asked: Sequence[str]) -> list[str]:
    """The figures to show. Raises UserError for one that no row has."""
    known = [str(column) for column in frame.columns]
    if wrong := [name for name in asked if name not in known]:
        numeric = [str(name) for name in frame.select_dtypes("number").columns]
        close = nearest(wrong[0], numeric)
        guess = f"\ndid you mean: {', '.join(close)}" if close else ""
        raise UserError(f"no row has the figure {wrong[0]!r}{guess}\nfigures: {listing(numeric)}")
    return list(asked) or [name for name in METRICS if name in known and frame[name].notna().any()]


def best_rows(frame: pd.DataFrame, group: Sequence[str], metric: str) -> pd.DataFrame:
    """The row with the best `metric` of each group, without a group of all rows: the largest figure, the least time."""
    figures = pd.to_numeric(frame[metric], errors="coerce").dropna()
    measured = frame.loc[figures.index]
    if measured.empty:
        return measured
    figures = -figures if re.search(r"_(us|ms)\b", metric) else figures
    if not group:
        return measured.loc[[figures.idxmax()]]
    best = figures.groupby([measured[key].astype(str) for key in group]).idxmax()
    return measured.loc[best.sort_values()]


def pareto(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The rows that no other row beats in both figures, in the order of x."""
    kept = frame.dropna(subset=[x, y]).sort_values([x, y], ascending=False)
    return kept[kept[y] > kept[y].cummax().shift(fill_value=float("-inf"))].sort_values(x)
