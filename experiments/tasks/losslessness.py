"""Does each method, on each backend, write exactly what the target alone writes? And what is left where it cannot?

identity      in the run's dtype (float32 proves exactness, and so does a deterministic run in any dtype): every
              request, page size, batch size and level of capture, greedy and sampled, token for token against
              autoregressive decoding on the same backend; where the run is deterministic, against that of one request
              at a time
invariance    the baseline itself: the same tokens whatever the batch size, the level of capture, and the place in the
              batch
prefill       a deterministic run only: tokens and log-probabilities, bit for bit, whether prompts are prefilled whole
              or in chunks, and whether the first half of an answer was decoded or is part of the prompt
low           in bfloat16 rounding depends on the shape of a batch: requests that differ, the first position that does,
              and the gap between the logits of the two tokens there; a fault would show as a large gap
distribution  rules that draw their drafts: see `distribution`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from algorithms.runtime.request import Request
from algorithms.runtime.sampling_params import SamplingParams
from experiments.app.hardware import INTERPRETER
from experiments.app.plan import Plan
from experiments.report import metrics
from experiments.report.tables import DASH, METHOD, Column, Row, at, figure, lossless_tone, text
from experiments.tasks.base import Task
from experiments.tasks.decoding import AUTOREGRESSIVE, Decoded, baseline_config
from experiments.tasks.distribution import TOP_K, chi_square_p, filled_cells, testable_distribution
from experiments.tasks.near_tie import look_at

if TYPE_CHECKING:
    from algorithms.runtime.models.loading import Target
    from algorithms.runtime.request import Completion

ALPHA = 1e-6
"""A distribution test with a smaller chance fails the run."""
CHUNKS = (1, 24)
"""Prompt tokens between two steps, beside the run's own number."""
SEED_STEP = 7919
"""Distance between the seeds of two turns."""


def _identical(row: Row) -> str:
    return f"{row['identical']}/{row['checked']}"


def _low(row: Row) -> str:
    return _identical(row["low_precision"]) if row["low_precision"] else DASH


def _first_flip(row: Row) -> str:
    position = at(row, "low_precision/first/position")
    return DASH if position is None else f"position {position}, gap {figure(row['low_precision']['gap'], 4)}"


def _distribution(row: Row) -> str:
    found = row["distribution"]
    return f"{found['p']:.2g} of {found['cells']} cells" if found else DASH


class Losslessness(Task):
    """Each method on each backend, the baseline of a backend first. A difference in float32, or in a deterministic
    run, fails it."""

    name = "losslessness"
    objective = "share_identical"
    columns = (
        text("backend", "backend"),
        METHOD,
        text("rule", "rule"),
        Column("identical", _identical, tone=lambda row: lossless_tone({"lossless": row})),
        Column("tokens", lambda row: f"{row['tokens']:,}"),
        Column("low precision", _low),
        Column("first flip", _first_flip),
        Column("chi-square p", _distribution),
    )

    def measure(self) -> list[Row]:
        rows: list[Row] = []
        for backend in self.plan.backends:
            checks = BackendChecks(self, self.plan.varied(backend=backend))
            rows.append(checks.baseline_row())
            rows += [checks.prefill_row()] if self.plan.config.runtime.deterministic else []
            rows += [checks.method_row(label, algo) for label, algo in self.plan.methods.items()]
        return rows

    def label(self, row: Row) -> str:
        return f"{row['method']} on {row['backend']}"

    def best(self, rows: Sequence[Row]) -> Row:
        total = {key: sum(row[key] for row in rows) for key in ("identical", "checked")}
        return {**total, self.objective: total["identical"] / total["checked"] if total["checked"] else 1.0}

    def failures(self, rows: Sequence[Row]) -> list[str]:
        """Differences where the run is exact, near ties aside, and distributions that chance would miss once in a
        million runs."""
        failures = []
        for row in rows:
            dtype = self.plan.hardware.dtype
            if self.plan.exact and metrics.num_faults(row):
                differing = f"{metrics.num_faults(row)} of {row['checked']} requests differ"
                where = metrics.describe_difference(row.get("first_difference"), dtype)
                failures.append("; ".join(filter(None, [f"{self.label(row)}: {differing}", where])))
            if row["distribution"] and row["distribution"]["p"] < ALPHA:
                p = f"p = {row['distribution']['p']:.2g}"
                failures.append(f"{self.label(row)}: the drawn tokens do not follow the target's distribution ({p})")
        return failures

    @cached_property
    def low_precision_target(self) -> Target:
        """The target in `task.low_precision`."""
        return self.in_low_precision(self.plan).load_target()

    def in_low_precision(self, plan: Plan) -> Plan:
        """`plan` in `task.low_precision`."""
        return replace(plan, hardware=replace(plan.hardware, dtype=plan.config.task.low_precision))


