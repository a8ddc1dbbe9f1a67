"""The one decoding loop: continuous batching around propose, verify, accept and commit.

A request's prompt except its last token is prefilled; the last prompt token is the first root. So the first step is
like every other, and there is no second place where tokens are sampled. Pages for a request's whole life are reserved
when it is admitted, so a running request can never be stopped by a full pool; requests that do not fit yet wait.

On a GPU the tokens of a step are read while the next one runs: the host never waits for the step it has just launched.
A request that ended is then stepped once more, for nothing, into pages reserved for that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from algorithms.runtime.algorithm import Algorithm, Observation, Resources
from algorithms.runtime.backends import Backend
from algorithms.runtime.clock import PhaseClock
from algorithms.runtime.graphs import Capture, GraphReport, StepRunner
from algorithms.runtime.kv_cache import KVCache, PageAllocator
from algorithms.runtime.models.loading import Target
from algorithms.runtime.paged import PagedMixer
from algorithms.runtime.readback import Readback, StepResult
from algorithms.runtime.request import Completion, Request
from algorithms.runtime.state import BatchState
from algorithms.runtime.step import PHASES, SamplingNeeds, StepParts
from algorithms.runtime.stopping import extend, final_text

Decode = Callable[[Sequence[int]], str]


class EngineError(ValueError):
    """A request that cannot be served, or a target that produced no finite logit."""


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of a run. `max_length` bounds prompt + new tokens of a request, in tokens; None takes the target's context.

    `num_pages` None reserves enough for `max_batch` requests of that length. `graph` says how much of a step is
    captured, see `graphs`. `read_behind` is how many steps the host reads behind the device: None takes 1 on a GPU and
    0 elsewhere.
    """

    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    impl: str = "auto"
    graph: str = "none"
    read_behind: int | None = None


@dataclass(frozen=True)
class StepReport:
    """Where a run stands after a step; `tokens_per_step` is pooled over requests and steps so far."""

    num_finished: int
    num_requests: int
    emitted_tokens: int
    tokens_per_step: float
    elapsed_s: float


