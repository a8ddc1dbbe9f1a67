"""The figures of a sweep, drawn by matplotlib as SVG: lines over a swept key, a map over two, the Pareto front."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments.app.provenance import short_revision
from experiments.report.tables import words
from experiments.sweep.frame import WHERE, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_REQUEST, IN_ALL = "request_tokens_per_s", "wall_tokens_per_s"
MARKERS = "osD^vPX*<>"
MOST_LINES = 12
MOST_MAPS = 6
MAPS_IN_A_ROW = 3


def new_figure(columns: int = 1, rows: int = 1, width: float = 7.2, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A figure with its axes, row by row, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def svg(figure: Figure) -> str:
    """The figure as an element of an HTML page."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def numeric(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Those of `keys` whose values are at least two different numbers."""
    found = []
    for key in keys:
        values = pd.to_numeric(frame[key], errors="coerce")
        if values.notna().any() and values.nunique() > 1 and values.notna().sum() == frame[key].notna().sum():
            found.append(key)
    return found


def over(frame: pd.DataFrame, keys: Sequence[str], x: str, metric: str) -> Figure | None:
    """Lines of `metric` over the key `x`, one for each combination of the other keys; None where there are no rows."""
    kept = _numbers(frame, [x, metric])
    if kept.empty:
        return None
    figure, [axes] = new_figure()
    for index, (name, part) in enumerate(_parts(kept, [key for key in keys if key != x])):
        line = part.sort_values(x)
        axes.plot(line[x], line[metric], marker=MARKERS[index % len(MARKERS)], label=name)
        low, high = f"{metric}_low", f"{metric}_high"
        if low in line and high in line:
            axes.fill_between(line[x], line[low].astype(float), line[high].astype(float), alpha=0.15)
    axes.set_xticks(sorted(kept[x].unique()), [f"{value:g}" for value in sorted(kept[x].unique())])
    axes.set_ylim(bottom=0)
    return _finished(figure, axes, x, metric)


def over_two(frame: pd.DataFrame, keys: Sequence[str], x: str, y: str, metric: str) -> Figure | None:
    """A map of `metric` over two keys, one for each combination of the other keys. None where nothing was measured."""
    kept = _numbers(frame, [x, y, metric])
    if kept.empty:
        return None
    parts = list(_parts(kept, [key for key in keys if key not in (x, y)]))[:MOST_MAPS]
    rows = -(-len(parts) // MAPS_IN_A_ROW)
    columns = -(-len(parts) // rows)
    figure, all_axes = new_figure(columns, rows, width=1 + 3.6 * columns, height=3.6 * rows)
    low, high = kept[metric].min(), kept[metric].max()
    for axes, (name, part) in zip(all_axes, parts, strict=False):
        table = part.pivot_table(index=y, columns=x, values=metric, aggfunc="mean").sort_index(ascending=False)
        image = axes.imshow(table.to_numpy(), vmin=low, vmax=high, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(table.columns)), [f"{value:g}" for value in table.columns])
        axes.set_yticks(range(len(table.index)), [f"{value:g}" for value in table.index])
        _write_values(axes, table, low, high)
        axes.set_title(name or words(metric), fontsize=10)
        axes.set(xlabel=x, ylabel=y)
    for axes in all_axes[len(parts) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=all_axes, label=words(metric))
    return figure


def _write_values(axes: Axes, table: pd.DataFrame, low: float, high: float) -> None:
    """Each value of a map into its field, in the colour that stands out there."""
    digits = 2 if high < 10 else 1 if high < 100 else 0
    for row in range(len(table.index)):
        for column in range(len(table.columns)):
            value = table.iloc[row, column]
            if pd.notna(value):
                bright = high > low and (value - low) / (high - low) > 0.6
                axes.text(
                    column, row, f"{value:,.{digits}f}", ha="center", va="center", color="black" if bright else "white"
                )


def front(frame: pd.DataFrame, keys: Sequence[str]) -> Figure | None:
    """Tokens/s of a request against tokens/s in all, with the rows that none beats in both; None without figures."""
    if not {PER_REQUEST, IN_ALL} <= set(frame.columns):
        return None
    kept = _numbers(frame, [PER_REQUEST, IN_ALL])
    if kept.empty:
        return None
    figure, [axes] = new_figure()
    for index, (name, part) in enumerate(_parts(kept, [key for key in keys if key not in numeric(kept, keys)])):
        axes.scatter(part[PER_REQUEST], part[IN_ALL], marker=MARKERS[index % len(MARKERS)], label=name or "rows")
    best = pareto(kept, PER_REQUEST, IN_ALL)
    axes.plot(best[PER_REQUEST], best[IN_ALL], color="grey", linestyle="--", linewidth=1, label="Pareto front")
    for _, row in best.iterrows():
        told = " ".join(f"{key.rpartition('.')[2]}={row[key]:g}" for key in numeric(kept, keys))
        right = row[PER_REQUEST] > 0.6 * kept[PER_REQUEST].max()
        point, beside = (row[PER_REQUEST], row[IN_ALL]), (-6 if right else 6, 4)
        axes.annotate(
            told,
            point,
            beside,
            textcoords="offset points",
            fontsize=7,
            horizontalalignment="right" if right else "left",
        )
    axes.set_xlim(0, 1.05 * kept[PER_REQUEST].max())
    axes.set_ylim(0, 1.1 * kept[IN_ALL].max())
    return _finished(figure, axes, "tokens/s of a request (median)", "tokens/s of all requests together")


def _numbers(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The rows that have a number in each of `columns`."""
    kept = frame.copy()
    for column in columns:
        kept[column] = pd.to_numeric(kept[column], errors="coerce")
    return kept.dropna(subset=list(columns))


def _parts(frame: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """(name, rows) of each combination of `keys`, at most `MOST_LINES` of them."""
    varied = _telling(frame, keys)
    if not varied:
        yield "", frame
        return
    for index, (values, part) in enumerate(frame.groupby(varied, dropna=False, sort=False)):
        if index < MOST_LINES:
            yield ", ".join(_told(key, value) for key, value in zip(varied, values, strict=True)), part


def _telling(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """The keys that tell parts of the frame apart, without a card or a revision that the others already name."""
    varied = [key for key in keys if frame[key].nunique(dropna=False) > 1]
    swept = [key for key in varied if key not in WHERE]
    if not swept:
        return varied
    places = frame.groupby(swept, dropna=False)
    return [key for key in varied if key in swept or (places[key].nunique(dropna=False) > 1).any()]


def _told(key: str, value: Any) -> str:
    """A value of a group by its own name, any other with the name of its key."""
    if isinstance(value, str):
        return short_revision(value) if key == "revision" else value
    return f"{key.rpartition('.')[2]}={value:g}"


def _finished(figure: Figure, axes: Axes, x: str, y: str) -> Figure:
    axes.set(xlabel=x, ylabel=words(y))
    axes.grid(alpha=0.3)
    if lines := axes.get_legend_handles_labels()[1]:
        figure.legend(fontsize=8, loc="outside lower center", ncols=min(4, len(lines)))  # where it hides nothing
    return figure
