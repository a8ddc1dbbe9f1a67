"""The decoding loop: requests are submitted, prefilled, stepped and returned when they end.

The `Scheduler` decides; a session applies this to the tensors and launches the steps. A step prefills at most one
prefill batch, so no running request waits for a whole long prompt. If whole steps are captured, the batch is part of a
decode step (mixed prefill) and shares its pass over the weights; otherwise it runs before the step.

On a GPU the host reads the tokens of a step while the next one runs. A request that has ended is then stepped once
more, without effect, in pages reserved for that.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from algorithms.engine.clock import PhaseClock
from algorithms.engine.grammar import Grammars, Matcher
from algorithms.engine.request import Completion, EngineError, Request, SlotResult
from algorithms.engine.scheduler import PrefillSegment, Running, Scheduler, SlotMove
from algorithms.engine.transfers import Readback, StepResult
from algorithms.parallel.collectives import parallel
from algorithms.step.context import StepParts
from algorithms.step.prefill import Prefiller, prefill_for
from algorithms.step.prefill_batch import PASS_ROWS, PrefillBatch
from algorithms.step.runner import GraphReport, Marks, StepRunner
from algorithms.step.sampling_params import SamplingNeeds
from algorithms.step.step import PHASES

_LONG_PROMPT = 4096
"""Tokens of a prompt above which it is prefilled between steps."""


@dataclass(frozen=True)
class StepReport:
    """How far a run is after a step; `tokens_per_step` is pooled over requests and steps so far."""

    num_finished: int
    num_requests: int
    emitted_tokens: int
    tokens_per_step: float
    elapsed_s: float


@dataclass(frozen=True)
class Generation:
    """All completions in the order of the requests, and where the time went.

    `phase_times_ms` sums the phases draft, verify, accept, commit and host over all steps, without prefill. On a GPU
    the phases and `prefill_ms` are device time; `prefill_ms` includes the time that a mixed prefill adds to a step
    on an idle device. `decode_ms` is the time of all steps without `prefill_ms`, and at least the sum of the phases;
    `host` is the rest. `step_ms` is the host's time of each step, `launch_ms` the host's time of all launches.
    `adaptive` is `Sizing.report`, None where all steps have one size. `experts` is `ExpertLedger.report`, None for a
    target without experts.
    """

    completions: list[Completion]
    num_steps: int
    prefill_ms: float
    decode_ms: float
    wall_ms: float
    launch_ms: float
    step_ms: list[float]
    phase_times_ms: dict[str, float]
    graphs: GraphReport
    adaptive: dict[str, Any] | None = None
    experts: dict[str, float] | None = None


class Launched(NamedTuple):
    """A step in flight: requests by slot, nodes, number in the session from 1 on, marks of `StepRunner.launch`."""

    requests: list[Running]
    nodes: int
    number: int
    marks: Marks | None


class Session:
    def __init__(
        self,
        prefiller: Prefiller,
        parts: StepParts,
        runner: StepRunner,
        scheduler: Scheduler,
        readback: Readback[Launched],
        needs: SamplingNeeds,
        check: Callable[[Request], None],
        grammars: Grammars | None,
    ) -> None:
        self._parts, self._algorithm, self._state = parts, parts.algorithm, parts.state
        self._prefiller, self._runner, self._scheduler, self._readback = prefiller, runner, scheduler, readback
        self._prefill_clock = PhaseClock(parts.resources.device)
        self._needs, self._check, self._grammars = needs, check, grammars
        self._matchers: dict[int, Matcher] = {}
        self._num_submitted = self._num_finished = self._slot_steps = self._emitted = 0
        self._step_ms: list[float] = []
        self._loop_ms = self._launch_ms = 0.0
        runner.reset()
        if parts.sizing is not None:
            parts.sizing.num_steps.clear()
        self._began_ms = _now_ms()

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it can never be served here, or one of its id is being served."""
        self._check(request)
        if self._algorithm.recorder is not None and not request.continuation:
            named = f"request {request.id}: algo={self._algorithm.name}"
            raise EngineError(f"{named}: expected prompts of one turn, whose answers are decoded beforehand")
        if not self._needs.covers(SamplingNeeds.of([request.sampling])):
            raise EngineError(f"request {request.id}: it samples in a way that this session was not opened for")
        self._scheduler.submit(request)
        self._num_submitted += 1

    def abort(self, request_id: int) -> Completion | None:
        """End a request now; returns its completion so far, or None if it is not here (any more)."""
        aborted = self._scheduler.abort(request_id, _now_ms())
        if aborted is None:
            return None
        completion, move = aborted
        self._num_finished += 1
        self._matchers.pop(request_id, None)
        if move is not None:
            self._move_slots([move])
        return completion

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Launch a step with its prefill, and take in the results that are due. Returns the requests that ended."""
        began_ms = _now_ms()
        ended = self._take_in(all_of_them=self._reads_first())
        read_ms = _now_ms() - began_ms
        self._start()
        mixed = self._mixes_prefill()
        segments = self._admit(mixed)
        began_ms = _now_ms()
        if segments and not mixed:
            with self._prefill_clock.phase("prefill"):
                self._prefiller.run(segments)
            self._start()
        if self._scheduler.running:
            self._launch(segments if mixed else [])
            ended += self._take_in()
            self._step_ms.append(read_ms + _now_ms() - began_ms)
        self._loop_ms += read_ms + _now_ms() - began_ms
        return ended

    def _mixes_prefill(self) -> bool:
        """Whether the next step prefills (mixed prefill). Its requests take part one step later: if more could start
        than run, that costs more than a pass over the weights. The narrow tiles of a step make the attention of a long
        prompt longer."""
        scheduler = self._scheduler
        if scheduler.num_startable > len(scheduler.running) or scheduler.next_prompt > _LONG_PROMPT:
            return False
        return bool(self._mixed_prefills())

    def _mixed_prefills(self) -> Sequence[PrefillBatch]:
        return self._runner.mixed_prefills(self._needs, len(self._scheduler.running))

    def _reads_first(self) -> bool:
        """Whether the steps in flight are read before the next one is launched.

        Launching ahead wastes a step for each request that ends while another waits for its slot; reading first leaves
        the device idle while the host works. The smaller loss decides. Processes that share a target launch ahead,
        because their clocks differ and they must serve the same slots in every step.
        """
        if parallel() or not (self._scheduler.waiting or self._scheduler.held):
            return False
        working_ms = self._loop_ms - self._readback.waited_ms
        return self._num_finished * self._loop_ms > self._slot_steps * working_ms

    def _launch(self, segments: list[PrefillSegment]) -> None:
        """A step over the slots in use, which prefills `segments`; their requests take part from the next one on."""
        began_ms, slots = _now_ms(), self._scheduler.running
        prefill = None
        if segments:
            prefill = prefill_for(self._mixed_prefills(), segments)
            prefill.send(segments)
        ahead = self._readback.num_pending * (self._algorithm.max_depth + 1)
        longest = max(running.length for running in slots) + ahead
        if self._state.constraints is not None and self._needs.constrained:
            matchers = [self._matchers.get(running.request.id) for running in slots]
            self._state.constraints.begin(matchers, partial(self._news, list(slots), matchers))
        (step, marks), sizing = self._runner.launch(len(slots), longest, self._needs, prefill), self._parts.sizing
        launched = Launched(list(slots), step.num_nodes, sizing.num_steps.total() if sizing else 0, marks)
        self._readback.push(step.table[: len(slots)], step.widths, launched)
        self._start()
        self._launch_ms += _now_ms() - began_ms

    def _news(self, slots: Sequence[Running], matchers: Sequence[Matcher | None]) -> list[list[int]]:
        """For each slot the tokens of all launched steps that its matcher has not seen; waits for these steps."""
        flying: dict[int, list[int]] = {}
        for result, launched in self._readback.in_flight():
            for place, running in enumerate(launched.requests):
                slot = result.of(place)
                flying.setdefault(id(running), []).extend(slot.tokens if slot.valid else [])
        news: list[list[int]] = []
        for running, matcher in zip(slots, matchers, strict=True):
            known, seen = running.completion.token_ids, matcher.num_tokens if matcher else 0
            ahead = flying.get(id(running), [])
            news.append([*known[seen:], *ahead[max(0, seen - len(known)) :]])
        return news

    def _take_in(self, all_of_them: bool = False) -> list[Completion]:
        """Read the steps that are due, or all in flight; returns the requests that ended."""
        ended: list[Completion] = []
        moves: list[SlotMove] = []
        for result, launched in self._readback.due(all_of_them):
            ended += self._collect(result, launched.requests, moves)
            if self._parts.sizing is not None and not self._needs.constrained:
                spent_ms = None
                if launched.marks is not None:
                    spent_ms = self._runner.spent_ms(launched.marks, len(launched.requests), launched.nodes)
                self._parts.sizing.update(result, launched.number, launched.nodes, spent_ms)
        if not self._scheduler.running:
            # What is still in flight was launched for requests that have ended.
            self._readback.drop()
        self._move_slots(moves)
        return ended

    def report(self) -> StepReport:
        return StepReport(
            num_finished=self._num_finished,
            num_requests=self._num_submitted,
            emitted_tokens=self._emitted,
            tokens_per_step=self._emitted / max(1, self._slot_steps),
            elapsed_s=(_now_ms() - self._began_ms) / 1e3,
        )

    def generation(self, completions: list[Completion]) -> Generation:
        """`completions` with the times of the session so far."""
        wall_ms, phase_times = _now_ms() - self._began_ms, self._runner.clock.phase_times_ms()
        mixed_ms = self._runner.mixed_ms
        prefill_ms = sum(self._prefill_clock.phase_times_ms().values()) + sum(mixed_ms.values())
        phases = {name: max(0.0, phase_times.get(name, 0.0) - mixed_ms[name]) for name in (*PHASES, *phase_times)}
        # The device goes on while the host is outside of `step`, where callers record the requests that have ended.
        decode_ms = max(self._loop_ms - prefill_ms, sum(phases.values()))
        return Generation(
            completions=completions,
            num_steps=len(self._step_ms),
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            wall_ms=wall_ms,
            launch_ms=self._launch_ms,
            step_ms=self._step_ms,
            phase_times_ms=phases | {"host": decode_ms - sum(phases.values())},
            graphs=self._runner.report(self._prefiller.captured_sizes),
            adaptive=None if self._parts.sizing is None else self._parts.sizing.report(),
            experts=None if self._parts.experts is None else self._parts.experts.report(),
        )

    def _admit(self, mixed: bool) -> list[PrefillSegment]:
        """The segments that this step prefills: at most the largest prefill batch of its kind."""
        ahead_alone = mixed and self._scheduler.num_startable == 0
        prefills = self._mixed_prefills() if mixed else self._prefiller.prefills
        largest = self._largest_ahead() if ahead_alone else prefills[-1]
        if ahead_alone and not self._scheduler.prefill_ahead_pays(largest.tile, largest.size):
            return []
        segments = self._scheduler.admit(_now_ms(), largest.tile, largest.size, ahead=mixed)
        for running, start, _ in segments:
            if start == 0:
                self._state.fill(running.slot, running.request, self._needs)
                if running.request.sampling.constrained:
                    assert self._grammars is not None
                    grammar, ends = running.request.sampling.grammar, running.request.ends
                    self._matchers[running.request.id] = self._grammars.matcher(grammar, ends)
        return segments

    def _largest_ahead(self) -> PrefillBatch:
        """The largest prefill batch that, with the next step's nodes, needs no more weight passes than the smallest."""
        prefills = self._mixed_prefills()
        nodes = self._runner.bucket_of(len(self._scheduler.running)) * self._algorithm.num_nodes
        room = -(-(nodes + prefills[0].num_tokens) // PASS_ROWS) * PASS_ROWS - nodes
        return next(prefill for prefill in reversed(prefills) if prefill.num_tokens <= room)

    def _start(self) -> None:
        self._move_slots(self._scheduler.start(_now_ms()))

    def _collect(self, result: StepResult, launched: list[Running], moves: list[SlotMove]) -> list[Completion]:
        """Give a step's tokens to its requests, the last slot first; appends the moves of those that end to `moves`."""
        ended: list[Completion] = []
        for place in reversed(range(len(launched))):
            request, completion = launched[place].request, launched[place].completion
            if completion.finish_reason:
                continue
            move = self._advance(launched[place], result.of(place))
            if request.sampling.drafts and len(completion.accepted_counts) > len(completion.drafts):
                completion.drafts.append(result.drafts_of(place))
            if move is None:
                continue
            self._num_finished += 1
            if self._matchers.pop(request.id, None) is not None:
                assert self._grammars is not None
                written = completion.token_ids
                completion.parsed = self._grammars.parses(request.sampling.grammar, request.ends, written)
            moves.append(move)
            ended.append(completion)
        return ended

    def _advance(self, running: Running, slot: SlotResult) -> SlotMove | None:
        """Append a step's tokens; returns the move if that ends the request. Without a finite logit for the bonus token
        it fails, unless the accepted drafts have ended it, and its pages are zeroed after the steps in flight."""
        if not slot.valid:
            slot = slot.without_bonus()
            for cache in self._parts.resources.caches:
                cache.zero(running.pages)
        move = None
        if slot.tokens:
            self._slot_steps += 1
            self._emitted += len(slot.tokens)
            move = self._scheduler.advance(running, slot, _now_ms())
        return move if slot.valid or move is not None else self._fail(running)

    def _fail(self, running: Running) -> SlotMove:
        request, reason = running.request, "its weights are broken or the dtype overflows"
        if request.sampling.constrained or request.sampling.forbids:
            reason = f"sampling.grammar and sampling.bad_words leave no token, or {reason}"
        where = f"the target gave no finite logit near position {running.length}"
        return self._scheduler.fail(running, f"request {request.id}: {where}; {reason}", _now_ms())

    def _move_slots(self, moves: Sequence[SlotMove]) -> None:
        if moves:
            self._state.rearrange(moves)
        for source, target in moves:
            if source != target:
                self._parts.move_slot(source, target)
            if self._parts.backlog is not None:
                self._parts.backlog.clear(source)


def _now_ms() -> float:
    return time.perf_counter() * 1e3