@dataclass(frozen=True)
class Generation:
    """All completions in the order of the requests, and where the time went.

    `ledger_ms` sums the phases draft, verify, accept, commit (or `graph`, where one graph is the whole step) and host
    over all steps; prefill is outside of it. On a GPU the phases are device time and `host` is what the decode time
    has beyond it. `launch_ms` is the host's own time to launch the steps.
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


@dataclass
class _Running:
    order: int
    request: Request
    completion: Completion
    pages: list[int]
    length: int
    admitted_at: float
    row: int


class Engine:
    """Runs batches of requests with one target, one algorithm and one backend."""

    def __init__(
        self,
        target: Target,
        algorithm: Algorithm,
        backend: Backend,
        settings: EngineSettings,
        decode: Decode,
        capture: Capture | None = None,
    ) -> None:
        """`capture` replaces CUDA graphs, for tests of captured steps where there is no GPU."""
        weight = target.model.model.norm.weight
        longest = target.config.max_position_embeddings
        self._limit = min(settings.max_length or longest, longest)
        self._algorithm, self._target, self._decode = algorithm, target.model, decode
        self.read_behind = settings.read_behind if settings.read_behind is not None else int(weight.is_cuda)
        # The last step of a request drafts past its end, and so do steps launched before its end was read.
        slots = max(algorithm.num_nodes, algorithm.draft_slots)
        self._overshoot = slots + self.read_behind * (algorithm.max_depth + 1)
        context = self._limit + self._overshoot
        max_pages = -(-context // settings.page_size)
        num_pages = settings.num_pages or max_pages * settings.max_batch
        self._resources = Resources(
            target=target,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
            num_pages=num_pages,
            page_size=settings.page_size,
            context=context,
            max_batch=settings.max_batch,
            impl=settings.impl,
        )
        self.allocator = PageAllocator(num_pages)
        self._cache = KVCache.allocate(target.config, self._resources)
        self._state = BatchState(settings.max_batch, max_pages, context, target.config.vocab_size, weight.device)
        algorithm.attach(self._resources)
        parts = StepParts(algorithm, self._cache, self._state, self._resources)
        self._runner = StepRunner(parts, algorithm.graph or settings.graph, PhaseClock(weight.device), capture)

    def generate(self, requests: Sequence[Request], on_step: Callable[[StepReport], None] | None = None) -> Generation:
        """Serve `requests` to the end.

        Raises EngineError before anything runs if a request has no prompt, is longer than the context or can never fit
        into the pool. However it ends, all pages are free again.
        """
        for request in requests:
            self._check(request)
        return _Run(self, requests, on_step).serve()

    def _check(self, request: Request) -> None:
        name, total = f"request {request.id}", len(request.prompt_ids) + request.max_new_tokens
        vocab = self._resources.target.config.vocab_size
        if not request.prompt_ids:
            raise EngineError(f"{name}: the prompt has no tokens")
        if (problem := request.problem(vocab)) is not None:
            raise EngineError(f"{name}: {problem}")
        if total > self._limit:
            raise EngineError(
                f"{name}: prompt of {len(request.prompt_ids)} tokens + {request.max_new_tokens} new tokens = {total} "
                f"is longer than the context of {self._limit} tokens; shorten the prompt or lower "
                "sampling.max_new_tokens"
            )
        strangers = [token for token in request.prompt_ids if not 0 <= token < vocab]
        if strangers:
            raise EngineError(f"{name}: prompt tokens outside the vocabulary of {vocab}: {strangers[:5]}")
        if self._pages_for(request) > self.allocator.num_pages:
            raise EngineError(
                f"{name}: needs {self._pages_for(request)} pages of {self._resources.page_size} tokens, the KV pool "
                f"has {self.allocator.num_pages}; raise runtime.num_pages or lower sampling.max_new_tokens"
            )

    def _pages_for(self, request: Request) -> int:
        slots = len(request.prompt_ids) + request.max_new_tokens + self._overshoot
        return -(-slots // self._resources.page_size)


class _Run:
    """One call of `generate`: the queue, the running rows, the clock."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], on_step: Callable[[StepReport], None] | None
    ) -> None:
        self._engine, self._runner = engine, engine._runner
        self._algorithm, self._target = engine._algorithm, engine._target
        self._state, self._resources = engine._state, engine._resources
        self._requests = requests
        self._needs = SamplingNeeds.of(requests)
        self._waiting = deque(enumerate(requests))
        self._rows: list[_Running] = []
        self._readback: Readback[list[_Running]] = Readback(
            engine.read_behind, engine._state.max_batch, self._algorithm.max_depth, self._resources.device
        )
        self._done: dict[int, Completion] = {}
        self._on_step = on_step
        self._step_ms: list[float] = []
        self._prefill_ms = self._launch_ms = 0.0
        self._row_steps = self._emitted = 0

    @torch.inference_mode()
    def serve(self) -> Generation:
        if self._needs.penalised:
            self._state.need_penalties()
        self._runner.prepare(self._needs)
        self._runner.clock.reset()
        began = time.perf_counter()
        try:
            while self._waiting or self._rows:
                self._admit()
                self._step(began)
        finally:
            for running in self._rows:
                self._state.clear(running.row)
                self._engine.allocator.release(running.pages)
        wall_ms = _since(began)
        ledger, decode_ms = self._runner.clock.ledger_ms(), sum(self._step_ms)
        phases = {name: ledger.get(name, 0.0) for name in PHASES} | ledger
        return Generation(
            completions=[self._done[order] for order in range(len(self._requests))],
            num_steps=len(self._step_ms),
            prefill_ms=self._prefill_ms,
            decode_ms=decode_ms,
            wall_ms=wall_ms,
            launch_ms=self._launch_ms,
            step_ms=self._step_ms,
            ledger_ms=phases | {"host": max(0.0, decode_ms - sum(phases.values()))},
            graphs=self._runner.report,
        )

    def _admit(self) -> None:
        """Move waiting requests into free rows as long as pages last, and prefill them together."""
        first, began = len(self._rows), time.perf_counter()
        allocator = self._engine.allocator
        while self._waiting and len(self._rows) < self._state.max_batch:
            order, request = self._waiting[0]
            needed = self._engine._pages_for(request)
            if needed > allocator.num_free:
                break
            self._waiting.popleft()
            pages, row = allocator.allocate(needed), len(self._rows)
            length = len(request.prompt_ids) - 1
            self._rows.append(_Running(order, request, Completion(request.id), pages, length, began, row))
            self._state.fill(row, request, pages)
        admitted = self._rows[first:]
        if admitted:
            self._prefill(first, admitted)
            self._synchronize()
            self._prefill_ms += _since(began)

    def _prefill(self, first: int, admitted: list[_Running]) -> None:
        # At least one column, so that a drafter hears of a prompt of one token too.
        device, width = self._resources.device, max(1, *(running.length for running in admitted))
        batch = self._state.batch(first, len(self._rows), max_length=0)
        counts, start = batch.lengths.to(torch.int32), torch.zeros_like(batch.lengths)
        columns = torch.arange(width + 1, device=device)
        # Behind a shorter prompt the row may hold what a former request left there.
        text = torch.where(columns <= counts[:, None], batch.history[:, : width + 1], 0)
        tokens, positions = text[:, :-1].contiguous(), columns[:-1].expand(len(admitted), width)
        mixer = PagedMixer.over(
            replace(batch, lengths=start),
            positions,
            self._engine._cache,
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

    def _step(self, run_began: float) -> None:
        """Launch a step, then take in the results that are due."""
        began = time.perf_counter()
        ahead = self._readback.num_pending * (self._algorithm.max_depth + 1)
        longest = max(running.length for running in self._rows) + ahead
        table = self._runner.launch(len(self._rows), longest, self._needs)
        self._readback.push(table, list(self._rows))
        self._launch_ms += _since(began)
        for result, rows in self._readback.due():
            self._collect(result, rows)
        if not self._rows:
            # What is still in flight was launched for requests that have ended.
            self._readback.drop()
        self._step_ms.append(_since(began))
        self._report(run_began)

    def _collect(self, result: StepResult, rows: list[_Running]) -> None:
        """Hand emitted tokens to their requests; rows of finished ones are filled from the back."""
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
            extend(running.request, completion, tokens, logprobs, self._engine._decode)
            completion.emitted_at_ms.append(_since(running.admitted_at))
            running.length += len(tokens)
            self._row_steps += 1
            self._emitted += len(tokens)
            if completion.finish_reason:
                completion.total_ms = _since(running.admitted_at)
                self._retire(running)

    def _retire(self, running: _Running) -> None:
        row, last = running.row, len(self._rows) - 1
        completion = running.completion
        completion.text = final_text(running.request, completion, self._engine._decode)
        self._done[running.order] = completion
        if row != last:
            self._state.move(last, row)
            self._algorithm.move_row(last, row)
            self._rows[row] = self._rows[last]
            self._rows[row].row = row
        self._state.clear(last)
        self._rows.pop()
        self._engine.allocator.release(running.pages)

    def _report(self, run_began: float) -> None:
        if self._on_step is None:
            return
        self._on_step(
            StepReport(
                num_finished=len(self._done),
                num_requests=len(self._requests),
                emitted_tokens=self._emitted,
                tokens_per_step=self._emitted / max(1, self._row_steps),
                elapsed_s=time.perf_counter() - run_began,
            )
        )

    def _synchronize(self) -> None:
        if self._resources.device.type == "cuda":
            torch.cuda.synchronize(self._resources.device)


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
