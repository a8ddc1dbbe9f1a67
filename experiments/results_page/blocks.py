"""Fenced blocks of the results page, and what they become.

A block is YAML. `rows` makes a table:

    file: NAME.jsonl            or a list of names, in experiments/results
    where: {KEY: VALUE}         rows with these values, or one of a list; a key may be a path, `sampling/temperature`
    down: KEY                   what tells the lines apart; a list of keys makes one line per combination
    names: {VALUE: TEXT}        what a value of `down` or `across` is called
    order: [VALUE, …]           the lines, in this order, or the name of such a list in sections/shared.yaml; a value
                                without a row is shown as not measured
    head: TEXT                  heading of the first column
    across: KEY                 one column per value of KEY; `columns: [VALUE, …]` orders them
    cell: FORMAT                with `across`: what a cell shows of its row, a format string over the row's keys
    cells: {HEADING: FORMAT}    without `across`: one column per entry
    total: [KEY, …]             a cell shows these numbers summed over its rows, which are otherwise of one kind

`made` tells file, card, clocks, versions and revisions of the rows of `file`, narrowed by `where`. `curve` draws lines
into docs/PICTURE.svg: `x` and `y` are keys, `down`, `names` and `order` are those of a table, and `title` and
`axes: [x, y]` are words.

Without `total`, a cell that several rows claim is an error, so a file with repeated measurements needs a narrower
`where`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.report.tables import DASH, Column, Row, markdown
from experiments.results_page.rows import matching, read_all, value_at

ROWS_LINK = "../experiments/results"


@dataclass
class Selection:
    """Which rows a block shows."""

    file: str | list[str]
    where: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """The rows, at least one."""
        found = matching(read_all(self.file), self.where)
        if not found:
            raise ValueError(f"{self.file}: no row has {self.where}")
        return found


@dataclass
class Table(Selection):
    """A block `rows`."""

    down: str | list[str] = "method"
    names: dict[Any, str] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)
    head: str = ""
    across: str | None = None
    columns: list[Any] = field(default_factory=list)
    cell: str | None = None
    cells: dict[str, str] = field(default_factory=dict)
    total: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.across is None) != (self.cell is None) or (self.across is None) != bool(self.cells):
            raise ValueError("a table has either across and cell, or cells")

    def text(self) -> str:
        """The table in Markdown."""
        rows = self.rows()
        lines = self.order or list(dict.fromkeys(_line(row, self.down) for row in rows))
        first = Column(self.head, lambda line: _name(line["line"], self.names), numeric=False)
        if self.across is None:
            grid = {heading: self._placed(rows, lambda row: True, cell) for heading, cell in self.cells.items()}
        else:
            across, cell = self.across, self.cell or ""
            keys = self.columns or list(dict.fromkeys(value_at(row, across) for row in rows))
            grid = {_name(k, self.names): self._placed(rows, _has(across, k), cell) for k in keys}
        columns = [first, *(_column(heading, cells) for heading, cells in grid.items())]
        return markdown(columns, [{"line": tuple(x) if isinstance(x, list) else x} for x in lines])

    def _placed(self, rows: Sequence[Row], chosen: Callable[[Row], bool], cell: str) -> dict[Any, str]:
        """Line to what its cell shows."""
        found: dict[Any, list[Row]] = {}
        for row in filter(chosen, rows):
            found.setdefault(_line(row, self.down), []).append(row)
        for line, here in found.items():
            if len(here) > 1 and not self.total:
                name = _name(line, self.names)
                raise ValueError(f"{self.file}: several rows for {name}; expected one, narrow `where`")
        return {line: shown(cell, self._summed(here)) for line, here in found.items()}

    def _summed(self, rows: Sequence[Row]) -> Row:
        """The first of `rows`, with the sums over all of them under the keys of `total`."""
        return {**rows[0], **{key: sum(row[key] for row in rows) for key in self.total}}


@dataclass
class Made(Selection):
    """A block `made`."""

    def text(self) -> str:
        """One paragraph."""
        rows = self.rows()
        names = [self.file] if isinstance(self.file, str) else self.file
        links = ", ".join(f"[{name}]({ROWS_LINK}/{name})" for name in names)
        facts = [*_unique(rows, _machine), *_clocks(rows), *_unique(rows, _versions)]
        facts.append(f"revision {', '.join(_unique(rows, _revision))}")
        return f"Rows: {links}. {'; '.join(facts)}.\n"


@dataclass
class Curve(Selection):
    """A block `curve`: a picture beside the page."""

    x: str = ""
    y: str = ""
    down: str | list[str] = "method"
    names: dict[Any, str] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)
    title: str = ""
    axes: list[str] = field(default_factory=list)
    picture: str = ""

    def series(self) -> list[tuple[str, list[tuple[float, float]]]]:
        """Name and points of each line."""
        rows = self.rows()
        lines = self.order or list(dict.fromkeys(_line(row, self.down) for row in rows))
        found = []
        for line in (tuple(x) if isinstance(x, list) else x for x in lines):
            here = [row for row in rows if _line(row, self.down) == line]
            points = [(float(value_at(row, self.x)), float(value_at(row, self.y))) for row in here]
            found.append((_name(line, self.names), points))
        return [(name, points) for name, points in found if points]


def _line(row: Row, down: str | list[str]) -> Any:
    """What tells the line of `row` apart: the value of a key, or those of several."""
    return value_at(row, down) if isinstance(down, str) else tuple(value_at(row, key) for key in down)


def _name(value: Any, names: Mapping[Any, str]) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return ", ".join(names.get(part, str(part)) for part in parts)


def shown(cell: str, row: Row) -> str:
    """`cell` with the row's values; a dash where one of them is missing."""
    try:
        return cell.format_map(row)
    except (KeyError, TypeError, IndexError):
        return DASH


def _has(key: str, value: Any) -> Callable[[Row], bool]:
    return lambda row: value_at(row, key) == value


def _column(heading: str, cells: Mapping[Any, str]) -> Column:
    return Column(heading, lambda line: cells.get(line["line"], DASH))


def _unique(rows: Sequence[Row], tell: Callable[[Row], str]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(tell, rows))))


def _machine(row: Row) -> str:
    return str(row.get("machine") or "")


def _clocks(rows: Sequence[Row]) -> list[str]:
    """Slowest and fastest clock of the multiprocessors at the ends of the runs; nothing where no row tells."""
    found = [row["clocks"] for row in rows if row.get("clocks")]
    if not found:
        return []
    speeds = sorted({round(clocks["sm_mhz"]) for clocks in found})
    span = f"{speeds[0]}" if len(speeds) == 1 else f"{speeds[0]} to {speeds[-1]}"
    return [f"SM clock {span} of {found[0]['max_sm_mhz']:.0f} MHz, memory {found[0]['memory_mhz']:.0f} MHz"]


def _versions(row: Row) -> str:
    versions = row.get("versions") or {}
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if versions.get(name))


def _revision(row: Row) -> str:
    return str(row["revision_text"])
