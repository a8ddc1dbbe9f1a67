"""How many tokens a step of every method would produce, from one recorded output.

With equal seeds the output does not depend on the drafter. So one output of the target alone scores all drafters whose
drafts are a function of the tokens before: each drafts at every position, the recorded tokens confirm some of the
drafts, and the steps of the engine follow from that. The best choice of drafters and the bound of a perfect drafter
need no further pass.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from algorithms.algorithm import Algorithm
from experiments.app.errors import UserError, user_errors
from experiments.report.html_page import acceptance_lines
from experiments.report.metrics import AcceptanceFigures
from experiments.report.tables import Metric, Result, columns
from experiments.report.templates import section
from experiments.studies.replay.recorder import Drafts, Recorded, all_steps, perfect, read_trace, score, summary
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, baseline_config, make_algorithm


class ReplayResult(AcceptanceFigures):
    """One way to draft."""

    data: Annotated[str, Metric("Prompt set.")]
    method: Annotated[str, Metric("Label of the method, or of a bound.", "method")]
    kind: Annotated[str, Metric("baseline, method, oracle or perfect.", "kind")]
    num_nodes: Annotated[int | None, Metric("Nodes verified per request and step, root included.", "nodes", digits=0)]


class Replay(Task):
    """Every method, what follows from several of them, and the bounds."""

    objective = "tokens_per_step"
    columns = columns(ReplayResult, "method", "kind", "num_nodes", "tokens_per_step", "acceptance_at", "row_steps")
    _notes: tuple[str, ...] = ()

    def measure(self) -> Sequence[Result]:
        processes = self.plan.config.runtime.tensor_parallel
        if processes > 1:
            raise UserError(f"task=replay runs in one process: expected runtime.tensor_parallel=1, got {processes}")
        methods = {label: make_algorithm(self.plan, self.target, algo) for label, algo in self.plan.methods.items()}
        for label, algorithm in methods.items():
            if algorithm.rule != "target_only":
                why = "samples its drafts, so no recorded output scores them; expected the rule target_only"
                raise UserError(f"task=replay: {label} has the rule {algorithm.rule}, which {why}")
        trace = self._trace()
        if not trace:
            raise UserError("task=replay: the trace has no tokens")
        nothing = [Drafts([0] * len(each.tokens), [True] * len(each.tokens)) for each in trace]
        scored = self._scored(methods, trace)
        results: list[Result] = [self._result(AUTOREGRESSIVE, "baseline", [nothing], 0, 1)]
        for label, algorithm in methods.items():
            results.append(self._result(label, "method", [scored[label]], algorithm.max_depth, algorithm.num_nodes))
        for nodes in sorted({algorithm.num_nodes for algorithm in methods.values()} - {1}):
            right = [perfect(len(each.tokens), nodes - 1) for each in trace]
            results.append(self._result(f"perfect, {nodes} nodes", "perfect", [right], nodes - 1, nodes))
        if len(methods) > 1:
            deepest = max(algorithm.max_depth for algorithm in methods.values())
            results.append(self._result("oracle", "oracle", [nothing, *scored.values()], deepest, None))
        return results

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
                why = "numerical ties of a low precision, or the trace is of another model or setting"
                place = f"{num_other} of {num_tokens} positions of the trace"
                notes.append(f"the target would choose another token at {place}: {why}")
        if learning:
            why = "drafts depend on the requests served before: figures are those of runtime.max_batch=1 and this order"
            notes.append(f"{', '.join(learning)}: {why}")
        self._notes = tuple(dict.fromkeys(notes))
        return {label: found[label] for label in methods}

    def _result(
        self, label: str, kind: str, methods: Sequence[list[Drafts]], max_depth: int, num_nodes: int | None
    ) -> ReplayResult:
        """The fewest steps that one of `methods` for each step takes; each has the drafts of every output."""
        own = {"data": self.plan.workloads[0].name, "method": label, "kind": kind, "num_nodes": num_nodes}
        return {**own, **summary(all_steps(methods), max_depth)}  # type: ignore[typeddict-item]

    def warnings(self, results: Sequence[Result]) -> list[str]:
        return [*(note for workload in self.plan.workloads for note in workload.notes), *self._notes]

    def best(self, results: Sequence[Result]) -> Result:
        return super().best([result for result in results if result["kind"] == "method"])

    def sections(self, results: Sequence[Result]) -> list[str]:
        shown = [result for result in results if result["kind"] == "method"]
        return [section("Acceptance by draft position", acceptance_lines(shown))]
