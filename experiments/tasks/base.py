"""What a task is: a question that is answered by rows of figures, and how the rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from algorithms.runtime.sampling_params import SamplingParams
from experiments.app.conversation import Conversations
from experiments.app.errors import user_errors
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.report import metrics
from experiments.report.console import OnStep, step_progress
from experiments.report.json_log import json_lines
from experiments.report.page import Card
from experiments.report.run_folder import RunFolder
from experiments.report.tables import Column, Row, counted, csv_text, markdown
from experiments.report.tracking import Tracker
from experiments.tasks import earlier
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
    from algorithms.runtime.engine import Engine
    from algorithms.runtime.models.loading import Target
    from algorithms.runtime.request import Completion, Request
    from algorithms.runtime.session import Generation, StepReport


SHORT_RUN_ROUNDS = 3
LONGEST_SHORT_ROUND_MS = 8_000.0
"""Rounds of a run whose first round takes no longer than that, where `task.repeats` is not given."""


class Task:
    """Base of all tasks. A subclass names itself, its columns and its objective, and measures."""

    name: ClassVar[str]
    columns: ClassVar[Sequence[Column]]
    objective: ClassVar[str]
    """Key of the row figure that a sweep maximises."""

    keeps_parts: ClassVar[bool] = True
    """Whether a resumed run takes over requests of a decoding that was not finished."""

    folder: RunFolder
    """Where requests are recorded as they end; set before `measure` is called."""
    tracker: Tracker | None = None
    """What is told how fast the run is while it goes on."""
    baselines: BaselineStore | None = None
    """Decodings of the target alone that runs of a sweep share."""

    def __init__(self, plan: Plan, target: Target, console: Console) -> None:
        self.plan, self.target, self.console = plan, target, console
        self._order: list[tuple[str, str]] = []

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
        sets = ", ".join(f"{name} ({counted(count, 'prompt')})" for name, count in counts)
        return f"{methods} · {backends} · {plan.model_label} · {sets}"

    def label(self, row: Row) -> str:
        """What a warning calls `row`."""
        return str(row["method"])

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        """What a reader of the table must know."""
        dtype, exact = self.plan.hardware.dtype, self.plan.exact
        notes = [note for workload in self.plan.workloads for note in workload.notes]
        labelled = [(self.label(row), row) for row in rows]
        notes += [f"{label}: {text}" for label, row in labelled for text in metrics.warnings(row, dtype, exact)]
        return notes + metrics.warnings_of_all(labelled)

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

    def settings(self) -> dict[str, Any]:
        """The settings that the run used, with every setting of its algorithms, and none that it ignored."""
        plan, config = self.plan, self.plan.config
        ignored, neutral = config.task.IGNORED, asdict(SamplingParams())
        sampling = {key: value for key, value in asdict(config.sampling).items() if value != neutral[key]}
        sampling |= {"max_new_tokens": config.sampling.max_new_tokens, "temperature": config.sampling.temperature}
        sampling |= {"seed": config.sampling.seed} if config.sampling.temperature > 0 else {}
        drafters = {algo.name: config.model.drafter_of(algo.name) for algo in plan.methods.values()}
        task = {key: value for key, value in asdict(config.task).items() if key not in ("methods", "only")}
        groups = {"sampling": sampling, "runtime": asdict(config.runtime)}
        used = {
            name: {k: v for k, v in values.items() if f"{name}.{k}" not in ignored and v is not None}
            for name, values in groups.items()
        }
        return {
            "task": task,
            "algo": {label: asdict(algo) for label, algo in plan.methods.items()},
            "backend": [asdict(backend) for backend in plan.backends],
            "model": {"name": config.model.name, "path": str(plan.target.path)},
            "drafters": {name: path for name, path in drafters.items() if path is not None},
            "data": [asdict(data) for data in config.task.data_of(config)],
            **used,
        }

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
        round_number: int = 0,
    ) -> Decoded:
        """Decode `requests` (default: all of `workload`) with `algo`, after a warm-up that no clock sees.

        `plan` and `target` replace the task's own. Without `first_turns`, the later turns of conversations follow;
        requests are then numbered from 0. The cache is sized for the longest request of `workload`. What an earlier run
        has left of this decoding is not decoded again, and in a sweep rows share what the target alone decodes. Raises
        UserError where the requests cannot be served.
        """
        asked, used = workload.requests if requests is None else requests, plan or self.plan
        key = earlier.Key(workload.name, label or algo.name, round_number)
        conversations = partial(Conversations, workload.prompts.prompts, asked, used.tokenizer)
        follow: Callable[[], Conversations | None] = (lambda: None) if first_turns else conversations
        self._order.append(key[:2])
        if self.folder.resumed and (done := earlier.restored(self.folder, key, asked, follow())):
            return done
        decode = partial(self._decode, algo, workload, asked, key, used, target or self.target, follow)
        if self.baselines is None or algo.name != AUTOREGRESSIVE:
            return decode()
        decoded, stored = self.baselines.shared(used, workload, asked, first_turns, decode)
        if stored:
            earlier.take_over(self.folder, key, decoded)
        return decoded

    def _decode(
        self,
        algo: Any,
        workload: Workload,
        asked: Sequence[Request],
        key: earlier.Key,
        plan: Plan,
        target: Target,
        follow: Callable[[], Conversations | None],
    ) -> Decoded:
        """As `decode`, in this process; `follow` makes the later turns."""
        engine, algorithm, backend = make_engine(plan, target, algo, workload.max_length)
        ended, conversations = self._left_over(key, algorithm.learns), follow()
        rest = earlier.still_to_do(asked, ended, conversations)
        if ended and not rest:  # the run broke off between the last request and its times
            earlier.forget(self.folder, key)
            ended, rest, conversations = {}, list(asked), follow()
        timed, compiled = self._generate(engine, plan, rest, key, conversations, len(ended))
        every = conversations.requests if conversations else asked
        completions = ended | {completion.request_id: completion for completion in timed.completions}
        generation = replace(timed, completions=[completions[request.id] for request in every])
        decoded = Decoded.by(
            algo, algorithm, backend, requests=every, generation=generation, timed=timed, compiled=compiled
        )
        earlier.keep(self.folder, key, decoded)
        return decoded

    def _generate(
        self,
        engine: Engine,
        plan: Plan,
        asked: Sequence[Request],
        key: earlier.Key,
        conversations: Conversations | None,
        num_ended: int,
    ) -> tuple[Generation, list[str]]:
        """Serve `asked` and what follows; also the kernels that were compiled while the clock ran."""
        from algorithms.runtime.request import EngineError
        from algorithms.runtime.sampling_params import SamplingNeeds
        from specdec_kernels.launch import record_compilations

        with user_errors(EngineError):
            for request in asked:
                engine.check(request)
            # Compilation and first imports are no part of a step, so they happen here, before the clock runs.
            # A few requests may ask for less than all of them, whose steps run other kernels.
            needs = SamplingNeeds.of(request.sampling for request in asked)
            for count, tokens in warm_up_sizes(plan.hardware.label == "triton", plan.config.runtime.max_batch):
                few = asked[:count]
                brief = [r.shortened(tokens) for r in few]
                engine.generate(brief, needs=needs)
            engine.forget()
            title = key.method + (f", round {key.round + 1}" if key.round else "")
            progress = step_progress(
                self.console, title, conversations.num_requests - num_ended if conversations else len(asked)
            )
            record = partial(earlier.record, self.folder, key)
            with progress as on_step, record_compilations() as compiled:
                timed = engine.generate(asked, self._watched(key.method, on_step), on_end=record, follow=conversations)
            failed = [completion.error for completion in timed.completions if completion.error]
            if failed and len(failed) == len(asked):
                raise EngineError(f"all {len(asked)} requests failed; the first: {failed[0]}")
        return timed, list(compiled)

    def _left_over(self, key: earlier.Key, learns: bool) -> dict[int, Completion]:
        """Requests that ended before the run was interrupted.

        A decoding begins again where the drafts depend on what was served before, and where the task wants it whole.
        """
        if not self.folder.resumed or key.round:
            return {}
        found = earlier.finished(self.folder, key)
        if found and (learns or not self.keeps_parts):
            earlier.forget(self.folder, key)
            return {}
        return found

    def recorder(self, data: str, method: str, round_number: int = 0) -> Callable[[Completion], None]:
        """For a task that serves requests itself: what records each of them as it ends."""
        self._order.append((data, method))
        return partial(earlier.record, self.folder, earlier.Key(data, method, round_number))

    def requests_in_order(self) -> list[dict[str, Any]]:
        """What requests.jsonl holds at the end: decodings in the order of the task, and the requests of each."""
        place = {key: index for index, key in reversed(list(enumerate(self._order)))}
        entries = self.folder.requests.entries
        return sorted(entries, key=lambda entry: (place.get((entry["data"], entry["method"]), 0), entry["id"]))

    def _watched(self, label: str, on_step: OnStep) -> OnStep:
        """`on_step`, and the same to the tracker."""
        tracker = self.tracker
        if tracker is None:
            return on_step

        def both(report: StepReport) -> None:
            on_step(report)
            tracker.live(label, report)

        return both

    def decode_methods(
        self,
        workload: Workload,
        requests: Sequence[Request] | None = None,
        note: str = "",
        plan: Plan | None = None,
        baseline: bool = True,
    ) -> list[tuple[dict[str, Any], Decoded]]:
        """Every method of the plan on the same requests, each with its row, behind autoregressive decoding.

        Speedups, identity and predictions are against that baseline; without it they are None. All methods take turns,
        round after round, so that a machine that gets slower or faster does so for each of them.
        """
        algos = ({AUTOREGRESSIVE: baseline_config()} if baseline else {}) | dict(self.plan.methods)
        rounds: dict[str, list[Decoded]] = {label: [] for label in algos}
        number = 0
        while number < self._num_rounds(rounds):
            for label, algo in algos.items():
                name = f"{label}{note}"
                done = self.decode(algo, workload, requests, name, plan, first_turns=False, round_number=number)
                rounds[label].append(done)
            number += 1
        found: list[tuple[dict[str, Any], Decoded]] = []
        deterministic = self.plan.config.runtime.deterministic
        for label, decoded in rounds.items():
            against = found[0] if baseline and found else None
            row = method_row(label, decoded, workload, against, self.target, deterministic)
            found.append((row, decoded[0]))
        return found

    def _num_rounds(self, rounds: Mapping[str, Sequence[Decoded]]) -> int:
        """As many as `task.repeats` asks for; by itself several where there is a speedup and a round is short."""
        if self.plan.config.task.repeats is not None:
            return int(self.plan.config.task.repeats)
        first = [decoded[0] for decoded in rounds.values() if decoded]
        round_ms = sum(decoded.timed.wall_ms for decoded in first)
        return SHORT_RUN_ROUNDS if len(first) > 1 and round_ms <= LONGEST_SHORT_ROUND_MS else 1
