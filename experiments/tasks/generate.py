"""What an algorithm writes, whether it is exactly what the target alone would write, and where the time goes.

Both sides of the comparison are the same loop, engine settings, requests and clocks; only the drafter differs.
Sampled output is compared as strictly as greedy output: random numbers are keyed by request and position, so an exact
algorithm gives the tokens of autoregressive sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from experiments.app.conversation import text_of
from experiments.report import console as terminal
from experiments.report import tables
from experiments.report.json_log import json_lines
from experiments.report.metrics import answer_verdict
from experiments.report.page import Card, acceptance_bars, method_cards, request_details, section, step_times
from experiments.report.tables import Row
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE


class Generate(Task):
    """The run's algorithm beside autoregressive decoding, with every text."""

    name = "generate"
    objective = "tokens_per_step"
    columns = (
        tables.METHOD,
        tables.DECODE_RATE,
        replace(tables.WALL_RATE, narrow=False),
        tables.STEP_MS,
        tables.STEP_MS_RANGE,
        tables.TOKENS_PER_STEP,
        replace(tables.ACCEPTANCE_RATE, narrow=False),
        replace(tables.FIRST_TOKEN_MS, narrow=False),
        tables.DECODE_SPEEDUP,
        tables.LOSSLESS,
        tables.ACCURACY,
        tables.CUT,
        tables.PARSED,
        tables.COMPILED,
    )
    records: Sequence[dict[str, Any]] = ()
    """The lines of requests.jsonl, known once the run is measured."""

    def measure(self) -> list[Row]:
        (workload,) = self.plan.workloads
        config = self.plan.config
        decoded = self.decode_methods(workload, baseline=config.baseline and config.algo.name != AUTOREGRESSIVE)
        plain = {c.request_id: c for c in decoded[0][1].generation.completions} if len(decoded) > 1 else {}
        ours, prompts, judge = decoded[-1][1], workload.prompts.prompts, workload.judge
        self.records = [
            {
                "id": request.id,
                "prompt": text_of(prompts, request),
                "num_prompt_tokens": len(request.prompt_ids),
                "seed": request.sampling.seed,
                **{key: value for key, value in asdict(completion).items() if key != "request_id"},
                "answer": prompts[request.id % len(prompts)].answer,
                "verdict": answer_verdict(completion, request.id, judge),
                "identical": reference and completion.token_ids == reference.token_ids,
                "baseline_token_ids": reference and reference.token_ids,
            }
            for request, completion in zip(ours.requests, ours.generation.completions, strict=True)
            for reference in [plain.get(request.id)]
        ]
        return [row for row, _ in decoded]

    def best(self, rows: Sequence[Row]) -> Row:
        return rows[-1]

    def headline(self, rows: Sequence[Row]) -> list[Card]:
        return method_cards(rows[-1])

    def sections(self, rows: Sequence[Row]) -> list[str]:
        return [
            acceptance_bars(rows[-1]),
            section("Time of a step", step_times(rows)),
            section("Requests", "".join(map(request_details, self.records))),
        ]

    def show(self, rows: Sequence[Row]) -> None:
        row = rows[-1]
        if row["acceptance_at"]:
            self.console.print(terminal.acceptance_chart(row))
        self.console.print(terminal.ledger_chart(row))
        if row["prediction"]:
            self.console.print(terminal.prediction_line(row), highlight=False)
        for record in self.records[: self.plan.config.samples]:
            self.console.print(terminal.sample_panel(record))

    def files(self, rows: Sequence[Row], conditions: Mapping[str, Any]) -> dict[str, str]:
        return super().files(rows, conditions) | {"requests.jsonl": json_lines(self.records)}
