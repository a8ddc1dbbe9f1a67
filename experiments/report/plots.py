"""Charts as inline SVG: readable in a file without network, and in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

PHASE_COLOURS = {
    "draft": "#18a0b8",
    "verify": "#3557d6",
    "accept": "#a445c9",
    "commit": "#1c8a4f",
    "host": "#d99a1c",
    "graph": "#5b6475",
}
WIDTH, ROW, LABEL, VALUE = 480, 22, 34, 84


def bars(rows: Sequence[tuple[str, float, str]], title: str) -> str:
    """Horizontal bars: (label, share in [0, 1], value as text) a row."""
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
    """One stacked bar a row, all to one scale, so that lengths compare."""
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
COLOURS = ("#3557d6", "#d9541c", "#1c8a4f", "#a445c9", "#18a0b8", "#d99a1c", "#8a5a3c", "#c2306b", "#6b7a1c", "#5b6475")
PLOT_WIDTH, PLOT_HEIGHT, MARGIN_LEFT, MARGIN_BOTTOM = 960, 420, 70, 46


def logarithmic(
    series: Sequence[Series],
    title: str,
    axes: tuple[str, str],
    joined: bool = True,
    limits: Sequence[Series] = (),
) -> str:
    """Points (x, y, what it is) on two logarithmic axes, one colour a series, its line drawn when `joined`.

    `limits` are lines without points, such as a roof. What is not positive has no place and is left out.
    """
    kept = [(name, [point for point in points if min(point[:2]) > 0]) for name, points in series]
    kept = [(name, points) for name, points in kept if points]
    roofs = [(name, [point for point in points if min(point[:2]) > 0]) for name, points in limits]
    everything = [point for _, points in [*kept, *roofs] for point in points]
    if not everything:
        return ""
    place = _Axes([x for x, *_ in everything], [y for _, y, _ in everything])
    body = [place.grid(*axes)]
    for name, points in roofs:
        path = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y, _ in points)
        x, y, _ = points[-1]
        body.append(f'<polyline points="{path}" fill="none" stroke="#8a93a3" stroke-dasharray="6 4"/>')
        body.append(f'<text x="{place.x(x):.1f}" y="{place.y(y) - 6:.1f}" text-anchor="end">{escape(name)}</text>')
    for index, (_, points) in enumerate(kept):
        colour = COLOURS[index % len(COLOURS)]
        spots = [(place.x(x), place.y(y), hint) for x, y, hint in sorted(points)]
        if joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(hint)}</title></circle>'
            for x, y, hint in spots
        ]
    return _svg("".join(body), PLOT_HEIGHT, title, PLOT_WIDTH)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    title: str,
    axes: tuple[str, str],
    top: float | None = None,
) -> str:
    """Points (x, y) on two linear axes from zero, one colour and one line a series; `top` fixes the height."""
    everything = [point for _, points in series for point in points]
    if not everything:
        return ""
    right, height = max(x for x, _ in everything) or 1.0, top or _round_up(max(y for _, y in everything))
    # Positions and batch sizes are whole numbers, so their marks are too.
    stride = max(1, math.ceil(right / 8))
    span_x, span_y = PLOT_WIDTH - MARGIN_LEFT - 20, PLOT_HEIGHT - MARGIN_BOTTOM - 20

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN_LEFT + x / right * span_x, 20 + (1 - y / height) * span_y

    body, bottom = [], PLOT_HEIGHT - MARGIN_BOTTOM
    for mark in range(0, math.floor(right) + 1, stride):
        x, _ = place(mark, 0)
        body.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{mark:,}</text>')
    for quarter in range(5):
        _, y = place(0, height * quarter / 4)
        body.append(f'<line x1="{MARGIN_LEFT}" x2="{PLOT_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        body.append(f'<text x="{MARGIN_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{height * quarter / 4:,.4g}</text>')
    for index, (name, points) in enumerate(series):
        colour, spots = COLOURS[index % len(COLOURS)], [(*place(x, y), x, y) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in spots)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{escape(name)}: {value:,.4g} at {at:,.4g}</title></circle>"
            for x, y, at, value in spots
        ]
    middle = (MARGIN_LEFT + PLOT_WIDTH - 20) // 2
    body.append(f'<text x="{middle}" y="{PLOT_HEIGHT - 8}" text-anchor="middle" class="soft">{escape(axes[0])}</text>')
    body.append(f'<text x="{MARGIN_LEFT}" y="12" class="soft">{escape(axes[1])}</text>')
    return _svg("".join(body), PLOT_HEIGHT, title, PLOT_WIDTH)


def _round_up(value: float) -> float:
    """The next number whose quarters are easily read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * (1 - 1e-9))


def phase_legend(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """The key of `stacked`: the phases that its rows have."""
    shown = {phase for _, parts in rows for phase in parts}
    marks = (
        f'<span><i style="background:{colour}"></i>{phase}</span>'
        for phase, colour in PHASE_COLOURS.items()
        if phase in shown
    )
    return f"<div class=key>{''.join(marks)}</div>"


def legend(names: Sequence[str]) -> str:
    """The key of a chart of several series, in the order of their colours."""
    marks = (
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    return f"<div class=key>{''.join(marks)}</div>"


class _Axes:
    """Two logarithmic axes around the data, with a grid line at each power of ten."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x, self._y = _decades(xs), _decades(ys)

    def x(self, value: float) -> float:
        return MARGIN_LEFT + _share(value, self._x) * (PLOT_WIDTH - MARGIN_LEFT - 20)

    def y(self, value: float) -> float:
        return PLOT_HEIGHT - MARGIN_BOTTOM - _share(value, self._y) * (PLOT_HEIGHT - MARGIN_BOTTOM - 20)

    def grid(self, x_name: str, y_name: str) -> str:
        right, bottom, parts = PLOT_WIDTH - 20, PLOT_HEIGHT - MARGIN_BOTTOM, []
        for power in range(self._x[0], self._x[1] + 1):
            at = self.x(10.0**power)
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="{bottom}" stroke="#8884"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{_tick(power)}</text>')
        for power in range(self._y[0], self._y[1] + 1):
            at = self.y(10.0**power)
            parts.append(f'<line x1="{MARGIN_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8884"/>')
            parts.append(f'<text x="{MARGIN_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_tick(power)}</text>')
        middle = (MARGIN_LEFT + right) // 2
        parts.append(
            f'<text x="{middle}" y="{PLOT_HEIGHT - 8}" text-anchor="middle" class="soft">{escape(x_name)}</text>'
        )
        parts.append(f'<text x="{MARGIN_LEFT}" y="12" class="soft">{escape(y_name)}</text>')
        return "".join(parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _share(value: float, decades: tuple[int, int]) -> float:
    return (math.log10(value) - decades[0]) / (decades[1] - decades[0])


def _tick(power: int) -> str:
    return f"{10**power:,}" if 0 <= power <= 6 else f"1e{power}"
