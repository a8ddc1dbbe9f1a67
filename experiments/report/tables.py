"""A table of results in the forms that people want: terminal, Markdown, CSV, JSON lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from experiments.report.run_folder import RunFolder, to_json

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading, and how a row shows under it."""

    title: str
    show: Callable[[Row], str]
    numeric: bool = True


def console_table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> RichTable:
    table = RichTable(title=title)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.numeric else "left", overflow="fold", no_wrap=not column.numeric
        )
    for row in rows:
        # As text: a label may look like markup.
        table.add_row(*(Text(column.show(row)) for column in columns))
    return table


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    head = line([column.title for column in columns])
    rule = line(["---:" if column.numeric else "---" for column in columns])
    return head + rule + "".join(line([column.show(row) for column in columns]) for row in rows)


def html_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    def cell(tag: str, column: Column, text: str) -> str:
        return f"<{tag}{'' if column.numeric else ' class=text'}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, column.title) for column in columns)
    body = "".join(
        "<tr>" + "".join(cell("td", column, column.show(row)) for column in columns) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def csv_text(rows: Sequence[Row]) -> str:
    """Every figure of every row, nested ones as `lossless/checked`; lists as JSON."""
    flat = [_flat(row) for row in rows]
    every = list(dict.fromkeys(name for row in flat for name in row))
    # What is a mapping in one row and missing in another has columns of its own already.
    names = [name for name in every if not any(other.startswith(f"{name}/") for other in every)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def write_tables(
    folder: RunFolder, name: str, columns: Sequence[Column], rows: Sequence[Row], common: Mapping[str, Any]
) -> None:
    """`name`.md, .csv and .jsonl; a line of the last also carries `common`, where its row has no such key."""
    folder.write(f"{name}.md", markdown(columns, rows))
    folder.write(f"{name}.csv", csv_text(rows))
    folder.write(f"{name}.jsonl", "".join(to_json({**common, **row}, indent=None) + "\n" for row in rows))


def _flat(row: Row, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = to_json(value, indent=None) if isinstance(value, (list, tuple)) else value
    return flat
