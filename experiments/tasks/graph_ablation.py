"""Gain of capturing more of a step: the same run at each level, with the host's and the device's time per step.

Captured or not, the tokens must be the same.
"""

from collections.abc import Sequence
from typing import Annotated

from experiments.report.metrics import MethodResult
from experiments.report.tables import Metric, Result, columns
from experiments.tasks.base import Task
from experiments.tasks.decoding import method_result

NEEDS_GPU = "needs a CUDA device"


class GraphResult(MethodResult):
    """One level of capture. Without a GPU nothing can be captured, and the result is `level` and `note`."""

    level: Annotated[str, Metric("How much of a step is captured in CUDA graphs.", "captured")]
    launch_ms_per_step: Annotated[float, Metric("The host's time to start a step.", "host ms/step", digits=3)]
    device_ms_per_step: Annotated[float, Metric("The device's time for its phases.", "device ms/step", digits=3)]
    differing: int
    note: Annotated[str, Metric("Whether the tokens are those of the first level.", "note")]


class GraphAblation(Task):
    """One result per level of capture."""

    objective = "decode_tokens_per_s"
    columns = (
        *columns(GraphResult, "level", "launch_ms_per_step", "device_ms_per_step", "decode_tokens_per_s"),
        Metric("Captured graphs.", "graphs", digits=0).column("graphs/num_graphs", numeric=True),
        Metric("Time of capture.", "capture ms", digits=0).column("graphs/warmup_ms", numeric=True),
        Metric("Memory of the graphs.", "memory", digits=0, unit=" MiB", scale=2**-20).column(
            "graphs/memory_bytes", True
        ),
        *columns(GraphResult, "compiled", "note", wide=["compiled"]),
    )

    def measure(self) -> Sequence[Result]:
        (workload,) = self.plan.workloads
        algo = self.plan.config.algo
        results: list[Result] = []
        first: list[list[int]] = []
        for level in self.plan.config.task.levels:
            if level != "none" and not self.plan.hardware.can_capture:
                results.append({"level": level, "note": NEEDS_GPU})
                continue
            decoded = self.decode(algo, workload, label=f"graph={level}", plan=self.plan.varied(graph=level))
            generation = decoded.generation
            tokens = [completion.token_ids for completion in generation.completions]
            first = first or tokens
            differing = sum(a != b for a, b in zip(tokens, first, strict=True))
            steps, phases = max(1, generation.num_steps), generation.phase_times_ms
            own = {
                "level": level,
                "differing": differing,
                "note": f"{differing} requests differ" if differing else "same tokens",
                "launch_ms_per_step": generation.launch_ms / steps,
                "device_ms_per_step": sum(ms for phase, ms in phases.items() if phase != "host") / steps,
            }
            results.append({**method_result(level, [decoded], [0], workload, None, self.target), **own})
        return results

    def label(self, result: Result) -> str:
        return str(result["level"])

    def failures(self, results: Sequence[Result]) -> list[str]:
        first = self.label(results[0])
        return [
            f"graph={self.label(result)}: {result['differing']} requests differ from those of graph={first}"
            for result in results
            if self.plan.exact and result.get("differing")
        ]
