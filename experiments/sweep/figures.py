"""The figures of a sweep: lines over a swept key, a map over two, the Pareto front of each prompt set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.app.provenance import short_revision
from experiments.report.plots import Series, chart, heat_map
from experiments.report.tables import words
from experiments.sweep.frame import WHERE, Line, distinct, grouped, is_number, numbers, numeric, pareto

PER_REQUEST, IN_ALL = "request_tokens_per_s", "wall_tokens_per_s"
MOST_LINES, MOST_MAPS = 10, 6


def over(found: Sequence[Line], keys: Sequence[str], x: str, metric: str) -> str:
    """Lines of `metric` over the key `x`, one for each combination of the other keys, with their intervals."""
    low, high = f"{metric}_low", f"{metric}_high"
    series = []
    for name, part in _parts(numbers(found, x, metric), [key for key in keys if key != x]):
        with_ends = len(numbers(part, low, high)) == len(part)
        part = sorted(part, key=lambda line: (line[x], line[metric]))
        band = [(max(0.0, line[low]), line[high]) for line in part] if with_ends else ()
        series.append(Series(name or words(metric), [(line[x], line[metric]) for line in part], band=band))
    return chart(series, f"{words(metric)} over {x}", (x, words(metric)))


def over_two(found: Sequence[Line], keys: Sequence[str], x: str, y: str, metric: str) -> str:
    """A map of `metric` over two keys, one for each combination of the other keys."""
    maps = []
    for name, part in _parts(numbers(found, x, y, metric), [key for key in keys if key not in (x, y)])[:MOST_MAPS]:
        across, down, cells = sorted(distinct(part, x)), sorted(distinct(part, y), reverse=True), grouped(part, [x, y])
        measured = [[[line[metric] for line in cells.get((i, j), [])] for i in across] for j in down]
        means = [[sum(values) / len(values) if values else None for values in line] for line in measured]
        axes = f"{name + ': ' if name else ''}{words(metric)} over {x} (across) and {y} (down)"
        maps.append(heat_map([f"{i:g}" for i in across], [f"{j:g}" for j in down], means, words(metric), axes))
    return "".join(maps)


def fronts(found: Sequence[Line], keys: Sequence[str]) -> list[tuple[str, str]]:
    """(title, chart) of tokens/s of a request against tokens/s in all, one for each prompt set."""
    kept = numbers(found, PER_REQUEST, IN_ALL)
    sets = grouped(kept, ["data"]) if len(distinct(kept, "data")) > 1 else {("",): kept}
    charts = []
    for (name,), part in sets.items():
        told = numeric(part, keys)
        series = [
            Series(
                label or "jobs",
                [(line[PER_REQUEST], line[IN_ALL]) for line in points],
                labels=[" ".join(_named(key, line.get(key)) for key in told) for line in points],
                joined=False,
            )
            for label, points in _parts(part, [key for key in keys if key not in (*told, "data")])
        ]
        front = [(line[PER_REQUEST], line[IN_ALL]) for line in pareto(part, PER_REQUEST, IN_ALL)]
        title = "Tokens/s of a request and of all requests together" + (f", {name}" if name else "")
        axes = ("tokens/s of a request (median)", "tokens/s of all requests together")
        limits = [Series("Pareto front", front, limit=True)] if len(front) > 1 else []
        charts.append((title, chart([*series, *limits], title, axes) if front else ""))
    return charts


def _parts(found: Sequence[Line], keys: Sequence[str]) -> list[tuple[str, list[Line]]]:
    """(name, lines) of each combination of the keys that differ, at most `MOST_LINES` of them."""
    varied = [key for key in keys if len({str(line.get(key)) for line in found}) > 1]
    swept = [key for key in varied if key not in WHERE]
    if swept:  # a card or a revision is named where the other keys do not tell it
        places = grouped(found, swept).values()
        varied = [key for key in varied if key in swept or any(len(distinct(part, key)) > 1 for part in places)]
    return [
        (", ".join(_named(key, value) for key, value in zip(varied, values, strict=True)), part)
        for values, part in list(grouped(found, varied).items())[:MOST_LINES]
    ]


def _named(key: str, value: Any) -> str:
    """A value of a group by its own name, any other with the name of its key."""
    if isinstance(value, str):
        return short_revision(value) if key == "revision" else value
    return f"{key.rpartition('.')[2]}={value:g}" if is_number(value) else f"{key}={value}"
