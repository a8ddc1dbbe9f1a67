"""How many tokens a step of every method would produce, from one recorded output.

With equal seeds the output does not depend on the drafter. So one output of the target alone scores all drafters whose
drafts are a function of the tokens before: each drafts at every position, the recorded tokens confirm some of the
drafts, and the steps of the engine follow from that. The best choice of drafters and the bound of a perfect drafter
need no further pass. Times of a step turn tokens per step into tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from algorithms.algorithm import Algorithm
from experiments.app.errors import UserError, user_errors
from experiments.app.step_times import StepTimes, read_step_times
from experiments.report.html_page import acceptance_lines, section
from experiments.report.metrics import AcceptanceFigures
from experiments.report.tables import DASH, Metric, Result, columns, figure
from experiments.studies.replay.recorder import Recorded, read_trace, score
from experiments.studies.replay.steps import Drafts, all_steps, engine_steps, perfect, summary
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, baseline_config, make_algorithm

COST_FILE = "cost.json"


def _predicted(result: Result) -> str:
    pairs = [f"{batch}: {figure(times['tokens_per_s'])}" for batch, times in result["predicted"].items()]
    return " · ".join(pairs) or DASH


class ReplayResult(AcceptanceFigures):
    """One way to draft."""

    data: Annotated[str, Metric("Prompt set.")]
    method: Annotated[str, Metric("Label of the method, or of a bound.", "method")]
    kind: Annotated[str, Metric("baseline, method, oracle or perfect.", "kind")]
    num_nodes: Annotated[
        int | None, Metric("Nodes verified per request and step, the root included.", "nodes", digits=0)
    ]
    predicted: Annotated[
        dict[str, dict[str, float | None]],
        Metric(
            "Tokens/s by batch, from the steps and from their times in `task.cost`.",
            "predicted tokens/s",
            show=_predicted,
        ),
    ]


@dataclass(frozen=True)
class Candidate:
    """A way to draft; see `ReplayResult`."""

    label: str
    kind: str
    drafts: list[Drafts]  # one entry per output
    max_depth: int
    num_nodes: int


class Replay(Task):
    """Every method, what follows from several of them, and the bounds."""

    name = "replay"
    objective = "tokens_per_step"
    columns = columns(
        ReplayResult, "method", "kind", "num_nodes", "tokens_per_step", "acceptance_at", "row_steps", "predicted"
    )
    _notes: tuple[str, ...] = ()

    def measure(self) -> Sequence[Result]:
        processes = self.plan.config.runtime.tensor_parallel
        if processes > 1:
            raise UserError(f"task=replay runs in one process: expected runtime.tensor_parallel=1, got {processes}")
        times = self._times
        methods = {label: make_algorithm(self.plan, self.target, algo) for label, algo in self.plan.methods.items()}
        for label, algorithm in methods.items():
            if algorithm.rule != "target_only":
                raise UserError(
                    f"task=replay: {label} has the rule {algorithm.rule}, which samples its drafts: they are no "
                    "function of the tokens before, so no recorded output scores them; expected the rule target_only"
                )
        trace = self._trace()
        if not trace:
            raise UserError("task=replay: the trace has no tokens")
        candidates = self._candidates(methods, self._scored(methods, trace), trace)
        results: list[Result] = [self._result(candidate) for candidate in candidates]
        if len(methods) > 1:
            results.append(self._oracle([each for each in candidates if each.kind in ("baseline", "method")]))
        if times is not None:
            self.folder.write(COST_FILE, times.to_json())
        return results

    @cached_property
    def _times(self) -> StepTimes | None:
        path = self.plan.config.task.cost
        with user_errors(ValueError):
            return None if path is None else read_step_times(path)

    def _trace(self) -> list[Recorded]:
        (workload,) = self.plan.workloads
        folder = self.plan.config.task.trace
        if folder is not None:
            with user_errors(ValueError):
                found = read_trace(folder, workload.name, workload.requests)
        else:
            decoded = self.decode(baseline_config(), workload)
            pairs = zip(decoded.requests, decoded.generation.completions, strict=True)
            found = [Recorded(request, completion.token_ids) for request, completion in pairs]
        return [each for each in found if each.tokens]

    def _scored(self, methods: Mapping[str, Algorithm], trace: Sequence[Recorded]) -> dict[str, list[Drafts]]:
        """The drafts of each method. Those that learn from what is served read the outputs one after the other."""
        learning = [label for label, algorithm in methods.items() if algorithm.learns]
        others = [label for label in methods if label not in learning]
        found: dict[str, list[Drafts]] = {}
        num_tokens, sampling = sum(len(each.tokens) for each in trace), self.plan.config.sampling
        notes: list[str] = []
        groups = [(others, self.plan, False)] if others else []
        groups += [([label], self.plan.varied(max_batch=1, num_pages=None), True) for label in learning]
        for labels, plan, whole in groups:
            drafts, num_chosen = score(plan, self.target, [methods[label] for label in labels], trace, whole)
            found |= dict(zip(labels, drafts, strict=True))
            num_other = num_tokens - num_chosen
            if num_other and sampling.temperature == 0 and not sampling.penalised:
                notes.append(
                    f"the target would choose another token at {num_other} of {num_tokens} positions of the trace: "
                    "numerical ties of a low precision, or the trace is of another model or setting"
                )
        if learning:
            notes.append(
                f"{', '.join(learning)}: drafts depend on the requests served before, so outputs are read one after "
                "the other; the figures are those of runtime.max_batch=1 and this order of requests"
            )
        self._notes = tuple(dict.fromkeys(notes))
        return {label: found[label] for label in methods}

    def _candidates(
        self, methods: Mapping[str, Algorithm], scored: Mapping[str, list[Drafts]], trace: Sequence[Recorded]
    ) -> list[Candidate]:
        """Every candidate but the oracle."""
        nothing = [Drafts([0] * len(each.tokens), [True] * len(each.tokens)) for each in trace]
        found = [Candidate(AUTOREGRESSIVE, "baseline", nothing, 0, 1)]
        for label, algorithm in methods.items():
            found.append(Candidate(label, "method", scored[label], algorithm.max_depth, algorithm.num_nodes))
        for nodes in sorted({algorithm.num_nodes for algorithm in methods.values()} - {1}):
            right, name = [perfect(len(each.tokens), nodes - 1) for each in trace], f"perfect, {nodes} nodes"
            found.append(Candidate(name, "perfect", right, nodes - 1, nodes))
        return found

    def _result(self, candidate: Candidate) -> ReplayResult:
        outputs = all_steps([candidate.drafts])
        figures, lengths = summary(outputs, candidate.max_depth), [len(steps) for steps in outputs]
        predicted = {
            str(batch): self._rate(candidate, batch, lengths, figures["output_tokens"])
            for batch in (self._times.batches if self._times else [])
        }
        name, label, kind, nodes = self.plan.workloads[0].name, candidate.label, candidate.kind, candidate.num_nodes
        return {"data": name, "method": label, "kind": kind, "num_nodes": nodes, "predicted": predicted, **figures}

    def _rate(
        self, candidate: Candidate, batch: int, lengths: Sequence[int], num_tokens: int
    ) -> dict[str, float | None]:
        """The rate of an engine whose outputs take `lengths` steps, and the time of its mean step."""
        assert self._times is not None
        step = self._times.of(candidate.label, batch, candidate.num_nodes)
        if step is None:
            return {"tokens_per_s": None, "step_ms": None}
        steps = engine_steps(lengths, batch, step.late)
        step_ms = self._times.at_requests(step, sum(lengths) / steps)
        return {"tokens_per_s": num_tokens * 1e3 / (steps * step_ms), "step_ms": step_ms}

    def _oracle(self, singles: Sequence[Candidate]) -> ReplayResult:
        """The cheapest choice of one method, or of none, for each step, with knowledge of what follows. Without times a
        step of every method costs the same; tokens per step are always of that choice."""
        predicted: dict[str, dict[str, float | None]] = {}
        for batch in self._times.batches if self._times else []:
            assert self._times is not None
            timed = [(each, self._times.of(each.label, batch, each.num_nodes)) for each in singles]
            known = [(each, step) for each, step in timed if step is not None]
            predicted[str(batch)] = {"tokens_per_s": None, "step_ms": None}
            if known:
                costs = [step.step_ms / step.rows for _, step in known]
                outputs = all_steps([each.drafts for each, _ in known], costs)
                ms = sum(costs[step.choice] for steps in outputs for step in steps)
                tokens = sum(step.tokens for steps in outputs for step in steps)
                predicted[str(batch)]["tokens_per_s"] = 1e3 * tokens / ms
        figures = summary(all_steps([each.drafts for each in singles]), max(each.max_depth for each in singles))
        name, label = self.plan.workloads[0].name, "oracle"
        return {"data": name, "method": label, "kind": label, "num_nodes": None, "predicted": predicted, **figures}

    def warnings(self, results: Sequence[Result]) -> list[str]:
        notes = [note for workload in self.plan.workloads for note in workload.notes]
        timed = [result for result in results if result["kind"] == "method"]
        missing = [r["method"] for r in timed if any(t["tokens_per_s"] is None for t in r["predicted"].values())]
        if missing:
            notes.append(f"task.cost has no time of a step at every batch for {', '.join(missing)}")
        return [*notes, *self._notes]

    def best(self, results: Sequence[Result]) -> Result:
        return super().best([result for result in results if result["kind"] == "method"])

    def sections(self, results: Sequence[Result]) -> list[str]:
        shown = [result for result in results if result["kind"] == "method"]
        return [section("Acceptance by draft position", acceptance_lines(shown))]

    def show(self, results: Sequence[Result]) -> None:
        for batch, result in best_of_each_batch(results).items():
            rate = result["predicted"][batch]["tokens_per_s"]
            self.console.print(f"batch {batch}: {result['method']}, {rate:,.1f} tokens/s predicted", highlight=False)


def best_of_each_batch(results: Sequence[Result]) -> dict[str, Result]:
    """Batch to the result of the largest predicted rate among those that the engine can run."""
    found: dict[str, Result] = {}
    for result in results:
        for batch, times in result["predicted"].items():
            rate, best = times["tokens_per_s"], found.get(batch)
            if rate is None or result["kind"] not in ("baseline", "method"):
                continue
            if best is None or rate > best["predicted"][batch]["tokens_per_s"]:
                found[batch] = result
    return found
