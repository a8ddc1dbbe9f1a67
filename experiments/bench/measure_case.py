"""One result of the benchmark: whether a kernel agrees with its reference, its time, and that of others."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from typing import Annotated, Any, TypedDict

import torch

from experiments.bench import peers
from experiments.bench.roofline import Ceilings, Work, work_of
from experiments.bench.selection import maker
from experiments.bench.timing import (
    Arguments,
    Function,
    Limits,
    Timing,
    cold_copies,
    time_calls,
    time_function,
    time_interleaved,
)
from experiments.report.tables import DASH, Column, Metric, Result, columns, figure
from specdec_kernels import parity
from specdec_kernels.cases import Case, comparison_of

OK, DISAGREES, FAILED, NOT_RUN = "ok", "disagrees", "failed", "not run"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types that a command line may name."""


def _tflop_per_s(result: Result) -> str:
    return figure(result["flop_per_s"] * 1e-12) if result.get("flop") else DASH


def _ceiling(result: Result) -> str:
    return f"{result['ceiling_pct']:.0f}% {result['bound']}" if "ceiling_pct" in result else DASH


class CaseResult(TypedDict, total=False):
    """One case. Times of a kernel that disagrees with its reference are missing, and on a CPU all rates and ratios.
    A result has more than these columns."""

    family: Annotated[str, Metric("Family of kernels.", "family")]
    case: Annotated[str, Metric("Named input.", "case")]
    function: Annotated[str, Metric("Public function.")]
    status: Annotated[str, Metric("ok, disagrees (with its reference), failed, or not run.", "parity")]
    problem: Annotated[str, Metric("Why the status is not ok.")]
    compared: Annotated[str, Metric("What was compared with the reference.")]
    median_us: Annotated[float, Metric("Microseconds of a call, the median; graph replay on a GPU.", "us")]
    p20_us: Annotated[float, Metric("The 20 % quantile of the times.", "p20 us")]
    p80_us: Annotated[float, Metric("The 80 % quantile of the times.", "p80 us")]
    call_median_us: Annotated[float, Metric("Microseconds of a call from Python, launches included.", "us/call")]
    bytes_per_s: Annotated[float, Metric("Bytes that the call must move, over its time.", "GB/s", digits=0, scale=1e-9)]
    flop_per_s: Annotated[float, Metric("Operations over time.", "TFLOP/s", show=_tflop_per_s)]
    ceiling_pct: Annotated[float, Metric("Share of the ceiling that bounds the call.", "ceiling", show=_ceiling)]
    reference_ratio: Annotated[float, Metric("Time of the reference in plain torch over ours.", "torch x")]


def case_columns(peers: Sequence[str]) -> list[Column]:
    """The columns of the table, those of `peers` last."""
    ratio = "Time of this peer over ours by the same clock; above 1 ours is faster."
    of_peers = [Metric(ratio, f"{name} x", digits=2).column(f"peers/{name}/ratio", numeric=True) for name in peers]
    return [*columns(CaseResult), *of_peers]


@dataclass(frozen=True)
class Bench:
    """Settings of all results of a run."""

    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings | None
    peers: tuple[str, ...]
    seed: int
    limits: Limits
    tuning: Mapping[str, int] = field(default_factory=dict)  # fields that replace those of the launch table


def measure(family: str, case: Case, bench: Bench) -> dict[str, Any]:
    """The result of one case; a failure of any kind is one too."""
    result: dict[str, Any] = dict(family=family, case=case.name, function=case.function, dtype=str(bench.dtype)[6:])
    try:
        return result | _measured(family, case, bench)
    except Exception as failure:  # the next case may still be measured; the run ends with an error
        return result | dict(status=FAILED, problem=f"{type(failure).__name__}: {_first_line(failure)}")


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [""])[0][:300]


