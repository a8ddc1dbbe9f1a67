"""Tables of a paper: methods down, prompt sets across, as Markdown, CSV and LaTeX."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup

from experiments.report import tables
from experiments.report.intervals import interval
from experiments.report.tables import DASH, Column, Result

AVERAGE, METHOD = "average", "method"
_LATEX = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"} | {each: f"\\{each}" for each in "&%$#_{}"}


class Estimate(NamedTuple):
    """A figure and the half-width of its 95 % interval, None where that is unknown."""

    value: float
    half: float | None = None


@dataclass(frozen=True)
class Figure:
    """One of the figures of a cell: its name, its decimals, and its unit."""

    name: str
    digits: int = 2
    unit: str = ""


@dataclass(frozen=True)
class Pivot:
    """One block of a table. A cell has an estimate for each of `figures`; a missing cell is a dash."""

    title: str
    figures: Sequence[Figure]
    cells: Mapping[tuple[str, str], Sequence[Estimate]]
    """(row, column) to estimates, in the order in which rows and columns are shown."""

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def figure_names(self) -> str:
        return " / ".join(figure.name for figure in self.figures)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for _, column in self.cells))

    def best(self, column: str) -> list[float]:
        """The largest value of each figure in `column`, as it is shown."""
        here = [cell for (_, name), cell in self.cells.items() if name == column]
        digits = [figure.digits for figure in self.figures]
        return [max(round(cell[i].value, shown) for cell in here if cell) for i, shown in enumerate(digits)]


def with_average(pivot: Pivot) -> Pivot:
    """`pivot` with a last column: the mean over the columns of each row that has them all. Columns are independent."""
    cells = dict(pivot.cells)
    for row in pivot.rows:
        of_row = [pivot.cells[row, column] for column in pivot.columns if (row, column) in pivot.cells]
        if len(of_row) == len(pivot.columns):
            cells[row, AVERAGE] = [_mean(estimates) for estimates in zip(*of_row, strict=True)]
    return Pivot(pivot.title, pivot.figures, cells)


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over seeds, with the interval of their spread; of one seed its own."""
    if len(estimates) == 1:
        return estimates[0]
    mean = fmean(each.value for each in estimates)
    found = interval(mean, [each.value for each in estimates])
    return Estimate(mean, None if found is None else found[1] - mean)


def markdown(pivots: Sequence[Pivot]) -> str:
    """One table per block; the best of each column is bold."""
    blocks = ((f"**{each.title}** ({each.figure_names})", tables.markdown(*_table(each))) for each in pivots)
    return "\n".join(f"{title}\n\n{table}" for title, table in blocks)


def html(pivots: Sequence[Pivot]) -> str:
    """As `markdown`, for a page."""
    titles = (Markup("<p>{}</p>").format(f"{each.title} ({each.figure_names})") for each in pivots)
    blocks = (title + tables.html_table(*_table(each)) for title, each in zip(titles, pivots, strict=True))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", "".join(blocks)))


def _table(pivot: Pivot) -> tuple[list[Column], list[Result]]:
    """Columns and lines of `pivot`, whose first column has the names of the rows."""
    names = [METHOD, *pivot.columns]
    columns = [Column(name, lambda line, name=name: line[name], numeric=name != METHOD) for name in names]  # type: ignore[misc]
    return columns, _lines(pivot, _plain)


def latex(pivots: Sequence[Pivot], caption: str, label: str) -> str:
    """A `table` environment that needs no package; blocks of the same columns follow each other."""
    columns = pivots[0].columns
    body = [f"method & {' & '.join(map(latex_escaped, columns))} \\\\"]
    for pivot in pivots:
        body += ["\\hline", f"\\multicolumn{{{len(columns) + 1}}}{{c}}{{{latex_escaped(pivot.title)}}} \\\\", "\\hline"]
        lines = (line.values() for line in _lines(pivot, _mathematical))
        body += [" & ".join([latex_escaped(name), *cells]) + r" \\" for name, *cells in lines]
    rows = "\n".join(body)
    # Eight columns of a page's width.
    return rf"""\begin{{table*}}[t]
\centering\scriptsize\setlength{{\tabcolsep}}{{3pt}}
\caption{{{latex_escaped(caption)}}}\label{{{label}}}
\begin{{tabular}}{{l{"r" * len(columns)}}}
\hline
{rows}
\hline
\end{{tabular}}
\end{{table*}}
"""


def csv_text(pivots: Sequence[Pivot]) -> str:
    """One line for each figure of each cell, with the ends of its interval."""
    lines = []
    for pivot in pivots:
        for (row, column), cell in pivot.cells.items():
            for figure, (value, half) in zip(pivot.figures, cell, strict=True):
                ends = (None, None) if half is None else (value - half, value + half)
                line = {"block": pivot.title, "method": row, "column": column, "figure": figure.name, "value": value}
                lines.append({**line, **dict(zip(("low", "high"), ends, strict=True))})
    return tables.csv_text(lines)


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    halves = [each.half for each in estimates]
    known = [half for half in halves if half is not None]
    half = sqrt(sum(half * half for half in known)) / len(halves) if len(known) == len(halves) else None
    return Estimate(fmean(each.value for each in estimates), half)


def _lines(pivot: Pivot, show: Callable[[Estimate, Figure, bool], str]) -> list[Result]:
    """Texts by column, the name of the row first."""
    lines: list[Result] = []
    for row in pivot.rows:
        line = {METHOD: row}
        for column in pivot.columns:
            parts = zip(pivot.cells.get((row, column), ()), pivot.figures, pivot.best(column), strict=False)
            shown = [show(each, figure, round(each.value, figure.digits) == most) for each, figure, most in parts]
            line[column] = " / ".join(shown) or DASH
        lines.append(line)
    return lines


def _plain(estimate: Estimate, figure: Figure, is_best: bool) -> str:
    text = f"{estimate.value:,.{figure.digits}f}{figure.unit}"
    text += "" if estimate.half is None else f" ± {estimate.half:,.{figure.digits}f}"
    return f"**{text}**" if is_best else text


def _mathematical(estimate: Estimate, figure: Figure, is_best: bool) -> str:
    unit = {"×": "\\times", "%": "\\%"}.get(figure.unit, figure.unit)
    text = f"{estimate.value:.{figure.digits}f}{unit}"
    text = f"\\mathbf{{{text}}}" if is_best else text
    half = "" if estimate.half is None else f"{{\\scriptstyle\\,\\pm{estimate.half:.{figure.digits}f}}}"
    return f"${text}{half}$"


def latex_escaped(text: str) -> str:
    """`text` with every special character of LaTeX as itself."""
    return "".join(_LATEX.get(each, each) for each in text)
