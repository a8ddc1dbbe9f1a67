"""Several methods on the same prompts in one run: one target, one cache, one verifier, one clock; only drafters differ.

The target alone decodes every prompt set, too. Speedups, losslessness and accuracy of each method are relative to that.
"""

from collections.abc import Sequence

from experiments.report.html_page import acceptance_lines, step_times
from experiments.report.metrics import COMPARE
from experiments.report.tables import Result, grouped
from experiments.report.templates import section
from experiments.tasks.base import Task


class Compare(Task):
    """Every method on every prompt set, each set with its baseline first."""

    objective = "tokens_per_step"
    columns = COMPARE

    def measure(self) -> Sequence[Result]:
        sets = [self.decode_methods(workload, note=f" on {workload.name}") for workload in self.plan.workloads]
        return [result for of_set in sets for result, _ in of_set]

    def label(self, result: Result) -> str:
        return f"{result['data']}, {result['method']}"

    def sections(self, results: Sequence[Result]) -> list[str]:
        parts = []
        for (data,), here in grouped(results, ["data"]).items():
            parts.append(section(f"Acceptance by draft position, {data}", acceptance_lines(here)))
            parts.append(section(f"Time of a step, {data}", step_times(here)))
        return parts
