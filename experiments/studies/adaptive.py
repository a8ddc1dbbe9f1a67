"""Gain of choosing the draft length of each step, compared with every fixed one and with no draft at all.

For each method and batch one engine serves the same requests again and again: with every length fixed, and with
`runtime.adaptive` choosing. So all of them replay the same graphs, and only the lengths differ. The method as it is
configured, without lengths to choose from, and the target alone run in engines of their own.

In bfloat16 steps of other sizes round differently, so outputs differ between settings, and with them what is accepted.
With `runtime.deterministic=true` all settings give the same output, and only the lengths are compared.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Any

from algorithms.engine.request import EngineError
from experiments.app.errors import UserError, user_errors
from experiments.app.plan import Plan
from experiments.report.metrics import MethodResult
from experiments.report.tables import DASH, Column, Metric, Result, columns, figure
from experiments.tasks.base import Task
from experiments.tasks.decoding import (
    AUTOREGRESSIVE,
    Decoded,
    baseline_config,
    engine_of,
    make_algorithm,
    method_result,
    warm_up,
)
from experiments.tasks.throughput import at_concurrency
from specdec_kernels.launch import record_compilations

CHOSEN, CONFIGURED = "adaptive", "configured"
Key = tuple[str, str]  # prompt set and setting


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

    objective = "ratio_to_best_fixed"
    columns = (
        *columns(AdaptiveResult, "data", "batch", "method", "setting", "decode_tokens_per_s"),
        Column("over autoregressive", lambda result: figure(result["speedup_decode"], 3, "×")),
        *columns(AdaptiveResult, "ratio_to_best_fixed", "tokens_per_step", "lossless"),
        Column("steps by nodes", _steps, numeric=False, help="Steps of each number of nodes, where there are several."),
        *columns(AdaptiveResult, "compiled", wide=["compiled"]),
    )

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
        baselines: dict[str, Any] = {}
        for (data, _), rounds in self._decoded(baseline_config(), AUTOREGRESSIVE, plan, "1").items():
            result = self._result(AUTOREGRESSIVE, data, rounds, None)
            baselines[data] = (result, rounds[0])
            yield {**result, "batch": batch, "setting": "1", "ratio_to_best_fixed": None}
        for label, algo in self.plan.methods.items():
            decoded = self._decoded(algo, label, plan, CONFIGURED)
            decoded |= self._decoded(algo, label, plan.varied(adaptive=True), None)
            found = {key: self._result(label, key[0], rounds, baselines[key[0]]) for key, rounds in decoded.items()}
            for (data, setting), result in found.items():
                fixed = [r["decode_tokens_per_s"] or 0.0 for (d, s), r in found.items() if d == data and s != CHOSEN]
                ratio = (result["decode_tokens_per_s"] or 0.0) / max(fixed)
                yield {**result, "batch": batch, "setting": setting, "ratio_to_best_fixed": ratio}

    def _result(self, label: str, data: str, rounds: list[Decoded], baseline: Any) -> MethodResult:
        workload = next(workload for workload in self.plan.workloads if workload.name == data)
        deterministic = self.plan.config.runtime.deterministic
        return method_result(label, rounds, range(len(rounds)), workload, baseline, self.target, deterministic)

    def _decoded(self, algo: Any, label: str, plan: Plan, only: str | None) -> dict[Key, list[Decoded]]:
        """Every prompt set in every setting, by one engine, `task.repeats` interleaved rounds. The setting is `only`,
        or each number of nodes of the engine, and its choice."""
        longest = max(workload.max_length for workload in self.plan.workloads)
        engine = engine_of(plan, self.target, make_algorithm(plan, self.target, algo), longest)
        sizing, batch = engine.parts.sizing, plan.config.runtime.max_batch
        settings: list[tuple[str, int | None]] = [(only, None)] if only else []
        if not only:
            if sizing is None:
                raise UserError(f"task=adaptive: {label} verifies one node a step, so there is nothing to choose")
            settings = [(str(nodes), index) for index, nodes in enumerate(sizing.nodes)][1:] + [(CHOSEN, None)]
        requests = {workload.name: at_concurrency(plan, workload, batch)[1] for workload in self.plan.workloads}
        found: dict[Key, list[Decoded]] = {}
        with user_errors(EngineError):
            warm_up(engine, plan, requests[self.plan.workloads[0].name])
            for number, data, (setting, fixed) in product(range(self.plan.config.task.repeats), requests, settings):
                if sizing is not None:
                    sizing.pacing.fixed = fixed
                name = f"{label} ×{batch}, {setting}"
                engine.reset()
                with record_compilations() as compiled:
                    timed = engine.generate(requests[data], on_end=self.recorder(data, name, number))
                made: Any = dict(requests=requests[data], generation=timed, timed=timed, compiled=list(compiled))
                made |= {} if fixed is None else {"num_nodes": int(setting)}
                found.setdefault((data, setting), []).append(Decoded.by(algo, engine, **made))
                rate = sum(len(c.token_ids) for c in timed.completions) * 1e3 / max(timed.decode_ms, 1e-9)
                self.console.print(f"{data}, {name}: {rate:,.1f} tokens/s", highlight=False)
        return found