def _bare(request: Request, max_new_tokens: int) -> Request:
    """The request with its log-probabilities, and with nothing that depends on where its prompt ends."""
    asked = request.sampling
    sampling = SamplingParams(max_new_tokens, temperature=asked.temperature, seed=asked.seed, logprobs=True)
    return replace(request, sampling=sampling)


class BackendChecks:
    """All checks on one backend. Baseline decodings are kept, since every method is compared with the same ones."""

    def __init__(self, task: Losslessness, plan: Plan) -> None:
        self._task, self._plan, self._settings = task, plan, plan.config.task
        (self._workload,) = plan.workloads
        self._graphs = self._settings.graphs_of(plan.config, plan.hardware.can_capture)
        self._sizes = list(product(self._settings.page_sizes, self._settings.batches, self._graphs))
        self._deterministic = plan.config.runtime.deterministic
        self._baselines: dict[int, Sequence[Completion]] = {}

    def baseline_row(self) -> Row:
        """Invariance of autoregressive decoding to batch size, level of capture and place in the batch."""
        by_id = {c.request_id: c.token_ids for c in self._baseline(0)}
        done: list[Completion] = []
        for batch, graph, order in product(self._settings.batches, self._graphs, (1, -1)):
            asked = self._requests(0)[::order]
            decoded = self._decode(baseline_config(), asked, self._settings.page_sizes[-1], batch, graph)
            done += decoded.generation.completions
        return {
            **self._row(AUTOREGRESSIVE, AUTOREGRESSIVE, "target_only"),
            "checked": len(done),
            "identical": sum(c.token_ids == by_id[c.request_id] for c in done),
            "near_ties": 0,
            "tokens": sum(len(c.token_ids) for c in done),
        }

    def prefill_row(self) -> Row:
        """Prompts in chunks, and prompts that hold half of the answer, against whole prompts."""
        asked = [_bare(request, request.sampling.max_new_tokens) for request in self._requests(0)]
        whole = self._written(asked, self._plan.config.runtime.prefill_chunk, "prefill")
        half = [len(tokens) // 2 for tokens, _ in whole]
        longer = [
            replace(_bare(r, r.sampling.max_new_tokens - n), prompt_ids=r.prompt_ids + tuple(tokens[:n]))
            for r, n, (tokens, _) in zip(asked, half, whole, strict=True)
        ]
        rest = [(tokens[n:], logprobs[n:]) for n, (tokens, logprobs) in zip(half, whole, strict=True)]
        found = self._written(longer, self._plan.config.runtime.prefill_chunk, "prefill of half the answer")
        pairs = list(zip(found, rest, strict=True))
        for chunk in CHUNKS:
            pairs += zip(self._written(asked, chunk, f"prefill by {chunk}"), whole, strict=True)
        return {
            **self._row("prefill", AUTOREGRESSIVE, "target_only"),
            "checked": len(pairs),
            "identical": sum(ours == expected for ours, expected in pairs),
            "near_ties": 0,
            "tokens": sum(len(tokens) for (tokens, _), _ in pairs),
        }

    def _written(self, asked: Sequence[Request], chunk: int, label: str) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities in the largest size, with prompts in chunks of `chunk` tokens."""
        page_size, batch, graph = self._sizes[-1]
        sizes: dict[str, Any] = dict(page_size=page_size, max_batch=batch, graph=graph, num_pages=None)
        plan = self._plan.varied(**sizes, prefill_chunk=chunk)
        label = f"{plan.config.backend.name} {label}"
        decoded = self._task.decode(baseline_config(), self._workload, asked, label, plan)
        return [(completion.token_ids, completion.logprobs) for completion in decoded.generation.completions]

    def method_row(self, label: str, algo: Any) -> Row:
        """Identity over all sizes, then low precision, then the distribution where identity is not promised."""
        identical = checked = near_ties = tokens = turn = 0
        first: dict[str, Any] | None = None
        rule = "target_only"
        # Greedy text never changes: where draws are not compared token for token, more turns would repeat the first.
        while turn < len(self._sizes) or (tokens < self._settings.min_tokens and rule == "target_only"):
            asked = self._requests(turn)
            ours = self._decode(algo, asked, *self._sizes[turn % len(self._sizes)])
            rule = ours.rule
            exact = [i for i, r in enumerate(asked) if rule == "target_only" or r.sampling.temperature == 0]
            ours_exact, plain_exact = (
                [completions[i] for i in exact] for completions in (ours.generation.completions, self._baseline(turn))
            )
            compared = [asked[i] for i in exact]
            look = look_at(self._task.target, compared, plain_exact, self._deterministic, self._workload.grammars)
            comparison = metrics.lossless(ours_exact, plain_exact, look)
            identical, checked = identical + comparison["identical"], checked + comparison["checked"]
            near_ties += comparison["near_ties"]
            if comparison["first_difference"] and (first is None or first["near_tie"]):
                first = {**comparison["first_difference"], "turn": turn}
            tokens += sum(len(completion.token_ids) for completion in plain_exact)
            turn += 1
        drawn = rule != "target_only" and self._settings.distribution_draws
        return {
            **self._row(label, algo.name, rule),
            "checked": checked,
            "identical": identical,
            "near_ties": near_ties,
            "tokens": tokens,
            "first_difference": first,
            "low_precision": self._low_precision(algo) if self._settings.low_precision else None,
            "distribution": self._distribution(algo) if drawn else None,
        }

    def _row(self, label: str, algo: str, rule: str) -> dict[str, Any]:
        names = {"backend": self._plan.config.backend.name, "method": label, "algo": algo, "rule": rule}
        return names | dict.fromkeys(("first_difference", "low_precision", "distribution"))

    def _requests(self, turn: int) -> list[Request]:
        """Greedy and sampled requests side by side, which change places from turn to turn, with seeds of their turn.

        After one turn per size everything is sampled.
        """
        return [
            r.with_sampling(
                temperature=self._settings.temperature if (r.id + turn) % 2 or turn >= len(self._sizes) else 0.0,
                seed=r.sampling.seed + SEED_STEP * turn,
            )
            for r in self._workload.requests
        ]

    def _decode(
        self, algo: Any, asked: Sequence[Request], page_size: int, batch: int, graph: str, low: bool = False
    ) -> Decoded:
        """Decode with these sizes, in the low precision with `low`."""
        plan = self._plan.varied(page_size=page_size, max_batch=batch, graph=graph, num_pages=None)
        label = f"{plan.config.backend.name} {algo.name} page {page_size} batch {batch} graph {graph}"
        target = None
        if low:
            plan, target = self._task.in_low_precision(plan), self._task.low_precision_target
        return self._task.decode(algo, self._workload, asked, label, plan, target)

    def _baseline(self, turn: int) -> Sequence[Completion]:
        """What autoregressive decoding writes in `turn`."""
        if turn not in self._baselines:
            page, batch, graph = self._sizes[turn % len(self._sizes)]
            batch = 1 if self._deterministic else batch
            decoded = self._decode(baseline_config(), self._requests(turn), page, batch, graph)
            self._baselines[turn] = decoded.generation.completions
        return self._baselines[turn]

    @cached_property
    def _low_baseline(self) -> Decoded:
        """Greedy autoregressive decoding in the low precision."""
        asked = [r.with_sampling(temperature=0.0) for r in self._workload.requests]
        return self._decode(baseline_config(), asked, *self._sizes[-1], low=True)

    def _low_precision(self, algo: Any) -> dict[str, Any] | None:
        """Greedy decoding in the low precision: requests that differ, and the gap of logits at the first difference.

        None in Triton's interpreter, which computes that precision wrongly.
        """
        if self._plan.hardware.label == INTERPRETER:
            return None
        asked, plain = self._low_baseline.requests, self._low_baseline.generation.completions
        ours = self._decode(algo, asked, *self._sizes[-1], low=True).generation.completions
        look = look_at(self._task.low_precision_target, asked, plain, grammars=self._workload.grammars)
        comparison = metrics.lossless(ours, plain, look)
        first = comparison.pop("first_difference")
        return comparison | {"first": first, "gap": first and first["gap"]}

    def _distribution(self, algo: Any) -> dict[str, Any]:
        """The first two tokens of many seeds, drawn with no other parameters than temperature and top-k."""
        request = min(self._workload.requests, key=lambda r: len(r.prompt_ids))
        draws, wanted = self._settings.distribution_draws, self._settings.temperature
        temperature, expected = testable_distribution(self._task.target, request, wanted, draws)
        sampling = SamplingParams(max_new_tokens=2, temperature=temperature, top_k=TOP_K)
        bare = Request(0, request.prompt_ids, sampling, request.eos_token_ids)
        asked = [replace(bare.with_sampling(seed=i), id=i) for i in range(draws)]
        batch = max(*self._settings.batches, 32)
        decoded = self._decode(algo, asked, self._settings.page_sizes[-1], batch, self._graphs[-1])
        counts = Counter(tuple(completion.token_ids) for completion in decoded.generation.completions)
        cells = filled_cells(expected.values(), draws)
        return {"p": chi_square_p(counts, expected), "cells": cells, "draws": draws, "temperature": temperature}
