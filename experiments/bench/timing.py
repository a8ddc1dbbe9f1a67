"""Time of one function; the phases of a step are timed by `PhaseClock`.

On a GPU a call is timed in two ways, and a ratio is only taken between two times of one kind. `time_function` captures
calls in a CUDA graph and times its replays by events, so that the number is device time without Python or launch
overhead. The calls take copies of the inputs that together exceed the L2 cache, one after the other, so that each finds
it cold (`Timing.cache` says where tiny inputs could not). `time_interleaved` does the same for both sides of a ratio,
one replay of each after the other. `time_calls` times calls as a program makes them, launches included. Elsewhere all
use `time.perf_counter`. All warm up first, are bounded in time, and report the median with the 20 % and 80 % quantiles.
"""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec_kernels.parity import bytes_in

_MAX_COPIES = 256
_FEWEST_REPEATS = 3
_FEWEST_CALLS = 4  # of a graph, which share what starting a replay takes
_WARM_UP_MS = 50.0

Function = Callable[..., Any]
Arguments = Sequence[dict[str, Any]]  # of calls, one after the other
Side = tuple[Function, Arguments]


@dataclass(frozen=True)
class Limits:
    """How often a function is called: `warmup` calls that do not count, then up to `repeats` measurements, fewer (at
    least 3) where they would take longer than `budget_ms`."""

    warmup: int = 3
    repeats: int = 20
    budget_ms: float = 200.0

    def within_budget(self, one_ms: float) -> tuple[int, int]:
        """Warm-up calls and repeats of a function that takes `one_ms`."""
        affordable = int(self.budget_ms / max(one_ms, 1e-3))
        repeats = max(min(_FEWEST_REPEATS, self.repeats), min(self.repeats, affordable))
        return min(self.warmup, affordable), repeats


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and 20 % and 80 % quantiles of `repeats` measurements by `clock`, the
    L2 cache in the state that `cache` names."""

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int
    clock: str
    cache: str


def cold_copies(inputs: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """`inputs`, on a GPU with as many copies as fill its L2 cache twice, at most 256."""
    if device.type != "cuda":
        return [inputs]
    wanted = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    copies = min(_MAX_COPIES, max(1, -(-wanted // max(1, bytes_in(inputs)))))
    return [inputs, *(deepcopy(inputs) for _ in range(copies - 1))]


def time_function(function: Function, arguments: Arguments, device: torch.device, limits: Limits) -> Timing:
    """Device time of `function(**a)` for each of `arguments`, in a graph on a GPU and by the clock elsewhere. On a GPU
    the function must not read back from the device."""
    return time_interleaved([(function, arguments)], device, limits)[0]


def time_interleaved(sides: Sequence[Side], device: torch.device, limits: Limits) -> list[Timing]:
    """As `time_function`, of several functions whose measurements take turns: ours, theirs, ours, theirs, ... So both
    sides of a ratio find the same clocks and temperature."""
    if device.type == "cuda":
        samples = _replay_ms(sides, limits)
        return [
            _summary(of_side, "cuda graph replay", _cache_state(arguments, device))
            for of_side, (_, arguments) in zip(samples, sides, strict=True)
        ]
    samples = [[] for _ in sides]
    for index in range(-limits.warmup, limits.repeats):
        for (function, arguments), of_side in zip(sides, samples, strict=True):
            chosen, start = arguments[index % len(arguments)], time.perf_counter()
            function(**chosen)
            of_side.append((time.perf_counter() - start) * 1e3)
    return [_summary(of_side[limits.warmup :], "perf_counter", "not controlled") for of_side in samples]


def time_calls(function: Function, arguments: Arguments, device: torch.device, limits: Limits) -> Timing:
    """As `time_function`, but of calls as they are made from Python: launches are part of the time."""
    if device.type != "cuda":
        return time_function(function, arguments, device, limits)
    function(**arguments[0])
    warmup, repeats = limits.within_budget(_synchronized_ms(lambda: function(**arguments[0])))
    samples = []
    for index in range(warmup + repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        function(**arguments[index % len(arguments)])
        after.record()
        torch.cuda.synchronize()
        samples.append(before.elapsed_time(after))
    return _summary(samples[warmup:], "cuda events around a call", _cache_state(arguments, device))


def _synchronized_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call by the clock of the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _replay_ms(sides: Sequence[Side], limits: Limits) -> list[list[float]]:
    """Milliseconds per call of each replay of a graph for each side, which holds a call for every set of arguments."""
    captured = [_captured(function, arguments) for function, arguments in sides]
    graphs, counts = [graph for graph, _, _ in captured], [count for _, count, _ in captured]

    def replay_all() -> None:
        for graph in graphs:
            graph.replay()

    # Replays that do not count: a device that was idle takes a while to reach the clocks at which it works.
    start, one_ms = time.perf_counter(), 0.0
    while (time.perf_counter() - start) * 1e3 < _WARM_UP_MS or not one_ms:
        one_ms = _synchronized_ms(replay_all)
    warmup, repeats = limits.within_budget(one_ms / len(graphs))
    for _ in range(warmup):
        replay_all()
    turns = iter(graphs * repeats)
    times = back_to_back_ms(lambda: next(turns).replay(), 0, repeats * len(graphs))
    return [[each / count for each in times[index :: len(graphs)]] for index, count in enumerate(counts)]


def _captured(function: Function, arguments: Arguments) -> tuple[torch.cuda.CUDAGraph, int, list[Any]]:
    """A graph with calls of `function` over `arguments` one after the other, their number, and their results."""
    torch.cuda.synchronize()  # the copies of the inputs are made on another stream
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        function(**arguments[0])  # compiles, which a capture must not
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), -(-_FEWEST_CALLS // len(arguments))
    with torch.cuda.graph(graph):
        kept = [function(**each) for _ in range(rounds) for each in arguments]
    return graph, len(kept), kept


def back_to_back_ms(call: Callable[[], object], warmup: int, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` calls on a GPU without a pause between them, by events."""
    for _ in range(warmup):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def _cache_state(arguments: Arguments, device: torch.device) -> str:
    """Whether a round over the arguments pushes each of them out of the L2 cache before its next turn."""
    held, cache = sum(bytes_in(each) for each in arguments), torch.cuda.get_device_properties(device).L2_cache_size
    state = "cold" if held > cache else "warm"
    return f"{state}: {len(arguments)} inputs hold {held / 2**20:.1f} MiB, L2 {cache / 2**20:.0f} MiB"


def _summary(samples_ms: list[float], clock: str, cache: str) -> Timing:
    low, median, high = np.quantile(samples_ms, (0.2, 0.5, 0.8)).tolist()
    return Timing(median, low, high, len(samples_ms), clock, cache)
