"""The decoding loop: requests come in, are prefilled, stepped, and handed out when they end.

The `Scheduler` decides which request runs where and what is prefilled; a session does to the tensors what it decides,
and launches the steps. A step prefills one chunk at most, so a running request never waits for the whole of a long
prompt. Where whole steps are captured and requests run, the chunk rides in their step (piggybacked prefill) and shares
its reading of the weights; otherwise it comes before the step.

On a GPU the tokens of a step are read while the next one runs, so the device does not wait for the host. A request that
has ended is then stepped once more, without effect, in pages that are reserved for that. Where requests take few steps
and others wait for their rows, that costs more than it gains: then a step is read before the next one is launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from algorithms.runtime.chunk import PASS_ROWS, Chunk
from algorithms.runtime.clock import PhaseClock
from algorithms.runtime.collectives import parallel
from algorithms.runtime.cuda_graph import GraphReport, StepRunner
from algorithms.runtime.grammar import Grammars, Matcher
from algorithms.runtime.parts import StepParts
from algorithms.runtime.prefill import Prefiller, chunk_for
from algorithms.runtime.readback import Readback, RowResult, StepResult
from algorithms.runtime.request import Completion, EngineError, Request
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.scheduler import Piece, RowMove, Running, Scheduler
from algorithms.runtime.step import PHASES


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

    `ledger_ms` sums the phases draft, verify, accept, commit and host over all steps, at every level of capture;
    prefill is outside of it. On a GPU the phases and `prefill_ms` are device time. Of a step in which a chunk rode,
    `prefill_ms` has what the chunk adds to such a step where nothing is running, and the phases have the rest.
    `decode_ms` is the time of all steps without `prefill_ms`, no less than the phases took, which may go on while
    the host is busy between two steps. `host` is what it has beyond the phases. `step_ms` holds the host's time of
    each step; on a GPU that includes the wait for a chunk of a prompt which the device runs first. `launch_ms` is
    the host's own time to launch the steps. `adaptive` is what `Sizing.report` says, None where all steps have one
    size. `launched_rows` counts requests over all steps, those among them that had ended before the step and were
    not read yet.
    """

    completions: list[Completion]
    num_steps: int
    prefill_ms: float
    decode_ms: float
    wall_ms: float
    launch_ms: float
    step_ms: list[float]
    ledger_ms: dict[str, float]
    graphs: GraphReport
    adaptive: dict[str, Any] | None = None
    launched_rows: int = 0


