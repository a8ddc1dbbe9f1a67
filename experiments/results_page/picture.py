"""A chart as an SVG file of its own: with its colours and its key inside, as Markdown shows it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from experiments.report.plots import COLOURS, PLOT_HEIGHT, PLOT_WIDTH, lines

STYLE = "text{font:13px system-ui,sans-serif;fill:#1c2330}.soft{fill:#67707f}"
KEY_ROW, KEY_COLUMNS = 22, 3


def picture(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], title: str, axes: tuple[str, str]) -> str:
    """One line per series, on white, with the key below."""
    chart = lines(series, title, axes)
    body = chart[chart.index(">") + 1 : chart.rindex("</svg>")]
    height = PLOT_HEIGHT + 14 + KEY_ROW * -(-len(series) // KEY_COLUMNS)
    marks = []
    for index, (name, _) in enumerate(series):
        x = 70 + PLOT_WIDTH // KEY_COLUMNS * (index % KEY_COLUMNS)
        y = PLOT_HEIGHT + 14 + KEY_ROW * (index // KEY_COLUMNS)
        marks.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{COLOURS[index % len(COLOURS)]}"/>')
        marks.append(f'<text x="{x + 18}" y="{y}">{escape(name)}</text>')
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PLOT_WIDTH} {height}" role="img"'
    paper = f'<rect width="{PLOT_WIDTH}" height="{height}" fill="#fff"/>'
    return f"<svg {frame}><style>{STYLE}</style>{paper}{body}{''.join(marks)}</svg>\n"
