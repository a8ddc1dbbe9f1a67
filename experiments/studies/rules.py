"""Which acceptance rule accepts most, on the same samples of the run's drafters.

The engine runs with the rule `target_only`: the target's own choice at a seed decides, for every draft. So the
output is autoregressive sampling for every drafter and every way of sampling. In each step all rules are applied to the
same drafts after the same tokens, and their expectations over the uniforms are exact, so that only outputs and drafts
are random.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Annotated, Any, TypedDict

from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.drafting.draft_sampling import DraftSampling
from algorithms.engine.request import EngineError
from algorithms.mixed import Wrapper
from experiments.app.errors import UserError, user_errors
from experiments.report.intervals import ratio_interval
from experiments.report.tables import Metric, Result, columns
from experiments.tasks.base import Task
from experiments.tasks.decoding import engine_of, make_algorithm
from specdec_kernels import SamplingTensors
from specdec_kernels.verify import draft_by_node, expected_accepted


class Probe(Wrapper):
    """`inner` drafts and learns; `rules` are applied to its samples."""

    name = "rules_probe"

    def __init__(self, inner: Algorithm, rules: Sequence[str]) -> None:
        self.wrap(inner)
        self._rules = rules
        self.chain, self.num_nodes, self.max_depth = inner.chain, inner.num_nodes, inner.max_depth
        self.found: dict[int, list[list[float]]] = {}
        """Seed of the request to, for each step, the expected number of accepted drafts under each rule."""

    def propose(self, batch: Batch) -> DraftTree:
        self._sampled = self.inner[0].propose(batch)
        return replace(self._sampled, draft_probs=None, draft_rows=None)

    def inspect(self, batch: Batch, tree: DraftTree, logits: Tensor, sampling: SamplingTensors) -> None:
        sampled = self._sampled
        assert sampled.draft_probs is not None and batch.sampling.seeds is not None
        draft = draft_by_node(sampled.draft_probs, sampled.draft_rows, self.num_nodes)
        arguments = (tree.tokens, tree.links, logits, self.max_depth, sampling, draft)
        means = [expected_accepted(rule, *arguments).tolist() for rule in self._rules]
        seeds, active = batch.sampling.seeds.tolist(), batch.active.tolist()
        for seed, runs, *of_rules in zip(seeds, active, *means, strict=True):
            if runs:
                self.found.setdefault(seed, []).append(of_rules)

    def reset(self) -> None:
        super().reset()
        self.found.clear()


def summary(found: dict[int, list[list[float]]], rule: int, first: int) -> dict[str, Any]:
    """Figures of the rule with this number; its gain is over the rule `first`. Intervals of 95 % take requests as
    independent, and no steps."""
    steps = [len(of_request) for of_request in found.values()]
    sums = [sum(step[rule] for step in of_request) for of_request in found.values()]
    gains = [sum(step[rule] - step[first] for step in of_request) for of_request in found.values()]
    total = sum(steps)
    return {
        "expected_accepted": sum(sums) / total,
        "expected_accepted_interval": ratio_interval(sums, steps),
        "gain": sum(gains) / total,
        "gain_interval": None if rule == first else ratio_interval(gains, steps, least=-inf),
        "row_steps": total,
        "num_requests": len(steps),
    }


class RuleResult(TypedDict):
    """One rule on the samples of one drafter."""

    data: Annotated[str, Metric("Prompt set.", "data")]
    method: Annotated[str, Metric("Label of the drafter.", "method")]
    rule: Annotated[str, Metric("Acceptance rule.", "rule")]
    draft_sampling: Annotated[str, Metric("How drafts are sampled.", "draft_sampling")]
    num_nodes: Annotated[int, Metric("Nodes verified per request and step, the root included.", "nodes", digits=0)]
    expected_accepted: Annotated[
        float, Metric("Mean number of accepted drafts, exact over the uniforms.", "accepted/step", digits=3)
    ]
    expected_accepted_interval: list[float] | None
    gain: Annotated[float, Metric("Gain over the last rule on the same samples.", "gain", digits=3)]
    gain_interval: list[float] | None
    row_steps: Annotated[int, Metric("Steps times the requests in them.", "steps", digits=0)]
    num_requests: Annotated[int, Metric("Number of requests.", "requests", digits=0)]


class VerificationRules(Task):
    """One result for each drafter, and each rule that is exact for its samples."""

    objective = "expected_accepted"
    columns = columns(
        RuleResult, "data", "method", "rule", "expected_accepted", "gain", "draft_sampling", "num_nodes", "row_steps",
        "num_requests", wide=("draft_sampling", "num_nodes", "row_steps", "num_requests"),
    )  # fmt: skip

    def measure(self) -> Sequence[Result]:
        return [result for label, algo in self.plan.methods.items() for result in self._of_method(label, algo)]

    def _of_method(self, label: str, algo: Any) -> list[Result]:
        (workload,) = self.plan.workloads
        algorithm = make_algorithm(self.plan, self.target, algo)
        if algorithm.rule == "target_only":
            raise UserError(f"task=verification_rules: {label} samples nothing: expected algo.draft_sampling=sample")
        if algorithm.chain:
            raise UserError(f"task=verification_rules compares rules for trees: {label} drafts a chain")
        sampling = DraftSampling.of(algo.draft_sampling, algo.rule, algorithm.chain)
        rules = sampling.exact_rules
        probe = Probe(algorithm, rules)
        # All rules judge whole trees.
        plan = self.plan.varied(adaptive=False)
        engine = engine_of(plan, self.target, probe, workload.max_length)
        settings = dict(temperature=self.plan.config.task.temperature)
        # The probe keys its figures by the seed of a request.
        requests = [
            replace(request.with_sampling(**settings, seed=number), id=number)
            for number, request in enumerate(workload.requests)
        ]
        with user_errors(EngineError):
            record = self.recorder(workload.name, label)
            failed = [done.error for done in engine.generate(requests, on_end=record).completions if done.error]
            if failed:
                raise EngineError(failed[0])
        shared = {"data": workload.name, "method": label, "num_nodes": algorithm.num_nodes}
        return [
            {**shared, "draft_sampling": sampling.kind, **settings, "rule": rule}
            | summary(probe.found, number, len(rules) - 1)
            for number, rule in enumerate(rules)
        ]

    def label(self, result: Result) -> str:
        return f"{result['method']}, {result['rule']}"

    def show(self, results: Sequence[Result]) -> None:
        self.console.print("gain: over the last rule on the same samples", highlight=False)
