"""Tables of results: a metric is declared once, with the type of its key, and shown in four forms.

    class MyResult(TypedDict):
        tokens_per_step: Annotated[float, Metric("Mean of accepted drafts plus one.", "tokens/step", digits=2)]

    columns(MyResult, "tokens_per_step")

A table is printed in the terminal and written as Markdown, CSV and HTML.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from experiments.app.files import to_json
from experiments.report.templates import html

Result = Mapping[str, Any]  # one line of a table. The tasks declare their keys.
R = TypeVar("R", bound=Result)
DASH = "–"


@dataclass(frozen=True)
class Column:
    """A heading, and what its cells show."""

    title: str
    show: Callable[[Result], str]
    numeric: bool = True
    tone: Callable[[Result], str | None] = lambda result: None  # whether a cell is `good`, `bad` or neither (None)
    narrow: bool = True  # whether the terminal shows the column too; pages and files show all
    help: str = ""  # the meaning of the figures


@dataclass(frozen=True)
class Metric:
    """The meaning of a key of a result, and how a table shows it; see above. A cell is `scale` times the value with
    `digits` and `unit`, and with the half-width of its 95 % interval where the result has the key `<key>_interval`. Of
    nested figures it shows the `parts`, such as `p50/p90`. `show` replaces that. A metric without a `title` is in no
    table.
    """

    help: str
    title: str = ""
    digits: int = 1
    unit: str = ""
    scale: float = 1
    parts: str = ""
    show: Callable[[Result], str] | None = None
    tone: Callable[[Result], str | None] = lambda result: None

    def column(self, path: str, numeric: bool) -> Column:
        def figures(result: Result) -> str:
            if self.parts:
                values = [at(result, f"{path}/{part}") for part in self.parts.split("/")]
                return DASH if None in values else "/".join(figure(each, self.digits) for each in values)
            value, interval = at(result, path), at(result, f"{path}_interval")
            if value is None or isinstance(value, str):
                return value or (DASH if value is None else "")
            half = f" ± {figure(self.scale * (interval[1] - value), self.digits)}" if interval else ""
            return figure(self.scale * value, self.digits) + half + self.unit

        return Column(self.title, self.show or figures, numeric, self.tone, help=self.help)


def declared(record: type, prefix: str = "") -> dict[str, Column]:
    """Path, such as `step_ms/mean`, to the column of every metric that the TypedDict `record` and its parts declare."""
    found: dict[str, Column] = {}
    for key, hint in get_type_hints(record, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        path = f"{prefix}{key}"
        found |= dict((path, note.column(path, kind is not str)) for note in notes if isinstance(note, Metric))
        for part in (kind, *get_args(kind)):
            if is_typeddict(part):
                found |= declared(part, f"{path}/")
    return found


def columns(record: type, *paths: str, wide: Sequence[str] = ()) -> tuple[Column, ...]:
    """The columns of `paths` in this order, by default all with a title; the terminal leaves those of `wide` out."""
    known = declared(record)
    chosen = paths or tuple(path for path, column in known.items() if column.title)
    return tuple(replace(known[path], narrow=path not in wide) for path in chosen)


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


def at(result: Result, path: str) -> Any:
    """The value under `path`, such as `step_ms/median`; None where a part of the path is missing."""
    found: Any = result
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def grouped(results: Sequence[R], keys: Sequence[str]) -> dict[tuple[Any, ...], list[R]]:
    """The results by their values of `keys`, in the order of the results."""
    found: dict[tuple[Any, ...], list[R]] = {}
    for result in results:
        found.setdefault(tuple(result.get(key) for key in keys), []).append(result)
    return found


class WholeWords(RichTable):
    """A table that is wider than the terminal where a word of it would not fit; print it with `crop=False`."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = self.__rich_measure__(console, options.update(max_width=10_000)).minimum
        return super().__rich_console__(console, options.update(max_width=max(options.max_width, needed)))


def with_values(columns: Sequence[Column], results: Sequence[Result]) -> list[Column]:
    """The columns in which a result has a value; all of them where there are no results."""
    return [column for column in columns if not results or any(column.show(each) != DASH for each in results)]


def console_table(title: str, columns: Sequence[Column], results: Sequence[Result]) -> RichTable:
    table = WholeWords(title=Text(title))
    columns = [column for column in with_values(columns, results) if column.narrow]
    for column in columns:
        side: JustifyMethod = "right" if column.numeric else "left"
        # A heading is as wide as its cells, or as its longest word.
        cells = [column.show(result) for result in results]
        word = max((len(word) for text in [column.title, *cells] for word in text.split()), default=1)
        heading = "\n".join(wrap(column.title, max([word, *map(len, cells)])))
        table.add_column(heading, justify=side, overflow="fold", no_wrap=not column.numeric, min_width=word)
    styles = {"good": "green", "bad": "bold red", None: ""}
    for result in results:
        # As Text: a label may look like markup.
        table.add_row(*(Text(column.show(result), style=styles[column.tone(result)]) for column in columns))
    return table


def markdown(columns: Sequence[Column], results: Sequence[Result]) -> str:
    columns = with_values(columns, results)
    head = [column.title for column in columns]
    rule = ["---:" if column.numeric else "---" for column in columns]
    lines = [head, rule, *([column.show(result) for column in columns] for result in results)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def html_table(columns: Sequence[Column], results: Sequence[Result]) -> str:
    return html("table", with_values(columns, results), results)


def csv_text(results: Sequence[Result]) -> str:
    """Every figure of every result, nested ones as `lossless/checked`; lists as JSON."""
    cells = [flatten(result) for result in results]
    every = list(dict.fromkeys(name for each in cells for name in each))
    # What is a mapping in one result and missing in another has columns of its own already.
    parents = {name.rpartition("/")[0] for name in every}
    names = [name for name in every if name not in parents or any(each.get(name) is not None for each in cells)]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for each in cells:
        writer.writerow({k: to_json(v, indent=None) if isinstance(v, (list, tuple)) else v for k, v in each.items()})
    return lines.getvalue()


def flatten(values: Result, by: str = "/", prefix: str = "") -> dict[str, Any]:
    """Nested figures under names such as `phase_times_ms/draft`, whose parts are joined `by` this."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, by, f"{name}{by}") if isinstance(value, Mapping) else {name: value}
    return flat
