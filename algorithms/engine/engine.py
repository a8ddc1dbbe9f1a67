"""The engine: one target, one algorithm, one attention backend, and the cache and state that they share.

All but the last token of a prompt is prefilled; the first step starts from the last token. So the first
step is like every other, and tokens are sampled in one place. Requests are served in a `Session`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from algorithms.algorithm import Algorithm, Resources
from algorithms.attention.backends.protocol import Backend
from algorithms.attention.cache import KVScales
from algorithms.attention.memory import allocate_memory
from algorithms.engine.clock import PhaseClock
from algorithms.engine.grammar import GrammarError, Grammars
from algorithms.engine.request import Completion, EngineError, Request
from algorithms.engine.scheduler import Decode, Scheduler, tiles_of
from algorithms.engine.session import Generation, Launched, Session, StepReport
from algorithms.engine.settings import RuntimeSettings, graph_level, runs_fused
from algorithms.engine.transfers import Readback
from algorithms.models.config import DecoderConfig
from algorithms.models.experts.module import ExpertLedger
from algorithms.models.linear.config import LinearConfig
from algorithms.models.loading import Target
from algorithms.parallel.collectives import from_rank_0, parallel
from algorithms.step.adaptive import Sizing, StepCosts
from algorithms.step.batch import BatchState
from algorithms.step.context import DeferredObservation, StepParts
from algorithms.step.prefill import Prefiller
from algorithms.step.prefill_batch import PASS_ROWS, PrefillBatch, tile_counts
from algorithms.step.runner import Capture, StepRunner, buckets
from algorithms.step.sampling_params import SamplingNeeds
from specdec_kernels import CHUNK
from specdec_kernels.launch import use_triton

_MATRIX_ROWS = 64  # rows that fill a tile of the matrix unit
_LONG_REQUEST = 8192
"""Tokens of requests so long that their tiles fill two tiles of the matrix unit, which share the keys they read."""
_MIXED_TOKENS = (64, 384)
"""Prompt tokens that the smallest and the largest prefill in a step have room for. Fewer cost as much in a step, and
more would make it much longer. Their tiles are half as wide as the default, because their padding costs arithmetic."""
_SHORT_REQUEST = 512
"""Tokens of requests so short that reading their keys twice as often costs less than the padding of wide tiles."""


class Engine:
    def __init__(
        self,
        target: Target,
        algorithm: Algorithm,
        backend: Backend,
        settings: RuntimeSettings,
        decode: Decode,
        capture: Capture | None = None,
        grammars: Grammars | None = None,
        kv_scales: KVScales | None = None,
        step_costs: StepCosts | None = None,
    ) -> None:
        """`capture` replaces CUDA graphs, for tests of captured steps where there is no GPU. `grammars` compiles those
        of requests; without it no request may have one. `kv_scales` belong to the target's float8 cache. Times of
        steps for `adaptive` are `step_costs`, or measured before the first request.

        Raises EngineError or ValueError if the backend cannot do what target, algorithm and settings need.
        """
        device, longest = target.device, target.config.max_position_embeddings
        on_gpu = device.type == "cuda"
        level = graph_level(settings.graph, on_gpu)
        fused = runs_fused(settings, on_gpu, target.dtype == torch.float32)
        check_tree(algorithm)
        check_backend(backend, target, algorithm, settings)
        adaptive = _adapts(settings, algorithm)
        self._limit = min(settings.max_length or longest, longest)
        self._async_steps = int(on_gpu) if settings.async_steps is None else settings.async_steps
        # The last step of a request drafts past its end, and so do steps launched before its end was read.
        overshoot = max(algorithm.num_nodes, algorithm.draft_slots) + self._async_steps * (algorithm.max_depth + 1)
        context = self._limit + overshoot
        captures_prompts = level == "step" and backend.captures_prompts
        piggybacks = settings.mixed_prefill and captures_prompts
        slots = settings.max_batch + (ahead := prompts_ahead(settings) if piggybacks else 0)
        num_pages = settings.num_pages or slots * -(-context // settings.page_size)
        resources = Resources(
            target=target,
            backend=backend,
            device=device,
            dtype=target.dtype,
            kv_dtype=kv_dtype_of(settings) or target.dtype,
            num_pages=num_pages,
            page_size=settings.page_size,
            context=context,
            max_batch=slots,
            impl=settings.impl,
            fused=fused,
            deterministic=settings.deterministic,
            needs_path_probs=adaptive and not algorithm.chain,
        )
        self.scheduler = Scheduler(settings.max_batch, num_pages, settings.page_size, overshoot, decode, ahead)
        self.parts = _step_parts(algorithm, resources, ahead, adaptive, kv_scales, step_costs)
        prefills = _separate_prefills(self.parts, settings, self._limit)
        mixed = _mixed_prefills(self.parts, settings, prefills[-1]) if piggybacks else []
        self.runner = StepRunner(self.parts, level, PhaseClock(device), capture, mixed)
        self.prefiller = Prefiller(self.parts, prefills, self.runner.recorder if captures_prompts else None)
        self._grammars = grammars
        if (recorder := algorithm.recorder) is not None:
            plain = replace(settings, adaptive=False)
            self._recording = partial(Engine, target, recorder, backend, plain, decode, capture, grammars, kv_scales)
        self._session_is_open = False

    def generate(
        self,
        requests: Sequence[Request],
        on_step: Callable[[StepReport], None] | None = None,
        needs: SamplingNeeds | None = None,
        on_end: Callable[[Completion], None] | None = None,
        follow: Callable[[Completion], Request | None] | None = None,
    ) -> Generation:
        """Serve `requests` to the end, by steps made for `needs`; None: for the needs of these requests. `on_end` is
        called with each completion as its request ends. `follow` may answer a completion with another request, such as
        the next turn of a conversation; their completions come after the others, in the order of their ids.

        Raises EngineError before anything runs if a request does not fit the vocabulary, the context or the pool.
        However it ends, all pages are free again.
        """
        for request in requests:
            self.check(request)
        place = {request.id: index for index, request in enumerate(requests)}
        if len(place) < len(requests):
            raise EngineError("requests of one call must have different ids")
        needs = needs or SamplingNeeds.of(request.sampling for request in requests)
        if self.parts.algorithm.recorder is not None:
            plain = zip(requests, self._recording().generate(requests).completions, strict=True)
            requests = [replace(request, continuation=tuple(alone.token_ids)) for request, alone in plain]
        with self.session(needs) as session:
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
        `needs` bounds the sampling features of requests: a captured step does no more than it was captured for."""
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
        emit = algorithm.max_depth + 1
        width = 2 * emit * (1 + needs.top_logprobs) + 4 + emit + algorithm.num_nodes * (5 if needs.drafts else 1)
        readback: Readback[Launched] = Readback(self._async_steps, state.max_batch * width, device)
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

    def reset(self) -> None:
        self.parts.reset()
        if self.parts.sizing is not None:
            self.parts.sizing.reset()

    def _learn_costs(self, needs: SamplingNeeds) -> None:
        """Time the steps of each size before the first request, unless costs are known, by rank 0's clock."""
        parts, sizing = self.parts, self.parts.sizing
        if sizing is None or sizing.costs_ms or needs.constrained:
            return
        measured = self.runner.step_times(needs)
        times = torch.tensor(list(measured.values()), device=parts.resources.device)
        if parallel():
            (times,) = from_rank_0([times])
        step_ms = dict(zip(measured, times.tolist(), strict=True))
        sizing.set_costs(lambda slots, nodes: step_ms[slots, nodes])
        parts.state.reset()
        for cache in parts.resources.caches:
            cache.zero(slice(None))
        self.reset()
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


