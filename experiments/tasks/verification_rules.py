"""Which acceptance rule accepts most, on the same draws: over a small vocabulary exactly, then on the run's models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.app.errors import UserError, user_errors
from experiments.report import tables
from experiments.report.tables import Row
from experiments.tasks.base import Task
from experiments.tasks.decoding import engine_of, make_algorithm


class VerificationRules(Task):
    """One row for each drafter, and each rule that is exact for the way it draws."""

    name = "verification_rules"
    objective = "expected_accepted"
    columns = (
        tables.text("data", "data"),
        tables.METHOD,
        tables.text("rule", "rule"),
        tables.with_interval("accepted/step", "expected_accepted", 3),
        tables.with_interval("gain", "gain", 3),
        replace(tables.text("draw", "draw"), narrow=False),
        replace(tables.number("nodes", "num_nodes", 0), narrow=False),
        replace(tables.number("steps", "row_steps", 0), narrow=False),
        replace(tables.number("requests", "num_requests", 0), narrow=False),
    )

    def measure(self) -> list[Row]:
        from experiments.rules import analytic

        found: list[Row] = list(analytic.rows()) if self.plan.config.task.analytic else []
        for label, algo in self.plan.methods.items():
            found += self._rows(label, algo)
        if not found:
            raise UserError("task=verification_rules: expected task.analytic=true or a method, got neither")
        return found

    def _rows(self, label: str, algo: Any) -> list[Row]:
        """The rules on the drafts of one method."""
        from algorithms.runtime.drawing import Drawing
        from algorithms.runtime.request import EngineError
        from experiments.rules.probe import Probe, summary

        (workload,) = self.plan.workloads
        algorithm = make_algorithm(self.plan, self.target, algo)
        if algorithm.rule == "target_only":
            raise UserError(f"task=verification_rules: {label} draws nothing: expected algo.draw=sample, for example")
        if algorithm.chain:
            raise UserError(f"task=verification_rules compares rules for trees: {label} drafts a chain")
        drawing = Drawing.of(algo.draw, algo.rule, algorithm.chain)
        rules = drawing.exact_rules
        probe = Probe(algorithm, rules)
        engine, _ = engine_of(self.plan, self.target, probe, workload.max_length)
        settings = dict(temperature=self.plan.config.task.temperature)
        # A request of its own seed: the figures are kept by it.
        asked = [
            replace(request.with_sampling(**settings, seed=number), id=number)
            for number, request in enumerate(workload.requests)
        ]
        with user_errors(EngineError):
            record = self.recorder(workload.name, label)
            failed = [done.error for done in engine.generate(asked, on_end=record).completions if done.error]
        if failed:
            raise EngineError(failed[0])
        shared = {"data": workload.name, "method": label, "draw": drawing.draw, "num_nodes": algorithm.num_nodes}
        shared |= settings
        return [
            {**shared, "rule": rule, **summary(probe.found, number, len(rules) - 1)}
            for number, rule in enumerate(rules)
        ]

    def label(self, row: Row) -> str:
        return f"{row['method']}, {row['rule']}"

    def best(self, rows: Sequence[Row]) -> Row:
        return super().best([row for row in rows if row["row_steps"] is not None] or rows)

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        return [note for workload in self.plan.workloads for note in workload.notes]

    def failures(self, rows: Sequence[Row]) -> list[str]:
        return []

    def show(self, rows: Sequence[Row]) -> None:
        self.console.print("gain: over the last rule for the same draws", highlight=False)