class Session:
    """The decoding loop: requests come in, are prefilled, stepped, and handed out when they end."""

    def __init__(
        self,
        prefiller: Prefiller,
        parts: StepParts,
        runner: StepRunner,
        scheduler: Scheduler,
        readback: Readback[list[Running]],
        needs: SamplingNeeds,
        check: Callable[[Request], None],
        grammars: Grammars | None,
    ) -> None:
        self._parts, self._algorithm, self._state = parts, parts.algorithm, parts.state
        self._prefiller, self._runner, self._scheduler, self._readback = prefiller, runner, scheduler, readback
        self._prefill_clock = PhaseClock(parts.resources.device)
        self._needs, self._check, self._grammars = needs, check, grammars
        self._matchers: dict[int, Matcher] = {}
        self._num_submitted = self._num_finished = self._row_steps = self._emitted = self._launched_rows = 0
        self._step_ms: list[float] = []
        self._loop_ms = self._launch_ms = 0.0
        runner.reset()
        if parts.sizing is not None:
            parts.sizing.num_steps.clear()
        self._began_ms = _now_ms()

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return self._scheduler.idle

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it can never be served here, or one of its id is being served."""
        self._check(request)
        if not self._needs.covers(SamplingNeeds.of([request.sampling])):
            raise EngineError(f"request {request.id}: it samples in a way that this session was not opened for")
        self._scheduler.submit(request)
        self._num_submitted += 1

    def abort(self, request_id: int) -> Completion | None:
        """End a request where it stands; returns what it has so far, or None if it is not here (any more)."""
        aborted = self._scheduler.abort(request_id, _now_ms())
        if aborted is None:
            return None
        completion, move = aborted
        self._num_finished += 1
        self._matchers.pop(request_id, None)
        if move is not None:
            self._move_rows([move])
        return completion

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Launch a step and prefill a chunk, in the step or before it, and take in the results that are due.

        Returns the requests that ended.
        """
        began_ms = _now_ms()
        ended = self._take_in(all_of_them=self._reads_first())
        read_ms = _now_ms() - began_ms
        self._start()
        rides = self._rides()
        pieces = self._admit(rides)
        began_ms = _now_ms()
        if not rides:
            self._prefill(pieces)
        if self._scheduler.rows:
            self._launch(pieces if rides else [])
            ended += self._take_in()
            self._step_ms.append(read_ms + _now_ms() - began_ms)
        self._loop_ms += read_ms + _now_ms() - began_ms
        return ended

    def _rides(self) -> bool:
        """Whether what is prefilled rides in the next step, where steps of so many requests have room for it.

        Requests whose prompts ride take part one step later. Where more of them could start than run, that costs more
        than another reading of the weights.
        """
        scheduler = self._scheduler
        return bool(self._riding()) and scheduler.num_startable <= len(scheduler.rows)

    def _riding(self) -> Sequence[Chunk]:
        """The chunks that may ride in the next step."""
        return self._runner.riding(self._needs, len(self._scheduler.rows))

    def _reads_first(self) -> bool:
        """Whether the steps in flight are to be read before the next one is launched.

        To launch ahead wastes a step for each request that ends, if another waits for its row. To read first lets the
        device wait while the host works. The smaller share of the time is the better one to lose. Processes that share
        a target launch ahead: their clocks differ, and they must serve the same rows in every step.
        """
        if parallel() or not (self._scheduler.num_waiting or self._scheduler.held):
            return False
        working_ms = self._loop_ms - self._readback.waited_ms
        return self._num_finished * self._loop_ms > self._row_steps * working_ms

    def _launch(self, pieces: list[Piece]) -> None:
        """A step over the rows in use, in which `pieces` ride; their requests take part from the next one on."""
        began_ms, rows = _now_ms(), self._scheduler.rows
        chunk = None
        if pieces:
            chunk = chunk_for(self._riding(), pieces)
            chunk.send(pieces)
        ahead = self._readback.num_pending * (self._algorithm.max_depth + 1)
        longest = max(running.length for running in rows) + ahead
        if self._state.constraints is not None and self._needs.constrained:
            matchers = [self._matchers.get(running.request.id) for running in rows]
            self._state.constraints.begin(matchers, partial(self._news, list(rows), matchers))
        table = self._runner.launch(len(rows), longest, self._needs, chunk)
        self._launched_rows += len(rows)
        sizing = self._parts.sizing
        self._readback.push(table, list(rows), None if sizing is None else sizing.choice)
        self._start()
        self._launch_ms += _now_ms() - began_ms

    def _news(self, rows: Sequence[Running], matchers: Sequence[Matcher | None]) -> list[list[int]]:
        """For each row what its request has written behind the tokens that its matcher has, as far as steps were
        launched before the current one; waits for them."""
        flying: dict[int, list[int]] = {}
        for result, launched in self._readback.in_flight():
            for place, running in enumerate(launched):
                row = result.of(place)
                flying.setdefault(id(running), []).extend(row.tokens if row.valid else [])
        news: list[list[int]] = []
        for running, matcher in zip(rows, matchers, strict=True):
            known, seen = running.completion.token_ids, matcher.num_tokens if matcher else 0
            ahead = flying.get(id(running), [])
            news.append([*known[seen:], *ahead[max(0, seen - len(known)) :]])
        return news

    def _take_in(self, all_of_them: bool = False) -> list[Completion]:
        """Read the steps that are due, or all in flight; returns the requests that ended."""
        ended: list[Completion] = []
        moves: list[RowMove] = []
        for result, launched in self._readback.due(all_of_them):
            ended += self._collect(result, launched, moves)
            if self._parts.sizing is not None and self._readback.choice is not None:
                self._parts.sizing.pacing.told(*self._readback.choice)
        if not self._scheduler.rows:
            # What is still in flight was launched for requests that have ended.
            self._readback.drop()
        self._move_rows(moves)
        return ended

    def report(self) -> StepReport:
        """How far the session is."""
        return StepReport(
            num_finished=self._num_finished,
            num_requests=self._num_submitted,
            emitted_tokens=self._emitted,
            tokens_per_step=self._emitted / max(1, self._row_steps),
            elapsed_s=(_now_ms() - self._began_ms) / 1e3,
        )

    def generation(self, completions: list[Completion]) -> Generation:
        """`completions` with the times of the session so far."""
        wall_ms, ledger = _now_ms() - self._began_ms, self._runner.clock.ledger_ms()
        riding_ms = self._runner.riding_ms
        prefill_ms = sum(self._prefill_clock.ledger_ms().values()) + sum(riding_ms.values())
        phases = {name: max(0.0, ledger.get(name, 0.0) - riding_ms[name]) for name in (*PHASES, *ledger)}
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
            ledger_ms=phases | {"host": decode_ms - sum(phases.values())},
            graphs=self._runner.report(self._prefiller.captured_sizes),
            adaptive=None if self._parts.sizing is None else self._parts.sizing.report(),
            launched_rows=self._launched_rows,
        )

    def _admit(self, rides: bool) -> list[Piece]:
        """What this step prefills, in the largest chunk of its kind at most."""
        ahead_alone = rides and self._scheduler.num_startable == 0
        largest = self._chunk_ahead() if ahead_alone else (self._riding() if rides else self._prefiller.chunks)[-1]
        if ahead_alone and not self._scheduler.worth_a_chunk(largest.tile, largest.size):
            return []
        pieces = self._scheduler.admit(_now_ms(), largest.tile, largest.size, ahead=rides)
        for running, start, _ in pieces:
            if start == 0:
                self._state.fill(running.row, running.request, self._needs)
                self._begin_text(running.request)
        return pieces

    def _chunk_ahead(self) -> Chunk:
        """The largest chunk for prompts that have no row yet that needs no more passes over the weights than the
        smallest one does, beside the nodes of the next step."""
        chunks = self._riding()
        nodes = self._runner.num_rows_of(len(self._scheduler.rows)) * self._algorithm.num_nodes
        room = -(-(nodes + chunks[0].num_tokens) // PASS_ROWS) * PASS_ROWS - nodes
        return next(chunk for chunk in reversed(chunks) if chunk.num_tokens <= room)

    def _begin_text(self, request: Request) -> None:
        """Put a request with a grammar at the beginning of its text."""
        if request.sampling.constrained:
            assert self._grammars is not None
            self._matchers[request.id] = self._grammars.matcher(request.sampling.grammar, request.ends)

    def _end_text(self, running: Running) -> None:
        """Say whether the text of a request that has ended is a whole one of its grammar."""
        if self._matchers.pop(running.request.id, None) is not None:
            assert self._grammars is not None
            request, written = running.request, running.completion.token_ids
            running.completion.parsed = self._grammars.parses(request.sampling.grammar, request.ends, written)

    def _start(self) -> None:
        """Let requests run whose prompts are complete, as far as there are rows."""
        self._move_rows(self._scheduler.start(_now_ms()))

    def _prefill(self, pieces: list[Piece]) -> None:
        """Prefill a chunk; requests whose prompts are complete take part in steps from now on."""
        if pieces:
            with self._prefill_clock.phase("prefill"):
                self._prefiller.run(pieces)
            self._start()

    def _collect(self, result: StepResult, launched: list[Running], moves: list[RowMove]) -> list[Completion]:
        """Hand the tokens of a step to the requests it was launched for, from the last row to the first; adds the moves
        of those that end to `moves`."""
        ended: list[Completion] = []
        for place in reversed(range(len(launched))):
            running = launched[place]
            if running.completion.finish_reason:
                continue
            move = self._advance(running, result.of(place))
            if move is not None:
                self._num_finished += 1
                self._end_text(running)
                moves.append(move)
                ended.append(running.completion)
        return ended

    def _advance(self, running: Running, row: RowResult) -> RowMove | None:
        """Append what a step says to a request; the move if that ends it. Without a finite logit for the bonus token it
        fails, unless the accepted drafts have ended it. What it stored is then overwritten, behind the steps still in
        flight."""
        if not row.valid:
            row = row.without_bonus()
            for cache in self._parts.resources.caches:
                cache.zero(running.pages)
        move = None
        if row.tokens:
            self._row_steps += 1
            self._emitted += len(row.tokens)
            running.completion.note_draft(row.num_drafted, row.ran_out)
            move = self._scheduler.advance(running, row.tokens, row.logprobs, _now_ms(), row.top)
        return move if row.valid or move is not None else self._fail(running)

    def _fail(self, running: Running) -> RowMove:
        """End a request without a finite logit."""
        sampling, reason = running.request.sampling, "its weights are broken or the dtype overflows"
        if sampling.constrained or sampling.forbids:
            reason = f"sampling.grammar and sampling.bad_words leave no token, or {reason}"
        message = (
            f"request {running.request.id}: the target gave no finite logit near position {running.length}; {reason}"
        )
        return self._scheduler.fail(running, message, _now_ms())

    def _move_rows(self, moves: Sequence[RowMove]) -> None:
        """Do to the tensors what the scheduler did to its rows."""
        if moves:
            self._state.rearrange(moves)
        for source, target in moves:
            if source != target:
                self._parts.move_row(source, target)
            if self._parts.backlog is not None:
                self._parts.backlog.clear(source)


def _now_ms() -> float:
    return time.perf_counter() * 1e3
