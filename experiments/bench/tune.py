"""Searches launch settings of a family on the card at hand.

The cases of the unit benchmark are grouped by the row of the static table that they ask for. In each group one field at
a time takes other values and keeps what makes the geometric mean of the cases' times smaller, until a round changes
nothing. A setting counts only where the kernel still agrees with its reference on every case of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from math import exp, log
from statistics import fmean
from typing import Any

import torch

from experiments.bench import parity
from experiments.bench.row import Bench
from experiments.bench.selection import maker
from experiments.bench.timing import cold_copies, time_function
from specdec_kernels.cases import Case, comparison_of
from specdec_kernels.tuning import Key, record_keys

CANDIDATES: dict[str, dict[str, Sequence[int]]] = {
    "attention": {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)},
}
"""Family to the fields that are searched and their values. Fields that decide how keys are split are left out: they
change the bits of a result with the length of a request."""
LEAST_GAIN = 0.02
Times = Mapping[str, float]


@dataclass(frozen=True)
class Prepared:
    """A case that is ready to be timed with other settings."""

    name: str
    call: Callable[..., Any]
    copies: Sequence[dict[str, Any]]
    comparison: Any

    def time_us(self, fields: Mapping[str, Any], bench: Bench) -> float | None:
        """Microseconds of a call with `fields`; None where the kernel does not fit the card or disagrees."""
        tuned = [copy | {"tuning": {**(copy.get("tuning") or {}), **fields}} for copy in self.copies]
        try:
            if parity.check(self.call, tuned[0], self.comparison).problem is not None:
                return None
            return 1e3 * time_function(self.call_kernel, tuned, bench.device, bench.limits).median_ms
        except (RuntimeError, ValueError):  # out of shared memory or registers, or no shape of this chip
            return None
        except Exception as failure:
            if type(failure).__module__.startswith("triton"):
                return None
            raise

    def call_kernel(self, **arguments: Any) -> Any:
        return self.call(**arguments, impl="triton")


def groups(family: str, cases: Sequence[Case], bench: Bench) -> dict[Key, list[Case]]:
    """Row of the static table to the cases that ask for it."""
    found: dict[Key, list[Case]] = {}
    functions = import_module(f"specdec_kernels.{family}")
    for case in cases:
        function = getattr(functions, case.function)
        if "tuning" not in signature(function).parameters:
            continue
        inputs = case.build(maker(bench.device, bench.dtype, bench.seed))
        if inputs.get("tuning") or inputs.get("batch_invariant"):
            continue
        with record_keys() as keys:
            function(**inputs, impl="triton")
        for key in dict.fromkeys(key for of, key in keys if of == family):
            found.setdefault(key, []).append(case)
    return found


def prepared(family: str, case: Case, bench: Bench) -> Prepared:
    """`case` with as many inputs as fill the cache."""
    inputs = case.build(maker(bench.device, bench.dtype, bench.seed))
    function = getattr(import_module(f"specdec_kernels.{family}"), case.function)
    return Prepared(case.name, function, cold_copies(inputs, bench.device), comparison_of(family))


def search(family: str, cases: Sequence[Prepared], bench: Bench, time_left: Callable[[], bool]) -> dict[str, Any]:
    """`fields` that beat the table by `LEAST_GAIN` (empty where none do), and the times of both, for one group."""
    table = times({}, cases, bench)
    if table is None:
        return {"fields": {}, "problem": "the table's own setting does not run or disagrees"}
    best: dict[str, Any] = {}
    best_times, tried = table, 1
    changed = True
    while changed and time_left():
        changed = False
        for fields in _neighbours(CANDIDATES[family], best):
            if not time_left():
                break
            found, tried = times(fields, cases, bench), tried + 1
            if found is not None and _ratio(found, best_times) < 1 - LEAST_GAIN:
                best, best_times, changed = fields, found, True
    return {
        "fields": best,
        "gain": 1 - _ratio(best_times, table),
        "table_us": dict(table),
        "tuned_us": dict(best_times),
        "tried": tried,
    }


def times(fields: Mapping[str, Any], cases: Sequence[Prepared], bench: Bench) -> Times | None:
    """Case to microseconds with `fields`; None where one case cannot have them."""
    found = {case.name: case.time_us(fields, bench) for case in cases}
    kept = {name: value for name, value in found.items() if value is not None}
    return kept if len(kept) == len(found) else None


def _neighbours(candidates: Mapping[str, Sequence[int]], best: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`best` with one field changed, for each value of each field."""
    for name, values in candidates.items():
        for value in values:
            if best.get(name) != value:
                yield {**best, name: value}


def _ratio(ours: Times, theirs: Times) -> float:
    """The geometric mean of ours over theirs."""
    return exp(fmean(log(ours[name] / theirs[name]) for name in theirs))


def free() -> None:
    """Give the memory of the last group back to the card."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
