"""Launches steps, captured in CUDA graphs at one of four levels: `none`, `draft`, `verify` (draft and verify), `step`
(all of it, and the prefill batches between steps, see `prefill`).

Batch sizes are rounded up to a bucket, and each is captured once, before the clock runs, with every slot inactive: a
replay serves any requests. `none` runs the same code over exactly the slots in use, and compiles its kernels before the
clock runs. If requests have grammars, each phase is a graph of its own, see `constraints`. Each size of prefill batch
that may join a step in one graph (mixed prefill) makes another graph.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from algorithms.engine.clock import PhaseClock, Stamps
from algorithms.engine.settings import LAST_CAPTURED
from algorithms.step.context import COLUMNS, StepParts
from algorithms.step.prefill_batch import PrefillBatch
from algorithms.step.sampling_params import SamplingNeeds
from algorithms.step.step import PHASES, Step, phases_of

_WARMUP_RUNS = 2
_TIMED_RUNS = 5
_IDLE_RUNS = 3
_DUMMY_TOKENS = 256  # committed tokens of a dummy request, with which steps are timed; half of the context at most


@dataclass(frozen=True)
class GraphReport:
    """Sizes that are captured: slots of steps (`buckets`), tiles of prefill batches between steps and in steps. The
    cost: graphs, milliseconds of warm-up and capture, and bytes of device memory."""

    level: str
    buckets: tuple[int, ...]
    prefill_tiles: tuple[int, ...] = ()
    step_tiles: tuple[int, ...] = ()
    num_graphs: int = 0
    warmup_ms: float = 0.0
    memory_bytes: int = 0


class Captured(Protocol):
    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Captured]
Marks = tuple[Any, Any]
Calls = list[tuple[str | None, Callable[[], None]]]
"""Work in order, each with its phase; a call without one stamps its phases."""


def buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes that are captured: powers of two and `max_batch` itself."""
    sizes = [1 << bit for bit in range(max_batch.bit_length()) if 1 << bit < max_batch]
    return (*sizes, max_batch)


