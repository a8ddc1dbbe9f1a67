"""What serves requests: one target, one algorithm, one attention backend, and the cache and state they share.

A request's prompt except its last token is prefilled; the last prompt token is the first root. So the first step is
like every other, and there is no second place where tokens are sampled. Pages for a request's whole life are reserved
when it is admitted, so a running request can never be stopped by a full pool; requests that do not fit yet wait. The
loop itself is `session`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from algorithms.runtime.algorithm import Algorithm, Resources
from algorithms.runtime.backends import Backend, check_calls
from algorithms.runtime.cache import KVCache, PageAllocator
from algorithms.runtime.clock import PhaseClock
from algorithms.runtime.cuda_graph import Capture, GraphReport, StepRunner
from algorithms.runtime.models.loading import Target
from algorithms.runtime.request import Completion, Request
from algorithms.runtime.session import EngineError, Session, StepReport
from algorithms.runtime.state import BatchState
from algorithms.runtime.step import SamplingNeeds, StepParts

__all__ = ["Engine", "EngineError", "EngineSettings", "Generation", "StepReport"]

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of a run. `max_length` bounds prompt + new tokens of a request, in tokens; None takes the target's context.

    `num_pages` None reserves enough for `max_batch` requests of that length. `graph` says how much of a step is
    captured, see `graphs`. `overlap` is how many steps the host reads behind the device: None takes 1 on a GPU and
    0 elsewhere.
    """

    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    impl: str = "auto"
    graph: str = "none"
    overlap: int | None = None


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
        self.algorithm, self.target, self.decode = algorithm, target.model, decode
        self.overlap = settings.overlap if settings.overlap is not None else int(weight.is_cuda)
        # The last step of a request drafts past its end, and so do steps launched before its end was read.
        slots = max(algorithm.num_nodes, algorithm.draft_slots)
        self._overshoot = slots + self.overlap * (algorithm.max_depth + 1)
        context = self._limit + self._overshoot
        max_pages = -(-context // settings.page_size)
        num_pages = settings.num_pages or max_pages * settings.max_batch
        self.resources = Resources(
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
        verify = "decode" if algorithm.num_nodes == 1 else "verify"
        modes = {"prefill": "chain", verify: "chain" if algorithm.chain else "tree"}
        level = algorithm.graph or settings.graph
        if level != "none" and not backend.capturable:
            raise EngineError(
                f"backend={backend.name} reads lengths back in every step and cannot be captured, got graph={level}"
            )
        check_calls(backend, target.config, modes, settings.page_size, weight.dtype, weight.device)
        self.allocator = PageAllocator(num_pages)
        self.cache = KVCache.allocate(target.config, self.resources)
        self.state = BatchState(settings.max_batch, max_pages, context, target.config.vocab_size, weight.device)
        algorithm.attach(self.resources)
        parts = StepParts(algorithm, self.cache, self.state, self.resources)
        self.runner = StepRunner(parts, level, PhaseClock(weight.device), capture)

    def generate(self, requests: Sequence[Request], on_step: Callable[[StepReport], None] | None = None) -> Generation:
        """Serve `requests` to the end.

        Raises EngineError before anything runs if a request has no prompt, is longer than the context or can never fit
        into the pool. However it ends, all pages are free again.
        """
        for request in requests:
            self.check(request)
        if len({request.id for request in requests}) < len(requests):
            raise EngineError("requests of one call must have different ids")
        with self.session(SamplingNeeds.of(requests)) as session:
            for request in requests:
                session.submit(request)
            done: list[Completion] = []
            while not session.idle:
                done += session.step()
                if on_step is not None:
                    on_step(session.report())
            place = {request.id: index for index, request in enumerate(requests)}
            return Generation(
                completions=sorted(done, key=lambda completion: place[completion.request_id]),
                num_steps=len(session.step_ms),
                prefill_ms=session.prefill_ms,
                decode_ms=sum(session.step_ms),
                wall_ms=session.wall_ms,
                launch_ms=session.launch_ms,
                step_ms=session.step_ms,
                ledger_ms=session.ledger_ms(),
                graphs=self.runner.report,
            )

    def forget(self) -> None:
        """Make the next requests the first ones, for an algorithm that learns from what it serves."""
        self.algorithm.forget()

    def session(self, needs: SamplingNeeds) -> Session:
        """A stretch of serving that takes requests as it runs; one at a time."""
        return Session(self, needs)

    def check(self, request: Request) -> None:
        name, new_tokens = f"request {request.id}", request.sampling.max_new_tokens
        if (problem := request.problem(self.resources.target.config.vocab_size)) is not None:
            raise EngineError(f"{name}: {problem}")
        if request.max_length > self._limit:
            raise EngineError(
                f"{name}: prompt of {len(request.prompt_ids)} tokens + {new_tokens} new tokens = {request.max_length} "
                f"is longer than the context of {self._limit} tokens; shorten the prompt or lower "
                "sampling.max_new_tokens"
            )
        if self.pages_for(request) > self.allocator.num_pages:
            raise EngineError(
                f"{name}: needs {self.pages_for(request)} pages of {self.resources.page_size} tokens, the KV pool "
                f"has {self.allocator.num_pages}; raise runtime.num_pages or lower sampling.max_new_tokens"
            )

    def pages_for(self, request: Request) -> int:
        return -(-(request.max_length + self._overshoot) // self.resources.page_size)
