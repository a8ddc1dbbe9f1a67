"""What serves requests: one target, one algorithm, one attention backend, and the cache and state they share.

Of a prompt, all but the last token is prefilled; the last token is the first one that a step starts from. So the first
step is like every other, and tokens are sampled in one place. The `Scheduler` decides which request runs where and what
is prefilled; the engine does to the tensors what it decides, and launches the steps. A step prefills one chunk at most,
so a running request never waits for the whole of a long prompt. Where whole steps are captured and requests run, the
chunk rides in their step (piggybacked prefill) and shares its reading of the weights; otherwise it comes before the
step.

On a GPU the tokens of a step are read while the next one runs, so the device does not wait for the host. A request that
has ended is then stepped once more, without effect, in pages that are reserved for that. Where requests take few steps
and others wait for their rows, that costs more than it gains: then a step is read before the next one is launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from algorithms.runtime.adaptive import Sizing, StepCosts
from algorithms.runtime.algorithm import Algorithm, Resources
from algorithms.runtime.backends.protocol import Backend
from algorithms.runtime.backends.registry import check_calls
from algorithms.runtime.backlog import Backlog
from algorithms.runtime.batch import BatchState
from algorithms.runtime.cache import KVCache, KVScales
from algorithms.runtime.chunk import Chunk, tile_counts
from algorithms.runtime.clock import PhaseClock
from algorithms.runtime.collectives import from_rank_0, parallel
from algorithms.runtime.cuda_graph import Capture, GraphReport, StepRunner, buckets
from algorithms.runtime.grammar import GrammarError, Grammars, Matcher
from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.loading import Target
from algorithms.runtime.parts import StepParts
from algorithms.runtime.prefill import Prefiller, chunk_for
from algorithms.runtime.readback import Readback, RowResult, StepResult
from algorithms.runtime.request import Completion, EngineError, Request
from algorithms.runtime.sampling_params import SamplingNeeds
from algorithms.runtime.scheduler import Decode, Piece, RowMove, Running, Scheduler, tiles_of
from algorithms.runtime.step import PHASES

_MATRIX_ROWS = 64
"""Rows that fill a tile of the matrix unit."""
_RIDING_TOKENS = (64, 384)
"""Prompt tokens that the smallest and the largest chunk in a step have room for. Fewer cost as much beside a step, and
more would make it much longer. Their tiles are half as wide as those of a chunk between steps, because their padding
costs arithmetic."""


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of a run. `max_length` bounds prompt and new tokens of a request together; None takes the target's context.

    `num_pages` None reserves enough for `max_batch` requests of that length. `graph` says how much of a step is
    captured, see `cuda_graph`. `overlap` is how many steps the host reads behind the device: None takes 1 on a GPU and
    0 elsewhere. `fused` runs the models by fused kernels, see `models.fusion`. Before a step at most `prefill_chunk`
    tokens are prefilled, in tiles of `prefill_tile` (None: of `default_tile`), or of the chunk where that is smaller.
    With `piggyback` prompts ride in captured steps, where the backend captures prompts.
    While all rows are taken, the prompts of `prefill_ahead` requests more are then prefilled (None: of
    `default_ahead`); `num_pages` None has room for them.
    `kv_dtype` is that of stored keys and values, None the one of the weights; `kv_scales` are the factors of the
    target's. With `deterministic` the target gives a token the same bits whatever stands beside it; that needs `fused`
    and a backend built for it. With `adaptive` each step verifies as many nodes as pay, see `adaptive`; that is decided
    with `step_costs`, or where they are None with what steps take before the first request.
    """

    page_size: int = 16
    max_batch: int = 8
    num_pages: int | None = None
    max_length: int | None = None
    impl: str = "auto"
    graph: str = "none"
    overlap: int | None = None
    fused: bool = False
    prefill_chunk: int = 2048
    prefill_tile: int | None = None
    piggyback: bool = True
    prefill_ahead: int | None = None
    kv_dtype: torch.dtype | None = None
    kv_scales: KVScales | None = None
    deterministic: bool = False
    adaptive: bool = False
    step_costs: StepCosts | None = None


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
    `decode_ms` is the time of all steps without `prefill_ms`, and `host` is what it has beyond the phases. `step_ms`
    holds the host's time of each step; on a GPU that includes the wait for a chunk of a prompt which the device runs
    first. `launch_ms` is the host's own time to launch the steps. `adaptive` is what
    `Sizing.report` says, None where all steps have one size.
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
        _check_tree(algorithm)
        _check_backend(backend, target, algorithm, settings, level)
        adaptive = settings.adaptive and algorithm.num_nodes > 1
        if adaptive:
            _check_adaptive(algorithm, level)
        self._limit = min(settings.max_length or config.max_position_embeddings, config.max_position_embeddings)
        self._overlap = settings.overlap if settings.overlap is not None else int(weight.is_cuda)
        # The last step of a request drafts past its end, and so do steps launched before its end was read.
        slots = max(algorithm.num_nodes, algorithm.draft_slots)
        overshoot = slots + self._overlap * (algorithm.max_depth + 1)
        context = self._limit + overshoot
        max_pages = -(-context // settings.page_size)
        captures_prompts = level == "step" and backend.captures_prompts
        piggybacks = settings.piggyback and captures_prompts
        ahead = _ahead(settings) if piggybacks else 0
        num_pages = settings.num_pages or max_pages * (settings.max_batch + ahead)
        resources = Resources(
            target=target,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
            kv_dtype=settings.kv_dtype or weight.dtype,
            num_pages=num_pages,
            page_size=settings.page_size,
            context=context,
            max_batch=settings.max_batch + ahead,
            impl=settings.impl,
            fused=settings.fused,
            deterministic=settings.deterministic,
            confidence=adaptive and not algorithm.chain,
        )
        self.scheduler = Scheduler(settings.max_batch, num_pages, settings.page_size, overshoot, decode, ahead)
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
        self.parts.algorithm.forget()
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
    """Requests whose prompts are prefilled while all rows are taken: as many as may end in one step or two."""
    return min(max_batch, max(4, max_batch // 4))


def _ahead(settings: EngineSettings) -> int:
    """Requests whose prompts are prefilled while all rows are taken; EngineError if that is less than none."""
    ahead = default_ahead(settings.max_batch) if settings.prefill_ahead is None else settings.prefill_ahead
    if ahead < 0:
        raise EngineError(f"prefill_ahead: expected at least 0, got {ahead}")
    return ahead


def _chunks_between(parts: StepParts, settings: EngineSettings, longest: int) -> list[Chunk]:
    """Chunks that come before a step, in ascending order of size; requests have up to `longest` tokens. Raises
    EngineError if a chunk could not hold a token."""
    config, device = parts.resources.target.config, parts.resources.device
    tile = default_tile(config, device) if settings.prefill_tile is None else settings.prefill_tile
    tile = min(tile, settings.prefill_chunk)
    if tile < 1:
        raise EngineError(f"prefill_chunk and prefill_tile: expected at least 1, got {tile}")
    # No chunk is larger than all rows together.
    most = min(settings.prefill_chunk // tile, settings.max_batch * tiles_of(longest, tile))
    return [Chunk(parts, size, tile) for size in tile_counts(most)]


def _chunks_in_steps(parts: StepParts, settings: EngineSettings, largest: Chunk) -> list[Chunk]:
    """Chunks that ride in steps, in ascending order of size, none of them larger than the `largest` between steps.
    Where steps differ in size, every second one is left out: each is captured with each size of a step."""
    tile = largest.tile if settings.prefill_tile else max(1, largest.tile // 2)
    least, most = (max(1, min(largest.size * largest.tile, tokens) // tile) for tokens in _RIDING_TOKENS)
    sizes = [size for size in tile_counts(most) if size >= least]
    if parts.sizing is not None:
        sizes = sizes[(len(sizes) - 1) % 2 :: 2]
    return [Chunk(parts, size, tile) for size in sizes]


def _check_tree(algorithm: Algorithm) -> None:
    """Raise EngineError if no tree has the size that the algorithm names."""
    nodes, depth = algorithm.num_nodes, algorithm.max_depth
    least, kind = (nodes - 1, "chain") if algorithm.chain else (min(1, nodes - 1), "tree")
    if not least <= depth < nodes:
        expected = str(least) if least == nodes - 1 else f"{least} to {nodes - 1}"
        raise EngineError(
            f"algo={algorithm.name}: max_depth: expected {expected} for a {kind} of {nodes} nodes, got {depth}"
        )


def _check_adaptive(algorithm: Algorithm, level: str) -> None:
    """Raise EngineError where steps cannot differ in size."""
    if algorithm.rule != "target_only":
        raise EngineError(
            f"adaptive: algo={algorithm.name} draws its drafts (rule {algorithm.rule}), and a number of nodes that "
            "depends on them would change the distribution; expected the rule target_only"
        )
    if level not in ("none", "step"):
        raise EngineError(f"adaptive: a step of each size is one graph: expected graph none or step, got {level}")


def _check_backend(
    backend: Backend, target: Target, algorithm: Algorithm, settings: EngineSettings, level: str
) -> None:
    if level != "none" and not backend.capturable:
        raise EngineError(
            f"backend={backend.name} reads lengths back in every step and cannot be captured, got graph={level}"
        )
    if settings.deterministic and not (settings.fused and backend.deterministic):
        raise EngineError(
            f"deterministic: expected fused kernels and a backend built for it, got fused={settings.fused} and "
            f"backend={backend.name} with deterministic={backend.deterministic}"
        )
    weight, verify = target.model.model.norm.weight, "decode" if algorithm.num_nodes == 1 else "verify"
    modes = {"prefill": "chain", verify: "chain" if algorithm.chain else "tree"}
    if settings.adaptive:
        modes["decode"] = "chain"
    dtype, device, kv_dtype = weight.dtype, weight.device, settings.kv_dtype
    check_calls(backend, target.config, modes, settings.page_size, dtype, device, kv_dtype=kv_dtype)


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
        self._num_submitted = self._num_finished = self._row_steps = self._emitted = 0
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
        decode_ms = max(0.0, self._loop_ms - prefill_ms)
        phases = {name: max(0.0, ledger.get(name, 0.0) - riding_ms[name]) for name in (*PHASES, *ledger)}
        return Generation(
            completions=completions,
            num_steps=len(self._step_ms),
            prefill_ms=prefill_ms,
            decode_ms=decode_ms,
            wall_ms=wall_ms,
            launch_ms=self._launch_ms,
            step_ms=self._step_ms,
            ledger_ms=phases | {"host": max(0.0, decode_ms - sum(phases.values()))},
            graphs=self._runner.report(self._prefiller.captured_sizes),
            adaptive=None if self._parts.sizing is None else self._parts.sizing.report(),
        )

    def _admit(self, rides: bool) -> list[Piece]:
        """What this step prefills, in the largest chunk of its kind at most."""
        largest = (self._riding() if rides else self._prefiller.chunks)[-1]
        pieces = self._scheduler.admit(_now_ms(), largest.tile, largest.size, ahead=rides)
        for running, start, _ in pieces:
            if start == 0:
                self._state.fill(running.row, running.request, self._needs)
                self._begin_text(running.request)
        return pieces

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
                self._algorithm.move_row(source, target)
            if (backlog := self._parts.backlog) is not None:
                if source != target:
                    backlog.move(source, target)
                backlog.clear(source)


def _now_ms() -> float:
    return time.perf_counter() * 1e3
