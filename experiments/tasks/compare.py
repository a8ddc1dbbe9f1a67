"""Several methods on the same prompts in one run: one target, one cache, one verifier, one clock; only drafters differ.

The target alone decodes every prompt set once. Speedups, identity and accuracy of each method are held against that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.report import tables
from experiments.report.page import acceptance_lines, section, step_times
from experiments.report.tables import Row
from experiments.tasks.base import Task


class Compare(Task):
    """Every method on every prompt set, each set with its baseline first."""

    name = "compare"
    objective = "tokens_per_step"
    columns = (
        tables.text("data", "data"),
        tables.METHOD,
        tables.DECODE_SPEEDUP,
        tables.number("predicted", "prediction/predicted", 2, "×"),
        tables.TOKENS_PER_STEP,
        tables.ACCEPTANCE_BY_POSITION,
        replace(tables.ACCEPTANCE_RATE, narrow=False),
        tables.STEP_MS,
        tables.LOSSLESS,
        tables.ACCURACY,
        tables.CUT,
        tables.PARSED,
        tables.COMPILED,
    )

    def measure(self) -> list[Row]:
        return [
            row
            for workload in self.plan.workloads
            for row, _ in self.decode_methods(workload, note=f" on {workload.name}")
        ]

    def label(self, row: Row) -> str:
        return f"{row['data']}, {row['method']}"

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        levels = sorted({row["graphs"]["level"] for row in rows})
        unfair = f"methods differ in runtime.graph ({', '.join(levels)}): set it for all of them"
        return ([unfair] if len(levels) > 1 else []) + super().warnings(rows)

    def sections(self, rows: Sequence[Row]) -> list[str]:
        parts = []
        for data in dict.fromkeys(row["data"] for row in rows):
            here = [row for row in rows if row["data"] == data]
            parts.append(section(f"Acceptance by draft position, {data}", acceptance_lines(here)))
            parts.append(section(f"Time of a step, {data}", step_times(here)))
        return parts
