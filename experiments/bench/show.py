"""The rows of a benchmark as a table in the terminal and as one page with its plots.

In every ratio a number above 1 means that the other side takes longer than our kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from rich.table import Table

from experiments.bench.ceilings import Ceilings
from experiments.bench.row import OK
from experiments.report import page as report
from experiments.report.plots import Series, legend, logarithmic
from experiments.report.tables import DASH, Column, Row, at, console_table, figure, html_table, number, text

_CONTEXT = re.compile(r"_\d+k(?=_|$)")  # in the names of cases that differ in their context alone


def columns(peers: Sequence[str]) -> list[Column]:
    """The columns of the table, those of `peers` last."""
    return [
        text("family", "family"),
        text("case", "case"),
        text("parity", "status"),
        number("us", "median_us"),
        Column(
            "20–80%", lambda row: "–".join(figure(row[q]) for q in ("p20_us", "p80_us")) if "p20_us" in row else DASH
        ),
        number("us/call", "call_median_us"),
        number("GB/s", "bytes_per_s", 0, scale=1e-9),
        Column("TFLOP/s", lambda row: figure(row["flop_per_s"] * 1e-12) if row.get("flop") else DASH),
        Column("ceiling", lambda row: f"{row['ceiling_pct']:.0f}% {row['bound']}" if "ceiling_pct" in row else DASH),
        number("torch x", "reference_ratio"),
        *(number(f"{name} x", f"peers/{name}/ratio", 2) for name in peers),
    ]


def table(rows: Sequence[Row], title: str, peers: Sequence[str]) -> Table:
    """The table for a terminal."""
    return console_table(title, columns(peers), rows)


def problems(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a case, and why a peer has no number: each reason once."""
    own: dict[str, list[str]] = {}
    absent: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row["status"] != OK:
            own.setdefault(f"{row['status']}: {row['problem']}", []).append(row["case"])
        others = row.get("peers", {}).items()
        absent.update((name, peer["status"], peer["problem"]) for name, peer in others if peer["status"] != OK)
    return [f"{', '.join(cases)}: {reason}" for reason, cases in own.items()] + [
        f"{name}: {status} in {count} cases, {problem}" for (name, status, problem), count in absent.items()
    ]


def page(rows: Sequence[Row], title: str, notes: Sequence[str], peers: Sequence[str], ceilings: Ceilings | None) -> str:
    """Everything in one HTML file without scripts; plots only where something was measured on a GPU."""
    parts = [f"<p class=note>{escape(note)}</p>" for note in notes]
    if ceilings is not None:
        parts.append(report.section("Roofline", roofline(rows, ceilings)))
        parts.append(report.section("Microseconds over context length", over_context(rows)))
    parts.append(report.section("Cases", html_table(columns(peers), rows)))
    return report.page(title, "times of single kernels, each compared with its reference first", parts)


def roofline(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """Rate over intensity of the rows that compute, below the ceilings that were measured."""
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        if row.get("flop"):
            intensity = row["flop"] / row["moved_bytes"]
            hint = f"{row['case']}: {row['median_us']:.1f} us, {row['ceiling_pct']:.0f}% of the ceiling"
            series.setdefault(row["family"], []).append((intensity, row["flop_per_s"] / 1e12, hint))
    if not series:
        return ""
    ridge, peak = ceilings.flop_per_s / ceilings.bytes_per_s, ceilings.flop_per_s / 1e12
    intensities = [x for points in series.values() for x, *_ in points]
    lowest, highest = min(ridge, *intensities), max(4 * ridge, *intensities)
    roof: Series = (
        f"measured: {ceilings.bytes_per_s / 1e12:.2f} TB/s, {peak:.0f} TFLOP/s",
        [(lowest, lowest * ceilings.bytes_per_s / 1e12, ""), (ridge, peak, ""), (highest, peak, "")],
    )
    axes = ("operations per byte", "TFLOP/s")
    chart = logarithmic(list(series.items()), "roofline", axes, joined=False, limits=[roof])
    return chart + legend(list(series))


def over_context(rows: Sequence[Row]) -> str:
    """Time over context length, one line per shape that was measured at two lengths or more."""
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        context = at(row, "shape/context_tokens")
        if context and "median_us" in row:
            point = (context, row["median_us"], f"{row['case']}: {row['median_us']:.1f} us")
            series.setdefault(_CONTEXT.sub("", row["case"]), []).append(point)
    lines = {name: points for name, points in series.items() if len({x for x, *_ in points}) > 1}
    if not lines:
        return ""
    chart = logarithmic(list(lines.items()), "time over context", ("tokens of context", "us"))
    return chart + legend(list(lines))