def _measured(family: str, case: Case, bench: Bench) -> dict[str, Any]:
    function = getattr(import_module(f"specdec_kernels.{family}"), case.function)
    inputs = case.build(maker(bench.device, bench.dtype, bench.seed))
    if bench.tuning:
        if "tuning" not in signature(function).parameters:
            raise ValueError(f"{case.function} takes no tuning, got {', '.join(bench.tuning)}")
        inputs["tuning"] = {**(inputs.get("tuning") or {}), **bench.tuning}
    found = parity.check(function, inputs, comparison_of(family))
    result: dict[str, Any] = dict(shape=_shape(inputs), compared=found.scope)
    if found.problem is not None:
        return result | dict(status=DISAGREES, problem=found.problem)
    copies, kernel = cold_copies(inputs, bench.device), _impl(function, "triton")
    timing = time_function(kernel, copies, bench.device, bench.limits)
    result |= dict(status=OK) | _times(timing) | dict(clock=timing.clock, cache=timing.cache)
    if bench.device.type != "cuda":
        return result
    called = time_calls(kernel, copies, bench.device, bench.limits)
    result |= _times(called, "call_")
    result |= _rates(work_of(family, case.function, inputs, kernel(**inputs)), timing, bench.ceilings)
    result |= _against_reference(function, copies, called, found, bench)
    return result | {"peers": {name: _against_peer(name, case.function, copies, kernel, bench) for name in bench.peers}}


def _impl(function: Function, impl: str) -> Function:
    return lambda **arguments: function(**arguments, impl=impl)


def _times(timing: Timing, prefix: str = "") -> dict[str, Any]:
    """Microseconds of a timing, as fields of a result."""
    fields = dict(median_us=timing.median_ms, p20_us=timing.low_ms, p80_us=timing.high_ms)
    scaled: dict[str, Any] = {prefix + name: milliseconds * 1e3 for name, milliseconds in fields.items()}
    return scaled | {f"{prefix}repeats": timing.repeats}


def _shape(inputs: dict[str, Any]) -> dict[str, Any]:
    """Shapes of the tensors, the longest committed length, and the plain options."""
    found: dict[str, Any] = {}
    metadata = inputs.get("metadata")
    inputs = inputs if metadata is None else inputs | metadata._asdict()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            found[name] = list(value.shape)
        elif isinstance(value, (int, float, str, bool)):
            found[name] = value
    if isinstance(inputs.get("lengths"), torch.Tensor) and inputs["lengths"].numel():
        found["context_tokens"] = int(inputs["lengths"].max())
    return found


def _rates(work: Work, timing: Timing, ceilings: Ceilings | None) -> dict[str, Any]:
    """Bytes and operations of the call, their rates, and the share of the ceiling that bounds them."""
    seconds = timing.median_ms / 1e3
    found = work._asdict() | dict(bytes_per_s=work.moved_bytes / seconds, flop_per_s=work.flop / seconds)
    if ceilings is not None:
        floor_us, bound = ceilings.floor_us(work.moved_bytes, work.flop)
        found |= dict(floor_us=floor_us, bound=bound, ceiling_pct=100 * floor_us / (timing.median_ms * 1e3))
    return found


def _against_reference(
    function: Function, copies: Arguments, called: Timing, found: parity.Parity, bench: Bench
) -> dict[str, Any]:
    """The reference, timed as calls from Python, because a graph cannot capture all of plain torch."""
    if not found.reference_fits:
        return dict(reference="not timed: needs too much memory")
    try:
        timing = time_calls(_impl(function, "reference"), copies, bench.device, bench.limits)
    except torch.OutOfMemoryError:
        return dict(reference="not timed: out of memory")
    ratio = timing.median_ms / called.median_ms
    return dict(reference="timed", reference_us=timing.median_ms * 1e3, reference_ratio=ratio)


def _against_peer(name: str, function: str, copies: Arguments, kernel: Function, bench: Bench) -> dict[str, Any]:
    """The times of the peer and of our kernel, interleaved and over as many inputs, or why there are none."""
    try:
        # Some functions write into their arguments: each side gets its own.
        ours, theirs = deepcopy(copies[0]), deepcopy(copies[0])
        first = peers.prepare(name, function, theirs)
        sides = [peers.compared(function, theirs, first()), peers.compared(function, ours, kernel(**ours))]
        if (problem := parity.difference(*sides)) is not None:
            return dict(status=DISAGREES, problem=problem)
        calls = [peers.prepare(name, function, copy) for copy in copies]
        theirs_of_copies = (lambda call: call(), [dict(call=call) for call in calls])
        own, timed = time_interleaved([(kernel, copies), theirs_of_copies], bench.device, bench.limits)
    except (peers.Unavailable, ImportError) as reason:
        return dict(status=NOT_RUN, problem=_first_line(reason))
    except Exception as failure:  # a peer's failure says nothing about our kernel
        return dict(status=FAILED, problem=f"{type(failure).__name__}: {_first_line(failure)}")
    return dict(status=OK, ratio=timed.median_ms / own.median_ms, ours_us=own.median_ms * 1e3) | _times(timed)
