"""Charts as inline SVG: readable in a file without network, and in print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

PHASE_COLOURS = {
    "draft": "#18a0b8",
    "verify": "#3557d6",
    "accept": "#a445c9",
    "commit": "#1c8a4f",
    "host": "#d99a1c",
}
WIDTH, ROW, LABEL, VALUE = 480, 22, 34, 150


def bars(rows: Sequence[tuple[str, float, str]], title: str) -> str:
    """Horizontal bars. A row is (label, share in [0, 1], value as text)."""
    span = WIDTH - LABEL - VALUE
    body = []
    for index, (label, share, value) in enumerate(rows):
        y = index * ROW
        filled = span * min(1.0, max(0.0, share))
        body.append(
            f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end" class="soft">{escape(label)}</text>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{span}" height="14" rx="3" class="track"/>'
            f'<rect x="{LABEL}" y="{y + 4}" width="{filled:.1f}" height="14" rx="3" class="bar"/>'
            f'<text x="{LABEL + span + 8}" y="{y + 15}">{escape(value)}</text>'
        )
    return _svg("".join(body), ROW * len(rows), title)


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """One stacked bar per row, all to one scale, so that lengths compare."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    width, height, body = 960, 56, []
    for index, (name, parts) in enumerate(rows):
        y, x, total = index * height, 0.0, sum(parts.values())
        body.append(f'<text x="0" y="{y + 14}">{escape(name)}: {total:.2f} {unit}</text>')
        for phase, value in parts.items():
            length = value / longest * width
            hint = f"{phase}: {value:.3f} {unit}, {value / total if total else 0:.0%}"
            box = f'x="{x:.1f}" y="{y + 22}" width="{length:.1f}" height="22"'
            body.append(f'<rect {box} fill="{PHASE_COLOURS[phase]}"><title>{escape(hint)}</title></rect>')
            x += length
    return _svg("".join(body), height * len(rows), "time by phase", width)


def _svg(body: str, height: int, title: str, width: int = WIDTH) -> str:
    box = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}><title>{escape(title)}</title>{body}</svg>"


Series = tuple[str, Sequence[tuple[float, float, str]]]
"""A name and its points: x, y and a hint that the pointer shows."""
COLOURS = ("#3557d6", "#d9541c", "#1c8a4f", "#a445c9", "#18a0b8", "#d99a1c", "#8a5a3c", "#c2306b", "#6b7a1c", "#5b6475")
PLOT_WIDTH, PLOT_HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 70, PLOT_WIDTH - 20, 20, PLOT_HEIGHT - 46
"""Edges of the area inside the axes."""


@dataclass(frozen=True)
class _Axis:
    """Maps values to a share in [0, 1], and says where its marks are."""

    name: str
    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies between the ends of the axis."""
        scale = math.log10 if self.logarithmic else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))

    @classmethod
    def of_decades(cls, name: str, values: Sequence[float]) -> _Axis:
        """A logarithmic axis with a mark at each power of ten."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        marks = [(10.0**p, f"{10**p:,}" if 0 <= p <= 6 else f"1e{p}") for p in range(low, high + 1)]
        return cls(name, 10.0**low, 10.0**high, marks, logarithmic=True)


