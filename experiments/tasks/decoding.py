"""Shared by every task: an engine for one algorithm, and the result of what it decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from algorithms import load_algorithm, load_backend
from algorithms.algorithm import Algorithm
from algorithms.engine.engine import Engine
from algorithms.engine.request import Request
from algorithms.engine.session import Generation
from algorithms.models.loading import Target
from algorithms.registry import available
from algorithms.step.runner import buckets
from algorithms.step.sampling_params import SamplingNeeds
from experiments.app.errors import UserError, user_errors
from experiments.app.plan import Plan, kv_dtype_of
from experiments.app.workload import Workload
from experiments.report import summarize
from experiments.report.metrics import MethodResult
from experiments.tasks.numerical_tie import lossless

AUTOREGRESSIVE = "autoregressive"
WARM_UP_PROMPT = 512
"""Most prompt tokens of a request of the warm-up where prefills are captured: a graph launches the same for any
prompt."""


@dataclass(frozen=True)
class Decoded:
    """One decoding of `requests` and what did it."""

    algo: str
    config: dict[str, Any]  # every setting of the algorithm
    requests: Sequence[Request]
    generation: Generation  # all requests, those that ended before the run was resumed among them
    timed: Generation  # the requests that its times are of
    max_depth: int
    rule: str
    drafts_with_model: bool
    attention: dict[str, str]  # phase of the attention to what computed it
    compiled: Sequence[str]  # kernels that were compiled after the warm-up, one name per compilation
    num_nodes: int  # nodes verified per step, the root included
    process: str = ""  # the process of the run whose clock the times are of; a run that is resumed has several

    @property
    def whole(self) -> bool:
        """Whether its times are of all requests."""
        return len(self.timed.completions) == len(self.requests)

    @property
    def comparable(self) -> bool:
        """Whether the tokens must be those of autoregressive decoding, and not only of the same distribution."""
        return self.rule == "target_only" or all(request.sampling.temperature == 0 for request in self.requests)


def baseline_config() -> Any:
    """The configuration of autoregressive decoding."""
    return available()[AUTOREGRESSIVE].Config()


def warm_up_sizes(compiled: bool, max_batch: int) -> list[tuple[int, int]]:
    """(requests, new tokens) of the decodings before the clock runs. Kernels are compiled for powers of two of a batch,
    and prompts enter a running batch in any number. So every size is prefilled once, and then several batches pass
    through."""
    return [*((size, 2) for size in buckets(max_batch)), (4 * max_batch, 32)] if compiled else [(1, 2)]


def warm_up(engine: Engine, plan: Plan, requests: Sequence[Request]) -> None:
    """Decode the beginnings of `requests`, so that compilation and first imports are no part of a step."""
    # A few requests may need less than all of them, whose steps run other kernels.
    needs = SamplingNeeds.of(request.sampling for request in requests)
    prompt = WARM_UP_PROMPT if engine.prefiller.captures else None
    for count, tokens in warm_up_sizes(plan.hardware.label == "triton", plan.config.runtime.max_batch):
        engine.generate([request.shortened(tokens, prompt) for request in requests[:count]], needs=needs)
    engine.reset()


def make_algorithm(plan: Plan, target: Target, algo: Any) -> Algorithm:
    """The algorithm that `algo` configures, with its drafter."""
    # PyTorch keeps the pool of the engine before; a drafter inside it would leave a hole too small for the next pool.
    torch.cuda.empty_cache()
    drafter = plan.config.model.drafter_of_method(algo)
    with _memory_errors(), user_errors(ValueError, OSError):
        return load_algorithm(algo, target, drafter)


def engine_of(plan: Plan, target: Target, algorithm: Algorithm, longest: int) -> Engine:
    """An engine for `algorithm`; `longest` is the length of the longest request in tokens, prompt and output."""
    config, runtime, impl = plan.config, plan.config.runtime, plan.hardware.impl
    settings = replace(
        runtime,
        impl=impl,
        graph=plan.graph,
        forward=plan.hardware.forward,
        max_length=runtime.max_length or longest,
        kv_dtype="auto" if kv_dtype_of(config) is None else runtime.kv_dtype,
        kv_scales=None,
    )
    with _memory_errors(), user_errors(ValueError, OSError):
        # A backend records what served each phase, so every decoding has one of its own.
        backend = load_backend(config.backend, impl, runtime.deterministic)
        grammars = next((workload.grammars for workload in plan.workloads if workload.grammars), None)
        given: Any = dict(grammars=grammars, kv_scales=plan.kv_scales())
        return Engine(target, algorithm, backend, settings, plan.tokenizer.decode, **given)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn a failed allocation into a UserError; on the CPU that error has no type of its own."""
    cpu_messages = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        typed = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not typed and not any(text in str(error) for text in cpu_messages):
            raise
        reason = (str(error) or "out of memory").splitlines()[0]
        raise UserError(f"{reason}\nlower runtime.num_pages, runtime.max_batch or sampling.max_new_tokens") from error


