"""The HTML and SVG of pages: macros of page.jinja, and line charts, readable in a file without network and in print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any


def number(value: float) -> str:
    """Four digits, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@cache
def _macros() -> Any:
    from jinja2 import Environment, FileSystemLoader  # where a page is written: the command line starts without it

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    return environment.get_template("page.jinja").module


def html(macro: str, *arguments: Any) -> str:
    """What a macro makes of its arguments. Macros escape text, but not each other's HTML."""
    made: str = getattr(_macros(), macro)(*arguments)
    return made


def section(title: str, content: str) -> str:
    """A card over the whole width; nothing where there is no content."""
    return html("section", title, content)


PHASE_COLOURS = {
    "draft": "#18a0b8",
    "verify": "#3557d6",
    "accept": "#a445c9",
    "commit": "#1c8a4f",
    "host": "#d99a1c",
}
COLOURS = ("#3557d6", "#d9541c", "#1c8a4f", "#a445c9", "#18a0b8", "#d99a1c", "#8a5a3c", "#c2306b", "#6b7a1c", "#5b6475")


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one colour, joined by a line from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()  # interval of each y, of points from left to right

    @property
    def outline(self) -> list[tuple[float, float]]:
        """The border of the band: its lower ends, and back along the upper ones."""
        ends = [(x, low, high) for (x, _), (low, high) in zip(self.points, self.band, strict=False)]
        return [*((x, low) for x, low, _ in ends), *((x, high) for x, _, high in reversed(ends))]


@dataclass(frozen=True)
class _Axis:
    """A linear axis from zero, and where its marks are."""

    name: str
    high: float
    marks: Sequence[tuple[float, str]]

    @classmethod
    def over(cls, name: str, values: Sequence[float], end: float | None = None) -> _Axis:
        """Marks at whole numbers where all values are, else at quarters of a number easy to read."""
        most = max(values)
        if end is None and all(float(value).is_integer() for value in values):
            step = _whole_step(most / 8)
            return cls(name, most or 1.0, [(m, f"{m:,}") for m in range(0, math.floor(most) + 1, step)])
        end = end or _round_up(most)
        return cls(name, end, [(end * q / 4, number(end * q / 4)) for q in range(5)])


def chart(series: Sequence[Series], title: str, axes: tuple[str, str], top: float | None = None) -> str:
    """A chart of all series with its key. Axes begin at zero; `top` is the end of the y axis. Empty where there is no
    point."""
    kept = [each for each in series if each.points]
    if not kept:
        return ""
    xs, ys = ([point[i] for each in kept for point in each.points] for i in (0, 1))
    ys += [end for each in kept for _, end in each.band]
    x_axis, y_axis = _Axis.over(axes[0], xs), _Axis.over(axes[1], ys, top or _round_up(max(ys)))
    coloured = list(zip(kept, cycle(COLOURS), strict=False))
    names = [(each.name, colour) for each, colour in coloured]
    return html("chart", title, coloured, x_axis, y_axis) + html("key", names)


def _round_up(value: float) -> float:
    """The next number whose quarters are easy to read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def _whole_step(value: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, …"""
    power: int = 10 ** max(0, math.floor(math.log10(value))) if value > 0 else 1
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
