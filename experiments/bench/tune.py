"""Searches launch settings of a family on the card at hand.

The cases of the unit benchmark are grouped by the row of the static table that they ask for. In each group one field at
a time takes other values and keeps what makes the geometric mean of the cases' times smaller, until a round changes
nothing. A setting counts only where the kernel still agrees with its reference on every case of the group. The
reference of a large case takes longer than a compilation, so only settings that are faster are compared. Compilations
take most of the time, so processes side by side compile the settings of the first round ahead, into Triton's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from inspect import signature
from math import exp, log
from multiprocessing import get_context
from statistics import fmean
from typing import Any

import torch

from experiments.bench import parity
from experiments.bench.row import Bench
from experiments.bench.selection import chosen_cases, maker
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
        """Microseconds of a call with `fields`; None where the kernel does not fit the card."""
        with _unfit() as fits:
            timing = time_function(self.call_kernel, self._tuned(fields), bench.device, bench.limits)
            fits.append(1e3 * timing.median_ms)
        return fits[0] if fits else None

    def agrees(self, fields: Mapping[str, Any]) -> bool:
        """Whether the kernel with `fields` agrees with its reference."""
        with _unfit() as agreed:
            agreed.append(parity.check(self.call, self._tuned(fields)[0], self.comparison).problem is None)
        return agreed == [True]

    def _tuned(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [copy | {"tuning": {**(copy.get("tuning") or {}), **fields}} for copy in self.copies]

    def call_kernel(self, **arguments: Any) -> Any:
        return self.call(**arguments, impl="triton")


@contextmanager
def _unfit() -> Iterator[list[Any]]:
    """A list for a result, which stays empty where a setting needs more than the card has, or no shape of its chip."""
    found: list[Any] = []
    try:
        yield found
    except (RuntimeError, ValueError):
        pass
    except Exception as failure:
        if not type(failure).__module__.startswith("triton"):
            raise


def groups(family: str, cases: Sequence[Case], bench: Bench) -> dict[Key, list[Case]]:
    """Row of the static table to the cases that ask for it."""
    found: dict[Key, list[Case]] = {}
    for case in cases:
        function = _function(family, case)
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


def compile_ahead(family: str, cases: Sequence[Case], bench: Bench, processes: int) -> None:
    """Compile what the first round of the search tries on `cases`, in `processes` processes."""
    settings = [{}, *_neighbours(CANDIDATES[family], {})]
    jobs = [(family, case.name, fields, bench.device, bench.dtype, bench.seed) for case in cases for fields in settings]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[str, str, Mapping[str, Any], torch.device, torch.dtype, int]) -> None:
    family, name, fields, *where = job
    function, inputs = _inputs(family, name, *where)
    with _unfit():
        function(**inputs, tuning=fields, impl="triton")


@lru_cache(maxsize=1)
def _inputs(
    family: str, name: str, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A case's function and its inputs, which a process keeps for the next setting."""
    [(_, case)] = chosen_cases((family,), name, device.type == "cuda")
    return _function(family, case), case.build(maker(device, dtype, seed))


def _function(family: str, case: Case) -> Callable[..., Any]:
    return getattr(import_module(f"specdec_kernels.{family}"), case.function)


def prepared(family: str, case: Case, bench: Bench) -> Prepared:
    """`case` with as many inputs as fill the cache."""
    inputs = case.build(maker(bench.device, bench.dtype, bench.seed))
    return Prepared(case.name, _function(family, case), cold_copies(inputs, bench.device), comparison_of(family))


def search(family: str, cases: Sequence[Prepared], bench: Bench, time_left: Callable[[], bool]) -> dict[str, Any]:
    """`fields` that beat the table by `LEAST_GAIN` (empty where none do), and the times of both, for one group."""
    table = times({}, cases, bench, time_left)
    if table is None or not all(case.agrees({}) for case in cases):
        return {"fields": {}, "problem": "the table's own setting does not run, disagrees, or took all the time"}
    best: dict[str, Any] = {}
    best_times, tried = table, 1
    changed = True
    while changed and time_left():
        changed = False
        for fields in _neighbours(CANDIDATES[family], best):
            found, tried = times(fields, cases, bench, time_left), tried + 1
            if found is None or _ratio(found, best_times) >= 1 - LEAST_GAIN:
                continue
            if all(case.agrees(fields) for case in cases):
                best, best_times, changed = fields, found, True
    return {
        "fields": best,
        "gain": round(1 - _ratio(best_times, table), 4),
        "table_us": _rounded(table),
        "tuned_us": _rounded(best_times),
        "tried": tried,
    }


def times(
    fields: Mapping[str, Any], cases: Sequence[Prepared], bench: Bench, time_left: Callable[[], bool]
) -> Times | None:
    """Case to microseconds with `fields`; None where one case cannot have them, or no time is left for one."""
    found = {}
    for case in cases:
        time_us = case.time_us(fields, bench) if time_left() else None
        if time_us is None:
            return None
        found[case.name] = time_us
    return found


def _neighbours(candidates: Mapping[str, Sequence[int]], best: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """`best` with one field changed, for each value of each field."""
    for name, values in candidates.items():
        for value in values:
            if best.get(name) != value:
                yield {**best, name: value}


def _rounded(times_us: Times) -> Times:
    return {name: round(time_us, 2) for name, time_us in times_us.items()}


def _ratio(ours: Times, theirs: Times) -> float:
    """The geometric mean of ours over theirs."""
    return exp(fmean(log(ours[name] / theirs[name]) for name in theirs))


def free() -> None:
    """Give the memory of the last group back to the card."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
