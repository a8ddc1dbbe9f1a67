"""How many tokens a step of every method would write, from one recorded text.

With equal seeds the text does not depend on the drafter. So one text, written by the target alone, scores all drafters
whose drafts are a function of the text before: each drafts at every position, the text confirms some of the drafts, and
the steps of the engine follow from that. Chains that are cut short, merged trees, the best choice of drafters and the
bound of a perfect drafter need no further pass. Times of a step turn tokens per step into tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from experiments.app.errors import UserError, user_errors
from experiments.replay.cost import StepTimes, read_step_times
from experiments.replay.score import score
from experiments.replay.steps import Drafts, all_steps, engine_steps, perfect, summary, union
from experiments.replay.trace import Recorded, read_trace, recorded
from experiments.report import tables
from experiments.report.page import acceptance_lines, section
from experiments.report.tables import Column, Row
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, baseline_config, make_algorithm

if TYPE_CHECKING:
    from algorithms.runtime.algorithm import Algorithm

COST_FILE = "cost.json"
CHOSEN = ("method", "shortened", "union")
"""Kinds of rows that the engine can run."""


@dataclass(frozen=True)
class Candidate:
    """A way to draft: one row of the table."""

    label: str
    kind: str
    """baseline, method, shortened, union or perfect."""
    drafts: list[Drafts]
    """One entry per text."""
    max_depth: int
    num_nodes: int
    timed_as: str
    """The label under which a file of step times has it."""


class Replay(Task):
    """Every method, what follows from several of them, and the bounds."""

    name = "replay"
    objective = "tokens_per_step"
    columns = (
        tables.METHOD,
        tables.text("kind", "kind"),
        tables.number("nodes", "num_nodes", 0),
        tables.with_interval("tokens/step", "tokens_per_step", 2),
        tables.ACCEPTANCE_BY_POSITION,
        tables.number("steps", "row_steps", 0),
        Column("predicted tokens/s", lambda row: _predicted(row)),
    )
    _notes: tuple[str, ...] = ()

    def measure(self) -> list[Row]:
        self._refuse()
        methods = {label: make_algorithm(self.plan, self.target, algo) for label, algo in self.plan.methods.items()}
        for label, algorithm in methods.items():
            if algorithm.rule != "target_only":
                raise UserError(
                    f"task=replay: {label} has the rule {algorithm.rule}, which draws its drafts: they are no function "
                    "of the text, so a recorded text cannot score them; expected the rule target_only"
                )
        trace = self._trace()
        if not trace:
            raise UserError("task=replay: the trace has no tokens")
        scored = self._scored(methods, trace)
        candidates = self._candidates(methods, scored, trace)
        rows: list[Row] = [self._row(candidate) for candidate in candidates]
        singles = [each for each in candidates if each.kind in ("baseline", "method")]
        if len(methods) > 1:
            rows.append(self._oracle(singles))
        if self._times is not None:
            self.folder.write(COST_FILE, self._times.to_json())
        return rows

    @cached_property
    def _times(self) -> StepTimes | None:
        path = self.plan.config.task.cost
        with user_errors(ValueError):
            return None if path is None else read_step_times(path)

    def _refuse(self) -> None:
        """Raise UserError for settings that cannot be served, before anything is decoded."""
        processes = self.plan.config.runtime.tensor_parallel
        if processes > 1:
            raise UserError(f"task=replay runs in one process: expected runtime.tensor_parallel=1, got {processes}")
        _ = self._times

    def _trace(self) -> list[Recorded]:
        (workload,) = self.plan.workloads
        folder = self.plan.config.task.trace
        if folder is not None:
            with user_errors(ValueError):
                return read_trace(folder, workload.name, workload.requests)
        decoded = self.decode(baseline_config(), workload)
        return recorded(decoded.requests, decoded.generation.completions)

    def _scored(self, methods: Mapping[str, Algorithm], trace: Sequence[Recorded]) -> dict[str, list[Drafts]]:
        """The drafts of each method. Those that learn from what is served read the texts one after the other."""
        learning = [label for label, algorithm in methods.items() if algorithm.learns]
        others = [label for label in methods if label not in learning]
        found: dict[str, list[Drafts]] = {}
        num_tokens = sum(len(each.tokens) for each in trace)
        notes: list[str] = []
        groups = [(others, self.plan, False)] if others else []
        groups += [([label], self.plan.varied(max_batch=1, num_pages=None), True) for label in learning]
        for labels, plan, whole in groups:
            scored = score(plan, self.target, [methods[label] for label in labels], trace, whole)
            found |= dict(zip(labels, scored.drafts, strict=True))
            notes += self._other_text(num_tokens - scored.num_chosen, num_tokens)
        if learning:
            notes.append(
                f"{', '.join(learning)}: drafts depend on the requests served before, so the texts are read one after "
                "the other; the figures are those of runtime.max_batch=1 and this order of requests"
            )
        self._notes = tuple(dict.fromkeys(notes))
        return {label: found[label] for label in methods}

    def _other_text(self, num_other: int, num_tokens: int) -> list[str]:
        """A note where the target, at its likeliest, would not write the trace, though it was asked for just that."""
        sampling = self.plan.config.sampling
        if not num_other or sampling.temperature > 0 or sampling.penalised:
            return []
        return [
            f"the target would choose another token at {num_other} of {num_tokens} positions of the trace: near ties "
            "of a low precision, or the trace is of another model or setting"
        ]

    def _candidates(
        self, methods: Mapping[str, Algorithm], scored: Mapping[str, list[Drafts]], trace: Sequence[Recorded]
    ) -> list[Candidate]:
        """Every row but the oracle's."""
        nothing = [Drafts([0] * len(each.tokens), [True] * len(each.tokens)) for each in trace]
        found = [Candidate(AUTOREGRESSIVE, "baseline", nothing, 0, 1, AUTOREGRESSIVE)]
        for label, algorithm in methods.items():
            depth, nodes, drafts = algorithm.max_depth, algorithm.num_nodes, scored[label]
            found.append(Candidate(label, "method", drafts, depth, nodes, label))
            for length in self.plan.config.task.lengths:
                if algorithm.chain and length < depth:
                    short, name = [each.shortened(length) for each in drafts], f"{label}, first {length}"
                    found.append(Candidate(name, "shortened", short, length, length + 1, label))
        for labels in self.plan.config.task.unions:
            if missing := [label for label in labels if label not in methods]:
                raise UserError(f"task.unions names {missing[0]}, which task.only leaves out")
            merged = [union(parts) for parts in zip(*(scored[label] for label in labels), strict=True)]
            depth = max(methods[label].max_depth for label in labels)
            nodes = 1 + sum(methods[label].num_nodes - 1 for label in labels)
            name = " + ".join(labels)
            found.append(Candidate(name, "union", merged, depth, nodes, name))
        for nodes in sorted({algorithm.num_nodes for algorithm in methods.values()} - {1}):
            right, name = [perfect(len(each.tokens), nodes - 1) for each in trace], f"perfect, {nodes} nodes"
            found.append(Candidate(name, "perfect", right, nodes - 1, nodes, name))
        return found

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        row = self._shared(candidate.label, candidate.kind, candidate.num_nodes)
        texts = all_steps([candidate.drafts])
        row |= summary(texts, candidate.max_depth)
        lengths = [len(text) for text in texts]
        for batch in self._times.batches if self._times else []:
            row["predicted"][str(batch)] = self._predicted(candidate, batch, lengths, row["output_tokens"])
        return row

    def _predicted(
        self, candidate: Candidate, batch: int, lengths: Sequence[int], num_tokens: int
    ) -> dict[str, float | None]:
        """The rate of an engine that writes the texts in steps of so many `lengths`, and the time of its mean step."""
        assert self._times is not None
        step = self._times.of(candidate.timed_as, batch, candidate.num_nodes)
        if step is None:
            return {"tokens_per_s": None, "step_ms": None}
        steps = engine_steps(lengths, batch, step.late)
        step_ms = self._times.at_rows(step, sum(lengths) / steps)
        return {"tokens_per_s": num_tokens * 1e3 / (steps * step_ms), "step_ms": step_ms}

    def _oracle(self, singles: Sequence[Candidate]) -> dict[str, Any]:
        """The cheapest choice of one method, or of none, for each step, by someone who knows what follows.

        Without times a step of every method costs the same; tokens per step are always of that choice.
        """
        row = self._shared("oracle", "oracle", None)
        row |= summary(all_steps([each.drafts for each in singles]), max(each.max_depth for each in singles))
        for batch in self._times.batches if self._times else []:
            assert self._times is not None
            timed = [(each, self._times.of(each.timed_as, batch, each.num_nodes)) for each in singles]
            known = [(each, step) for each, step in timed if step is not None]
            if not known:
                row["predicted"][str(batch)] = {"tokens_per_s": None, "step_ms": None}
                continue
            costs = [step.step_ms / step.rows for _, step in known]
            steps = [s for text in all_steps([each.drafts for each, _ in known], costs.__getitem__) for s in text]
            ms, tokens = sum(costs[step.choice] for step in steps), sum(step.tokens for step in steps)
            row["predicted"][str(batch)] = {"tokens_per_s": 1e3 * tokens / ms, "step_ms": None}
        return row

    def _shared(self, label: str, kind: str, num_nodes: int | None) -> dict[str, Any]:
        (workload,) = self.plan.workloads
        return {"data": workload.name, "method": label, "kind": kind, "num_nodes": num_nodes, "predicted": {}}

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        notes = [note for workload in self.plan.workloads for note in workload.notes]
        missing = [row["method"] for row in rows if row["kind"] in ("method", "shortened") and _lacks_times(row)]
        if missing:
            notes.append(f"task.cost has no time of a step at every batch for {', '.join(missing)}")
        return [*notes, *self._notes]

    def failures(self, rows: Sequence[Row]) -> list[str]:
        return []

    def best(self, rows: Sequence[Row]) -> Row:
        return super().best([row for row in rows if row["kind"] in CHOSEN])

    def sections(self, rows: Sequence[Row]) -> list[str]:
        drawn = [row for row in rows if row["kind"] in ("method", "union")]
        return [section("Acceptance by draft position", acceptance_lines(drawn))]

    def show(self, rows: Sequence[Row]) -> None:
        for batch, row in best_of_each_batch(rows).items():
            rate = row["predicted"][batch]["tokens_per_s"]
            self.console.print(f"batch {batch}: {row['method']}, {rate:,.1f} tokens/s predicted", highlight=False)


def best_of_each_batch(rows: Sequence[Row]) -> dict[str, Row]:
    """Batch to the row of the largest predicted rate among those that the engine can run."""
    found: dict[str, Row] = {}
    for row in rows:
        for batch, times in row["predicted"].items():
            rate, best = times["tokens_per_s"], found.get(batch)
            if rate is None or row["kind"] not in ("baseline", *CHOSEN):
                continue
            if best is None or rate > best["predicted"][batch]["tokens_per_s"]:
                found[batch] = row
    return found


def _lacks_times(row: Row) -> bool:
    return any(times["tokens_per_s"] is None for times in row["predicted"].values())


def _predicted(row: Row) -> str:
    """Batch and rate, for every batch with times."""
    pairs = [f"{batch}: {tables.figure(times['tokens_per_s'], 1)}" for batch, times in row["predicted"].items()]
    return " · ".join(pairs) or tables.DASH
