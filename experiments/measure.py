"""The only timer: one function at a time here, phases of a step in `PhaseClock`.

On a GPU the calls are captured in one CUDA graph and its replays are timed by events, so that a number is
device time and holds neither Python nor launch overhead; the calls go round copies of the inputs that
together exceed the L2 cache, so that each call finds it cold. Elsewhere a call is timed by
`time.perf_counter`. Both warm up first and report the median with the 20 % and 80 % quantiles.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from experiments.provenance import git_revision, machine, versions

__all__ = [
    "Timing",
    "cold_copies",
    "provenance",
    "tensors_in",
    "time_function",
]

_MAX_COPIES = 64


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and 20 % and 80 % quantiles of `repeats` measurements by `clock`."""

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int
    clock: str


def provenance(device: str) -> dict[str, Any]:
    """What a number depends on besides the code's arguments: machine, versions, revision (`-dirty` if
    changed)."""
    return dict(machine=machine(device), platform=platform.platform(), versions=versions(), git_revision=git_revision())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def cold_copies(inputs: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """`inputs`, on a GPU with as many copies as fill its L2 cache twice."""
    if device.type != "cuda":
        return [inputs]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(inputs))
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    copies = min(_MAX_COPIES, max(1, -(-wanted // max(1, held))))
    return [inputs, *(deepcopy(inputs) for _ in range(copies - 1))]


def time_function(
    function: Callable[..., Any],
    arguments: Sequence[dict[str, Any]],
    device: torch.device,
    *,
    warmup: int = 3,
    repeats: int = 20,
) -> Timing:
    """Time of `function(**a)`, going round `arguments`. On a GPU the function must not read back from the
    device."""
    if not arguments:
        raise ValueError("arguments: expected at least one set, got none")
    if warmup < 0 or repeats < 1:
        raise ValueError(f"expected warmup >= 0 and repeats >= 1, got {warmup} and {repeats}")
    if device.type == "cuda":
        return _summary(_replay_ms(function, arguments, warmup, repeats), "cuda graph replay, cold L2")
    for index in range(warmup):
        function(**arguments[index % len(arguments)])
    return _summary([_call_ms(function, arguments[i % len(arguments)]) for i in range(repeats)], "perf_counter")


def _call_ms(function: Callable[..., Any], arguments: dict[str, Any]) -> float:
    start = time.perf_counter()
    function(**arguments)
    return (time.perf_counter() - start) * 1e3


def _replay_ms(
    function: Callable[..., Any], arguments: Sequence[dict[str, Any]], warmup: int, repeats: int
) -> list[float]:
    """Milliseconds a call of each replay of a graph that holds one call for every set of arguments."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        function(**arguments[0])  # compiles, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [function(**each) for each in arguments]
    for _ in range(warmup):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    del kept
    return [a.elapsed_time(b) / len(arguments) for a, b in zip(events, events[1:], strict=False)]


def _summary(samples_ms: list[float], clock: str) -> Timing:
    low, median, high = torch.tensor(samples_ms, dtype=torch.float64).quantile(
        torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    )
    return Timing(median.item(), low.item(), high.item(), len(samples_ms), clock)
