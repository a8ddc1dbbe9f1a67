"""Charts as inline SVG, readable in a file without network and in print: bars, stacked bars, lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

PHASE_COLOURS = {
    "draft": "#18a0b8",
    "verify": "#3557d6",
    "accept": "#a445c9",
    "commit": "#1c8a4f",
    "host": "#d99a1c",
}
COLOURS = ("#3557d6", "#d9541c", "#1c8a4f", "#a445c9", "#18a0b8", "#d99a1c", "#8a5a3c", "#c2306b", "#6b7a1c", "#5b6475")
WIDTH, LINE, LABEL, VALUE = 480, 22, 34, 150  # sizes of `bars`: width, height of one, room for labels and for values
PLOT_WIDTH, PLOT_HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 70, PLOT_WIDTH - 20, 20, PLOT_HEIGHT - 46  # edges of the area inside the axes


@dataclass(frozen=True)
class Series:
    """Points (x, y) of one colour, joined by a line from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()  # interval of each y, of points from left to right


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
    body = [_grid(x_axis, y_axis), *(_drawn(each, colour, x_axis, y_axis) for each, colour in coloured)]
    key = _key((each.name, colour) for each, colour in coloured)
    return _svg("".join(body), PLOT_HEIGHT, title, PLOT_WIDTH) + key


def _drawn(series: Series, colour: str, x_axis: _Axis, y_axis: _Axis) -> str:
    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_axis.high * (RIGHT - LEFT), BOTTOM - y / y_axis.high * (BOTTOM - TOP)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)

    body = ""
    if series.band:
        ends = [(x, end) for (x, _), (end, _) in zip(series.points, series.band, strict=True)]
        ends += [(x, end) for (x, _), (_, end) in reversed(list(zip(series.points, series.band, strict=True)))]
        body += f'<polygon points="{path(ends)}" fill="{colour}" opacity=".15"/>'
    body += f'<polyline points="{path(sorted(series.points))}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for x, y in series.points:
        (left, down), hint = place(x, y), f"{series.name}: {number(y)} at {number(x)}"
        body += f'<circle cx="{left:.1f}" cy="{down:.1f}" r="4" fill="{colour}"><title>{escape(hint)}</title></circle>'
    return body


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    """Marks and names of both axes, with a line at each mark of y."""
    parts = []
    for value, label in x_axis.marks:
        x = LEFT + value / x_axis.high * (RIGHT - LEFT)
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for value, label in y_axis.marks:
        y = BOTTOM - value / y_axis.high * (BOTTOM - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    middle = f'x="{(LEFT + RIGHT) // 2}" y="{PLOT_HEIGHT - 8}" text-anchor="middle" class="soft"'
    parts.append(f"<text {middle}>{escape(x_axis.name)}</text>")
    parts.append(f'<text x="{LEFT}" y="12" class="soft">{escape(y_axis.name)}</text>')
    return "".join(parts)


def bars(values: Sequence[tuple[str, float, str]], title: str) -> str:
    """Horizontal bars, each of (label, share in [0, 1], value as text)."""
    span, body = WIDTH - LABEL - VALUE, ""
    for index, (label, share, value) in enumerate(values):
        y, filled = index * LINE, span * min(1.0, max(0.0, share))
        body += (
            f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end" class="soft">{escape(label)}</text>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{span}" height="14" rx="3" class="track"/>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{filled:.1f}" height="14" rx="3" class="bar"/>'
            f'<text x="{LABEL + span + 8}" y="{y + 15}">{escape(value)}</text>'
        )
    return _svg(body, LINE * len(values), title)


def phase_bars(phases: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One stacked bar of phases for each name, all to one scale, with the key of the phases."""
    longest = max((sum(parts.values()) for parts in phases.values()), default=0.0) or 1.0
    width, height, body = 960, 56, ""
    for index, (name, parts) in enumerate(phases.items()):
        y, x, total = index * height, 0.0, sum(parts.values())
        body += f'<text x="0" y="{y + 14}">{escape(name)}: {total:.2f} {unit}</text>'
        for phase, value in parts.items():
            length = value / longest * width
            hint = f"{phase}: {value:.3f} {unit}, {value / total if total else 0:.0%}"
            box = f'x="{x:.1f}" y="{y + 22}" width="{length:.1f}" height="22"'
            body += f'<rect {box} fill="{PHASE_COLOURS[phase]}"><title>{escape(hint)}</title></rect>'
            x += length
    shown = {phase for parts in phases.values() for phase in parts}
    key = _key((phase, colour) for phase, colour in PHASE_COLOURS.items() if phase in shown)
    return _svg(body, height * len(phases), "time by phase", width) + key


def number(value: float) -> str:
    """Four digits, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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


def _key(entries: Iterable[tuple[str, str]]) -> str:
    marks = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f"<div class=key>{''.join(marks)}</div>"


def _svg(body: str, height: int, title: str, width: int = WIDTH) -> str:
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}><title>{escape(title)}</title>{body}</svg>"
