"""Gain of choosing the draft length of each step, compared with every fixed one and with no draft at all.

For each method and batch one engine serves the same requests again and again: with every length fixed, and with
`runtime.adaptive` choosing. So all of them replay the same graphs, and only the lengths differ. The method as it is
configured, without lengths to choose from, and the target alone run in engines of their own.

In bfloat16 steps of other sizes round differently, so outputs differ between settings, and with them what is accepted.
With `runtime.deterministic=true` all settings give the same output, and only the lengths are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any

from algorithms.engine.engine import Engine
from algorithms.models.loading import Target
from experiments.app.errors import UserError
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.report.metrics import MethodResult
from experiments.report.tables import DASH, Column, Metric, Result, columns, figure
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded, baseline_config, method_result
from experiments.tasks.throughput import at_concurrency

CHOSEN, CONFIGURED = "adaptive", "configured"


class AdaptiveResult(MethodResult):
    """One method in one batch with one setting of the draft length."""

    batch: Annotated[int, Metric("Requests at a time, at most.", "batch", digits=0)]
    setting: Annotated[
        str, Metric("Nodes of every step; `configured`: as configured; `adaptive`: chosen for each step.", "nodes")
    ]
    ratio_to_best_fixed: Annotated[
        float | None,
        Metric(
            "Decode tokens/s over those of the best fixed number of nodes, `configured` included.",
            "over the best fixed",
            digits=3,
            unit="×",
        ),
    ]


def _steps(result: Result) -> str:
    steps = (result.get("adaptive") or {}).get("steps_by_nodes", {})
    return " · ".join(f"{nodes}: {count}" for nodes, count in steps.items() if count) or DASH


class Adaptive(Task):
    """Every method at every batch on every prompt set."""

    shares_engines = True
    objective = "ratio_to_best_fixed"
    columns = (
        *columns(AdaptiveResult, "data", "batch", "method", "setting", "decode_tokens_per_s"),
        Column("over autoregressive", lambda result: figure(result["speedup_decode"], 3, "×")),
        *columns(AdaptiveResult, "ratio_to_best_fixed", "tokens_per_step", "lossless"),
        Column("steps by nodes", _steps, numeric=False, help="Steps of each number of nodes, where there are several."),
        *columns(AdaptiveResult, "compiled", wide=["compiled"]),
    )

    _fixed: int | None = None  # the size that every step of the next decoding has; None lets the engine choose

    def measure(self) -> Sequence[Result]:
        return [result for batch in self.plan.config.task.batches for result in self._of_batch(batch)]

    def label(self, result: Result) -> str:
        return f"{result['data']} ×{result['batch']}, {result['method']}, {result['setting']}"

    def best(self, results: Sequence[Result]) -> Result:
        """The choice that falls shortest of the best fixed number of nodes."""
        return min((each for each in results if each["setting"] == CHOSEN), key=lambda each: each[self.objective])

    def show(self, results: Sequence[Result]) -> None:
        worst = self.best(results)
        self.console.print(
            f"least: {self.label(worst)} at {worst['ratio_to_best_fixed']:.3f} of the best fixed number of nodes, "
            f"{worst['speedup_decode']:.3f} of autoregressive decoding",
            highlight=False,
        )

    def _of_batch(self, batch: int) -> Iterator[Result]:
        """All results of one batch: first the target alone, then each method."""
        plan = self.plan.varied(max_batch=batch, num_pages=None, adaptive=False)
        baselines: dict[str, tuple[MethodResult, Decoded]] = {}
        for workload in plan.workloads:
            rounds = self._decoded(baseline_config(), AUTOREGRESSIVE, workload, plan, {"1": None})["1"]
            result = self._result(AUTOREGRESSIVE, rounds, workload, None)
            baselines[workload.name] = result, rounds[0]
            yield {**result, "batch": batch, "setting": "1", "ratio_to_best_fixed": None}
        for label, algo in self.plan.methods.items():
            self.give_up_engines()
            configured = [self._decoded(algo, label, each, plan, {CONFIGURED: None}) for each in plan.workloads]
            chosen = plan.varied(adaptive=True)
            sizes = self._sizes(label, algo, chosen)
            for workload, decoded in zip(plan.workloads, configured, strict=True):
                decoded |= self._decoded(algo, label, workload, chosen, sizes)
                results = {
                    setting: self._result(label, rounds, workload, baselines[workload.name])
                    for setting, rounds in decoded.items()
                }
                fixed = max(r["decode_tokens_per_s"] or 0.0 for setting, r in results.items() if setting != CHOSEN)
                for setting, result in results.items():
                    nodes = int(setting) if setting.isdigit() else result["num_nodes"]
                    ratio = (result["decode_tokens_per_s"] or 0.0) / fixed
                    own = {"batch": batch, "setting": setting, "num_nodes": nodes, "ratio_to_best_fixed": ratio}
                    yield {**result, **own}

    def _sizes(self, label: str, algo: Any, plan: Plan) -> dict[str, int | None]:
        """The numbers of nodes of a drafting step, each with what the engine fixes for it, and the engine's choice."""
        sizing = self.engine_for(plan, self.target, algo, plan.workloads[0]).parts.sizing
        if sizing is None:
            raise UserError(f"task=adaptive: {label} verifies one node a step, so there is nothing to choose")
        return {**{str(nodes): index for index, nodes in enumerate(sizing.nodes) if index}, CHOSEN: None}

    def _result(self, label: str, rounds: Sequence[Decoded], workload: Workload, baseline: Any) -> MethodResult:
        deterministic = self.plan.config.runtime.deterministic
        return method_result(label, rounds, range(len(rounds)), workload, baseline, self.target, deterministic)

    def _decoded(
        self, algo: Any, label: str, workload: Workload, plan: Plan, settings: Mapping[str, int | None]
    ) -> dict[str, list[Decoded]]:
        """The `task.repeats` interleaved rounds of a prompt set in each of `settings`."""
        batch = plan.config.runtime.max_batch
        requests = at_concurrency(plan, workload, batch)[1]
        found: dict[str, list[Decoded]] = {setting: [] for setting in settings}
        for number, (setting, self._fixed) in product(range(plan.config.task.repeats), settings.items()):
            name = f"{label} ×{batch}, {setting}"
            found[setting].append(self.decode(algo, workload, requests, name, plan, round_number=number))
        return found

    def engine_for(self, plan: Plan, target: Target, algo: Any, workload: Workload) -> Engine:
        engine = super().engine_for(plan, target, algo, workload)
        if engine.parts.sizing is not None:
            engine.parts.sizing.pacing.fixed = self._fixed
        return engine
