"""The rows of a benchmark as a table in the terminal and as one page with its plots.

In every ratio a number above 1 means that the other side takes longer than our kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from experiments.bench.ceilings import Ceilings
from experiments.bench.row import OK
from experiments.report.page import STYLE_FILE
from experiments.report.plots import Series, legend, logarithmic

Row = Mapping[str, Any]
_CONTEXT = re.compile(r"_\d+k(?=_|$)")  # in the names of cases that differ in their context alone
_COLUMNS = ("family", "case", "parity", "us", "20-80 %", "us/call", "GB/s", "TFLOP/s", "ceiling", "torch x")


def table(rows: Sequence[Row], title: str, peers: Sequence[str]) -> Table:
    """One line a case; a dash where there is no number."""
    shown = Table(title=title)
    for index, column in enumerate((*_COLUMNS, *(f"{name} x" for name in peers))):
        shown.add_column(column, justify="left" if index < 3 else "right", no_wrap=index < 2)
    for row in rows:
        shown.add_row(*_cells(row, peers))
    return shown


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    spread = f"{row['p20_us']:.1f}-{row['p80_us']:.1f}" if "p20_us" in row else "-"
    ceiling = f"{row['ceiling_pct']:.0f} % {row['bound']}" if "ceiling_pct" in row else "-"
    return [
        row["family"],
        row["case"],
        row["status"],
        _number(row, "median_us", 1, ".1f"),
        spread,
        _number(row, "call_median_us", 1, ".1f"),
        _number(row, "bytes_per_s", 1e-9, ".0f"),
        _number(row, "flop_per_s", 1e-12, ".1f") if row.get("flop") else "-",
        ceiling,
        _number(row, "reference_ratio", 1, ".1f"),
        *(_number(row.get("peers", {}).get(name, {}), "ratio", 1, ".2f") for name in peers),
    ]


def _number(row: Row, key: str, scale: float, style: str) -> str:
    return format(row[key] * scale, style) if key in row else "-"


def problems(rows: Sequence[Row]) -> list[str]:
    """What is wrong with a case, and why a peer has no number: each reason once, with the number of cases."""
    own: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != OK:
            own.setdefault(f"{row['status']}: {row['problem']}", []).append(row["case"])
    return [f"{', '.join(cases)}: {reason}" for reason, cases in own.items()] + _absent_peers(rows)


def _absent_peers(rows: Sequence[Row]) -> list[str]:
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        for name, peer in row.get("peers", {}).items():
            if peer["status"] != OK:
                key = (name, peer["status"], peer["problem"])
                reasons[key] = reasons.get(key, 0) + 1
    return [f"{name}: {status} in {count} cases, {problem}" for (name, status, problem), count in reasons.items()]


def page(rows: Sequence[Row], title: str, notes: Sequence[str], peers: Sequence[str], ceilings: Ceilings | None) -> str:
    """Everything in one HTML file without scripts; plots only where something was measured on a GPU."""
    header = "".join(f"<th>{escape(name)}</th>" for name in (*_COLUMNS, *(f"{peer} x" for peer in peers)))
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row, peers)) + "</tr>" for row in rows
    )
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p class=note>{escape(note)}</p>" for note in notes)]
    if ceilings is not None:
        parts.append(_card("Roofline", roofline(rows, ceilings)))
        parts.append(_card("Microseconds over context length", over_context(rows)))
    parts.append(_card("Cases", f"<div class=scroll><table><tr>{header}</tr>{lines}</table></div>"))
    style = STYLE_FILE.read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style></head>\n<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _card(heading: str, content: str) -> str:
    return f'<section class="card wide"><h2>{escape(heading)}</h2>{content}</section>' if content else ""


def roofline(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """Rate over intensity of the rows that compute, under the roof that was measured."""
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        if row.get("flop"):
            intensity = row["flop"] / row["moved_bytes"]
            hint = f"{row['case']}: {row['median_us']:.1f} us, {row['ceiling_pct']:.0f} % of the ceiling"
            series.setdefault(row["family"], []).append((intensity, row["flop_per_s"] / 1e12, hint))
    if not series:
        return ""
    ridge, peak = ceilings.flop_per_s / ceilings.bytes_per_s, ceilings.flop_per_s / 1e12
    lowest = min(ridge, *(x for points in series.values() for x, *_ in points))
    highest = max(4 * ridge, *(x for points in series.values() for x, *_ in points))
    roof: Series = (
        f"measured: {ceilings.bytes_per_s / 1e12:.2f} TB/s, {peak:.0f} TFLOP/s",
        [(lowest, lowest * ceilings.bytes_per_s / 1e12, ""), (ridge, peak, ""), (highest, peak, "")],
    )
    axes = ("operations a byte", "TFLOP/s")
    chart = logarithmic(list(series.items()), "roofline", axes, joined=False, limits=[roof])
    return chart + legend(list(series))


def over_context(rows: Sequence[Row]) -> str:
    """Time over context length, a line for every shape that was measured at two lengths or more."""
    series: dict[str, list[tuple[float, float, str]]] = {}
    for row in rows:
        shape = row.get("shape", {})
        if "median_us" in row and shape.get("context_tokens"):
            point = (shape["context_tokens"], row["median_us"], f"{row['case']}: {row['median_us']:.1f} us")
            series.setdefault(_CONTEXT.sub("", row["case"]), []).append(point)
    lines = {name: points for name, points in series.items() if len({x for x, *_ in points}) > 1}
    if not lines:
        return ""
    chart = logarithmic(list(lines.items()), "time over context", ("tokens of context", "us"))
    return chart + legend(list(lines))
