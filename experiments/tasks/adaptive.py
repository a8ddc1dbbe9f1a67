"""What it gains to choose the number of verified nodes each step, beside every fixed number and no draft at all.

For each method and batch one engine serves the same requests again and again: with every size held, and with
`runtime.adaptive` choosing. So all of them replay the same graphs, and only the sizes differ. The method as it is
configured, without sizes to choose from, and the target alone run in engines of their own.

In bfloat16 steps of other sizes round otherwise, so texts differ between settings, and with them what is accepted. With
`runtime.deterministic=true` all settings write the same text, and only the sizes are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from experiments.app.errors import UserError, user_errors
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.report import tables
from experiments.report.tables import Column, Row
from experiments.tasks.base import Task
from experiments.tasks.decoding import (
    AUTOREGRESSIVE,
    Decoded,
    baseline_config,
    make_engine,
    method_row,
    warm_up_sizes,
)
from experiments.tasks.throughput import repeated

if TYPE_CHECKING:
    from algorithms.runtime.request import Completion, Request

CHOSEN, CONFIGURED = "adaptive", "configured"
Key = tuple[str, str]
"""Prompt set and setting."""


@dataclass(frozen=True)
class Setting:
    """How sizes of steps are found: `held` is the index of the size of every step; None lets the engine choose, or
    leaves it one size."""

    name: str
    held: int | None = None


class Adaptive(Task):
    """Every method at every batch on every prompt set."""

    name = "adaptive"
    objective = "ratio_to_best_fixed"
    columns = (
        tables.text("data", "data"),
        tables.number("batch", "batch", 0),
        tables.METHOD,
        tables.text("nodes", "setting"),
        tables.DECODE_RATE,
        tables.number("over autoregressive", "speedup_decode", 3, "×"),
        tables.number("over the best fixed", "ratio_to_best_fixed", 3, "×"),
        tables.TOKENS_PER_STEP,
        tables.LOSSLESS,
        Column("steps by nodes", lambda row: _steps(row), numeric=False),
        tables.COMPILED,
    )

    def measure(self) -> list[Row]:
        return [row for batch in self.plan.config.task.batches for row in self._rows(batch)]

    def label(self, row: Row) -> str:
        return f"{row['data']} ×{row['batch']}, {row['method']}, {row['setting']}"

    def best(self, rows: Sequence[Row]) -> Row:
        """The choice that falls shortest of the best fixed size."""
        return min((row for row in rows if row["setting"] == CHOSEN), key=lambda row: row[self.objective])

    def show(self, rows: Sequence[Row]) -> None:
        worst = self.best(rows)
        self.console.print(
            f"least: {self.label(worst)} at {worst['ratio_to_best_fixed']:.3f} of the best fixed number of nodes, "
            f"{worst['speedup_decode']:.3f} of autoregressive decoding",
            highlight=False,
        )

    def _rows(self, batch: int) -> Iterator[dict[str, Any]]:
        """All rows of one batch: first the target alone, then each method."""
        plan = self.plan.varied(max_batch=batch, num_pages=None, adaptive=False)
        alone = self._decoded(baseline_config(), AUTOREGRESSIVE, plan, [Setting("1")])
        baselines = {}
        for (data, setting), rounds in alone.items():
            row = self._row(AUTOREGRESSIVE, data, setting, batch, rounds, None)
            baselines[data] = (row, rounds[0])
            yield row | {"ratio_to_best_fixed": None}
        for label, algo in self.plan.methods.items():
            found = self._decoded(algo, label, plan, [Setting(CONFIGURED)])
            found |= self._decoded(algo, label, plan.varied(adaptive=True), None)
            rows = [
                self._row(label, data, setting, batch, rounds, baselines[data])
                for (data, setting), rounds in found.items()
            ]
            for row in rows:
                fixed = [r["decode_tokens_per_s"] for r in rows if r["data"] == row["data"] and r["setting"] != CHOSEN]
                yield row | {"ratio_to_best_fixed": row["decode_tokens_per_s"] / max(fixed)}

    def _row(
        self,
        label: str,
        data: str,
        setting: str,
        batch: int,
        rounds: list[Decoded],
        baseline: tuple[dict[str, Any], Decoded] | None,
    ) -> dict[str, Any]:
        workload = next(workload for workload in self.plan.workloads if workload.name == data)
        row = method_row(label, rounds, workload, baseline, self.target, self.plan.config.runtime.deterministic)
        return row | {"batch": batch, "setting": setting}

    def _decoded(self, algo: Any, label: str, plan: Plan, settings: list[Setting] | None) -> dict[Key, list[Decoded]]:
        """Every prompt set in every setting, by one engine, `task.repeats` rounds in turn. `settings` None: each size
        of the engine, and its choice."""
        from algorithms.runtime.request import EngineError

        longest = max(workload.max_length for workload in self.plan.workloads)
        engine, algorithm, backend = make_engine(plan, self.target, algo, longest)
        sizing = engine.parts.sizing
        if settings is None:
            if sizing is None:
                raise UserError(f"task=adaptive: {label} verifies one node a step, so there is nothing to choose")
            sizes = enumerate(sizing.nodes[1:], start=1)
            settings = [*(Setting(str(nodes), index) for index, nodes in sizes), Setting(CHOSEN)]
        found: dict[Key, list[Decoded]] = {}
        with user_errors(EngineError):
            self._warm_up(engine, plan)
            rounds = range(self.plan.config.task.repeats)
            for number, workload, setting in product(rounds, self.plan.workloads, settings):
                if sizing is not None:
                    sizing.pacing.held = setting.held
                asked = self._requests(workload, plan.config.runtime.max_batch)
                name = f"{label} ×{plan.config.runtime.max_batch}, {setting.name}"
                timed, compiled = _generated(engine, asked, self.recorder(workload.name, name, number))
                decoded = Decoded.by(
                    algo, algorithm, backend, requests=asked, generation=timed, timed=timed, compiled=compiled
                )
                if setting.held is not None:
                    decoded = replace(decoded, num_nodes=int(setting.name))
                found.setdefault((workload.name, setting.name), []).append(decoded)
                rate = sum(len(c.token_ids) for c in timed.completions) * 1e3 / max(timed.decode_ms, 1e-9)
                self.console.print(f"{workload.name}, {name}: {rate:,.1f} tokens/s", highlight=False)
        return found

    def _requests(self, workload: Workload, batch: int) -> list[Request]:
        return repeated(workload.requests, max(len(workload.requests), batch * self.plan.config.task.requests))

    def _warm_up(self, engine: Any, plan: Plan) -> None:
        from algorithms.runtime.sampling_params import SamplingNeeds

        asked = self._requests(self.plan.workloads[0], plan.config.runtime.max_batch)
        needs = SamplingNeeds.of(request.sampling for request in asked)
        for count, tokens in warm_up_sizes(plan.hardware.label == "triton", plan.config.runtime.max_batch):
            engine.generate([request.shortened(tokens) for request in asked[:count]], needs=needs)


def _generated(engine: Any, asked: Sequence[Request], record: Callable[[Completion], None]) -> tuple[Any, list[str]]:
    """What the engine makes of `asked` when it has seen nothing before, and the kernels compiled meanwhile. `record`
    gets each request as it ends."""
    from specdec_kernels.launch import record_compilations

    engine.forget()
    with record_compilations() as compiled:
        timed = engine.generate(asked, on_end=record)
    return timed, list(compiled)


def _steps(row: Row) -> str:
    """Steps of each number of nodes, where there are several."""
    steps = (row.get("adaptive") or {}).get("steps_by_nodes", {})
    return " · ".join(f"{nodes}: {count}" for nodes, count in steps.items() if count) or tables.DASH
