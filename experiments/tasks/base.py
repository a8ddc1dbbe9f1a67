"""A task: a question that is answered by a table of results, and how the results are shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from rich.console import Console

from algorithms.engine.engine import Engine
from algorithms.engine.request import Completion, EngineError, Request
from algorithms.engine.session import StepReport
from algorithms.engine.settings import RuntimeSettings
from algorithms.models.loading import Target
from algorithms.parallel.collectives import from_rank_0, parallel
from experiments.app.errors import user_errors
from experiments.app.files import json_lines
from experiments.app.plan import Plan
from experiments.app.workload import Conversations, Workload
from experiments.report import checks
from experiments.report.console import step_progress
from experiments.report.html_page import Card
from experiments.report.metrics import MethodResult
from experiments.report.run_folder import RunFolder
from experiments.report.tables import Column, Result, counted, csv_text, markdown
from experiments.report.tracking import Tracker
from experiments.tasks import decoding, resumed
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded
from experiments.tasks.resumed import BaselineStore
from specdec_kernels.launch import record_compilations

SHORT_RUN_ROUNDS = 3
LONGEST_SHORT_ROUND_MS = 8_000.0
"""Without `task.repeats`, a run whose first round takes no longer than that has `SHORT_RUN_ROUNDS` rounds."""


def agreed(number: int, device: str) -> int:
    """Rank 0's `number`, on every rank of a tensor-parallel run: their clocks differ."""
    return int(from_rank_0([torch.tensor([number], device=device)])[0]) if parallel() else number


