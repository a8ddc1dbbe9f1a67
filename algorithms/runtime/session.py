"""The decoding loop itself: requests come in, are prefilled, stepped and handed out when they end.

A session takes requests while it runs and can abort them. On a GPU the tokens of a step are read while the next one
runs: the host never waits for the step it has just launched. A request that ended is then stepped once more, for
nothing, into pages reserved for that.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from algorithms.runtime.algorithm import Observation
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.readback import Readback, StepResult
from algorithms.runtime.request import Completion, Request
from algorithms.runtime.step import PHASES, SamplingNeeds
from algorithms.runtime.stopping import extend, final_text

if TYPE_CHECKING:
    from algorithms.runtime.engine import Engine

ABORTED = "aborted"


class EngineError(ValueError):
    """A request that cannot be served, or a target that produced no finite logit."""


@dataclass(frozen=True)
class StepReport:
    """Where a run stands after a step; `tokens_per_step` is pooled over requests and steps so far."""

    num_finished: int
    num_requests: int
    emitted_tokens: int
    tokens_per_step: float
    elapsed_s: float


@dataclass
class _Running:
    request: Request
    completion: Completion
    pages: list[int]
    length: int
    admitted_at: float
    row: int


class Session:
    """One stretch of serving with one engine. Use it in a `with` block: however that ends, all pages are free again.

    `needs` bounds what requests may ask of the sampler: a captured step does no more than it was captured for.
    """

    def __init__(self, engine: Engine, needs: SamplingNeeds) -> None:
        self._engine, self._runner, self._needs = engine, engine.runner, needs
        self._algorithm, self._target = engine.algorithm, engine.target
        self._state, self._resources = engine.state, engine.resources
        self._waiting: deque[Request] = deque()
        self._rows: list[_Running] = []
        self._here: set[int] = set()
        self._readback: Readback[list[_Running]] = Readback(
            engine.overlap, engine.state.max_batch, engine.algorithm.max_depth, engine.resources.device
        )
        self._began = time.perf_counter()
        self._num_submitted = self._num_finished = self._row_steps = self._emitted = 0
        self.step_ms: list[float] = []
        self.prefill_ms = self.launch_ms = 0.0

    def __enter__(self) -> Session:
        if self._needs.penalised:
            self._state.need_penalties()
        with torch.inference_mode():
            self._runner.prepare(self._needs)
        self._runner.clock.reset()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._rows:
            self._state.clear(running.row)
            self._engine.allocator.release(running.pages)
        self._rows.clear()
        self._waiting.clear()

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._waiting and not self._rows

    @property
    def wall_ms(self) -> float:
        """Since the session began."""
        return _since(self._began)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it can never be served here, or one of its id is being served."""
        self._engine.check(request)
        if not self._needs.covers(SamplingNeeds.of([request])):
            raise EngineError(f"request {request.id}: it samples in a way that this session was not opened for")
        if request.id in self._here:
            raise EngineError(f"request {request.id}: a request of this id is already here")
        self._here.add(request.id)
        self._waiting.append(request)
        self._num_submitted += 1

    def abort(self, request_id: int) -> Completion | None:
        """End a request where it stands; returns what it has so far, or None if it is not here (any more)."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                self._here.remove(request_id)
                self._num_finished += 1
                return Completion(request_id, finish_reason=ABORTED)
        for running in self._rows:
            if running.request.id == request_id:
                running.completion.finish_reason = ABORTED
                self._retire(running)
                return running.completion
        return None

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, launch a step, and take in the results that are due; returns the requests that ended."""
        self._admit()
        began = time.perf_counter()
        ended: list[Completion] = []
        if not self._rows:
            return ended
        ahead = self._readback.num_pending * (self._algorithm.max_depth + 1)
        longest = max(running.length for running in self._rows) + ahead
        table = self._runner.launch(len(self._rows), longest, self._needs)
        self._readback.push(table, list(self._rows))
        self.launch_ms += _since(began)
        for result, rows in self._readback.due():
            ended += self._collect(result, rows)
        if not self._rows:
            # What is still in flight was launched for requests that have ended.
            self._readback.drop()
        self.step_ms.append(_since(began))
        return ended

    def report(self) -> StepReport:
        """Where the session stands."""
        return StepReport(
            num_finished=self._num_finished,
            num_requests=self._num_submitted,
            emitted_tokens=self._emitted,
            tokens_per_step=self._emitted / max(1, self._row_steps),
            elapsed_s=time.perf_counter() - self._began,
        )

    def ledger_ms(self) -> dict[str, float]:
        """Milliseconds by phase over all steps, and `host`, what the steps took beyond them."""
        ledger = self._runner.clock.ledger_ms()
        phases = {name: ledger.get(name, 0.0) for name in PHASES} | ledger
        return phases | {"host": max(0.0, sum(self.step_ms) - sum(phases.values()))}

    def _admit(self) -> None:
        """Move waiting requests into free rows as long as pages last, and prefill them together."""
        first, began = len(self._rows), time.perf_counter()
        allocator = self._engine.allocator
        while self._waiting and len(self._rows) < self._state.max_batch:
            request = self._waiting[0]
            needed = self._engine.pages_for(request)
            if needed > allocator.num_free:
                break
            self._waiting.popleft()
            pages, row = allocator.allocate(needed), len(self._rows)
            length = len(request.prompt_ids) - 1
            self._rows.append(_Running(request, Completion(request.id), pages, length, began, row))
            self._state.fill(row, request, pages)
        admitted = self._rows[first:]
        if admitted:
            self._prefill(first, admitted)
            self._synchronize()
            self.prefill_ms += _since(began)

    def _prefill(self, first: int, admitted: list[_Running]) -> None:
        # At least one column, so that a drafter hears of a prompt of one token too.
        device, width = self._resources.device, max(1, *(running.length for running in admitted))
        batch = self._state.batch(first, len(self._rows), max_length=0)
        counts, start = batch.lengths.to(torch.int32), torch.zeros_like(batch.lengths)
        columns = torch.arange(width + 1, device=device)
        # Behind a shorter prompt the row may hold what a former request left there.
        text = torch.where(columns <= counts[:, None], batch.history[:, : width + 1], 0)
        tokens, positions = text[:, :-1].contiguous(), columns[:-1].repeat(len(admitted), 1)
        mixer = PagedMixer.over(
            replace(batch, lengths=start),
            positions,
            self._engine.cache,
            self._resources,
            mode="chain",
            counts=counts,
            phase="prefill",
        )
        hidden, features = self._target(tokens, mixer, self._algorithm.capture)
        self._algorithm.observe(
            Observation(
                tokens=tokens,
                next_tokens=text[:, 1:].contiguous(),
                features=features,
                hidden=hidden,
                start=start,
                positions=positions,
                counts=counts,
                history=batch.history,
                page_table=batch.page_table,
                rows=batch.rows,
                max_length=0,
                is_prefill=True,
            )
        )

    def _collect(self, result: StepResult, rows: list[_Running]) -> list[Completion]:
        """Hand emitted tokens to their requests; rows of finished ones are filled from the back."""
        ended: list[Completion] = []
        for place in reversed(range(len(rows))):
            running = rows[place]
            completion = running.completion
            if completion.finish_reason:
                continue
            tokens, logprobs, valid = result.of(place)
            if not valid:
                raise EngineError(
                    f"request {running.request.id}: the target gave no finite logit near position {running.length}; "
                    "its weights are broken or the dtype overflows"
                )
            if not completion.token_ids:
                completion.ttft_ms = _since(running.admitted_at)
            extend(running.request, completion, tokens, logprobs, self._engine.decode)
            completion.emitted_at_ms.append(_since(running.admitted_at))
            running.length += len(tokens)
            self._row_steps += 1
            self._emitted += len(tokens)
            if completion.finish_reason:
                self._retire(running)
                ended.append(completion)
        return ended

    def _retire(self, running: _Running) -> None:
        row, last = running.row, len(self._rows) - 1
        completion = running.completion
        completion.text = final_text(running.request, completion, self._engine.decode)
        completion.total_ms = _since(running.admitted_at)
        self._num_finished += 1
        self._here.remove(running.request.id)
        if row != last:
            self._state.move(last, row)
            self._algorithm.move_row(last, row)
            self._rows[row] = self._rows[last]
            self._rows[row].row = row
        self._state.clear(last)
        self._rows.pop()
        self._engine.allocator.release(running.pages)

    def _synchronize(self) -> None:
        if self._resources.device.type == "cuda":
            torch.cuda.synchronize(self._resources.device)


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