def logarithmic(
    series: Sequence[Series],
    title: str,
    axes: tuple[str, str],
    joined: bool = True,
    limits: Sequence[Series] = (),
) -> str:
    """A chart with two logarithmic axes, one colour per series; `joined` draws its line.

    `limits` are lines without points, such as a roof. Points that are not positive are left out.
    """
    kept, roofs = (
        [(name, [p for p in points if min(p[:2]) > 0]) for name, points in group] for group in (series, limits)
    )
    kept = [(name, sorted(points)) for name, points in kept if points]
    everything = [point for _, points in [*kept, *roofs] for point in points]
    if not everything:
        return ""
    x = _Axis.of_decades(axes[0], [x for x, _, _ in everything])
    y = _Axis.of_decades(axes[1], [y for _, y, _ in everything])
    return _chart(kept, title, x, y, grid_x=True, joined=joined, limits=roofs)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    title: str,
    axes: tuple[str, str],
    top: float | None = None,
) -> str:
    """A chart of points (x, y) on two linear axes from zero, one line per series; `top` fixes the height."""
    everything = [point for _, points in series for point in points]
    if not everything:
        return ""
    right, height = max(x for x, _ in everything) or 1.0, top or _round_up(max(y for _, y in everything))
    # Positions and batch sizes are whole numbers, so their marks are too.
    whole = range(0, math.floor(right) + 1, _whole_step(right / 8))
    x_axis = _Axis(axes[0], 0.0, right, [(mark, f"{mark:,}") for mark in whole])
    y_axis = _Axis(axes[1], 0.0, height, [(height * q / 4, _number(height * q / 4)) for q in range(5)])
    hinted = [(name, [(x, y, f"{name}: {_number(y)} at {_number(x)}") for x, y in sorted(pts)]) for name, pts in series]
    return _chart(hinted, title, x_axis, y_axis)


def _chart(
    series: Sequence[Series],
    title: str,
    x_axis: _Axis,
    y_axis: _Axis,
    grid_x: bool = False,
    joined: bool = True,
    limits: Sequence[Series] = (),
) -> str:
    def place(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
        return [
            (LEFT + x_axis.share(x) * (RIGHT - LEFT), BOTTOM - y_axis.share(y) * (BOTTOM - TOP), hint)
            for x, y, hint in points
        ]

    def path(spots: Sequence[tuple[float, float, str]], style: str) -> str:
        return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)}" fill="none" {style}/>'

    body = [_grid(x_axis, y_axis, grid_x)]
    for name, points in limits:
        spots = place(points)
        x, y, _ = spots[-1]
        body.append(path(spots, 'stroke="#8a93a3" stroke-dasharray="6 4"'))
        body.append(f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="end">{escape(name)}</text>')
    for index, (_, points) in enumerate(series):
        colour, spots = COLOURS[index % len(COLOURS)], place(points)
        if joined:
            body.append(path(spots, f'stroke="{colour}" stroke-width="1.5"'))
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(hint)}</title></circle>'
            for x, y, hint in spots
        ]
    return _svg("".join(body), PLOT_HEIGHT, title, PLOT_WIDTH)


def _grid(x_axis: _Axis, y_axis: _Axis, grid_x: bool) -> str:
    """Marks and names of both axes, with a line at each mark of y and, with `grid_x`, of x."""
    parts = []
    for value, label in x_axis.marks:
        x = LEFT + x_axis.share(value) * (RIGHT - LEFT)
        if grid_x:
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#8884"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for value, label in y_axis.marks:
        y = BOTTOM - y_axis.share(value) * (BOTTOM - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    name = f'<text x="{(LEFT + RIGHT) // 2}" y="{PLOT_HEIGHT - 8}" text-anchor="middle" class="soft">'
    parts.append(f"{name}{escape(x_axis.name)}</text>")
    parts.append(f'<text x="{LEFT}" y="12" class="soft">{escape(y_axis.name)}</text>')
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next number whose quarters are easy to read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def _number(value: float) -> str:
    """Four digits, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _whole_step(value: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, …"""
    power = 10 ** max(0, math.floor(math.log10(value))) if value > 0 else 1
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def phase_legend(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """The key of `stacked`: the phases that its rows have."""
    shown = {phase for _, parts in rows for phase in parts}
    return _key({phase: colour for phase, colour in PHASE_COLOURS.items() if phase in shown}.items())


def legend(names: Sequence[str]) -> str:
    """The key of a chart of several series, in the order of their colours."""
    return _key((name, COLOURS[index % len(COLOURS)]) for index, name in enumerate(names))


def _key(entries: Iterable[tuple[str, str]]) -> str:
    marks = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f"<div class=key>{''.join(marks)}</div>"
