"""One table, and a page with figures, from the folders of one or several sweeps, finished or not.

    python -m experiments.collect outputs/sweeps/trees
    python -m experiments.collect outputs/sweeps/a outputs/sweeps/b metrics=speedup_wall,tokens_per_step x=algo.topk

Settings: `metrics` figures of the table, the first of which is drawn and decides the best rows; `group` keys of which
each value has a best row; `x`, `y` keys of the axes; `where` key=value pairs joined by `+` that rows must have;
`mix=true` to compare rows of several machines or revisions; `out` the folder of table.csv, table.md, table.tex,
table.jsonl and sweep.html (default: the first sweep's own).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.app.arguments import assign
from experiments.app.cli import report
from experiments.app.errors import UserError
from experiments.app.provenance import short_revision
from experiments.app.suggest import unknown_key_message
from experiments.report import page as pages
from experiments.report.console import plain_console
from experiments.report.json_log import json_lines
from experiments.report.metrics import NOT_A_GPU
from experiments.report.run_folder import write_whole
from experiments.report.tables import DASH, Column, Row, console_table, html_table, markdown, words
from experiments.sweep.folder import DONE, SweepFolder

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Settings:
    """What the command line asks for."""

    metrics: str = ""
    group: str = ""
    x: str = ""
    y: str = ""
    where: str = ""
    mix: str = "false"
    out: str = ""


def parsed(arguments: Sequence[str]) -> tuple[list[SweepFolder], Settings]:
    """Folders and settings of the command line. Raises UserError for what is neither."""
    settings = Settings()
    paths = [Path(word) for word in assign(settings, arguments, __doc__ or "")]
    if missing := [path for path in paths if not path.is_dir()]:
        raise UserError(f"{missing[0]}: no such folder")
    folders = [SweepFolder(path) for path in paths]
    if not folders:
        raise UserError("give the folder of a sweep, such as outputs/sweeps/trees")
    if settings.mix not in ("true", "false"):
        raise UserError(f"mix: expected true or false, got {settings.mix!r}")
    return folders, settings


def columns_of(frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], best: set[Any]) -> list[Column]:
    """The columns of the table: what was swept, the state where one is not done, figures with their intervals."""
    found = [_column(key, frame) for key in keys]
    if (frame["state"] != DONE).any():
        found.append(Column("state", lambda row: row["state"], numeric=False, tone=_state_tone))
    found += [_column(metric, frame, interval=True) for metric in metrics]
    if len(best) < (frame["state"] == DONE).sum():
        found.append(Column("best", lambda row: "best" if row["index"] in best else "", numeric=False, tone=_best_tone))
    if "reason" in frame and frame["reason"].fillna("").str.len().any():
        found.append(Column("reason", _reason, numeric=False, narrow=False))
    return found


def _column(name: str, frame: pd.DataFrame, interval: bool = False) -> Column:
    from pandas.api.types import is_numeric_dtype

    def show(row: Row) -> str:
        value = row.get(name)
        if name == "revision" and isinstance(value, str):
            return short_revision(value)
        return _cell(value) + (_interval(row, name) if interval else "")

    return Column(words(name) if interval else name, show, numeric=is_numeric_dtype(frame[name]))


def _cell(value: Any) -> str:
    if value is None or value != value:
        return DASH
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:,.{_decimals(value)}f}"
    return str(value)


def _decimals(value: float) -> int:
    """Digits behind the point of a figure, so that three or more count."""
    return next(digits for least, digits in ((1000, 0), (100, 1), (1, 2), (0, 3)) if abs(value) >= least)


def _interval(row: Row, name: str) -> str:
    """The half-width of a figure's interval, where repeats of the run gave one."""
    high = row.get(f"{name}_high")
    if high is None or high != high:
        return ""
    return f" ± {high - row[name]:,.{_decimals(row[name])}f}"


def _state_tone(row: Row) -> str | None:
    return {DONE: "good", "failed": "bad", "killed": "bad"}.get(row["state"])


def _best_tone(row: Row) -> str | None:
    return "good"


def _reason(row: Row) -> str:
    reason = row.get("reason")
    return reason.splitlines()[0] if isinstance(reason, str) and reason else ""


