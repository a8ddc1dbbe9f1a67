"""Charts as inline SVG: readable in a file without network, and in print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

PHASE_COLOURS = {
    "draft": "#18a0b8",
    "verify": "#3557d6",
    "accept": "#a445c9",
    "commit": "#1c8a4f",
    "host": "#d99a1c",
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
