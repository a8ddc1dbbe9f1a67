"""One table, and a page with a figure, from the folders of one or several sweeps, finished or not.

    python -m experiments.collect outputs/sweeps/trees
    python -m experiments.collect outputs/sweeps/a outputs/sweeps/b metrics=speedup_wall,tokens_per_step x=algo.topk

Settings: `metrics` figures of the table, the first of which is drawn and decides the best lines; `group` keys of which
each value has a best line; `x` the key of the axis; `where` key=value pairs joined by `+` that lines must have;
`mix=true` to compare jobs of several machines or revisions; `out` the folder of table.csv, table.md, table.jsonl and
sweep.html (default: the first sweep's own).
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.app.cli import HELP, explain, report, write_plain_characters
from experiments.app.errors import UserError, unknown_key_message
from experiments.app.files import json_lines, write_whole
from experiments.app.provenance import short_revision
from experiments.report.checks import NOT_A_GPU
from experiments.report.console import plain_console
from experiments.report.tables import DASH, Column, console_table, csv_text, grouped, html_table, markdown, words
from experiments.report.templates import Series, chart, html, section
from experiments.sweep import frame
from experiments.sweep.folder import DONE, STATE, SweepFolder
from experiments.sweep.frame import METRICS, WHERE, Line, distinct, numbers

MOST_DRAWN = 10  # lines of a figure
OWN = ("report", "best")  # keys of a line for the page alone


@dataclass
class Settings:
    metrics: str = ""
    group: str = ""
    x: str = ""
    where: str = ""
    mix: bool = False
    out: str = ""


def parsed(arguments: Sequence[str]) -> tuple[list[SweepFolder], Settings]:
    """Folders and settings of the command line. Raises UserError for what is neither."""
    if set(arguments) & set(HELP):
        print((__doc__ or "").strip())
        sys.exit()
    folders = [word for word in arguments if "=" not in word or Path(word).exists()]
    typed = OmegaConf.from_dotlist([word for word in arguments if word not in folders])
    try:
        settings: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), typed))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    if missing := [folder for folder in folders if not Path(folder).is_dir()]:
        raise UserError(f"{missing[0]}: no such folder")
    if not folders:
        raise UserError("give the folder of a sweep, such as outputs/sweeps/trees")
    return [SweepFolder(Path(folder)) for folder in folders], settings


def collect(folders: Sequence[SweepFolder], settings: Settings) -> None:
    """Print the table, write its files and the page. Raises UserError for what cannot be compared or is not there."""
    lines, keys = frame.read(folders, settings.mix)
    for pair in filter(None, settings.where.split("+")):
        key, _, value = pair.partition("=")
        _expect_columns(lines, [key])
        lines = [line for line in lines if str(line.get(key)) == value]
    if not lines:
        raise UserError(f"where={settings.where}: no job is left")
    asked = [name for name in settings.metrics.split(",") if name]
    metrics = asked or [name for name in METRICS if any(line.get(name) is not None for line in lines)]
    group = [key for key in settings.group.split(",") if key] or _groups(keys)
    _expect_columns(lines, [*asked, *group, *filter(None, [settings.x])])
    for line in frame.best_lines(lines, group, metrics[0]) if metrics else ():
        line["best"] = "best"
    best = f"Best {words(metrics[0])}" + (f" for each {', '.join(group)}" if group else "") if metrics else ""
    columns = columns_of(lines, keys, metrics)
    title = ", ".join(dict.fromkeys(folder.name for folder in folders))
    out = Path(settings.out) if settings.out else folders[0].path
    out.mkdir(parents=True, exist_ok=True)
    plain = [{key: value for key, value in line.items() if key not in OWN and value is not None} for line in lines]
    files = {
        "table.csv": csv_text(plain),
        "table.md": markdown(columns, lines),
        "table.jsonl": json_lines(plain),
        "sweep.html": _page(title, lines, columns, best, _figure(lines, keys, metrics, settings.x), out),
    }
    for name, text in files.items():
        write_whole(out / name, text)
    console = plain_console()
    console.print(console_table(f"sweep {title}", columns, lines), crop=False)
    for note in _notes(lines):
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    console.print(f"wrote {', '.join(files)} into {out}", highlight=False, soft_wrap=True)


def _groups(keys: Sequence[str]) -> list[str]:
    """The keys of which each value has a best line: the prompt set, which nobody chooses, and the first of several.
    Where seeds alone differ, no line is better than another."""
    others = [key for key in keys if key not in ("data", "sampling.seed")]
    given = ("data",) if others else ("data", "sampling.seed")
    return [*(others[:1] if len(others) > 1 else []), *(key for key in keys if key in given)]


def _expect_columns(lines: Sequence[Line], names: Sequence[str]) -> None:
    known = dict.fromkeys(name for line in lines for name in line)
    figures_first = sorted(known, key=lambda name: not numbers(lines, name))
    for name in names:
        if name not in known:
            raise UserError(unknown_key_message(name, figures_first, {}))


def columns_of(lines: Sequence[Line], keys: Sequence[str], metrics: Sequence[str]) -> list[Column]:
    """The columns of the table: what was swept, the state where one is not done, figures with their intervals."""
    found = [_column(key, lines) for key in keys]
    done = [line for line in lines if line["state"] == DONE]
    if len(done) < len(lines):
        found.append(STATE)
    found += [_column(metric, lines, interval=True) for metric in metrics]
    if sum("best" in line for line in lines) < len(done):
        found.append(Column("best", lambda line: line.get("best", ""), numeric=False, tone=lambda line: "good"))
    if any(line.get("reason") for line in lines):
        reason = lambda line: (line.get("reason") or "").partition("\n")[0]  # noqa: E731
        found.append(Column("reason", reason, numeric=False, narrow=False))
    return found


def _column(name: str, lines: Sequence[Line], interval: bool = False) -> Column:
    def show(line: Any) -> str:
        value, high = line.get(name), line.get(f"{name}_high")
        if name == "revision" and isinstance(value, str):
            return short_revision(value)
        return _cell(value) + (f" ± {_cell(high - value)}" if interval and high is not None else "")

    return Column(words(name) if interval else name, show, numeric=bool(numbers(lines, name)))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        digits = next(digits for least, digits in ((1000, 0), (100, 1), (1, 2), (0, 3)) if abs(value) >= least)
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:,.{digits}f}"
    return DASH if value is None else str(value)


def _figure(lines: Sequence[Line], keys: Sequence[str], metrics: Sequence[str], x: str) -> str:
    """The first metric over `x`, by default the first key of numbers; empty where there is none. Raises UserError where
    `x` has no numbers."""
    done = [line for line in lines if line["state"] == DONE]
    axes = frame.numeric(done, keys)
    if x and not numbers(done, x):
        raise UserError(f"{x} has no numbers, and an axis needs them; numbers: {', '.join(axes) or 'none'}")
    x = x or next(iter(axes), "")
    drawn = over(done, keys, x, metrics[0]) if x and metrics else ""
    return section(f"{words(metrics[0])} over {x}", drawn) if drawn else ""


def over(found: Sequence[Line], keys: Sequence[str], x: str, metric: str) -> str:
    """Lines of `metric` over the key `x`, one for each combination of the other keys, with their intervals."""
    low, high = f"{metric}_low", f"{metric}_high"
    series = []
    for name, part in _parts(numbers(found, x, metric), [key for key in keys if key != x]):
        with_ends = len(numbers(part, low, high)) == len(part)
        part = sorted(part, key=lambda line: (line[x], line[metric]))
        band = [(max(0.0, line[low]), line[high]) for line in part] if with_ends else ()
        series.append(Series(name or words(metric), [(line[x], line[metric]) for line in part], band=band))
    return chart(series, f"{words(metric)} over {x}", (x, words(metric)))


def _parts(found: Sequence[Line], keys: Sequence[str]) -> list[tuple[str, list[Line]]]:
    """(name, lines) of each combination of the keys that differ, at most `MOST_DRAWN` of them."""
    varied = [key for key in keys if len({str(line.get(key)) for line in found}) > 1]
    swept = [key for key in varied if key not in WHERE]
    if swept:  # a card or a revision is named where the other keys do not tell it
        places = grouped(found, swept).values()
        varied = [key for key in varied if key in swept or any(len(distinct(part, key)) > 1 for part in places)]
    return [
        (", ".join(_named(key, value) for key, value in zip(varied, values, strict=True)), part)
        for values, part in list(grouped(found, varied).items())[:MOST_DRAWN]
    ]


def _named(key: str, value: Any) -> str:
    """A value of a group by its own name, any other with the name of its key."""
    if isinstance(value, str):
        return short_revision(value) if key == "revision" else value
    return f"{key.rpartition('.')[2]}={value:g}" if frame.is_number(value) else f"{key}={value}"


def _page(title: str, lines: Sequence[Line], columns: Sequence[Column], best: str, figure: str, out: Path) -> str:
    """The page in `out`; `best` is the heading of the best lines."""
    chosen = [line for line in lines if "best" in line]
    shown = [column for column in columns if column.title != "best"]
    reports = {line["report"]: line["job"] for line in lines if Path(line.get("report", "")).is_file()}
    links = {os.path.relpath(path, out): job for path, job in reports.items()}
    parts = [
        *(html("note", note) for note in _notes(lines)),
        section(best, html_table(shown, chosen)) if chosen else "",
        figure,
        section("Jobs", html_table([Column("job", lambda line: line["job"], numeric=False), *columns], lines)),
        section("Reports of the jobs", html("links", links)),
    ]
    machines, revisions = (list(map(str, distinct(lines, name))) for name in WHERE)
    places = [*machines, *(f"revision {short_revision(revision)}" for revision in revisions)]
    return html("page", f"sweep {title}", "; ".join(places), parts)


def _notes(lines: Sequence[Line]) -> list[str]:
    counts = {state: sum(line["state"] == state for line in lines) for state in distinct(lines, "state")}
    rest = ", ".join(f"{count} {state}" for state, count in counts.items() if state != DONE)
    resumed = dict.fromkeys(line["job"] for line in lines if line.get("num_resumed"))
    return [
        *([f"{len(lines)} lines, of which {rest}"] if rest else []),
        *([f"resumed jobs, whose times leave out earlier requests: {', '.join(resumed)}"] if resumed else []),
        *(NOT_A_GPU[impl] for impl in distinct(lines, "impl") if impl in NOT_A_GPU),
    ]


def main() -> None:
    write_plain_characters()
    try:
        collect(*parsed(sys.argv[1:]))
    except UserError as error:
        report(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
