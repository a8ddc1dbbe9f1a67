"""Charts as inline SVG, readable in a file without network and in print: bars, stacked bars, lines, scatter, maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Points (x, y) of one colour, joined by a line unless `joined` is false."""

    name: str
    points: Sequence[tuple[float, float]]
    hints: Sequence[str] = ()  # shown by the pointer at each point; by default the name and both numbers
    labels: Sequence[str] = ()  # text at each point
    band: Sequence[tuple[float, float]] = ()  # interval of each y, drawn below the line
    joined: bool = True
    limit: bool = False
    """A dashed grey line without points, named at its end: a roof or a Pareto front. It has no entry in the key."""


@dataclass(frozen=True)
class _Axis:
    """Maps values to a share in [0, 1], and says where its marks are."""

    name: str
    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        scale = math.log10 if self.log else float
        return (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))

    @classmethod
    def decades(cls, name: str, values: Sequence[float]) -> _Axis:
        """A logarithmic axis with a mark at each power of ten."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        marks = [(10.0**p, f"{10**p:,}" if 0 <= p <= 6 else f"1e{p}") for p in range(low, high + 1)]
        return cls(name, 10.0**low, 10.0**high, marks, log=True)

    @classmethod
    def from_zero(cls, name: str, values: Sequence[float], end: float | None = None) -> _Axis:
        """A linear axis: marks at whole numbers where all values are, else at quarters of a number easy to read."""
        most = max(values)
        if end is None and all(float(value).is_integer() for value in values):
            step = _whole_step(most / 8)
            return cls(name, 0.0, most or 1.0, [(m, f"{m:,}") for m in range(0, math.floor(most) + 1, step)])
        end = end or _round_up(most)
        return cls(name, 0.0, end, [(end * q / 4, number(end * q / 4)) for q in range(5)])


def chart(
    series: Sequence[Series], title: str, axes: tuple[str, str], log: bool = False, top: float | None = None
) -> str:
    """A chart of all series with its key. Axes begin at zero, or have powers of ten with `log`, which leaves out points
    that are not positive; `top` is the end of the y axis. Empty where there is no point."""
    kept = [_sorted(each, log) for each in series]
    kept = [each for each in kept if each.points]
    if all(each.limit for each in kept):
        return ""
    xs, ys = ([point[i] for each in kept for point in each.points] for i in (0, 1))
    ys += [end for each in kept for _, end in each.band]
    if log:
        x_axis, y_axis = _Axis.decades(axes[0], xs), _Axis.decades(axes[1], ys)
    else:
        x_axis = _Axis.from_zero(axes[0], xs)
        y_axis = _Axis.from_zero(axes[1], ys, top or _round_up(max(ys)))
    names = [each.name for each in kept if not each.limit]
    body = [_grid(x_axis, y_axis), *(_drawn(each, names, x_axis, y_axis) for each in kept)]
    return _svg("".join(body), PLOT_HEIGHT, title, PLOT_WIDTH) + _key(zip(names, cycle(COLOURS), strict=False))


def _sorted(series: Series, log: bool) -> Series:
    """`series` from left to right, with a hint for each point."""
    order = sorted(range(len(series.points)), key=lambda i: series.points[i])
    kept = [i for i in order if not log or min(series.points[i]) > 0]
    hints = series.hints or [f"{series.name}: {number(y)} at {number(x)}" for x, y in series.points]
    return replace(
        series,
        points=[series.points[i] for i in kept],
        hints=[hints[i] for i in kept],
        labels=[series.labels[i] for i in kept] if series.labels else [""] * len(kept),
        band=[series.band[i] for i in kept] if series.band else (),
    )


def _drawn(series: Series, names: Sequence[str], x_axis: _Axis, y_axis: _Axis) -> str:
    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x_axis.share(x) * (RIGHT - LEFT), BOTTOM - y_axis.share(y) * (BOTTOM - TOP)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)

    if series.limit:
        x, y = place(*series.points[-1])
        return (
            f'<polyline points="{path(series.points)}" fill="none" stroke="#8a93a3" stroke-dasharray="6 4"/>'
            f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="end">{escape(series.name)}</text>'
        )
    colour, body = COLOURS[names.index(series.name) % len(COLOURS)], ""
    if series.band:
        ends = [(x, end) for (x, _), (end, _) in zip(series.points, series.band, strict=True)]
        ends += [(x, end) for (x, _), (_, end) in reversed(list(zip(series.points, series.band, strict=True)))]
        body += f'<polygon points="{path(ends)}" fill="{colour}" opacity=".15"/>'
    if series.joined:
        body += f'<polyline points="{path(series.points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    for point, hint, label in zip(series.points, series.hints, series.labels, strict=True):
        x, y = place(*point)
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(hint)}</title></circle>'
        if label:
            side, anchor = (-7, "end") if x > (LEFT + RIGHT) / 2 else (7, "start")
            body += (
                f'<text x="{x + side:.1f}" y="{y - 5:.1f}" text-anchor="{anchor}" class="soft">{escape(label)}</text>'
            )
    return body


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    """Marks and names of both axes, with a line at each mark of y, and of a logarithmic x."""
    parts = []
    for value, label in x_axis.marks:
        x = LEFT + x_axis.share(value) * (RIGHT - LEFT)
        if x_axis.log:
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#8884"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for value, label in y_axis.marks:
        y = BOTTOM - y_axis.share(value) * (BOTTOM - TOP)
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


def heat_map(
    columns: Sequence[str], lines: Sequence[str], values: Sequence[Sequence[float | None]], title: str, names: str
) -> str:
    """A map with a field for each line and column, darker for larger values; `names` says what they are."""
    known = [value for line in values for value in line if value is not None]
    low, spread = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    width, height, body = min(90, (WIDTH - 90) // max(1, len(columns))), 26, ""
    for i, line in enumerate(values):
        body += f'<text x="82" y="{i * height + 18}" text-anchor="end">{escape(lines[i])}</text>'
        for j, value in enumerate(line):
            if value is None:
                continue
            share, x, y = (value - low) / spread, 90 + j * width, i * height
            colour = "#fff" if share > 0.5 else "#1c2330"
            box = f'x="{x}" y="{y}" width="{width - 2}" height="{height - 2}"'
            body += f'<rect {box} fill="#dde4fb"/><rect {box} fill="#3557d6" opacity="{share:.2f}"/>'
            spot = f'x="{x + width // 2}" y="{y + 17}" text-anchor="middle" style="fill:{colour}"'
            body += f"<text {spot}>{number(value)}</text>"
    y = len(lines) * height + 14
    for j, column in enumerate(columns):
        body += f'<text x="{90 + j * width + width // 2}" y="{y}" text-anchor="middle">{escape(column)}</text>'
    body += f'<text x="90" y="{y + 20}" class="soft">{escape(names)}</text>'
    return _svg(body, y + 28, title)


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
