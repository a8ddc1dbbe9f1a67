"""Whether each method, on each backend, outputs exactly what the target alone outputs, and how far apart the rest is.

identity      in the run's dtype (float32 proves exactness, and so does a deterministic run in any dtype): every
              request, page size, batch size and level of capture, greedy and sampled, token for token against
              autoregressive decoding on the same backend; in a deterministic run, against one request at a time
invariance    the baseline itself: the same tokens for every batch size, level of capture, and place in the
              batch
prefill       a deterministic run only: tokens and log-probabilities, bit for bit, whether prompts are prefilled whole
              or in chunks, and whether the first half of an output was decoded or is part of the prompt
low           in bfloat16 rounding depends on the shape of a batch: requests that differ, the first position that does,
              and the gap between the logits of the two tokens there; a large gap would be a fault
distribution  acceptance rules for sampled drafts: see `distribution`
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Annotated, Any, TypedDict

from algorithms.engine.request import Completion, Request
from algorithms.models.loading import Target
from algorithms.step.sampling_params import SamplingParams
from experiments.app.hardware import INTERPRETER
from experiments.app.plan import Plan
from experiments.report import checks
from experiments.report.metrics import Difference, lossless_tone, num_faults
from experiments.report.tables import DASH, Column, Metric, Result, at, columns, figure
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded, baseline_config
from experiments.tasks.distribution import TOP_K, chi_square_p, filled_cells, testable
from experiments.tasks.numerical_tie import lossless

ALPHA = 1e-6  # a distribution test with a smaller p fails the run
CHUNKS = (1, 24)  # prompt tokens between two steps, in addition to the run's own number
SEED_STEP = 7919  # distance between the seeds of two turns


def _identical(result: Result | None) -> str:
    return f"{result['identical']}/{result['checked']}" if result else DASH


def _identical_tone(result: Result) -> str | None:
    return lossless_tone({"lossless": result})


def _low_precision(result: Result) -> str:
    return _identical(result["low_precision"])


def _first_flip(result: Result) -> str:
    position = at(result, "low_precision/first/position")
    return DASH if position is None else f"position {position}, gap {figure(result['low_precision']['gap'], 4)}"


def _distribution(result: Result) -> str:
    found = result["distribution"]
    return f"{found['p']:.2g} of {found['cells']} cells" if found else DASH


class IdentityResult(TypedDict):
    """One method on one backend, over all page sizes, batch sizes and levels of capture."""

    backend: Annotated[str, Metric("Attention backend.", "backend")]
    method: Annotated[str, Metric("Label of the method.", "method")]
    algo: str
    rule: Annotated[str, Metric("Acceptance rule.", "rule")]
    checked: int
    identical: Annotated[
        int,
        Metric(
            "Requests whose tokens equal autoregressive decoding, over requests compared.",
            "identical",
            show=_identical,
            tone=_identical_tone,
        ),
    ]
    near_ties: int
    tokens: Annotated[int, Metric("Tokens that were compared.", "tokens", digits=0)]
    first_difference: Difference | None
    low_precision: Annotated[
        dict[str, Any] | None, Metric("The same in `task.low_precision`, greedy.", "low precision", show=_low_precision)
    ]
    distribution: Annotated[
        dict[str, Any] | None,
        Metric(
            "Pearson's chi-square test of the first two tokens against their exact joint distribution: the probability "
            "that correct code fits no better. Below 1e-6 the run fails.",
            "chi-square p",
            show=_distribution,
        ),
    ]


class Losslessness(Task):
    """Each method on each backend, the baseline of a backend first. A difference in float32, or in a deterministic
    run, fails it."""

    objective = "share_identical"
    columns = (
        *columns(IdentityResult, "backend", "method", "rule", "identical", "tokens", "low_precision"),
        Column("first flip", _first_flip, help="First position that differs there, and the gap of the two logits."),
        *columns(IdentityResult, "distribution"),
    )

    def measure(self) -> Sequence[Result]:
        results: list[Result] = []
        for backend in self.plan.backends:
            backend_checks = BackendChecks(self, self.plan.varied(backend=backend))
            results.append(backend_checks.baseline_result())
            results += [backend_checks.prefill_result()] if self.plan.config.runtime.deterministic else []
            results += [backend_checks.method_result(label, algo) for label, algo in self.plan.methods.items()]
        return results

    def label(self, result: Result) -> str:
        return f"{result['method']} on {result['backend']}"

    def best(self, results: Sequence[Result]) -> Result:
        total = {key: sum(result[key] for result in results) for key in ("identical", "checked")}
        return {**total, self.objective: total["identical"] / total["checked"] if total["checked"] else 1.0}

    def failures(self, results: Sequence[Result]) -> list[str]:
        """Differences in an exact run, numerical ties aside, and distributions that fit too badly."""
        return [f"{self.label(result)}: {fault}" for result in results for fault in self._faults(result)]

    def _faults(self, result: Result) -> Iterator[str]:
        if self.plan.exact and num_faults(result):
            where = checks.describe_difference(result.get("first_difference"), self.plan.hardware.dtype)
            differing = f"{num_faults(result)} of {result['checked']} requests differ"
            yield f"{differing}; {where}" if where else differing
        if result["distribution"] and result["distribution"]["p"] < ALPHA:
            p = f"p = {result['distribution']['p']:.2g}"
            yield f"the sampled tokens do not follow the target's distribution ({p})"

    def in_low_precision(self, plan: Plan) -> Plan:
        """`plan` in `task.low_precision`."""
        return replace(plan, hardware=replace(plan.hardware, dtype=plan.config.task.low_precision))

    @cached_property
    def low_precision_target(self) -> Target:
        return self.in_low_precision(self.plan).load_target()


def _bare(request: Request, max_new_tokens: int) -> Request:
    """The request with its log-probabilities, and with nothing that depends on where its prompt ends."""
    given = request.sampling
    sampling = SamplingParams(max_new_tokens, temperature=given.temperature, seed=given.seed, logprobs=True)
    return replace(request, sampling=sampling)


class BackendChecks:
    """All checks on one backend. Baseline decodings are kept, since every method is compared with the same ones."""

    def __init__(self, task: Losslessness, plan: Plan) -> None:
        self._task, self._plan, self._settings = task, plan, plan.config.task
        (self._workload,) = plan.workloads
        self._graphs = self._settings.graphs_of(plan.config, plan.hardware.can_capture)
        self._sizes = list(product(self._settings.page_sizes, self._settings.batches, self._graphs))
        self._deterministic = plan.config.runtime.deterministic
        self._baselines: dict[int, Sequence[Completion]] = {}

    def _result(self, label: str, **found: Any) -> Result:
        """A result of autoregressive decoding, but for what `found` says."""
        names = {"backend": self._plan.config.backend.name, "method": label, "algo": AUTOREGRESSIVE}
        absent: Any = dict.fromkeys(("first_difference", "low_precision", "distribution"))
        return names | {"rule": "target_only", "near_ties": 0} | absent | found

    def baseline_result(self) -> Result:
        """Invariance of autoregressive decoding to batch size, level of capture and place in the batch."""
        by_id = {c.request_id: c.token_ids for c in self._baseline(0)}
        done: list[Completion] = []
        for batch, graph, order in product(self._settings.batches, self._graphs, (1, -1)):
            requests = self._requests(0)[::order]
            decoded = self._decode(baseline_config(), requests, self._settings.page_sizes[-1], batch, graph)
            done += decoded.generation.completions
        identical, tokens = sum(c.token_ids == by_id[c.request_id] for c in done), sum(len(c.token_ids) for c in done)
        return self._result(AUTOREGRESSIVE, checked=len(done), identical=identical, tokens=tokens)

    def prefill_result(self) -> Result:
        """Prompts in chunks, and prompts that hold half of the output, against whole prompts."""
        requests = [_bare(request, request.sampling.max_new_tokens) for request in self._requests(0)]
        whole = self._outputs(requests, self._plan.config.runtime.prefill_chunk, "prefill")
        half = [len(tokens) // 2 for tokens, _ in whole]
        longer = [
            replace(_bare(r, r.sampling.max_new_tokens - n), prompt_ids=r.prompt_ids + tuple(tokens[:n]))
            for r, n, (tokens, _) in zip(requests, half, whole, strict=True)
        ]
        rest = [(tokens[n:], logprobs[n:]) for n, (tokens, logprobs) in zip(half, whole, strict=True)]
        found = self._outputs(longer, self._plan.config.runtime.prefill_chunk, "prefill of half the output")
        pairs = list(zip(found, rest, strict=True))
        for chunk in CHUNKS:
            pairs += zip(self._outputs(requests, chunk, f"prefill by {chunk}"), whole, strict=True)
        identical, compared = sum(ours == expected for ours, expected in pairs), sum(len(ours[0]) for ours, _ in pairs)
        return self._result("prefill", checked=len(pairs), identical=identical, tokens=compared)

    def _outputs(self, requests: Sequence[Request], chunk: int, label: str) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities in the largest size, with prompts in chunks of `chunk` tokens."""
        sizes: Any = dict(zip(("page_size", "max_batch", "graph"), self._sizes[-1], strict=True))
        plan = self._plan.varied(**sizes, num_pages=None, prefill_chunk=chunk)
        label = f"{plan.config.backend.name} {label}"
        decoded = self._task.decode(baseline_config(), self._workload, requests, label, plan)
        return [(completion.token_ids, completion.logprobs) for completion in decoded.generation.completions]

    def method_result(self, label: str, algo: Any) -> Result:
        """Identity over all sizes, then low precision, then the distribution where identity is not promised."""
        total, tokens, turn, rule = Counter[str](), 0, 0, "target_only"
        first: Any = None
        # Greedy outputs never change: where samples are not compared by token, more turns would repeat the first.
        while turn < len(self._sizes) or (tokens < self._settings.min_tokens and rule == "target_only"):
            requests = self._requests(turn)
            ours = self._decode(algo, requests, *self._sizes[turn % len(self._sizes)])
            rule = ours.rule
            every = zip(requests, ours.generation.completions, self._baseline(turn), strict=True)
            exact = [each for each in every if rule == "target_only" or each[0].sampling.temperature == 0]
            comparison = lossless(self._task.target, exact, self._deterministic, self._workload.grammars)
            total.update({key: comparison[key] for key in ("identical", "checked", "near_ties")})  # type: ignore[literal-required]
            if comparison["first_difference"] and (first is None or first["numerical_tie"]):
                first = {**comparison["first_difference"], "turn": turn}
            tokens += sum(len(plain.token_ids) for _, _, plain in exact)
            turn += 1
        sampled = rule != "target_only" and self._settings.distribution_draws
        return self._result(
            label,
            algo=algo.name,
            rule=rule,
            **total,
            tokens=tokens,
            first_difference=first,
            low_precision=self._low_precision(algo) if self._settings.low_precision else None,
            distribution=self._distribution(algo) if sampled else None,
        )

    def _requests(self, turn: int) -> list[Request]:
        """Greedy and sampled requests, interleaved, which change places from turn to turn, with seeds of their turn.
        After one turn per size everything is sampled."""
        return [
            r.with_sampling(
                temperature=self._settings.temperature if (r.id + turn) % 2 or turn >= len(self._sizes) else 0.0,
                seed=r.sampling.seed + SEED_STEP * turn,
            )
            for r in self._workload.requests
        ]

    def _decode(
        self, algo: Any, requests: Sequence[Request], page_size: int, batch: int, graph: str, low: bool = False
    ) -> Decoded:
        plan = self._plan.varied(page_size=page_size, max_batch=batch, graph=graph, num_pages=None)
        label = f"{plan.config.backend.name} {algo.name} page {page_size} batch {batch} graph {graph}"
        target = None
        if low:
            plan, target = self._task.in_low_precision(plan), self._task.low_precision_target
        return self._task.decode(algo, self._workload, requests, label, plan, target)

    def _baseline(self, turn: int) -> Sequence[Completion]:
        if turn not in self._baselines:
            page, batch, graph = self._sizes[turn % len(self._sizes)]
            batch = 1 if self._deterministic else batch
            decoded = self._decode(baseline_config(), self._requests(turn), page, batch, graph)
            self._baselines[turn] = decoded.generation.completions
        return self._baselines[turn]

    @cached_property
    def _low_baseline(self) -> Decoded:
        requests = [r.with_sampling(temperature=0.0) for r in self._workload.requests]
        return self._decode(baseline_config(), requests, *self._sizes[-1], low=True)

    def _low_precision(self, algo: Any) -> dict[str, Any] | None:
        """Greedy decoding in the low precision: requests that differ, and the gap of logits at the first difference.
        None in Triton's interpreter, which computes that precision wrongly."""
        if self._plan.hardware.label == INTERPRETER:
            return None
        requests, plain = self._low_baseline.requests, self._low_baseline.generation.completions
        ours = self._decode(algo, requests, *self._sizes[-1], low=True).generation.completions
        compared = list(zip(requests, ours, plain, strict=True))
        found: Any = lossless(self._task.low_precision_target, compared, grammars=self._workload.grammars)
        first = found.pop("first_difference")
        return {**found, "first": first, "gap": first and first["gap"]}

    def _distribution(self, algo: Any) -> dict[str, Any]:
        """The first two tokens of many seeds, sampled with no other parameters than temperature and top-k."""
        request = min(self._workload.requests, key=lambda r: len(r.prompt_ids))
        draws, wanted = self._settings.distribution_draws, self._settings.temperature
        temperature, expected = testable(self._task.target, request, wanted, draws)
        sampling = SamplingParams(max_new_tokens=2, temperature=temperature, top_k=TOP_K)
        bare = Request(0, request.prompt_ids, sampling, request.eos_token_ids)
        requests = [replace(bare.with_sampling(seed=i), id=i) for i in range(draws)]
        batch = max(*self._settings.batches, 32)
        decoded = self._decode(algo, requests, self._settings.page_sizes[-1], batch, self._graphs[-1])
        counts = Counter(tuple(completion.token_ids) for completion in decoded.generation.completions)
        cells = filled_cells(expected.values(), draws)
        return {"p": chi_square_p(counts, expected), "cells": cells, "draws": draws, "temperature": temperature}
