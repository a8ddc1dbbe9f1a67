"""Tokens per second, time to the first token and latency between tokens as more requests share the batch.

Each level of concurrency serves the same requests with autoregressive decoding, with the run's algorithm and with the
methods of `task.methods`, in batches of up to that many. The clock of a request starts when it enters the batch. The
tokens of one step share the time since the step before (`inter_token_ms`, pooled over tokens), so a speculative step
does not count as one slow token and some free ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from algorithms.engine.request import Completion, Request
from experiments.app.plan import Plan
from experiments.app.workload import Workload
from experiments.report.metrics import THROUGHPUT, ThroughputResult
from experiments.report.summarize import quantiles
from experiments.report.tables import Result, grouped
from experiments.report.templates import Series, chart, section
from experiments.tasks.base import Task


class Throughput(Task):
    """The run's algorithm, further methods and the baseline at every level of concurrency."""

    objective = "wall_tokens_per_s"
    keeps_parts = False  # the rest of a level would run at another concurrency
    columns = THROUGHPUT

    def measure(self) -> Sequence[Result]:
        return [result for level in self.plan.config.task.concurrency for result in self._level(level)]

    def _level(self, concurrency: int) -> Iterator[ThroughputResult]:
        """Baseline and methods with up to `concurrency` requests at a time."""
        (workload,) = self.plan.workloads
        plan, requests = at_concurrency(self.plan, workload, concurrency)
        distinct = len({request.prompt_ids for request in requests})
        for result, decoded in self.decode_methods(workload, requests, f" ×{concurrency}", plan):
            latencies = quantiles(inter_token_ms(decoded.generation.completions), p50=0.5, p90=0.9)
            yield {**result, "concurrency": concurrency, "distinct_prompts": distinct, "inter_token_ms": latencies}

    def best(self, results: Sequence[Result]) -> Result:
        return super().best([result for result in results if result["method"] == self.plan.config.algo.name])

    def label(self, result: Result) -> str:
        return f"{result['method']} ×{result['concurrency']}"

    def warnings(self, results: Sequence[Result]) -> list[str]:
        found = super().warnings(results)
        repeats = [result for result in results if result["distinct_prompts"] < result["num_requests"]]
        if repeats:
            most = max(repeats, key=lambda result: result["num_requests"])
            times = f"×{most['concurrency']}: {most['num_requests']} requests for {most['distinct_prompts']} distinct"
            why = "an algorithm that learns from what it serves, such as ngram, has seen the answers; raise data.limit"
            found.append(f"prompts were used more than once ({times}): {why}")
        return found

    def sections(self, results: Sequence[Result]) -> list[str]:
        series = [
            Series(method, [(float(each["concurrency"]), each["wall_tokens_per_s"] or 0.0) for each in lines])
            for (method,), lines in grouped(results, ["method"]).items()
        ]
        drawn = chart(series, "wall tokens per second", ("requests at a time", "wall tokens/s"))
        return [section("Tokens per second", drawn)]


def at_concurrency(plan: Plan, workload: Workload, concurrency: int) -> tuple[Plan, list[Request]]:
    """`plan` for batches of `concurrency`, and the requests of `workload`, repeated to `task.requests` for each of
    them."""
    count = max(concurrency * plan.config.task.requests, len(workload.requests))
    return plan.varied(max_batch=concurrency, num_pages=None), repeated(workload.requests, count)


def repeated(requests: Sequence[Request], count: int) -> list[Request]:
    """`count` requests: the prompts again and again, each time with another seed."""
    distinct = len(requests)
    chosen = [(i, i - i % distinct, requests[i % distinct]) for i in range(count)]
    return [replace(r.with_sampling(seed=r.sampling.seed + before), id=i) for i, before, r in chosen]


def inter_token_ms(completions: Sequence[Completion]) -> list[float]:
    """One figure per token after the first step's: the time since the step before over the tokens of the step. Tokens
    past the end of a request do not count."""
    found: list[float] = []
    for completion in completions:
        given = [accepted + 1 for accepted in completion.accepted_counts]
        given[-1] -= completion.num_truncated
        for (before, after), tokens in zip(pairwise(completion.emitted_at_ms), given[1:], strict=True):
            found += [(after - before) / tokens] * tokens
    return found