def _step_parts(
    algorithm: Algorithm,
    resources: Resources,
    ahead: int,
    adaptive: bool,
    kv_scales: KVScales | None,
    step_costs: StepCosts | None,
) -> StepParts:
    """What steps work on; `ahead` of the slots in `resources` are for prompts that wait complete."""
    device, config, rows = resources.device, resources.target.config, resources.max_batch - ahead
    memory = allocate_memory(config, resources, kv_scales)
    max_pages = -(-resources.context // resources.page_size)
    state = BatchState(rows, ahead, max_pages, resources.context, config.vocab_size, device)
    algorithm.bind(resources)
    sizing = Sizing(algorithm.num_nodes, buckets(rows), device) if adaptive else None
    backlog = DeferredObservation(len(algorithm.target_layers), resources) if adaptive else None
    if sizing is not None and step_costs is not None:
        sizing.set_costs(step_costs)
    experts = ExpertLedger.of(resources.target.model)
    return StepParts(algorithm, memory, state, resources, sizing, backlog, experts)


def default_tile(config: DecoderConfig, device: torch.device, rows: int = _MATRIX_ROWS) -> int:
    """Tokens of a tile, 16 to 64: on a GPU as few as make `rows` rows with the query heads of a KV head. Narrow tiles
    waste less on short prompts; a long prompt reads its keys once per tile."""
    if device.type != "cuda":
        return 64
    group = config.num_heads // config.num_kv_heads
    return min(64, max(16, 1 << (rows // group - 1).bit_length()))


def prompts_ahead(settings: RuntimeSettings) -> int:
    """Requests whose prompts are prefilled while all rows are taken. By default as many as may end in a step or two,
    and enough of them to fill a prefill with short prompts while others wait complete."""
    rows, asked = settings.max_batch, settings.prefill_ahead
    return min(rows, max(4, min(12, 3 * rows // 4), rows // 4)) if asked is None else asked


def _separate_prefills(parts: StepParts, settings: RuntimeSettings, longest: int) -> list[PrefillBatch]:
    """Chunks that come before a step, in ascending order of size; requests have up to `longest` tokens."""
    config, device = parts.resources.target.config, parts.resources.device
    tile = settings.prefill_tile
    if tile is None and _in_chunks(config, settings):
        tile = CHUNK
    if tile is None and longest <= _SHORT_REQUEST:
        tile = _narrow(config, device)
    elif tile is None:
        tile = default_tile(config, device, _MATRIX_ROWS * (2 if longest > _LONG_REQUEST else 1))
    tile = min(tile, settings.prefill_chunk)
    # No prefill is larger than all rows together.
    most = min(settings.prefill_chunk // tile, settings.max_batch * tiles_of(longest, tile))
    return [PrefillBatch(parts, size, tile) for size in tile_counts(most, dense=PASS_ROWS // tile)]


def _in_chunks(config: DecoderConfig, settings: RuntimeSettings) -> bool:
    """Whether linear attention takes prompts through chunks of `CHUNK` tokens: then all tiles are one, so that segments
    end between chunks, and the states of a text do not depend on the prefill schedule."""
    return not settings.deterministic and any(isinstance(kind, LinearConfig) for kind in config.mixings)


def _narrow(config: DecoderConfig, device: torch.device) -> int:
    """Tokens of a tile where padding costs more than keys that are read twice as often: on a GPU half the default."""
    tile = default_tile(config, device)
    return tile // 2 if device.type == "cuda" else tile


def _mixed_prefills(parts: StepParts, settings: RuntimeSettings, largest: PrefillBatch) -> list[PrefillBatch]:
    """Prefill batches that join steps, rising, none larger than the `largest` between steps, the smallest without a
    further pass over the weights. Every second one is left out if steps differ in size: each is captured with each."""
    config, device = parts.resources.target.config, parts.resources.device
    fixed = settings.prefill_tile is not None or _in_chunks(config, settings)
    tile = largest.tile if fixed else min(largest.tile, _narrow(config, device))
    least, most = (max(1, min(largest.size * largest.tile, tokens) // tile) for tokens in _MIXED_TOKENS)
    sizes = [size for size in tile_counts(most) if size >= least]
    if parts.sizing is not None:
        sizes = sorted({*sizes[::2], sizes[-1]})
    return [PrefillBatch(parts, size, tile) for size in sizes]


def kv_dtype_of(settings: RuntimeSettings) -> torch.dtype | None:
    return None if settings.kv_dtype == "auto" else torch.float8_e4m3fn


def check_tree(algorithm: Algorithm) -> None:
    """Raise EngineError if no tree has the size that the algorithm names."""
    nodes, depth = algorithm.num_nodes, algorithm.max_depth
    least, kind = (nodes - 1, "chain") if algorithm.chain else (min(1, nodes - 1), "tree")
    if not least <= depth < nodes:
        expected = str(least) if least == nodes - 1 else f"{least} to {nodes - 1}"
        raise EngineError(
            f"algo={algorithm.name}: max_depth: expected {expected} for a {kind} of {nodes} nodes, got {depth}"
        )


def _adapts(settings: RuntimeSettings, algorithm: Algorithm) -> bool:
    """Whether steps differ in size. Raises EngineError where that would change the distribution."""
    adaptive = settings.adaptive and algorithm.num_nodes > 1
    if adaptive and algorithm.rule != "target_only":
        raise EngineError(
            f"adaptive: algo={algorithm.name} samples its drafts (rule {algorithm.rule}), and a number of nodes that "
            "depends on them would change the distribution; expected the rule target_only"
        )
    return adaptive


def check_backend(backend: Backend, target: Target, algorithm: Algorithm, settings: RuntimeSettings) -> None:
    """Raise EngineError or ValueError where the backend cannot serve the target."""
    if settings.deterministic and not backend.deterministic:
        raise EngineError(f"deterministic: expected a backend built with deterministic, got backend={backend.name}")
    if settings.deterministic and not use_triton(settings.impl, target.model.model.embed_tokens.weight):
        raise EngineError(
            "deterministic: expected a GPU, or TRITON_INTERPRET=1 set before Triton is imported, and kernels; here the "
            f"definitions in torch run on {target.device} (impl={settings.impl}), whose bits depend on the batch"
        )
    verify = "decode" if algorithm.num_nodes == 1 else "verify"
    modes = {"prefill": "chain", verify: "chain" if algorithm.chain else "tree"}
    if settings.adaptive:
        modes["decode"] = "chain"
    dtype, device = target.dtype, target.device
    backend.check(target.config, modes, settings.page_size, dtype, device, kv_dtype=kv_dtype_of(settings))
