"""What serves requests: one target, one algorithm, one attention backend, and the cache and state they share.

Of a prompt, all but the last token is prefilled; the last token is the first one that a step starts from. So the first
step is like every other, and tokens are sampled in one place. Requests are served in a `Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from algorithms.runtime.adaptive import Sizing, StepCosts
from algorithms.runtime.algorithm import Algorithm, Resources
from algorithms.runtime.backends.protocol import Backend
from algorithms.runtime.backlog import Backlog
from algorithms.runtime.batch import BatchState
from algorithms.runtime.cache import KVCache
from algorithms.runtime.chunk import PASS_ROWS, Chunk, tile_counts
from algorithms.runtime.clock import PhaseClock
from algorithms.runtime.collectives import from_rank_0, parallel
from algorithms.runtime.cuda_graph import Capture, StepRunner, buckets
from algorithms.runtime.engine_settings import EngineSettings, check_adaptive, check_backend, check_tree
from algorithms.runtime.grammar import GrammarError, Grammars
from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.loading import Target
from algorithms.runtime.parts import StepParts
from algorithms.runtime.prefill import Prefiller
from algorithms.runtime.readback import Readback
from algorithms.runtime.request import Completion, EngineError, Request
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.scheduler import Decode, Running, Scheduler, tiles_of
from algorithms.runtime.session import Generation, Session, StepReport

_MATRIX_ROWS = 64
"""Rows that fill a tile of the matrix unit."""
_RIDING_TOKENS = (64, 384)
"""Prompt tokens that the smallest and the largest chunk in a step have room for. Fewer cost as much beside a step, and
more would make it much longer. Their tiles are half as wide as the default, because their padding costs arithmetic."""
_SHORT_REQUEST = 512
"""Tokens of requests so short that reading their keys twice as often costs less than the padding of wide tiles."""


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
        grammars: Grammars | None = None,
    ) -> None:
        """`capture` replaces CUDA graphs, for tests of captured steps where there is no GPU. `grammars` compiles those
        of requests; without it no request may have one.

        Raises EngineError or ValueError if the backend cannot do what target, algorithm and settings ask for.
        """
        weight, config = target.model.model.norm.weight, target.config
        level = algorithm.graph or settings.graph
        check_tree(algorithm)
        check_backend(backend, target, algorithm, settings, level)
        adaptive = settings.adaptive and algorithm.num_nodes > 1
        if adaptive:
            check_adaptive(algorithm, level)
        self._limit = min(settings.max_length or config.max_position_embeddings, config.max_position_embeddings)
        self._overlap = settings.overlap if settings.overlap is not None else int(weight.is_cuda)
        # The last step of a request drafts past its end, and so do steps launched before its end was read.
        slots = max(algorithm.num_nodes, algorithm.draft_slots)
        overshoot = slots + self._overlap * (algorithm.max_depth + 1)
        context = self._limit + overshoot
        captures_prompts = level == "step" and backend.captures_prompts
        piggybacks = settings.piggyback and captures_prompts
        wanted = default_ahead(settings.max_batch) if settings.prefill_ahead is None else settings.prefill_ahead
        ahead = wanted if piggybacks else 0
        max_pages = -(-context // settings.page_size)
        confidence = adaptive and not algorithm.chain
        resources = _resources(target, backend, settings, context, max_pages, settings.max_batch + ahead, confidence)
        self.scheduler = Scheduler(
            settings.max_batch, resources.num_pages, settings.page_size, overshoot, decode, ahead
        )
        cache = KVCache.allocate(config, resources, settings.kv_scales)
        state = BatchState(settings.max_batch, ahead, max_pages, context, config.vocab_size, weight.device)
        algorithm.attach(resources)
        sizing = Sizing(algorithm, resources, buckets(settings.max_batch)) if adaptive else None
        backlog = Backlog(len(algorithm.capture), resources) if adaptive else None
        if sizing is not None and settings.step_costs is not None:
            sizing.set_costs(settings.step_costs)
        self.parts = StepParts(algorithm, cache, state, resources, sizing, backlog)
        chunks = _chunks_between(self.parts, settings, self._limit)
        riding = _chunks_in_steps(self.parts, settings, chunks[-1]) if piggybacks else []
        self.runner = StepRunner(self.parts, level, PhaseClock(weight.device), capture, riding)
        recorder = self.runner.recorder if captures_prompts else None
        self.prefiller = Prefiller(self.parts, chunks, recorder)
        self._grammars = grammars
        self._session_is_open = False

    def generate(
        self,
        requests: Sequence[Request],
        on_step: Callable[[StepReport], None] | None = None,
        needs: SamplingNeeds | None = None,
        on_end: Callable[[Completion], None] | None = None,
        follow: Callable[[Completion], Request | None] | None = None,
    ) -> Generation:
        """Serve `requests` to the end, by steps made for `needs`; None: for what these requests ask. `on_end` is
        called with each completion as its request ends. `follow` may answer a completion with another request, such as
        the next turn of a conversation; completions of these stand behind the others, in the order of their ids.

        Raises EngineError before anything runs if a request does not fit the vocabulary, the context or the pool.
        However it ends, all pages are free again.
        """
        for request in requests:
            self.check(request)
        place = {request.id: index for index, request in enumerate(requests)}
        if len(place) < len(requests):
            raise EngineError("requests of one call must have different ids")
        with self.session(needs or SamplingNeeds.of(request.sampling for request in requests)) as session:
            for request in requests:
                session.submit(request)
            done: list[Completion] = []
            while not session.idle:
                ended = session.step()
                done += ended
                for completion in ended:
                    if on_end is not None:
                        on_end(completion)
                    if follow is not None and (next_request := follow(completion)) is not None:
                        session.submit(next_request)
                if on_step is not None:
                    on_step(session.report())
            return session.generation(sorted(done, key=lambda c: (place.get(c.request_id, len(place)), c.request_id)))

    @contextmanager
    def session(self, needs: SamplingNeeds) -> Iterator[Session]:
        """A stretch of serving that takes requests as it runs; one at a time. Afterwards all pages are free again.

        `needs` bounds what requests may ask of the sampler: a captured step does no more than it was captured for.
        """
        if self._session_is_open:
            raise EngineError("this engine has an open session already: close it first")
        state, device = self.parts.state, self.parts.resources.device
        # Engines may share a target, each with its own forward.
        self.parts.resources.choose_forward(self.parts.resources.target.model)
        algorithm = self.parts.algorithm
        state.make_room(needs, algorithm.num_nodes, algorithm.max_depth)
        with torch.inference_mode():
            self.prefiller.prepare()
            self.runner.prepare(needs)
            self._learn_costs(needs)
        readback: Readback[list[Running]] = Readback(
            self._overlap, state.max_batch, algorithm.max_depth, device, needs.top_logprobs
        )
        self._session_is_open = True
        try:
            yield Session(
                self.prefiller, self.parts, self.runner, self.scheduler, readback, needs, self.check, self._grammars
            )
        finally:
            self.scheduler.clear()
            state.clear(slice(None))
            if self.parts.backlog is not None:
                self.parts.backlog.clear(slice(None))
            self._session_is_open = False

    def forget(self) -> None:
        """Make the next requests the first ones, for an algorithm that learns from what it serves."""
        self.parts.forget()
        if self.parts.sizing is not None:
            self.parts.sizing.forget()

    def _learn_costs(self, needs: SamplingNeeds) -> None:
        """Let the choice of a size know what steps cost, unless it does: they are timed before there is any request.
        Rank 0's clock decides."""
        parts, sizing = self.parts, self.parts.sizing
        if sizing is None or sizing.has_costs or needs.constrained:
            return
        measured = self.runner.step_times(needs)
        times = torch.tensor(list(measured.values()), device=parts.resources.device)
        if parallel():
            (times,) = from_rank_0([times])
        sizing.set_costs(StepCosts(dict(zip(measured, times.tolist(), strict=True))))
        parts.state.reset()
        for cache in parts.resources.caches:
            cache.zero(slice(None))
        self.forget()
        assert parts.backlog is not None
        parts.backlog.clear(slice(None))

    def check(self, request: Request) -> None:
        """Raise EngineError if the request can never be served here."""
        name, new_tokens = f"request {request.id}", request.sampling.max_new_tokens
        if (problem := request.problem(self.parts.resources.target.config.vocab_size)) is not None:
            raise EngineError(f"{name}: {problem}")
        if request.max_length > self._limit:
            raise EngineError(
                f"{name}: prompt of {len(request.prompt_ids)} tokens + {new_tokens} new tokens = {request.max_length} "
                f"is longer than the context of {self._limit} tokens; shorten the prompt or lower "
                "sampling.max_new_tokens"
            )
        if request.sampling.constrained:
            if self._grammars is None:
                raise EngineError(f"{name}: sampling.grammar: this engine was made without a compiler of grammars")
            try:
                self._grammars.matcher(request.sampling.grammar, request.ends)
            except GrammarError as error:
                raise EngineError(f"{name}: {error}") from error
        self.scheduler.check(request)


