"""What capturing more of a step gains: the same run at each level, with the host's and the device's time per step.

`launch` is the host's time to start a step. `device` is the time of its phases. Captured or not, the tokens must be the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from experiments.report import metrics
from experiments.report.tables import COMPILED, DECODE_RATE, Row, number, text
from experiments.tasks.base import Task

NEEDS_GPU = "needs a CUDA device"


class GraphAblation(Task):
    """One row per level of capture. Without a GPU nothing can be captured, and the row says so."""

    name = "graph_ablation"
    objective = "decode_tokens_per_s"
    columns = (
        text("captured", "level"),
        number("host ms/step", "launch_ms_per_step", 3),
        number("device ms/step", "device_ms_per_step", 3),
        DECODE_RATE,
        number("graphs", "graphs/num_graphs", 0),
        number("capture ms", "graphs/warmup_ms", 0),
        number("memory", "graphs/memory_bytes", 0, " MiB", scale=2**-20),
        COMPILED,
        text("", "note"),
    )

    def measure(self) -> list[Row]:
        (workload,) = self.plan.workloads
        algo = self.plan.config.algo
        rows: list[Row] = []
        first: list[list[int]] = []
        for level in self.plan.config.task.levels:
            if level != "none" and not self.plan.hardware.can_capture:
                rows.append({"level": level, "note": NEEDS_GPU})
                continue
            decoded = self.decode(algo, workload, label=f"graph={level}", plan=self.plan.varied(graph=level))
            generation = decoded.generation
            tokens = [completion.token_ids for completion in generation.completions]
            first = first or tokens
            differing = sum(a != b for a, b in zip(tokens, first, strict=True))
            figures = metrics.summarize_method(generation, decoded.max_depth)
            steps, ledger = max(1, generation.num_steps), generation.ledger_ms
            rows.append(
                {
                    "level": level,
                    "drafts_with_model": decoded.drafts_with_model,
                    "differing": differing,
                    "note": level_note(algo.name, level, generation.graphs.level, differing),
                    "launch_ms_per_step": generation.launch_ms / steps,
                    "device_ms_per_step": sum(ms for phase, ms in ledger.items() if phase != "host") / steps,
                    **figures,
                    **metrics.compilations(decoded.compiled),
                    "graphs": asdict(generation.graphs),
                }
            )
        return rows

    def label(self, row: Row) -> str:
        return str(row["level"])

    def failures(self, rows: Sequence[Row]) -> list[str]:
        exact = self.plan.exact
        return [
            f"graph={self.label(row)}: {row['differing']} requests differ from those of graph={self.label(rows[0])}"
            for row in rows
            if exact and row.get("differing")
        ]


def level_note(algo: str, asked: str, used: str, differing: int) -> str:
    """What a reader of the row must know; an algorithm may fix its own level of capture."""
    if used != asked:
        return f"algo={algo} ran with graph={used}"
    return f"{differing} requests differ" if differing else "same tokens"
