"""A table of results in four forms: terminal, Markdown, CSV and HTML. Its columns are declared once."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from experiments.report.metrics import num_faults
from experiments.report.run_folder import to_json

Row = Mapping[str, Any]
DASH = "–"


@dataclass(frozen=True)
class Column:
    """A heading, and how a row shows under it."""

    title: str
    show: Callable[[Row], str]
    numeric: bool = True
    tone: Callable[[Row], str | None] = lambda row: None
    """Whether a cell is `good`, `bad` or neither (None)."""
    narrow: bool = True
    """Whether the terminal shows the column too; pages and files show all."""


def words(name: str) -> str:
    """The name of a figure as a heading: `tokens_per_step` as `tokens/step`, `speedup_wall` as `wall speedup`."""
    kind, _, clock = name.partition("_")
    return f"{clock} speedup" if kind == "speedup" else name.replace("_per_", "/").replace("_", " ")


def counted(count: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def figure(value: float | None, digits: int = 1, suffix: str = "") -> str:
    """A number for a table, a dash where there is none."""
    return DASH if value is None else f"{value:,.{digits}f}{suffix}"


def at(row: Row, path: str) -> Any:
    """The value under `path`, such as `step_ms/median`; None where a part of the path is missing."""
    found: Any = row
    for key in path.split("/"):
        found = None if found is None else found.get(key)
    return found


def text(title: str, path: str) -> Column:
    """A column of words."""
    return Column(title, lambda row: str(at(row, path)), numeric=False)


def number(title: str, path: str, digits: int = 1, suffix: str = "", scale: float = 1) -> Column:
    """A column of `scale` times the figures under `path`."""

    def show(row: Row) -> str:
        value = at(row, path)
        return figure(None if value is None else scale * value, digits, suffix)

    return Column(title, show)


def quantile_pair(title: str, path: str, digits: int) -> Column:
    """A column of `p50/p90`."""

    def show(row: Row) -> str:
        values = [at(row, f"{path}/{name}") for name in ("p50", "p90")]
        return DASH if None in values else "/".join(figure(value, digits) for value in values)

    return Column(title, show)


def _lossless(row: Row) -> str:
    comparison = row["lossless"]
    if row["algo"] == "autoregressive":
        return "reference"
    if comparison["checked"]:
        return f"{comparison['identical']}/{comparison['checked']}"
    return DASH if row["rule"] == "target_only" else "by distribution"


def lossless_tone(row: Row) -> str | None:
    """Good where all requests are identical, bad where one differs at no near tie."""
    comparison = row["lossless"]
    if not comparison["checked"]:
        return None
    if comparison["identical"] == comparison["checked"]:
        return "good"
    return "bad" if num_faults(comparison) else None


def _accuracy(row: Row) -> str:
    answers, shown = row.get("answers"), number("", "accuracy", 0, "%", scale=100).show(row)
    return f"{shown} ({answers['cut']} cut)" if answers and answers["cut"] else shown


def _parsed(row: Row) -> str:
    return f"{row['num_parsed']}/{row['num_constrained']}" if row.get("num_constrained") else DASH


def _acceptance_by_position(row: Row) -> str:
    rates = [None if rate is None else 100 * rate for rate in row["acceptance_at"][:6]]
    return " ".join(figure(rate, 0) for rate in rates or [None])


def with_interval(title: str, path: str, digits: int, suffix: str = "") -> Column:
    """A column of figures with the half-width of their 95 % interval, where there is one."""

    def show(row: Row) -> str:
        value, found = at(row, path), at(row, f"{path}_interval")
        half = f" ± {figure(found[1] - value, digits)}" if found else ""
        return figure(value, digits) + half + (suffix if value is not None else "")

    return Column(title, show)


METHOD = text("method", "method")
DECODE_RATE = with_interval("decode tokens/s", "decode_tokens_per_s", 1)
WALL_RATE = with_interval("wall tokens/s", "wall_tokens_per_s", 1)
DECODE_SPEEDUP = with_interval("decode speedup", "speedup_decode", 2, "×")
WALL_SPEEDUP = with_interval("wall speedup", "speedup_wall", 2, "×")
ACCEPTANCE_RATE = number("accepted / drafted", "acceptance_rate", 1, "%", scale=100)
TOKENS_PER_STEP = with_interval("tokens/step", "tokens_per_step", 2)
ACCEPTANCE_BY_POSITION = Column("acceptance % at 1…6", _acceptance_by_position)
STEP_MS = number("ms/step", "step_ms/mean", 2)
STEP_MS_RANGE = Column(
    "ms/step 20–80%", lambda row: "–".join(figure(at(row, f"step_ms/{q}"), 2) for q in ("p20", "p80")), narrow=False
)
FIRST_TOKEN_MS = quantile_pair("first token ms p50/p90", "ttft_ms", 1)
LOSSLESS = Column("lossless", _lossless, tone=lossless_tone)
ACCURACY = Column("accuracy", _accuracy)
CUT = replace(number("cut", "num_cut", 0), narrow=False)
PARSED = Column("parsed", _parsed, narrow=False)
COMPILED = replace(
    number("compiled", "compiled", 0), tone=lambda row: "bad" if row.get("compiled") else None, narrow=False
)


def console_table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> RichTable:
    """The table for a terminal."""
    table = RichTable(title=Text(title))
    columns = [column for column in columns if column.narrow]
    for column in columns:
        side: JustifyMethod = "right" if column.numeric else "left"
        # A heading is as wide as its cells, or as its longest word.
        word = max(map(len, column.title.split()), default=1)
        heading = "\n".join(wrap(column.title, max([word, *(len(column.show(row)) for row in rows)])))
        table.add_column(heading, justify=side, overflow="fold", no_wrap=not column.numeric)
    styles = {"good": "green", "bad": "bold red", None: ""}
    for row in rows:
        # As text: a label may look like markup.
        table.add_row(*(Text(column.show(row), style=styles[column.tone(row)]) for column in columns))
    return table


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    head = line([column.title for column in columns])
    rule = line(["---:" if column.numeric else "---" for column in columns])
    return head + rule + "".join(line([column.show(row) for column in columns]) for row in rows)


def html_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The table in HTML, without the columns in which no row has a value."""
    columns = [column for column in columns if not rows or any(column.show(row) != DASH for row in rows)]

    def cell(tag: str, column: Column, content: str, tone: str | None = None) -> str:
        classes = " ".join(filter(None, ["" if column.numeric else "text", tone]))
        return f'<{tag} class="{classes}">{escape(content)}</{tag}>' if classes else f"<{tag}>{escape(content)}</{tag}>"

    head = "".join(cell("th", column, column.title) for column in columns)
    body = "".join(
        "<tr>" + "".join(cell("td", column, column.show(row), column.tone(row)) for column in columns) + "</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def csv_text(rows: Sequence[Row]) -> str:
    """Every figure of every row, nested ones as `lossless/checked`; lists as JSON."""
    cells = [flatten(row) for row in rows]
    every = list(dict.fromkeys(name for row in cells for name in row))
    # What is a mapping in one row and missing in another has columns of its own already.
    names = [name for name in every if not any(other.startswith(f"{name}/") for other in every)]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in cells:
        writer.writerow({k: to_json(v, indent=None) if isinstance(v, (list, tuple)) else v for k, v in row.items()})
    return lines.getvalue()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures under names such as `ledger_ms/draft`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
