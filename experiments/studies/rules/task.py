"""Which acceptance rule accepts most, on the same samples: exactly over a small vocabulary, and on the run's models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from experiments.app.errors import UserError, user_errors
from experiments.report.tables import Metric, Result, columns
from experiments.tasks.base import Task
from experiments.tasks.decoding import engine_of, make_algorithm


class RuleResult(TypedDict):
    """One rule on the samples of one drafter."""

    data: Annotated[str, Metric("Prompt set, or analytic: all samples over four tokens.", "data")]
    method: Annotated[str, Metric("Label of the drafter, or a shape of trees.", "method")]
    rule: Annotated[str, Metric("Acceptance rule.", "rule")]
    draft_sampling: Annotated[str, Metric("How drafts are sampled.", "draft_sampling")]
    num_nodes: Annotated[int, Metric("Nodes verified per request and step, the root included.", "nodes", digits=0)]
    expected_accepted: Annotated[
        float,
        Metric(
            "Mean number of accepted drafts: exact over the uniforms of the rule, for each sampled tree. ± takes "
            "requests as independent.",
            "accepted/step",
            digits=3,
        ),
    ]
    expected_accepted_interval: list[float] | None
    gain: Annotated[float, Metric("Gain over the last rule on the same samples.", "gain", digits=3)]
    gain_interval: list[float] | None
    row_steps: Annotated[int | None, Metric("Steps times the requests in them.", "steps", digits=0)]
    num_requests: Annotated[int | None, Metric("Number of requests.", "requests", digits=0)]


class VerificationRules(Task):
    """One result for each drafter, and each rule that is exact for its samples."""

    name = "verification_rules"
    objective = "expected_accepted"
    columns = columns(
        RuleResult, "data", "method", "rule", "expected_accepted", "gain", "draft_sampling", "num_nodes", "row_steps",
        "num_requests", wide=("draft_sampling", "num_nodes", "row_steps", "num_requests"),
    )  # fmt: skip

    def measure(self) -> Sequence[Result]:
        from experiments.studies.rules import analytic

        found: list[Result] = list(analytic.results()) if self.plan.config.task.analytic else []
        for label, algo in self.plan.methods.items():
            found += self._of_method(label, algo)
        if not found:
            raise UserError("task=verification_rules: expected task.analytic=true or a method, got neither")
        return found

    def _of_method(self, label: str, algo: Any) -> list[Result]:
        """All rules on the drafts of one method."""
        from algorithms.drafting.draft_sampling import DraftSampling
        from algorithms.engine.request import EngineError
        from experiments.studies.rules.probe import Probe, summary

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
        plan = self.plan.varied(adaptive=False, adaptive_cost=None)
        engine, _ = engine_of(plan, self.target, probe, workload.max_length)
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
        shared = {
            "data": workload.name,
            "method": label,
            "draft_sampling": sampling.kind,
            "num_nodes": algorithm.num_nodes,
        }
        return [
            {**shared, **settings, "rule": rule, **summary(probe.found, number, len(rules) - 1)}
            for number, rule in enumerate(rules)
        ]

    def label(self, result: Result) -> str:
        return f"{result['method']}, {result['rule']}"

    def best(self, results: Sequence[Result]) -> Result:
        return super().best([result for result in results if result["row_steps"] is not None] or results)

    def warnings(self, results: Sequence[Result]) -> list[str]:
        return [note for workload in self.plan.workloads for note in workload.notes]

    def failures(self, results: Sequence[Result]) -> list[str]:
        return []

    def show(self, results: Sequence[Result]) -> None:
        self.console.print("gain: over the last rule on the same samples", highlight=False)