class Task:
    """Base of all tasks. A subclass names its columns and its objective, and measures."""

    columns: ClassVar[Sequence[Column]]
    objective: ClassVar[str]  # key of the figure that stands for a run in the table of a sweep

    keeps_parts: ClassVar[bool] = True  # whether a resumed run takes over requests of a decoding that was not finished
    shares_engines: ClassVar[bool] = False  # whether decodings that differ in requests alone have one engine

    folder: RunFolder  # the folder in which requests are recorded as they end; set before `measure` is called
    tracker: Tracker = Tracker()  # receives the speed of the run while it goes on
    baselines: BaselineStore | None = None  # decodings of the target alone that jobs of a sweep share

    def __init__(self, plan: Plan, target: Target, console: Console) -> None:
        self.plan, self.target, self.console = plan, target, console
        self._order: list[tuple[str, str]] = []
        self._engines: dict[str, Engine] = {}
        self._served: RuntimeSettings | None = None  # the settings of `_engines`

    def measure(self) -> Sequence[Result]:
        """The results: the lines of the table."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """The subject of the run, in one line."""
        plan = self.plan
        methods = next(iter(plan.methods)) if len(plan.methods) == 1 else f"{len(plan.methods)} methods"
        backends = ", ".join(backend.name for backend in plan.backends)
        sets = ", ".join(f"{data.name} ({counted(len(data.requests), 'prompt')})" for data in plan.workloads)
        return f"{methods} · {backends} · {plan.model_label} · {sets}"

    def label(self, result: Result) -> str:
        """The name of `result` in warnings."""
        return str(result["method"])

    def warnings(self, results: Sequence[Result]) -> list[str]:
        dtype, exact = self.plan.hardware.dtype, self.plan.exact
        notes = [note for workload in self.plan.workloads for note in workload.notes]
        labelled = [(self.label(result), result) for result in results]
        notes += [f"{label}: {text}" for label, result in labelled for text in checks.warnings(result, dtype, exact)]
        return notes + checks.warnings_of_all(labelled)

    def failures(self, results: Sequence[Result]) -> list[str]:
        """Why outputs are wrong. A run with failures is done, and ends with exit code 3."""
        dtype, exact = self.plan.hardware.dtype, self.plan.exact
        return [f"{self.label(each)}: {text}" for each in results for text in checks.failures(each, dtype, exact)]

    def best(self, results: Sequence[Result]) -> Result:
        """The result with the largest objective; of equal ones the last."""
        return max(reversed(results), key=lambda result: result.get(self.objective) or 0.0)

    def headline(self, results: Sequence[Result]) -> list[Card]:
        """Figures at the top of the page."""
        return []

    def sections(self, results: Sequence[Result]) -> list[str]:
        """HTML that follows the table on the page."""
        return []

    def show(self, results: Sequence[Result]) -> None:
        """Print what follows the table in the terminal."""

    def files(self, results: Sequence[Result], conditions: Mapping[str, Any]) -> dict[str, str]:
        """Files of results: the table as Markdown, CSV and JSON lines, which also carry `conditions`."""
        name = self.plan.config.task.name
        return {
            f"{name}.md": markdown(self.columns, results),
            f"{name}.csv": csv_text(results),
            f"{name}.jsonl": json_lines({**conditions, **result} for result in results),
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
        requests are then numbered from 0. The cache is sized for the longest request of `workload`. Requests that
        an earlier process has decoded are not decoded again, and jobs of a sweep share baselines.
        Raises UserError where the requests cannot be served.
        """
        first, used = workload.requests if requests is None else requests, plan or self.plan
        key = resumed.Key(workload.name, label or algo.name, round_number)
        longest = min(used.config.runtime.max_length or workload.max_length, used.target.config.max_position_embeddings)
        prompts = () if first_turns else workload.prompts.prompts
        begin = partial(Conversations, prompts, first, used.tokenizer, longest)
        self._order.append(key[:2])
        if self.folder.resumed and (done := resumed.restored(self.folder, key, begin())):
            return done
        decode = partial(self._decode, algo, workload, key, used, target or self.target, begin)
        if self.baselines is None or algo.name != AUTOREGRESSIVE:
            return decode()
        decoded, stored = self.baselines.shared(used, workload, begin(), decode)
        if stored:  # the sweep's clock, which counts as this process's
            decoded = replace(decoded, process=self.folder.process)
            resumed.take_over(self.folder, key, decoded)
        return decoded

    def _decode(
        self,
        algo: Any,
        workload: Workload,
        key: resumed.Key,
        plan: Plan,
        target: Target,
        begin: Callable[[], Conversations],
    ) -> Decoded:
        """As `decode`, in this process, of the conversations that `begin`."""
        engine = self.engine_for(plan, target, algo, workload)
        ended = resumed.finished(self.folder, key) if self.folder.resumed and not key.round else {}
        rest = (conversations := begin()).still_to_do(ended)
        # A decoding begins again where drafts depend on what was served before, where the task wants it whole, and
        # where the run ended between the last request and its times.
        if ended and (engine.parts.algorithm.learns or not self.keeps_parts or not rest):
            resumed.drop(self.folder, key)
            ended = {}
            rest = (conversations := begin()).still_to_do(ended)
        title = key.method + (f", round {key.round + 1}" if key.round else "")
        total = conversations.num_requests - len(ended)
        record = partial(resumed.record, self.folder, key)
        with user_errors(EngineError):
            for request in rest:
                engine.check(request)
            decoding.warm_up(engine, plan, rest)
            with step_progress(self.console, title, total) as on_step, record_compilations() as compiled:

                def watched(report: StepReport) -> None:
                    on_step(report)
                    self.tracker.live(key.method, report)

                timed = engine.generate(rest, watched, on_end=record, follow=conversations)
            failed = [completion.error for completion in timed.completions if completion.error]
            if failed and len(failed) == len(rest):
                raise EngineError(f"all {len(rest)} requests failed; the first: {failed[0]}")
        if conversations.num_too_long:
            early = counted(conversations.num_too_long, "conversation")
            told = f"warning: {key.method}: {early} ended early: the next turn is longer than the engine's context"
            self.console.print(told, style="yellow", highlight=False)
        every = conversations.requests
        completions = ended | {completion.request_id: completion for completion in timed.completions}
        generation = replace(timed, completions=[completions[request.id] for request in every])
        algorithm = engine.parts.algorithm
        decoded = Decoded(
            algo=algo.name,
            config=asdict(algo),
            requests=every,
            generation=generation,
            timed=timed,
            max_depth=algorithm.max_depth,
            rule=algorithm.rule,
            drafts_with_model=algorithm.needs_draft_model,
            attention=dict(engine.parts.resources.backend.served),
            compiled=list(compiled),
            num_nodes=algorithm.num_nodes,
            process=self.folder.process,
        )
        self.folder.decodings.append(resumed.decoding_entry(key, decoded))
        return decoded

    def engine_for(self, plan: Plan, target: Target, algo: Any, workload: Workload) -> Engine:
        """An engine that serves `workload`, without anything that earlier requests have left. A shared one serves all
        prompt sets, and captures its steps once; engines of other settings are given up for it."""
        if not self.shares_engines:
            return decoding.engine_of(plan, target, decoding.make_algorithm(plan, target, algo), workload.max_length)
        if plan.config.runtime != self._served:
            self.give_up_engines()
            self._served = plan.config.runtime
        key = repr(algo)
        if key not in self._engines:
            longest = max(each.max_length for each in plan.workloads)
            algorithm = decoding.make_algorithm(plan, target, algo)
            self._engines[key] = decoding.engine_of(plan, target, algorithm, longest)
        self._engines[key].reset()
        return self._engines[key]

    def give_up_engines(self) -> None:
        """Free the memory of shared engines: each has a pool of its own."""
        self._engines.clear()

    def recorder(self, data: str, method: str) -> Callable[[Completion], None]:
        """For a task that serves requests itself: a function that records each of them as it ends."""
        self._order.append((data, method))
        return partial(resumed.record, self.folder, resumed.Key(data, method))

    def requests_in_order(self) -> list[dict[str, Any]]:
        """The content of requests.jsonl at the end: decodings in the order of the task, and the requests of each."""
        place = {key: index for index, key in reversed(list(enumerate(self._order)))}
        entries = self.folder.requests.entries
        return sorted(entries, key=lambda entry: (place.get((entry["data"], entry["method"]), 0), entry["id"]))

    def decode_methods(
        self,
        workload: Workload,
        requests: Sequence[Request] | None = None,
        note: str = "",
        plan: Plan | None = None,
        baseline: bool = True,
        repeats: int | None = None,
    ) -> list[tuple[MethodResult, Decoded]]:
        """Autoregressive decoding and every method of the plan on the same requests, each with its result.

        Speedups, lossless checks and predictions are against that baseline; without it they are None. The rounds of all
        methods are interleaved, so that a machine that gets slower or faster does so for each of them; there are
        `repeats`, or as many as `task.repeats` says.
        """
        algos = ({AUTOREGRESSIVE: decoding.baseline_config()} if baseline else {}) | dict(self.plan.methods)
        rounds: dict[str, list[Decoded]] = {label: [] for label in algos}
        number = 0
        while number < (repeats or self._num_rounds(rounds)):
            for label, algo in algos.items():
                name = f"{label}{note}"
                done = self.decode(algo, workload, requests, name, plan, first_turns=False, round_number=number)
                rounds[label].append(done)
            number += 1
        timed, deterministic = decoding.timed_rounds(rounds), self.plan.config.runtime.deterministic
        found: list[tuple[MethodResult, Decoded]] = []
        for label, decoded in rounds.items():
            against = found[0] if baseline and found else None
            result = decoding.method_result(label, decoded, timed, workload, against, self.target, deterministic)
            found.append((result, decoded[0]))
        return found

    def _num_rounds(self, decoded_rounds: Mapping[str, Sequence[Decoded]]) -> int:
        """As `task.repeats` says; by default several where there is a speedup and a round is short."""
        if self.plan.config.task.repeats is not None:
            return int(self.plan.config.task.repeats)
        first = [decoded[0] for decoded in decoded_rounds.values() if decoded]
        round_ms = sum(decoded.timed.wall_ms for decoded in first)
        rounds = SHORT_RUN_ROUNDS if len(first) > 1 and round_ms <= LONGEST_SHORT_ROUND_MS else 1
        return agreed(rounds, self.plan.hardware.device)
