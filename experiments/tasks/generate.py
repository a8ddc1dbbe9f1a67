"""The outputs of an algorithm, whether they are exactly the target's own, and the time per phase.

Both sides of the comparison are the same loop, engine settings, requests and clocks; only the drafter differs.
Sampled output is compared as strictly as greedy output: random numbers are keyed by request and position, so an exact
algorithm gives the tokens of autoregressive sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from experiments.app.files import json_lines
from experiments.report import console as terminal
from experiments.report.html_page import Card, acceptance_bars, method_cards, request_details, step_times
from experiments.report.metrics import GENERATE
from experiments.report.summarize import answer_verdict
from experiments.report.tables import Result
from experiments.report.templates import section
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE


class Generate(Task):
    """The run's algorithm and autoregressive decoding, with every output."""

    objective = "tokens_per_step"
    columns = GENERATE
    records: Sequence[dict[str, Any]] = ()  # the lines of requests.jsonl, known once the run is measured

    def measure(self) -> Sequence[Result]:
        (workload,) = self.plan.workloads
        config = self.plan.config
        decoded = self.decode_methods(workload, baseline=config.baseline and config.algo.name != AUTOREGRESSIVE)
        plain = {c.request_id: c for c in decoded[0][1].generation.completions} if len(decoded) > 1 else {}
        ours, prompts, judge = decoded[-1][1], workload.prompts.prompts, workload.judge
        self.records = [
            {
                "data": workload.name,
                "method": decoded[-1][0]["method"],
                "id": request.id,
                "prompt": prompts[request.id % len(prompts)].turn(request.id // len(prompts)),
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
        return [result for result, _ in decoded]

    def best(self, results: Sequence[Result]) -> Result:
        return results[-1]

    def headline(self, results: Sequence[Result]) -> list[Card]:
        return method_cards(results[-1])

    def sections(self, results: Sequence[Result]) -> list[str]:
        return [
            acceptance_bars(results[-1]),
            section("Time of a step", step_times(results)),
            section("Requests", Markup("").join(map(request_details, self.records))),
        ]

    def show(self, results: Sequence[Result]) -> None:
        result = results[-1]
        if result["acceptance_at"]:
            self.console.print(terminal.acceptance_chart(result))
        if result["phase_times_ms"]:
            self.console.print(terminal.phase_chart(result))
        if result["prediction"]:
            self.console.print(terminal.prediction_line(result), highlight=False)
        for record in self.records[: self.plan.config.samples]:
            self.console.print(terminal.sample_panel(record))

    def files(self, results: Sequence[Result], conditions: Mapping[str, Any]) -> dict[str, str]:
        return super().files(results, conditions) | {"requests.jsonl": json_lines(self.records)}
