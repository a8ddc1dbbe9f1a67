"""The one decoding loop: continuous batching around propose, verify, accept and commit.

A request's prompt except its last token is prefilled; the last prompt token is the first root. So the first step is
like every other, and there is no second place where tokens are sampled. Pages for a request's whole life are reserved
when it is admitted, so a running request can never be stopped by a full pool; requests that do not fit yet wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Algorithm, Observation, Resources
from algorithms.runtime.backends import Backend
from algorithms.runtime.clock import PhaseClock
from algorithms.runtime.kv_cache import KVCache, PageAllocator
from algorithms.runtime.models.loading import Target
from algorithms.runtime.paged import PagedMixer
from algorithms.runtime.request import Completion, Request
from algorithms.runtime.state import BatchState
from algorithms.runtime.stopping import extend, final_text
from specdec_kernels import Accepted, accept, move_accepted

Decode = Callable[[Sequence[int]], str]


class EngineError(ValueError):
    """A request that cannot be served, or a target that produced no finite logit."""


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of a run. `max_length` bounds prompt + new tokens of a request, in tokens; None takes the target's context.

    `num_pages` None reserves enough for `max_batch` requests of that length.
    """

    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    impl: str = "auto"


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

    `ledger_ms` sums the phases draft, verify, accept, commit and host over all steps; prefill is outside of it.
    """

    completions: list[Completion]
    num_steps: int
    prefill_ms: float
    decode_ms: float
    wall_ms: float
    step_ms: list[float]
    ledger_ms: dict[str, float]


@dataclass
class _Running:
    order: int
    request: Request
    completion: Completion
    pages: list[int]
    length: int
    admitted_at: float


class Engine:
    """Runs batches of requests with one target, one algorithm and one backend."""

    def __init__(
        self, target: Target, algorithm: Algorithm, backend: Backend, settings: EngineSettings, decode: Decode
    ) -> None:
        weight = target.model.model.norm.weight
        longest = target.config.max_position_embeddings
        self._limit = min(settings.max_length or longest, longest)
        self._algorithm, self._target, self._decode = algorithm, target.model, decode
        # The last step of a request may draft past its end.
        context = self._limit + algorithm.num_nodes
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
            impl=settings.impl,
        )
        self._max_batch = settings.max_batch
        self.allocator = PageAllocator(num_pages)
        self._cache = KVCache.allocate(target.config, self._resources)
        self._state = BatchState(settings.max_batch, max_pages, weight.device)
        algorithm.attach(self._resources)

    def generate(
        self, requests: Sequence[Request], on_step: Callable[[StepReport], None] | None = None
    ) -> Generation:
        """Serve `requests` to the end.

        Raises EngineError before anything runs if a request has no prompt, is longer than the context or can never fit
        into the pool. However it ends, all pages are free again.
        """
        for request in requests:
            self._check(request)
        return _Run(self, requests, on_step).serve()

    def _check(self, request: Request) -> None:
        name, total = f"request {request.id}", len(request.prompt_ids) + request.max_new_tokens
        if not request.prompt_ids:
            raise EngineError(f"{name}: the prompt has no tokens")
        if request.max_new_tokens < 1:
            raise EngineError(f"{name}: max_new_tokens: expected at least 1, got {request.max_new_tokens}")
        if request.temperature < 0:
            raise EngineError(f"{name}: temperature: expected at least 0, got {request.temperature}")
        if total > self._limit:
            raise EngineError(
                f"{name}: prompt of {len(request.prompt_ids)} tokens + {request.max_new_tokens} new tokens = {total} "
                f"is longer than the context of {self._limit} tokens; shorten the prompt or lower "
                "sampling.max_new_tokens"
            )
        vocab = self._resources.target.config.vocab_size
        strangers = [token for token in request.prompt_ids if not 0 <= token < vocab]
        if strangers:
            raise EngineError(f"{name}: prompt tokens outside the vocabulary of {vocab}: {strangers[:5]}")
        if self._pages_for(request) > self.allocator.num_pages:
            raise EngineError(
                f"{name}: needs {self._pages_for(request)} pages of {self._resources.page_size} tokens, the KV pool "
                f"has {self.allocator.num_pages}; raise runtime.num_pages or lower sampling.max_new_tokens"
            )

    def _pages_for(self, request: Request) -> int:
        slots = len(request.prompt_ids) + request.max_new_tokens + self._algorithm.num_nodes
        return -(-slots // self._resources.page_size)


class _Run:
    """One call of `generate`: the queue, the running rows, the clock."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], on_step: Callable[[StepReport], None] | None
    ) -> None:
        self._engine = engine
        self._algorithm, self._target = engine._algorithm, engine._target
        self._state, self._resources = engine._state, engine._resources
        self._requests = requests
        self._waiting = deque(enumerate(requests))
        self._rows: list[_Running] = []
        self._done: dict[int, Completion] = {}
        self._on_step = on_step
        self._clock = PhaseClock(self._resources.device)
        self._step_ms: list[float] = []
        self._prefill_ms = 0.0
        self._row_steps = self._emitted = 0

    @torch.inference_mode()
    def serve(self) -> Generation:
        began = time.perf_counter()
        try:
            while self._waiting or self._rows:
                self._admit()
                self._step(began)
        finally:
            for running in self._rows:
                self._engine.allocator.release(running.pages)
        wall_ms = _since(began)
        ledger, decode_ms = self._clock.ledger_ms(), sum(self._step_ms)
        phases = {name: ledger.get(name, 0.0) for name in ("draft", "verify", "accept", "commit")}
        return Generation(
            completions=[self._done[order] for order in range(len(self._requests))],
            num_steps=len(self._step_ms),
            prefill_ms=self._prefill_ms,
            decode_ms=decode_ms,
            wall_ms=wall_ms,
            step_ms=self._step_ms,
            ledger_ms=phases | {"host": max(0.0, decode_ms - sum(phases.values()))},
        )

    def _admit(self) -> None:
        """Move waiting requests into free rows as long as pages last, and prefill them together."""
        first, began = len(self._rows), time.perf_counter()
        allocator = self._engine.allocator
        while self._waiting and len(self._rows) < self._engine._max_batch:
            order, request = self._waiting[0]
            needed = self._engine._pages_for(request)
            if needed > allocator.num_free:
                break
            self._waiting.popleft()
            pages = allocator.allocate(needed)
            length = len(request.prompt_ids) - 1
            self._rows.append(_Running(order, request, Completion(request.id), pages, length, began))
            self._state.fill(
                len(self._rows) - 1,
                length=length,
                root=request.prompt_ids[-1],
                pages=pages,
                temperature=request.temperature,
                seed=request.seed,
            )
        admitted = self._rows[first:]
        if any(running.length for running in admitted):
            self._prefill(first, admitted)
            self._synchronize()
        if admitted:
            self._prefill_ms += _since(began)

    def _prefill(self, first: int, admitted: list[_Running]) -> None:
        device, width = self._resources.device, max(running.length for running in admitted)
        prompts = [list(r.request.prompt_ids[:-1]) + [0] * (width - r.length) for r in admitted]
        tokens = torch.tensor(prompts, dtype=torch.int64, device=device)
        counts = torch.tensor([r.length for r in admitted], dtype=torch.int32, device=device)
        batch = self._state.batch(first, len(self._rows), max_length=0)
        start = torch.zeros_like(batch.lengths)
        batch = replace(batch, lengths=start)
        positions = torch.arange(width, device=device).expand(len(admitted), width)
        mixer = PagedMixer.over(
            batch, positions, self._engine._cache, self._resources, mode="chain", counts=counts
        )
        _, features = self._target(tokens, mixer, self._algorithm.capture)
        self._algorithm.observe(Observation(tokens, features, start, positions, counts, batch.page_table))

    def _step(self, run_began: float) -> None:
        began, clock, algorithm = time.perf_counter(), self._clock, self._algorithm
        rows = slice(0, len(self._rows))
        batch = self._state.batch(0, len(self._rows), max(running.length for running in self._rows))
        with clock.phase("draft"):
            tree = algorithm.propose(batch)
        with clock.phase("verify"):
            mixer = PagedMixer.over(
                batch,
                tree.links.positions,
                self._engine._cache,
                self._resources,
                mode="chain" if algorithm.chain else "tree",
                mask=None if algorithm.chain else tree.links.mask,
            )
            hidden, features = self._target(tree.tokens, mixer, algorithm.capture)
            logits = self._target.logits(hidden)
        with clock.phase("accept"):
            accepted = accept(
                "target_only",
                tree.tokens,
                tree.links,
                logits,
                batch.lengths,
                algorithm.max_depth,
                temperature=self._state.temperature[rows],
                seeds=self._state.seeds[rows],
                impl=self._resources.impl,
            )
        with clock.phase("commit"):
            seen = self._commit(batch.lengths.clone(), batch.page_table, tree.tokens, features, accepted)
            algorithm.observe(seen)
            self._state.lengths[rows], self._state.roots[rows] = accepted.new_lengths, accepted.bonus
        # The only host read of a step.
        table = torch.cat([accepted.tokens, accepted.num_accepted[:, None], accepted.valid[:, None]], 1).tolist()
        self._collect(table)
        self._step_ms.append(_since(began))
        self._report(run_began)

    def _commit(
        self, start: Tensor, page_table: Tensor, tokens: Tensor, features: list[Tensor], accepted: Accepted
    ) -> Observation:
        """Bring the accepted path to the front of cache, tokens and features; a chain is there already."""
        if not self._algorithm.chain:
            move_accepted(
                self._engine._cache.kv, page_table, start, accepted.nodes, impl=self._resources.impl
            )
            path = accepted.nodes.clamp(min=0).long()
            tokens = tokens.gather(1, path)
            features = [f.gather(1, path[..., None].expand(-1, -1, f.shape[-1])) for f in features]
        positions = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
        return Observation(tokens, features, start, positions, accepted.num_accepted + 1, page_table)

    def _collect(self, table: list[list[int]]) -> None:
        """Hand emitted tokens to their requests; rows of finished ones are filled from the back."""
        for row in reversed(range(len(self._rows))):
            running, (*tokens, num_accepted, valid) = self._rows[row], table[row]
            if not valid:
                raise EngineError(
                    f"request {running.request.id}: the target gave no finite logit near position {running.length}; "
                    "its weights are broken or the dtype overflows"
                )
            completion = running.completion
            if not completion.token_ids:
                completion.ttft_ms = _since(running.admitted_at)
            extend(running.request, completion, tokens[: num_accepted + 1], self._engine._decode)
            running.length += num_accepted + 1
            self._row_steps += 1
            self._emitted += num_accepted + 1
            if completion.finish_reason:
                completion.total_ms = _since(running.admitted_at)
                self._retire(row)

    def _retire(self, row: int) -> None:
        running, last = self._rows[row], len(self._rows) - 1
        completion = running.completion
        completion.text = final_text(running.request, completion, self._engine._decode)
        self._done[running.order] = completion
        if row != last:
            self._state.move(last, row)
            self._rows[row] = self._rows[last]
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
                tokens_per_step=self._emitted / self._row_steps,
                elapsed_s=time.perf_counter() - run_began,
            )
        )

    def _synchronize(self) -> None:
        if self._resources.device.type == "cuda":
            torch.cuda.synchronize(self._resources.device)


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