def timed_rounds(rounds: Mapping[str, Sequence[Decoded]]) -> list[int]:
    """The rounds that times are taken from: those that one process decoded whole, for every method in `rounds`. Of
    several processes of a resumed run, the one with the most such rounds counts, of equals the latest."""
    found: dict[str, list[int]] = {}
    for number, of_methods in enumerate(zip(*rounds.values(), strict=True)):
        processes = {decoded.process for decoded in of_methods}
        if len(processes) == 1 and all(decoded.whole for decoded in of_methods):
            found.setdefault(processes.pop(), []).append(number)
    return max(reversed(found.values()), key=len, default=[])


def method_result(
    label: str,
    rounds: Sequence[Decoded],
    timed: Sequence[int],
    workload: Workload,
    baseline: tuple[MethodResult, Decoded] | None,
    target: Target,
    deterministic: bool = False,
) -> MethodResult:
    """The result of one method on one prompt set; `baseline` is the result and decoding that it is compared with.
    Outputs are those of the first of `rounds`, times those of the rounds `timed`. `target` computes the logits where
    two outputs of a request differ."""
    decoded, generation = rounds[0], rounds[0].generation
    completions = generation.completions
    first = [completion.token_ids for completion in completions]
    own = 1.0 if decoded.algo == AUTOREGRESSIVE and timed else None
    compared = []
    if baseline and decoded.comparable:
        # A later turn of a conversation whose first answers differ is another question.
        plain = baseline[1]
        theirs = {(r.id, r.prompt_ids): c for r, c in zip(plain.requests, plain.generation.completions, strict=True)}
        ours = zip(decoded.requests, completions, strict=True)
        compared = [(r, c, theirs[r.id, r.prompt_ids]) for r, c in ours if (r.id, r.prompt_ids) in theirs]
    result: Any = {
        "data": workload.name,
        "method": label,
        "algo": decoded.algo,
        "rule": decoded.rule,
        "drafts_with_model": decoded.drafts_with_model,
        "num_nodes": decoded.num_nodes,
        "graphs": asdict(generation.graphs),
        "attention": decoded.attention,
        "settings": decoded.config,
        **summarize.summarize_method(generation, decoded.max_depth, [rounds[number].timed for number in timed]),
        "num_resumed": len(completions) - len(decoded.timed.completions),
        "num_timed_rounds": len(timed),
        "differing_rounds": sum([c.token_ids for c in r.generation.completions] != first for r in rounds[1:]),
        **summarize.accuracy(completions, workload.judge),
        **summarize.compilations([name for r in rounds for name in r.compiled]),
        "template": workload.markup,
        "adaptive": generation.adaptive,
        "lossless": lossless(target, compared, deterministic, workload.grammars),
        **{"speedup_decode": own, "speedup_wall": own, "prediction": None},
        **{"speedup_decode_interval": None, "speedup_wall_interval": None},
    }
    return result | (summarize.against_baseline(result, baseline[0]) if baseline and timed else {})  # type: ignore[no-any-return]
