"""What every task shares: an engine for one algorithm, and the figures of what it decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from experiments.app.errors import UserError, user_errors
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.replay.cost import read_step_times
from experiments.report import metrics
from experiments.tasks.near_tie import look_at, ties_possible

if TYPE_CHECKING:
    from algorithms.runtime.adaptive import StepCosts
    from algorithms.runtime.algorithm import Algorithm
    from algorithms.runtime.backends.protocol import Backend
    from algorithms.runtime.engine import Engine
    from algorithms.runtime.grammar import Grammars
    from algorithms.runtime.models.loading import Target
    from algorithms.runtime.request import Completion, Request
    from algorithms.runtime.session import Generation

AUTOREGRESSIVE = "autoregressive"


def generation_of(figures: Mapping[str, Any], completions: Sequence[Completion]) -> Generation:
    """The generation of `completions` whose other fields JSON gave back as `figures`."""
    from algorithms.runtime.cuda_graph import GraphReport
    from algorithms.runtime.session import Generation

    graphs: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in figures["graphs"].items()}
    return Generation(**{**figures, "graphs": GraphReport(**graphs), "completions": list(completions)})


@dataclass(frozen=True)
class Decoded:
    """One decoding of `requests` and what did it."""

    algo: str
    config: dict[str, Any]
    """Every setting of the algorithm."""
    requests: Sequence[Request]
    generation: Generation
    """All requests, those that ended before the run was resumed among them."""
    timed: Generation
    """The requests that its times are of."""
    max_depth: int
    rule: str
    drafts_with_model: bool
    attention: dict[str, str]
    """Phase of the attention to what computed it."""
    compiled: Sequence[str]
    """Kernels that were compiled after the warm-up, one name per compilation."""
    num_nodes: int
    """Nodes verified per step, node 0 included."""

    @classmethod
    def by(cls, algo: Any, algorithm: Algorithm, backend: Any, **decoding: Any) -> Decoded:
        """A decoding by `algorithm`, which has the configuration `algo`, on `backend`."""
        made = {
            "algo": algo.name,
            "config": asdict(algo),
            "max_depth": algorithm.max_depth,
            "rule": algorithm.rule,
            "drafts_with_model": algorithm.needs_draft_model,
            "attention": dict(backend.served),
            "num_nodes": algorithm.num_nodes,
        }
        return cls(**{**made, **decoding})

    @property
    def comparable(self) -> bool:
        """Whether the tokens must be those of autoregressive decoding, and not only of the same distribution."""
        return self.rule == "target_only" or all(request.sampling.temperature == 0 for request in self.requests)


def baseline_config() -> Any:
    """The configuration of autoregressive decoding."""
    from algorithms.registry import available

    return available()[AUTOREGRESSIVE].Config()


def warm_up_sizes(compiled: bool, max_batch: int) -> list[tuple[int, int]]:
    """(requests, new tokens) of the decodings before the clock runs.

    Kernels are compiled for powers of two of a batch, and prompts enter a running batch in any number. So every size is
    prefilled once, and then several batches pass through.
    """
    from algorithms.runtime.cuda_graph import buckets

    if not compiled:
        return [(1, 2)]
    return [(size, 2) for size in buckets(max_batch)] + [(4 * max_batch, 32)]


def make_engine(plan: Plan, target: Target, algo: Any, longest: int) -> tuple[Engine, Algorithm, Backend]:
    """An engine for the algorithm that `algo` configures, that algorithm, and its attention backend.

    `longest` is the length of the longest request in tokens, prompt and answer.
    """
    algorithm = make_algorithm(plan, target, algo)
    engine, backend = engine_of(plan, target, algorithm, longest)
    return engine, algorithm, backend


def make_algorithm(plan: Plan, target: Target, algo: Any) -> Algorithm:
    """The algorithm that `algo` configures, with its drafter."""
    from algorithms.registry import available

    kind = available()[algo.name]
    with _memory_errors(), user_errors(ValueError, OSError):
        return kind(algo, target, plan.config.model.drafter_of(kind.drafter_for(algo)))


def engine_of(plan: Plan, target: Target, algorithm: Algorithm, longest: int) -> tuple[Engine, Backend]:
    """An engine for `algorithm`, and its attention backend; `longest` as in `make_engine`."""
    from algorithms.runtime.backends.registry import backends
    from algorithms.runtime.engine import Engine
    from algorithms.runtime.engine_settings import EngineSettings

    config, runtime, impl = plan.config, plan.config.runtime, plan.hardware.impl
    settings = EngineSettings(
        page_size=runtime.page_size,
        max_batch=runtime.max_batch,
        num_pages=runtime.num_pages,
        max_length=runtime.max_length or longest,
        impl=impl,
        graph=plan.graph,
        overlap=runtime.overlap,
        prefill_chunk=runtime.prefill_chunk,
        piggyback=runtime.piggyback,
        prefill_ahead=runtime.prefill_ahead,
        fused=plan.hardware.forward == "fused",
        deterministic=runtime.deterministic,
        kv_dtype=plan.kv_dtype,
        kv_scales=plan.kv_scales(),
        adaptive=runtime.adaptive,
        step_costs=step_costs(plan, algorithm.name) if algorithm.num_nodes > 1 else None,
    )
    with _memory_errors(), user_errors(ValueError, OSError):
        # A backend records what served each phase, so every decoding has one of its own.
        backend = backends()[config.backend.name](config.backend, impl, runtime.deterministic)
        grammars = next((workload.grammars for workload in plan.workloads if workload.grammars), None)
        return Engine(target, algorithm, backend, settings, plan.tokenizer.decode, grammars=grammars), backend


def step_costs(plan: Plan, algo: str) -> StepCosts | None:
    """What steps of the algorithm `algo` cost, from `runtime.adaptive_cost`; None where nothing is given."""
    from algorithms.runtime.adaptive import StepCosts

    path = plan.config.runtime.adaptive_cost
    if path is None:
        return None
    with user_errors(ValueError):
        times = read_step_times(path, "runtime.adaptive_cost")
        return StepCosts({(time.batch, time.nodes): time.step_ms for time in times.kinds_of(algo, AUTOREGRESSIVE)})


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn a failed allocation into a UserError; on the CPU that error has no type of its own."""
    import torch

    cpu_messages = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not typed and not any(text in str(error) for text in cpu_messages):
            raise
        reason = (str(error) or "out of memory").splitlines()[0]
        raise UserError(f"{reason}\nlower runtime.num_pages, runtime.max_batch or sampling.max_new_tokens") from error


