"""What a task is: a question that is answered by rows of figures, and how the rows are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from experiments.app.conversation import Conversations
from experiments.app.errors import user_errors
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.report import metrics
from experiments.report.console import step_progress
from experiments.report.page import Card
from experiments.report.run_folder import RunFolder, json_lines
from experiments.report.tables import Column, Row, csv_text, markdown
from experiments.tasks.baselines import BaselineStore
from experiments.tasks.decoding import (
    AUTOREGRESSIVE,
    Decoded,
    baseline_config,
    make_engine,
    method_row,
    warm_up_sizes,
)

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target
    from algorithms.runtime.request import Completion, Request


class Task:
    """Base of all tasks. A subclass names itself, its columns and its objective, and measures."""

    name: ClassVar[str]
    columns: ClassVar[Sequence[Column]]
    objective: ClassVar[str]
    """Key of the row figure that a sweep maximises."""

    folder: RunFolder | None = None
    """Where requests are recorded as they end."""
    baselines: BaselineStore | None = None
    """Decodings of the target alone that runs of a sweep share."""

    def __init__(self, plan: Plan, target: Target, console: Console) -> None:
        self.plan, self.target, self.console = plan, target, console

    def measure(self) -> list[Row]:
        """The rows of the table, as plain numbers and text."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """What the run measures, in one line."""
        plan = self.plan
        methods = next(iter(plan.methods)) if len(plan.methods) == 1 else f"{len(plan.methods)} methods"
        backends = ", ".join(backend.name for backend in plan.backends)
        counts = [(data.name, len(data.requests)) for data in plan.workloads]
        sets = ", ".join(f"{name} ({count} {'prompt' if count == 1 else 'prompts'})" for name, count in counts)
        return f"{methods} · {backends} · {plan.model_label} · {sets}"

    def label(self, row: Row) -> str:
        """What a warning calls `row`."""
        return str(row["method"])

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        """What a reader of the table must know."""
        dtype, exact = self.plan.hardware.dtype, self.plan.exact
        notes = [note for workload in self.plan.workloads for note in workload.notes]
        return notes + [f"{self.label(row)}: {text}" for row in rows for text in metrics.warnings(row, dtype, exact)]

    def failures(self, rows: Sequence[Row]) -> list[str]:
        """Why the texts are wrong. A run with failures is done, and ends with exit code 3."""
        dtype, exact = self.plan.hardware.dtype, self.plan.exact
        return [f"{self.label(row)}: {text}" for row in rows for text in metrics.failures(row, dtype, exact)]

    def best(self, rows: Sequence[Row]) -> Row:
        """The row with the largest objective; of equal rows the last."""
        return max(reversed(rows), key=lambda row: row.get(self.objective) or 0.0)

    def value(self, rows: Sequence[Row]) -> float:
        """The figure that a sweep maximises."""
        return float(self.best(rows).get(self.objective) or 0.0)

    def headline(self, rows: Sequence[Row]) -> list[Card]:
        """Figures at the top of the page."""
        return []

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """HTML that follows the table on the page."""
        return []

    def show(self, rows: Sequence[Row]) -> None:
        """Print what follows the table in the terminal."""

    def files(self, rows: Sequence[Row], conditions: Mapping[str, Any]) -> dict[str, str]:
        """Files of results: the table as Markdown, CSV and JSON lines, which also carry `conditions`."""
        return {
            f"{self.name}.md": markdown(self.columns, rows),
            f"{self.name}.csv": csv_text(rows),
            f"{self.name}.jsonl": json_lines({**conditions, **row} for row in rows),
        }

    def decode(
        self,
        algo: Any,
        workload: Workload,
        requests: Sequence[Request] | None = None,
        label: str | None = None,
        plan: Plan | None = None,
        target: Target | None = None,
        first_turns: bool = True,
    ) -> Decoded:
        """Decode `requests` (default: all of `workload`) with `algo`, after a warm-up that no clock sees.

        `plan` and `target` replace the task's own. Without `first_turns`, the later turns of conversations follow;
        requests are then numbered from 0. The cache is sized for the longest request of `workload`. In a sweep, rows
        share what the target alone decodes. Raises UserError where the requests cannot be served.
        """
        asked, used = workload.requests if requests is None else requests, plan or self.plan
        decode = partial(self._decode, algo, workload, asked, label, used, target or self.target, first_turns)
        if self.baselines is None or algo.name != AUTOREGRESSIVE:
            return decode()
        decoded, stored = self.baselines.shared(used, workload, asked, first_turns, decode)
        for completion in decoded.generation.completions if stored else ():
            self._record(workload.name, label or algo.name, completion)
        return decoded

    def _decode(
        self,
        algo: Any,
        workload: Workload,
        asked: Sequence[Request],
        label: str | None,
        plan: Plan,
        target: Target,
        first_turns: bool,
    ) -> Decoded:
        """As `decode`, in this process."""
        from algorithms.runtime.engine import EngineError
        from algorithms.runtime.sampling_params import SamplingNeeds
        from specdec_kernels.launch import record_compilations

        engine, algorithm, backend = make_engine(plan, target, algo, workload.max_length)
        with user_errors(EngineError):
            for request in asked:
                engine.check(request)
            # Compilation and first imports are no part of a step, so they happen here, before the clock runs.
            # A few requests may ask for less than all of them, whose steps run other kernels.
            needs = SamplingNeeds.of(request.sampling for request in asked)
            for count, tokens in warm_up_sizes(plan.hardware.label == "triton", plan.config.runtime.max_batch):
                few = asked[:count]
                brief = [r.with_sampling(max_new_tokens=min(tokens, r.sampling.max_new_tokens)) for r in few]
                engine.generate(brief, needs=needs)
            engine.forget()
            record = partial(self._record, workload.name, label or algo.name)
            talks = None if first_turns else Conversations(workload.prompts.prompts, asked, plan.tokenizer)
            progress = step_progress(self.console, label or algo.name, talks.num_requests if talks else len(asked))
            with progress as on_step, record_compilations() as compiled:
                generation = engine.generate(asked, on_step, on_end=record, follow=talks)
            failed = [completion.error for completion in generation.completions if completion.error]
            if failed and len(failed) == len(asked):
                raise EngineError(f"all {len(asked)} requests failed; the first: {failed[0]}")
        depth, served = algorithm.max_depth, dict(backend.served)
        trained = algorithm.needs_draft_model
        served_requests = talks.requests if talks else asked
        return Decoded(algo.name, served_requests, generation, depth, algorithm.rule, trained, served, compiled)

    def _record(self, data: str, method: str, completion: Completion) -> None:
        """Put a request that has ended on disk."""
        if self.folder is not None:
            figures = asdict(completion)
            self.folder.record({"data": data, "method": method, "id": figures.pop("request_id"), **figures})

    def decode_methods(
        self,
        workload: Workload,
        requests: Sequence[Request] | None = None,
        note: str = "",
        plan: Plan | None = None,
        baseline: bool = True,
    ) -> list[tuple[dict[str, Any], Decoded]]:
        """Every method of the plan on the same requests, each with its row, behind autoregressive decoding.

        Speedups, identity and predictions are against that baseline; without it they are None.
        """
        algos = ({AUTOREGRESSIVE: baseline_config()} if baseline else {}) | dict(self.plan.methods)
        found: list[tuple[dict[str, Any], Decoded]] = []
        for label, algo in algos.items():
            decoded = self.decode(algo, workload, requests, f"{label}{note}", plan, first_turns=False)
            against = found[0] if baseline and found else None
            deterministic = self.plan.config.runtime.deterministic
            row = method_row(label, decoded, workload, against, self.target, deterministic)
            found.append((row, decoded))
        return found
