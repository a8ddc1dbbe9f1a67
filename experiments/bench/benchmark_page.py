"""The results of a kernel benchmark as a table in the terminal, and as one page with its plots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from experiments.bench.measure_case import OK, CaseResult
from experiments.bench.roofline import Ceilings
from experiments.report import html_page
from experiments.report.plots import Series, chart
from experiments.report.tables import Column, Metric, Result, at, columns, html_table

_CONTEXT = re.compile(r"_\d+k(?=_|$)")  # in the names of cases that differ in their context alone


def case_columns(peers: Sequence[str]) -> list[Column]:
    """The columns of the table, those of `peers` last."""
    ratio = "Time of this peer over ours by the same clock; above 1 ours is faster."
    return [
        *columns(CaseResult),
        *(Metric(ratio, f"{name} x", digits=2).column(f"peers/{name}/ratio", numeric=True) for name in peers),
    ]


def problems(results: Sequence[Result]) -> list[str]:
    """Reasons why a case failed, or why a peer has no number: each once."""
    own: dict[str, list[str]] = {}
    absent: Counter[tuple[str, str, str]] = Counter()
    for result in results:
        if result["status"] != OK:
            own.setdefault(f"{result['status']}: {result['problem']}", []).append(result["case"])
        others = result.get("peers", {}).items()
        absent.update((name, peer["status"], peer["problem"]) for name, peer in others if peer["status"] != OK)
    return [f"{', '.join(cases)}: {reason}" for reason, cases in own.items()] + [
        f"{name}: {status} in {count} cases, {problem}" for (name, status, problem), count in absent.items()
    ]


def page(
    results: Sequence[Result], title: str, notes: Sequence[str], peers: Sequence[str], ceilings: Ceilings | None
) -> str:
    """Everything in one HTML file without scripts; plots only where something was measured on a GPU."""
    parts = [f"<p class=note>{escape(note)}</p>" for note in notes]
    if ceilings is not None:
        parts.append(html_page.section("Roofline", roofline(results, ceilings)))
        parts.append(html_page.section("Microseconds over context length", over_context(results)))
    parts.append(html_page.section("Cases", html_table(case_columns(peers), results)))
    return html_page.page(title, "times of single kernels, each compared with its reference first", parts)


def roofline(results: Sequence[Result], ceilings: Ceilings) -> str:
    """Rate over intensity of the kernels that compute, below the ceilings that were measured."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for result in results:
        if result.get("flop"):
            intensity, rate = result["flop"] / result["moved_bytes"], result["flop_per_s"] / 1e12
            hint = f"{result['case']}: {result['median_us']:.1f} us, {result['ceiling_pct']:.0f}% of the ceiling"
            points.setdefault(result["family"], []).append((intensity, rate, hint))
    if not points:
        return ""
    ridge, peak = ceilings.flop_per_s / ceilings.bytes_per_s, ceilings.flop_per_s / 1e12
    intensities = [x for of_family in points.values() for x, *_ in of_family]
    lowest, highest = min(ridge, *intensities), max(4 * ridge, *intensities)
    name = f"measured: {ceilings.bytes_per_s / 1e12:.2f} TB/s, {peak:.0f} TFLOP/s"
    roof = Series(name, [(lowest, lowest * ceilings.bytes_per_s / 1e12), (ridge, peak), (highest, peak)], limit=True)
    axes = ("operations per byte", "TFLOP/s")
    return chart([*_series(points, joined=False), roof], "roofline", axes, log=True)


def over_context(results: Sequence[Result]) -> str:
    """Time over context length, one line per shape that was measured at two lengths or more."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    for result in results:
        context = at(result, "shape/context_tokens")
        if context and "median_us" in result:
            hint = f"{result['case']}: {result['median_us']:.1f} us"
            points.setdefault(_CONTEXT.sub("", result["case"]), []).append((context, result["median_us"], hint))
    lines = {name: of_shape for name, of_shape in points.items() if len({x for x, *_ in of_shape}) > 1}
    return chart(_series(lines), "time over context", ("tokens of context", "us"), log=True)


def _series(points: dict[str, list[tuple[float, float, str]]], joined: bool = True) -> list[Series]:
    return [
        Series(name, [(x, y) for x, y, _ in each], [hint for *_, hint in each], joined=joined)
        for name, each in points.items()
    ]
