"""How sure a figure is: 95 % intervals of rates, ratios and shares.

Rates are pooled, that is, all tokens over all time. The interval around a pooled rate, or around the ratio of two, has
the half-width t * s / sqrt(n), with s the standard deviation over the n rounds and t from Student's distribution with
n - 1 degrees of freedom. Rounds of baseline and method are interleaved, so the ratio is taken within each round.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

Z_95 = 1.959964
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t of 97.5 % for 1 to 10 degrees of freedom; beyond, the last is a safe bound."""


def student_t(degrees: int) -> float:
    """Student's t of 97.5 % for that many degrees of freedom, at least 1; a safe bound beyond 10."""
    return _T_95[min(degrees, len(_T_95)) - 1]


def interval(centre: float | None, values: Sequence[float]) -> list[float] | None:
    """[low, high] around `centre` from the spread of `values`, None for fewer than two; low is at least 0."""
    if centre is None or len(values) < 2:
        return None
    half = student_t(len(values) - 1) * stdev(values) / sqrt(len(values))
    return [max(0.0, centre - half), centre + half]


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], least: float = 0.0
) -> list[float] | None:
    """The interval of sum(numerators) / sum(denominators) from the spread of the pairs, None for fewer than two. It
    does not reach below `least`."""
    count, total = len(numerators), sum(denominators)
    if count < 2 or not total:
        return None
    ratio = sum(numerators) / total
    errors = [(a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True)]
    half = student_t(count - 1) * sqrt(count / (count - 1) * sum(errors)) / total
    return [max(least, ratio - half), ratio + half]


def wilson(hits: int, trials: int) -> list[float] | None:
    """Wilson's interval of a share; None without trials."""
    if not trials:
        return None
    share, extra = hits / trials, Z_95**2 / trials
    centre, half = share + extra / 2, Z_95 * sqrt(share * (1 - share) / trials + extra / (4 * trials))
    return [max(0.0, (centre - half) / (1 + extra)), min(1.0, (centre + half) / (1 + extra))]


def spread(values: Sequence[float]) -> float:
    """(largest - smallest) / mean; 0 for fewer than two."""
    return (max(values) - min(values)) / fmean(values) if len(values) > 1 and fmean(values) else 0.0