def _resources(
    target: Target,
    backend: Backend,
    settings: EngineSettings,
    context: int,
    max_pages: int,
    max_batch: int,
    confidence: bool,
) -> Resources:
    """What the engine lends to its algorithm. `max_pages` hold a request of `context` positions, and without
    `settings.num_pages` the pool has them for `max_batch` requests."""
    weight = target.model.model.norm.weight
    return Resources(
        target=target,
        backend=backend,
        device=weight.device,
        dtype=weight.dtype,
        kv_dtype=settings.kv_dtype or weight.dtype,
        num_pages=settings.num_pages or max_pages * max_batch,
        page_size=settings.page_size,
        context=context,
        max_batch=max_batch,
        impl=settings.impl,
        fused=settings.fused,
        deterministic=settings.deterministic,
        confidence=confidence,
    )


def default_tile(config: DecoderConfig, device: torch.device) -> int:
    """Tokens of a tile, from 16 to 64: on a GPU as few as fill a tile of the matrix unit with the query heads of a KV
    head.

    A narrow tile wastes less on short prompts, and a long prompt reads its keys once per tile. Without a GPU every tile
    costs about the same.
    """
    if device.type != "cuda":
        return 64
    group = config.num_heads // config.num_kv_heads
    return min(64, max(16, 1 << (_MATRIX_ROWS // group - 1).bit_length()))


def default_ahead(max_batch: int) -> int:
    """Requests whose prompts are prefilled while all rows are taken: as many as may end in a step or two, and enough of
    them to fill a chunk with short prompts while others wait complete."""
    return min(max_batch, max(4, min(12, 3 * max_batch // 4), max_batch // 4))


def _chunks_between(parts: StepParts, settings: EngineSettings, longest: int) -> list[Chunk]:
    """Chunks that come before a step, in ascending order of size; requests have up to `longest` tokens."""
    config, device = parts.resources.target.config, parts.resources.device
    tile = settings.prefill_tile
    if tile is None:
        tile = _narrow(config, device) if longest <= _SHORT_REQUEST else default_tile(config, device)
    tile = min(tile, settings.prefill_chunk)
    # No chunk is larger than all rows together.
    most = min(settings.prefill_chunk // tile, settings.max_batch * tiles_of(longest, tile))
    return [Chunk(parts, size, tile) for size in tile_counts(most, dense=PASS_ROWS // tile)]


def _narrow(config: DecoderConfig, device: torch.device) -> int:
    """Tokens of a tile where padding costs more than keys that are read twice as often: on a GPU half the default."""
    tile = default_tile(config, device)
    return tile // 2 if device.type == "cuda" else tile


def _chunks_in_steps(parts: StepParts, settings: EngineSettings, largest: Chunk) -> list[Chunk]:
    """Chunks that ride in steps, in ascending order of size, none of them larger than the `largest` between steps.
    Where steps differ in size, every second one between the smallest and the largest is left out: each is captured with
    each size of a step. The smallest is the one that may need no further pass over the weights."""
    config, device = parts.resources.target.config, parts.resources.device
    tile = largest.tile if settings.prefill_tile else min(largest.tile, _narrow(config, device))
    least, most = (max(1, min(largest.size * largest.tile, tokens) // tile) for tokens in _RIDING_TOKENS)
    sizes = [size for size in tile_counts(most) if size >= least]
    if parts.sizing is not None:
        sizes = sorted({*sizes[::2], sizes[-1]})
    return [Chunk(parts, size, tile) for size in sizes]
