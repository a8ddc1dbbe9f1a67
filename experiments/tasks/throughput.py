"""Tokens per second, time to the first token and latency between tokens as more requests share the batch.

Each level of concurrency serves the same requests with autoregressive decoding, with the run's algorithm and with the
methods of `task.methods`, in batches of up to that many. The clock of a request starts when it enters the batch. The
tokens of one step share the time since the step before (`inter_token_ms`, pooled over tokens), so a speculative step
does not count as one slow token and some free ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from experiments.report import metrics, tables
from experiments.report.page import section
from experiments.report.plots import legend, lines
from experiments.report.tables import Row
from experiments.tasks.base import Task

if TYPE_CHECKING:
    from algorithms.runtime.request import Completion, Request


class Throughput(Task):
    """The run's algorithm, further methods and the baseline at every level of concurrency."""

    name = "throughput"
    objective = "wall_tokens_per_s"
    keeps_parts = False  # the rest of a level would run at another concurrency
    columns = (
        tables.number("concurrency", "concurrency", 0),
        tables.METHOD,
        tables.WALL_RATE,
        tables.WALL_SPEEDUP,
        tables.FIRST_TOKEN_MS,
        tables.quantile_pair("between tokens ms p50/p90", "inter_token_ms", 2),
        tables.TOKENS_PER_STEP,
        tables.ACCURACY,
        tables.CUT,
        tables.PARSED,
        tables.COMPILED,
    )

    def measure(self) -> list[Row]:
        return [row for level in self.plan.config.task.concurrency for row in self._level(level)]

    def _level(self, concurrency: int) -> list[Row]:
        """Baseline and methods with up to `concurrency` requests at a time."""
        (workload,) = self.plan.workloads
        plan = self.plan.varied(max_batch=concurrency, num_pages=None)
        count = max(concurrency * self.plan.config.task.requests, len(workload.requests))
        asked = repeated(workload.requests, count)
        distinct = len({request.prompt_ids for request in asked})
        return [
            row
            | {
                "concurrency": concurrency,
                "distinct_prompts": distinct,
                "inter_token_ms": metrics.quantiles(inter_token_ms(decoded.generation.completions), p50=0.5, p90=0.9),
            }
            for row, decoded in self.decode_methods(workload, asked, f" ×{concurrency}", plan)
        ]

    def best(self, rows: Sequence[Row]) -> Row:
        return super().best([row for row in rows if row["method"] == self.plan.config.algo.name])

    def label(self, row: Row) -> str:
        return f"{row['method']} ×{row['concurrency']}"

    def warnings(self, rows: Sequence[Row]) -> list[str]:
        found = super().warnings(rows)
        repeats = [row for row in rows if row["distinct_prompts"] < row["num_requests"]]
        if repeats:
            most = max(repeats, key=lambda row: row["num_requests"])
            found.append(
                f"prompts were asked more than once (×{most['concurrency']}: {most['num_requests']} requests for "
                f"{most['distinct_prompts']} distinct): an algorithm that learns from text, such as ngram, has seen "
                "the answers before and looks faster than it is; raise data.limit"
            )
        return found

    def sections(self, rows: Sequence[Row]) -> list[str]:
        methods = list(dict.fromkeys(row["method"] for row in rows))
        series = [
            (method, [(float(r["concurrency"]), r["wall_tokens_per_s"] or 0.0) for r in rows if r["method"] == method])
            for method in methods
        ]
        chart = lines(series, "wall tokens per second", ("requests at a time", "wall tokens/s"))
        return [section("Tokens per second", chart + legend(methods))]


def repeated(requests: Sequence[Request], count: int) -> list[Request]:
    """`count` requests: the prompts in turn, each time with another seed."""
    rounds = [(turn, request) for turn in range(-(-count // len(requests))) for request in requests][:count]
    return [
        replace(r.with_sampling(seed=r.sampling.seed + turn * len(requests)), id=i)
        for i, (turn, r) in enumerate(rounds)
    ]


def inter_token_ms(completions: Sequence[Completion]) -> list[float]:
    """One figure per token after the first step's: the time since the step before over the tokens of the step.

    Tokens past the end of a request do not count.
    """
    found: list[float] = []
    for completion in completions:
        given = [accepted + 1 for accepted in completion.accepted_counts]
        given[-1] -= completion.num_truncated
        for (before, after), tokens in zip(pairwise(completion.emitted_at_ms), given[1:], strict=True):
            found += [(after - before) / tokens] * tokens
    return found