def _capture_graph(pool: Any, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARMUP_RUNS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


class Recorder:
    """Captures the work of one engine, and counts what that takes. Its graphs share one memory pool: only one of them
    runs at a time."""

    def __init__(self, capture: Capture | None, device: torch.device) -> None:
        self._capture = capture or partial(_capture_graph, torch.cuda.graph_pool_handle())
        self._device = device
        self.num_graphs, self.warmup_ms, self.memory_bytes = 0, 0.0, 0

    def __call__(self, work: Callable[[], None]) -> Captured:
        began = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # capturing does so too, and what is free is nobody's
        before = self._memory()
        captured = self._capture(work)
        self.num_graphs += 1
        self.warmup_ms += (time.perf_counter() - began) * 1e3
        self.memory_bytes += self._memory() - before
        return captured

    def _memory(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0


class _Variant(NamedTuple):
    """Steps that are captured apart: by slots, nodes, sampling needs, and the tiles of their prefill batch."""

    slots: int
    nodes: int
    needs: SamplingNeeds
    tiles: int = 0


@dataclass(frozen=True)
class _Launch:
    """A step and how it is run. `idle_ms` is what the stamped phases take without requests."""

    step: Step
    calls: Calls
    idle_ms: dict[str, float] = field(default_factory=dict)


class StepRunner:
    """Launches steps at one level of capture; each of `prefills` may join them where a step is one graph."""

    def __init__(
        self,
        parts: StepParts,
        level: str,
        clock: PhaseClock,
        capture: Capture | None = None,
        prefills: Sequence[PrefillBatch] = (),
    ) -> None:
        if level != "none" and capture is None and parts.resources.device.type != "cuda":
            raise ValueError(
                f"runtime.graph={level} captures CUDA graphs and needs a CUDA device, got {parts.resources.device}; "
                "use runtime.graph=none"
            )
        self._parts, self.level, self.clock = parts, level, clock
        self.recorder: Recorder | None = None
        """Captures what this engine runs; None where nothing is captured."""
        if level != "none":
            self.recorder = Recorder(capture, parts.resources.device)
        self._stamps = clock.stamps(PHASES) if level == "step" else None
        self._captured: dict[_Variant, _Launch] = {}
        self._prefills = prefills
        self.mixed_ms: defaultdict[str, float] = defaultdict(float)
        """Time that prefills added to each phase of their steps, as measured without requests."""
        self._observing: dict[int, Captured] = {}
        self._num_kept = 0
        self._launched = False
        self._observed_ms: dict[int, float] = {}
        """By batch size, the share of a deferred observation in a step without a draft; empty before `step_times`."""
        self._compiled: set[SamplingNeeds] = set()
        self._buckets = buckets(parts.state.max_batch) if self.recorder else ()

    def report(self, prefill_tiles: tuple[int, ...] = ()) -> GraphReport:
        """The sizes captured so far, with prefill batches of `prefill_tiles`."""
        tiles = tuple(prefill.size for prefill in self._prefills)
        counts = {name: getattr(self.recorder, name, 0) for name in ("num_graphs", "warmup_ms", "memory_bytes")}
        return GraphReport(self.level, self._buckets, prefill_tiles, tiles, **counts)

    def prepare(self, needs: SamplingNeeds) -> None:
        """Capture every bucket and size for `needs`, or compile their kernels, unless done; no request may run."""
        if self.recorder is None and self._parts.resources.device.type == "cuda":
            self.compile(needs)
        missing = [variant for variant in self._variants(needs) if variant not in self._captured]
        if not missing:
            return
        if not self._captured:
            self._step(missing[0].slots, self._parts.longest, needs, checked=True).draft()
        prefills = {prefill.size: prefill for prefill in self._prefills}
        for variant in missing:
            if (prefill := prefills.get(variant.tiles)) is not None:
                prefill.send(())
            self._captured[variant] = self._prepared(
                variant.slots, self._parts.longest, needs, nodes=variant.nodes, prefill=prefill
            )
        if self._parts.backlog is not None and self.recorder is not None:
            for size in reversed(self._buckets):
                if size not in self._observing:
                    self._observing[size] = self.recorder(partial(self._observe, size, self._parts.longest))

    def _variants(self, needs: SamplingNeeds) -> list[_Variant]:
        """The variants for `needs`, the largest first, so that the others fit in the memory that it leaves."""
        found = []
        for slots in reversed(self._buckets):
            tiles = [*(prefill.size for prefill in reversed(self.mixed_prefills(needs, slots))), 0]
            found += [_Variant(slots, nodes, needs, count) for nodes in reversed(self._sizes(needs)) for count in tiles]
        return found

    def mixed_prefills(self, needs: SamplingNeeds, num_slots: int) -> Sequence[PrefillBatch]:
        """The prefill batches that may join a step for `needs` over `num_slots` requests, rising. Below the largest
        bucket few prompts join: every second size, or none where steps differ in size, to save graphs."""
        if not self._prefills or phases_of(needs) != PHASES:
            return ()
        if self.bucket_of(num_slots) == self._buckets[-1]:
            return self._prefills
        if self._parts.sizing is not None:
            return ()
        return self._prefills[(len(self._prefills) - 1) % 2 :: 2]

    def reset(self) -> None:
        self.clock.reset()
        self.mixed_ms.clear()
        if self._parts.experts is not None:
            self._parts.experts.reset()

    def _sizes(self, needs: SamplingNeeds) -> tuple[int, ...]:
        """Nodes of the steps for `needs`; one size with grammars, because jump-forward tokens are verified anyway."""
        sizing = self._parts.sizing
        return (self._parts.algorithm.num_nodes,) if sizing is None or needs.constrained else sizing.nodes

    def launch(
        self, num_slots: int, max_length: int, needs: SamplingNeeds, prefill: PrefillBatch | None = None
    ) -> tuple[Step, Marks | None]:
        """Start a step over slots 0 … num_slots - 1, with `prefill`, which has been sent. Returns it, whose table is
        still being written, with marks of its begin and end, if the costs of steps were timed and nothing is prefilled.
        The first draft for requests is checked, if captured by another one."""
        nodes = self._next_nodes(num_slots, max_length, needs)
        first, self._launched = not self._launched, True
        if first and self.recorder:
            self._step(num_slots, max_length, needs, checked=True).draft()
        if self.recorder:
            launch = self._recorded(_Variant(self.bucket_of(num_slots), nodes, needs), prefill)
        else:
            launch = self._prepared(num_slots, max_length, needs, checked=first, nodes=nodes)
        began = self.clock.mark() if self._observed_ms else None
        self._play(launch.calls)
        return launch.step, None if began is None or prefill is not None else (began, self.clock.mark())

    def spent_ms(self, marks: Marks, num_slots: int, nodes: int) -> float:
        """The time of a step between its marks, which the device has passed; as `step_times` has it."""
        share = next(ms for size, ms in self._observed_ms.items() if size >= num_slots)
        return self.clock.between_ms(*marks) + (share if nodes == 1 else 0.0)

    def _recorded(self, variant: _Variant, prefill: PrefillBatch | None) -> _Launch:
        alone = self._captured[variant]
        if prefill is None:
            return alone
        joint = self._captured[variant._replace(tiles=prefill.size)]
        for phase, spent_ms in joint.idle_ms.items():
            self.mixed_ms[phase] += max(0.0, spent_ms - alone.idle_ms[phase])
        return joint

    def _play(self, calls: Calls) -> None:
        for phase, work in calls:
            with self.clock.phase(phase) if phase else nullcontext():
                work()

    def bucket_of(self, num_slots: int) -> int:
        """Slots of the captured step for `num_slots` requests; the others are padding."""
        return next(size for size in self._buckets if size >= num_slots)

    def _next_nodes(self, num_slots: int, max_length: int, needs: SamplingNeeds) -> int:
        """Nodes of the next step. Deferred observations are made before a draft, and when their columns are full."""
        sizing = self._parts.sizing
        if sizing is None or needs.constrained:
            return self._parts.algorithm.num_nodes
        nodes = sizing.next(num_slots)
        if self._num_kept and (nodes > 1 or self._num_kept == COLUMNS):
            with self.clock.phase("commit"):
                if self.recorder:
                    self._observing[self.bucket_of(num_slots)].replay()
                else:
                    self._observe(num_slots, max_length)
            self._num_kept = 0
        self._num_kept += nodes == 1
        return nodes

    def _observe(self, num_slots: int, max_length: int) -> None:
        assert self._parts.backlog is not None
        self._parts.observe(self._parts.backlog.take(self._parts.state.batch(0, num_slots, max_length)))

    def step_times(self, needs: SamplingNeeds) -> dict[tuple[int, int], float]:
        """Milliseconds of a step by (batch, nodes), on dummy requests of random tokens, which are in the token
        histories too, because the time of a look-up depends on what it finds. No request may be running, and what the
        drafter stores must be dropped afterwards. A step without a draft has its share of the deferred observation.

        The sizes are timed interleaved, round after round, so that a disturbance affects at most one time of each.
        """
        state, length = self._parts.state, min(_DUMMY_TOKENS, self._parts.longest // 2)
        work: dict[tuple[int, int], Callable[[], None]] = {}
        for size in buckets(state.max_batch):
            for nodes in self._sizes(needs):
                if self.recorder:
                    calls = self._captured[_Variant(size, nodes, needs)].calls
                else:
                    launch = self._prepared(size, length, needs, nodes=nodes)
                    calls = [*launch.calls, (None, launch.step.drop_intermediates)]
                work[size, nodes] = partial(self._play, calls)
            work[size, 0] = self._observing[size].replay if self.recorder else partial(self._observe, size, length)
        generator = torch.Generator().manual_seed(0)
        rounds = [
            {place: self._timed_ms(run, place[0], length, generator) for place, run in work.items()}
            for _ in range(1 + _TIMED_RUNS)
        ]
        found = {place: median(times[place] for times in rounds[1:]) for place in work}
        self._observed_ms = {size: found.pop((size, 0)) / COLUMNS for size in buckets(state.max_batch)}
        return {place: ms + (self._observed_ms[place[0]] if place[1] == 1 else 0.0) for place, ms in found.items()}

    def _timed_ms(self, work: Callable[[], None], size: int, length: int, generator: torch.Generator) -> float:
        state, resources = self._parts.state, self._parts.resources
        clock = PhaseClock(resources.device)
        state.fill_dummy(size, length, resources.num_pages, generator)
        for texts in resources.histories:
            texts.begin(state.history[:size], length)
        with clock.phase("step"):
            work()
        return clock.phase_times_ms()["step"]

    def compile(self, needs: SamplingNeeds) -> None:
        """Run uncaptured steps without requests, unless done: one for every kernel that steps for `needs` may launch.
        Tiles are chosen by powers of two of the slots. How keys are split changes at four times a length or more."""
        if needs in self._compiled:
            return
        self._compiled.add(needs)
        state = self._parts.state
        for size in reversed(buckets(state.max_batch)):
            for bound in (*buckets(self._parts.longest)[:-1:2], self._parts.longest):
                for nodes in reversed(self._sizes(needs)):
                    _run(self._step(size, bound, needs, checked=True, nodes=nodes), phases_of(needs), None)

    def _step(self, size: int, max_length: int, needs: SamplingNeeds, **how: Any) -> Step:
        return Step(self._parts, self._parts.state.batch(0, size, max_length), needs, **how)

    def _prepared(self, size: int, max_length: int, needs: SamplingNeeds, **how: Any) -> _Launch:
        """A step over the first `size` slots, with its graphs captured; `how` as in `Step`."""
        step, phases = self._step(size, max_length, needs, **how), phases_of(needs)
        groups, rest = _captured(self.level, phases), phases
        idle_ms: dict[str, float] = {}
        calls: Calls = []
        for group in groups:
            assert self.recorder is not None
            stamps = self._stamps if group == PHASES else None
            graph = self.recorder(partial(_run, step, group, stamps))
            # Capturing computes nothing, and the next phases need results to start from.
            idle_ms = self._replay(graph)
            if group == PHASES:
                step.drop_intermediates()
            calls.append((None if stamps else group[-1], graph.replay))
            rest = rest[len(group) :]
        if groups:
            # The other phases compile what they launch.
            _run(step, rest, None)
        calls += [(phase, getattr(step, phase)) for phase in rest]
        return _Launch(step, self._with_turns(step, calls) if needs.constrained else calls, idle_ms)

    def _replay(self, graph: Captured) -> dict[str, float]:
        """Replay `graph` a few times: milliseconds of its phases in the fastest, as other programs may disturb."""
        if self._stamps is None:
            graph.replay()
            return {}
        ends = [self._stamps.phase_times_ms()]
        for _ in range(_IDLE_RUNS):
            graph.replay()
            ends.append(self._stamps.phase_times_ms())
        runs = [{phase: after[phase] - before[phase] for phase in after} for before, after in pairwise(ends)]
        return min(runs, key=lambda spent_ms: sum(spent_ms.values()))

    def _with_turns(self, step: Step, calls: Calls) -> Calls:
        """`calls`, one for each phase, with what the host does between them for grammars."""
        constraints = self._parts.state.constraints
        assert constraints is not None
        turns = {"draft": constraints.offer, "graft": lambda: constraints.read(step.nodes), "verify": constraints.mask}
        found: Calls = []
        for phase, work in calls:
            assert phase is not None
            found.append(("draft" if phase == "graft" else phase, work))
            if phase in turns:
                found.append((None, turns[phase]))
        return found


def _captured(level: str, phases: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The groups of `phases` that are one graph each at `level`; they are the first of a step."""
    if level == "step" and phases == PHASES:
        return [PHASES]
    last = LAST_CAPTURED[level]
    return [(phase,) for phase in phases[: phases.index(last) + 1]] if last else []


def _run(step: Step, phases: tuple[str, ...], stamps: Stamps | None) -> None:
    if stamps is not None:
        stamps.begin()
    for phase in phases:
        getattr(step, phase)()
        if stamps is not None:
            stamps.end(phase)
