"""The jobs of one or several sweeps as lines of one table: what was swept, what was measured, and where it was.

A line is a method of a job that is done, or a job that is not done with its state and reason. Autoregressive decoding
is the baseline of the speedups; it is left out where a job has other methods.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from experiments.app.errors import UserError
from experiments.report.tables import at, flatten, grouped
from experiments.sweep.folder import DONE, JobRecord, SweepFolder

BASELINE = "autoregressive"
INNER = ("data", "method", "concurrency", "level", "family", "case", "backend")
"""Figures that distinguish lines of one job."""
WHERE = ("machine", "revision")  # lines that differ here are compared with `mix` only
CONDITIONS = (*WHERE, "device", "impl", "dtype", "task")
METRICS = (
    "tokens_per_step", "request_tokens_per_s", "wall_tokens_per_s", "speedup_decode", "speedup_wall", "lossless",
    "median_us", "parameters", "training_tokens", "heldout_loss",
)  # fmt: skip
"""Figures of a table by default, as far as lines have them."""
Line = dict[str, Any]


def read(folders: Sequence[SweepFolder], mix: bool = False) -> tuple[list[Line], list[str]]:
    """(the lines, names of the columns that tell them apart). Raises UserError for a folder without jobs, and where
    lines of several machines or revisions meet without `mix`."""
    keys = list(dict.fromkeys(key for folder in folders for key in _swept(folder)))
    found: list[Line] = []
    for folder in folders:
        if not (records := folder.records()):
            raise UserError(f"{folder.path} is no sweep, which python run.py -m sweep=NAME makes: no jobs/*.json in it")
        for record in records:
            found += _lines(folder, record, keys)
    lines = _once(found)
    several = [column for column in WHERE if len(values := distinct(lines, column)) > 1]
    for column in several if not mix else ():
        values = sorted(map(str, distinct(lines, column)))
        raise UserError(f"jobs of {len(values)} {column}s meet: {', '.join(values)}\nmix=true puts them into one table")
    jobs = grouped(lines, ["job"]).values()
    inner = [name for name in INNER if name not in keys and any(len(distinct(part, name)) > 1 for part in jobs)]
    used = [key for key in keys if any(line.get(key) is not None for line in lines)]
    return lines, [*used, *inner, *several]


def distinct(lines: Sequence[Line], column: str) -> list[Any]:
    """The values of a column, without those that are missing, in the order of the lines."""
    return list(dict.fromkeys(line[column] for line in lines if line.get(column) is not None))


def _swept(folder: SweepFolder) -> list[str]:
    """The keys that were swept, and those whose values differ between jobs that were started one by one."""
    values: dict[str, set[str]] = {}
    for record in folder.records():
        for text in record.overrides:
            key = text.partition("=")[0].lstrip("+~")
            values.setdefault(key, set()).add(str(_setting(record, key)))
    return [*folder.settings()["keys"], *(key for key, found in values.items() if len(found) > 1)]


def _lines(folder: SweepFolder, record: JobRecord, keys: Sequence[str]) -> Iterator[Line]:
    """The lines of one job: its methods, or one line with its state."""
    state, summary = folder.state(record.id), folder.summary(record.id)
    values = {key: _setting(record, key) for key in keys}
    line: Line = {"job": record.id, **values, "state": state}
    if state != DONE or summary is None:
        yield line | {"reason": record.reason}
        return
    line |= {name: summary.get(name) for name in CONDITIONS if name not in values} | {"wall_s": record.wall_s}
    line["report"] = str(folder.path / record.id / "report.html")
    results = summary["rows"]
    for result in [each for each in results if each.get("algo") != BASELINE] or results:
        figures = {name: value for name, value in flatten(result).items() if name not in values}
        if figures.get("lossless/checked"):
            figures["lossless"] = f"{figures['lossless/identical']}/{figures['lossless/checked']}"
        for name, ends in list(figures.items()):
            if name.endswith("_interval") and ends and len(ends) == 2:
                base = name.removesuffix("_interval")
                figures |= {f"{base}_low": ends[0], f"{base}_high": ends[1]}
        yield line | figures


def _setting(record: JobRecord, key: str) -> Any:
    """The value of a swept key as it was typed; otherwise the value in the configuration, a group by its name."""
    typed = dict(text.lstrip("+~").split("=", 1) for text in record.overrides if "=" in text)
    found = yaml.safe_load(typed[key]) if key in typed else at(record.config, key.replace(".", "/"))
    if isinstance(found, Mapping) and key not in typed:
        found = found.get("name")
    return str(found) if isinstance(found, (list, dict)) else found


def _once(lines: Sequence[Line]) -> list[Line]:
    """Each job of several folders once: two shards of a sweep may both name it, and the one that is done counts."""
    done = {line["job"] for line in lines if line["state"] == DONE}
    seen: dict[Any, Line] = {}
    for line in lines:
        if line["state"] == DONE or line["job"] not in done:
            seen.setdefault((line["job"], *(line.get(name) for name in (*INNER, *WHERE))), line)
    return list(seen.values())


def is_number(value: Any) -> bool:
    """Whether a cell holds a number; a truth value is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numbers(lines: Sequence[Line], *columns: str) -> list[Line]:
    return [line for line in lines if all(is_number(line.get(column)) for column in columns)]


def numeric(lines: Sequence[Line], keys: Sequence[str]) -> list[str]:
    """The `keys` whose values are at least two different numbers."""
    measured = {key: [line for line in lines if line.get(key) is not None] for key in keys}
    return [key for key, kept in measured.items() if len(distinct(kept, key)) > 1 and numbers(kept, key) == kept]


def is_time(metric: str) -> bool:
    """Whether a smaller figure is better: times are, rates are not."""
    return "_per_" not in metric and re.search(r"(_|^)(us|ms|s)($|/|_)", metric) is not None


def best_lines(lines: Sequence[Line], group: Sequence[str], metric: str) -> list[Line]:
    """The line with the best `metric` of each group, in the order of the lines: the largest figure, the least time."""
    value: Callable[[Line], Any] = lambda line: -line[metric] if is_time(metric) else line[metric]  # noqa: E731
    best = [max(part, key=value) for part in grouped(numbers(lines, metric), group).values()]
    return [line for line in lines if any(line is each for each in best)]
