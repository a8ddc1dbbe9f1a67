"""How sure a figure is: the spread of several rounds, and the 95 % interval of their average.

Rates are pooled, that is, all tokens over all time. The interval around a pooled rate, or around the ratio of two, has
the half-width t * s / sqrt(n), with s the standard deviation over the n rounds and t from Student's distribution with
n - 1 degrees of freedom. Rounds of baseline and method take turns, so the ratio is taken within each round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

LARGEST_SPREAD = 0.2
MOST_NAMED = 10
"""Rows that one warning names."""
CLOCKS = ("decode", "wall")
Z_95 = 1.959964
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t of 97.5 % for 1 to 10 degrees of freedom; beyond, the last is a safe bound."""


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean of `values`; None for fewer than two."""
    if len(values) < 2:
        return None
    return student_t(len(values) - 1) * stdev(values) / sqrt(len(values))


def student_t(degrees: int) -> float:
    """Student's t of 97.5 % for that many degrees of freedom, at least 1; a safe bound beyond 10."""
    return _T_95[min(degrees, len(_T_95)) - 1]


def interval(centre: float | None, values: Sequence[float]) -> list[float] | None:
    """[low, high] around `centre`, as wide as `values` say; low is at least 0."""
    half = half_width(values)
    return None if half is None or centre is None else [max(0.0, centre - half), centre + half]


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], least: float = 0.0
) -> list[float] | None:
    """The 95 % interval of sum(numerators) / sum(denominators), from the spread of at least two pairs; else None. It
    does not reach below `least`."""
    count, total = len(numerators), sum(denominators)
    if count < 2 or not total:
        return None
    ratio = sum(numerators) / total
    errors = [(a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True)]
    half = student_t(count - 1) * sqrt(count / (count - 1) * sum(errors)) / total
    return [max(least, ratio - half), ratio + half]


def wilson(hits: int, trials: int) -> list[float] | None:
    """Wilson's 95 % interval of a share; None without trials."""
    if not trials:
        return None
    share, extra = hits / trials, Z_95**2 / trials
    centre, half = share + extra / 2, Z_95 * sqrt(share * (1 - share) / trials + extra / (4 * trials))
    return [max(0.0, (centre - half) / (1 + extra)), min(1.0, (centre + half) / (1 + extra))]


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / mean; 0 for fewer than two."""
    return (max(values) - min(values)) / fmean(values) if len(values) > 1 and fmean(values) else 0.0


def speedup_intervals(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, list[float] | None]:
    """`speedup_CLOCK_interval` of a row with speedups, from its rounds and those of the baseline in turn."""
    found = {}
    for clock in CLOCKS:
        key = f"{clock}_tokens_per_s"
        pairs = list(zip(row["rounds"][key], baseline["rounds"][key], strict=False))
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        found[f"speedup_{clock}_interval"] = interval(row[f"speedup_{clock}"], ratios)
    return found


def wide_spreads(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Which (label, row) have rounds so far apart that their times are doubtful; empty where none has."""
    spreads = [(label, spread(row.get("rounds", {}).get("decode_tokens_per_s", []))) for label, row in rows]
    wide = [f"{label}: {share:.0%}" for label, share in spreads if share > LARGEST_SPREAD]
    if not wide:
        return ""
    return (
        f"decode tokens/s differ by more than {LARGEST_SPREAD:.0%} of their mean between rounds ({several(wide)}): "
        "end other programs on the machine, or raise task.repeats"
    )


def several(texts: Sequence[str]) -> str:
    """The first of `texts`, and how many more there are."""
    more = len(texts) - MOST_NAMED
    return "; ".join(texts[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def warnings(row: Mapping[str, Any]) -> list[str]:
    """What makes the times of a row doubtful: a speedup that no drafter can give, and rounds of other texts."""
    found = []
    speedup, tokens = row.get("speedup_decode"), row.get("tokens_per_step")
    if speedup and tokens and speedup > max(tokens, 1.0):
        found.append(
            f"a decode speedup of {speedup:.2f}× is above its {tokens:.2f} tokens/step: a step of the method verifies "
            "more and cannot be faster than one of the baseline, so the times are not reliable"
        )
    if differing := row.get("differing_rounds"):
        found.append(f"rounds that wrote other texts than the first: {differing}")
    return found