def timed_rounds(rounds: Sequence[Decoded]) -> list[Generation]:
    """The decodings that times are taken from: whole ones, or else what there is."""
    whole = [r.timed for r in rounds if len(r.timed.completions) == len(r.requests)]
    return whole or [r.timed for r in rounds if r.timed.completions]


def method_row(
    label: str,
    rounds: Sequence[Decoded],
    workload: Workload,
    baseline: tuple[dict[str, Any], Decoded] | None,
    target: Target,
    deterministic: bool = False,
) -> dict[str, Any]:
    """The figures of one method on one prompt set; `baseline` is the row and decoding that it is held against.

    Texts are those of the first of `rounds`. `target` is asked for the logits where the two texts of a request differ.
    """
    decoded, timed = rounds[0], timed_rounds(rounds)
    generation = decoded.generation
    row: dict[str, Any] = {"data": workload.name, "method": label, "algo": decoded.algo, "rule": decoded.rule}
    row |= {"drafts_with_model": decoded.drafts_with_model, "num_nodes": decoded.num_nodes}
    row |= {"graphs": asdict(generation.graphs), "attention": decoded.attention, "settings": decoded.config}
    row |= metrics.summarize_method(generation, decoded.max_depth, timed)
    row["num_resumed"] = len(generation.completions) - (len(timed[0].completions) if timed else 0)
    first = [completion.token_ids for completion in generation.completions]
    row["differing_rounds"] = sum([c.token_ids for c in r.generation.completions] != first for r in rounds[1:])
    row |= metrics.accuracy(generation.completions, workload.judge)
    row |= metrics.compilations([name for r in rounds for name in r.compiled])
    row["template"] = workload.markup
    row["adaptive"] = generation.adaptive
    against = baseline[1] if baseline and decoded.comparable else None
    row["lossless"] = _lossless(decoded, against, target, deterministic, workload.grammars)
    own = 1.0 if decoded.algo == AUTOREGRESSIVE else None
    row |= {"speedup_decode": own, "speedup_wall": own, "prediction": None}
    row |= {"speedup_decode_interval": None, "speedup_wall_interval": None}
    return row | (metrics.against_baseline(row, baseline[0]) if baseline else {})


def _lossless(
    decoded: Decoded, plain: Decoded | None, target: Target, deterministic: bool, grammars: Grammars | None
) -> dict[str, Any]:
    """What `metrics.lossless` says of the requests that both were asked.

    A later turn of a conversation whose first answers differ is another question.
    """
    if plain is None:
        return metrics.lossless(decoded.generation.completions, None)
    theirs = {r.id: (r, c) for r, c in zip(plain.requests, plain.generation.completions, strict=True)}
    same = [
        (request, ours, theirs[request.id][1])
        for request, ours in zip(decoded.requests, decoded.generation.completions, strict=True)
        if request.id in theirs and theirs[request.id][0].prompt_ids == request.prompt_ids
    ]
    asked, baseline = [request for request, _, _ in same], [completion for _, _, completion in same]
    look = look_at(target, asked, baseline, deterministic, grammars)
    ties = ties_possible(target, asked, deterministic)
    return metrics.lossless([completion for _, completion, _ in same], baseline, look, ties)
