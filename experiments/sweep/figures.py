"""The figure of a sweep: lines over a swept key."""

from collections.abc import Sequence
from typing import Any

from experiments.app.provenance import short_revision
from experiments.report.plots import Series, chart
from experiments.report.tables import words
from experiments.sweep.frame import WHERE, Line, distinct, grouped, is_number, numbers

MOST_LINES = 10


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