def collect(folders: Sequence[SweepFolder], settings: Settings) -> None:
    """Print the table, write its files and the page. Raises UserError for what cannot be compared or is not there."""
    from experiments.sweep.frame import best_rows, chosen_metrics, read

    frame, keys = read(folders, settings.mix == "true")
    frame = _matching(frame, settings.where)
    metrics = chosen_metrics(frame, [name for name in settings.metrics.split(",") if name])
    group = [key for key in settings.group.split(",") if key] or keys[:1]
    _expect_columns(frame, [*group, *filter(None, (settings.x, settings.y))])
    best = set(best_rows(frame, group, metrics[0]).index) if metrics else set()
    rows = [{**row, "index": index} for index, row in zip(frame.index, frame.to_dict("records"), strict=True)]
    columns = columns_of(frame, keys, metrics, best)
    title = ", ".join(dict.fromkeys(folder.name for folder in folders))
    out = Path(settings.out) if settings.out else folders[0].path
    out.mkdir(parents=True, exist_ok=True)
    for name, text in _files(frame, columns, rows, [*keys, "state", *metrics]).items():
        write_whole(out / name, text)
    drawn = _figures(frame, keys, metrics, settings)
    write_whole(out / "sweep.html", _page(title, frame, columns, rows, drawn, metrics[:1], group))
    console = plain_console()
    console.print(console_table(f"sweep {title}", columns, rows))
    for note in _notes(frame):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    console.print(
        f"wrote {out}/sweep.html, table.csv, table.md, table.tex, table.jsonl", highlight=False, soft_wrap=True
    )


def _matching(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """The rows that have the values in `where`."""
    for pair in filter(None, where.split("+")):
        key, _, value = pair.partition("=")
        _expect_columns(frame, [key])
        frame = frame[frame[key].astype(str) == value]
    if frame.empty:
        raise UserError(f"where={where}: no row is left")
    return frame


def _expect_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if name not in frame:
            raise UserError(unknown_key_message(name, [str(column) for column in frame.columns], {}))


def _files(frame: pd.DataFrame, columns: Sequence[Column], rows: Sequence[Row], shown: Sequence[str]) -> dict[str, str]:
    """Names and contents of the table's files. CSV and JSON lines have every figure, Markdown and LaTeX the table's."""
    plain = [{key: value for key, value in row.items() if key != "index" and value == value} for row in rows]
    latex = frame[list(dict.fromkeys(shown))].style.format(_cell, escape="latex").format_index(escape="latex", axis=1)
    return {
        "table.csv": frame.to_csv(index=False),
        "table.md": markdown(columns, rows),
        "table.tex": latex.hide(axis="index").to_latex(hrules=True),
        "table.jsonl": json_lines(plain),
    }


def _figures(
    frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], settings: Settings
) -> list[tuple[str, str]]:
    """(title, SVG) of the figures that the rows allow."""
    from experiments.sweep.figures import front, numeric, over, over_two, svg

    done = frame[frame["state"] == DONE]
    axes = numeric(done, keys)
    x = settings.x or (axes[0] if axes else "")
    y = settings.y or next((key for key in axes if key != x), "")
    found = []
    if x and metrics:
        found.append((f"{words(metrics[0])} over {x}", over(done, keys, x, metrics[0])))
    if x and y and metrics:
        found.append((f"{words(metrics[0])} over {x} and {y}", over_two(done, keys, x, y, metrics[0])))
    found.append(("Tokens/s of a request against tokens/s in all", front(done, keys)))
    return [(title, svg(figure)) for title, figure in found if figure is not None]


def _page(
    title: str,
    frame: pd.DataFrame,
    columns: Sequence[Column],
    rows: Sequence[Row],
    drawn: Sequence[tuple[str, str]],
    metric: Sequence[str],
    group: Sequence[str],
) -> str:
    from experiments.sweep.frame import WHERE

    notes = [f"<p class=note>{escape(note)}</p>" for note in _notes(frame)]
    best = [row for row in rows if columns_best(columns, row)]
    parts = [
        *notes,
        pages.section(
            f"Best {', '.join(map(words, metric))} for each {', '.join(group)}",
            html_table([column for column in columns if column.title != "best"], best) if best else "",
        ),
        *(pages.section(name, f"<figure>{text}</figure>") for name, text in drawn),
        pages.section("Rows", html_table(columns, rows)),
    ]
    machines, revisions = (
        [str(value) for value in frame[name].dropna().unique()] if name in frame else [] for name in WHERE
    )
    places = [*machines, *(f"revision {short_revision(revision)}" for revision in revisions)]
    return pages.page(f"sweep {title}", "; ".join(places), parts)


def columns_best(columns: Sequence[Column], row: Row) -> bool:
    """Whether the table calls a row the best of its group."""
    return any(column.title == "best" and column.show(row) for column in columns)


def _notes(frame: pd.DataFrame) -> list[str]:
    """What a reader of the table must know."""
    counts = frame["state"].value_counts()
    rest = ", ".join(f"{count} {state}" for state, count in counts.items() if state != DONE)
    clocks = (
        [NOT_A_GPU[impl] for impl in frame["impl"].dropna().unique() if impl in NOT_A_GPU] if "impl" in frame else []
    )
    return ([f"{len(frame)} rows, of which {rest}"] if rest else []) + clocks


def main() -> None:
    """Command line entry."""
    try:
        collect(*parsed(sys.argv[1:]))
    except ModuleNotFoundError as error:
        report(f"{error.name} is not installed\npip install -e '.[collect]'")
        sys.exit(UserError.exit_code)
    except UserError as error:
        report(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
