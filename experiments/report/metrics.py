"""Every figure of a decoding: its key in `summary.json`, its type, what it means, and how tables show it.

A new metric is declared here and computed in `summarize`. Tables, the glossary of pages, CSV files and trackers take it
from the declaration.
"""

from typing import Annotated, Any, TypedDict

from experiments.report.tables import DASH, Metric, Result, columns, figure

Number = float | None  # None where there is nothing to measure
Quantiles = dict[str, Number]  # p50 and p90


class StepTime(TypedDict):
    """Milliseconds of a step: mean, median, 20 % and 80 % quantile."""

    mean: Annotated[Number, Metric("Mean time of a step, and of its wait for a prefill batch.", "ms/step", digits=2)]
    median: Number
    p20: Number
    p80: Number


class AcceptanceCounts(TypedDict):
    """Entry i: of the steps that reached draft i + 1, those that accepted it, rejected it, or had no draft there."""

    accepted: list[int]
    rejected: list[int]
    no_draft: list[int]


class Difference(TypedDict, total=False):
    """The first position at which an output differs from the baseline's, and the logits of both tokens there."""

    request: int
    position: int
    turn: int
    token: int | None
    baseline_token: int | None
    logit: Number
    baseline_logit: Number
    gap: Number
    bound: Number
    numerical_tie: bool


class Lossless(TypedDict):
    """Requests that were compared with the baseline, those with equal tokens, and those that differ at a tie."""

    checked: int
    identical: int
    near_ties: int
    first_difference: Difference | None


class Prediction(TypedDict):
    """speedup_decode = predicted × occupancy × kept, and predicted = tokens_per_step / step_time_ratio."""

    predicted: Annotated[
        Number, Metric("Decode speedup that tokens/step and step times predict.", "predicted", digits=2, unit="×")
    ]
    step_time_ratio: Annotated[Number, Metric("Mean time of a step over the baseline's.")]
    occupancy: Annotated[Number, Metric("Requests in a step over the baseline's.")]
    kept: Annotated[Number, Metric("Share of produced tokens that are output, over the baseline's.")]


def _at_positions(result: Result) -> str:
    rates = [None if rate is None else 100 * rate for rate in result["acceptance_at"][:6]]
    return " ".join(figure(rate, 0) for rate in rates or [None])


class AcceptanceFigures(TypedDict):
    """Acceptance of steps, in every task that counts steps."""

    num_requests: Annotated[int, Metric("Number of requests.", "requests", digits=0)]
    output_tokens: Annotated[int, Metric("Output tokens of all requests.")]
    row_steps: Annotated[int, Metric("Steps times the requests in them.", "steps", digits=0)]
    tokens_per_step: Annotated[
        Number, Metric("Mean of accepted drafts plus the bonus token (acceptance length).", "tokens/step", digits=2)
    ]
    tokens_per_step_interval: list[float] | None
    num_accepted_histogram: Annotated[list[int], Metric("Entry k: steps that accepted exactly k drafts.")]
    acceptance: Annotated[AcceptanceCounts, Metric("Steps that reached each draft position, by what became of it.")]
    acceptance_at: Annotated[
        list[Number], Metric("Accepted share of the drafts at a position.", "acceptance % at 1…6", show=_at_positions)
    ]
    acceptance_at_interval: Annotated[list[list[float] | None], Metric("Wilson's 95 % interval of each entry.")]


class Times(TypedDict):
    """Times of the rounds of a decoding. Rates are pooled over the rounds, sums are means over them."""

    decode_tokens_per_s: Annotated[
        Number, Metric("Output tokens over the time of the steps, without prefill and scheduling.", "decode tokens/s")
    ]
    wall_tokens_per_s: Annotated[
        Number, Metric("Output tokens over the time from the first request to the last token.", "wall tokens/s")
    ]
    decode_tokens_per_s_interval: list[float] | None
    wall_tokens_per_s_interval: list[float] | None
    rounds: Annotated[dict[str, list[float]], Metric("The rate of each round.")]
    request_tokens_per_s: Annotated[Number, Metric("Output tokens of a request over its time; the median.")]
    num_steps: Annotated[int, Metric("Steps of the engine in the first round.")]
    experts: Annotated[
        dict[str, float] | None,
        Metric(
            "Experts of a layer that a step touches, of how many, with rows of a step, in the first round.",
            "experts/step",
            digits=0,
            parts="touched_per_step/num_experts",
        ),
    ]
    ttft_ms: Annotated[
        Quantiles, Metric("Median and 90 % quantile to first token.", "first token ms p50/p90", parts="p50/p90")
    ]
    step_ms: Annotated[
        StepTime, Metric("20 % and 80 % quantiles of the time of a step.", "ms/step p20/p80", digits=2, parts="p20/p80")
    ]
    prefill_ms: Annotated[float, Metric("Time of prefill. In steps with mixed prefill: what the prompts add.")]
    decode_ms: Annotated[float, Metric("Time of all steps (the decode clock).")]
    wall_ms: Annotated[float, Metric("Time of the whole call (the wall clock).")]
    phase_times_ms: Annotated[dict[str, float], Metric("Time of all steps by phase.")]
    launch_ms: Annotated[float, Metric("The host's own time to start the steps.")]


def _parsed(result: Result) -> str:
    return f"{result['num_parsed']}/{result['num_constrained']}" if result.get("num_constrained") else DASH


class Counts(AcceptanceFigures):
    """Figures of outputs and drafts that do not depend on a clock."""

    num_failed: Annotated[int, Metric("Requests that ended with an error.")]
    num_cut: Annotated[
        int, Metric("Requests whose output was truncated by `sampling.max_new_tokens`.", "truncated", digits=0)
    ]
    num_constrained: Annotated[int, Metric("Requests with a grammar.")]
    num_parsed: Annotated[
        int, Metric("Complete outputs of their grammar, over requests that have one.", "parsed", show=_parsed)
    ]
    num_truncated: Annotated[int, Metric("Tokens that last steps produced past the end of a request.")]
    num_accepted: Annotated[int, Metric("Accepted drafts.")]
    num_drafted: Annotated[int, Metric("Drafted tokens; every node of a tree but its root is one.")]
    acceptance_rate: Annotated[
        Number, Metric("Accepted drafts over all drafted tokens (vLLM).", "accepted / drafted", scale=100, unit="%")
    ]
    finish_reasons: Annotated[dict[str, int], Metric("Reason for the end of a request, and number of requests.")]


def num_faults(comparison: Lossless | Result) -> int:
    """Requests that differ from the baseline at no numerical tie."""
    return int(comparison["checked"] - comparison["identical"] - comparison.get("near_ties", 0))  # type: ignore[operator]


def lossless_tone(result: Result) -> str | None:
    """Good where all requests are identical, bad where one differs at no numerical tie."""
    comparison = result["lossless"]
    if not comparison["checked"]:
        return None
    if comparison["identical"] == comparison["checked"]:
        return "good"
    return "bad" if num_faults(comparison) else None


def _lossless(result: Result) -> str:
    comparison = result["lossless"]
    if result["algo"] == "autoregressive":
        return "reference"
    if comparison["checked"]:
        return f"{comparison['identical']}/{comparison['checked']}"
    return DASH if result["rule"] == "target_only" else "by distribution"


def _accuracy(result: Result) -> str:
    share, answers = result.get("accuracy"), result.get("answers")
    shown = figure(None if share is None else 100 * share, 0, "%")
    return f"{shown} ({answers['cut']} truncated)" if answers and answers["cut"] else shown


def _compiled_tone(result: Result) -> str | None:
    return "bad" if result.get("compiled") else None


class MethodResult(Counts, Times):
    """One method on one prompt set, compared with autoregressive decoding of the same requests."""

    data: Annotated[str, Metric("Prompt set.", "data")]
    method: Annotated[str, Metric("Label of the method.", "method")]
    algo: Annotated[str, Metric("Algorithm.")]
    rule: Annotated[str, Metric("Acceptance rule.", "rule")]
    settings: Annotated[dict[str, Any], Metric("Every setting of the algorithm.")]
    drafts_with_model: Annotated[bool, Metric("Whether the drafter has weights.")]
    num_nodes: Annotated[int, Metric("Nodes verified per request and step, the root included.", "nodes", digits=0)]
    graphs: Annotated[dict[str, Any], Metric("CUDA graphs: level, sizes, number, time and memory of their capture.")]
    attention: Annotated[dict[str, str], Metric("What computed attention in each phase.")]
    adaptive: Annotated[dict[str, Any] | None, Metric("`runtime.adaptive`: step times (`costs`), steps by nodes.")]
    template: Annotated[Any, Metric("SHA-256 of the chat template, and whether the model was asked to think.")]
    num_resumed: Annotated[int, Metric("Requests that had ended before the run was resumed.")]
    num_timed_rounds: Annotated[int, Metric("Rounds that times are taken from: decoded whole by one process.")]
    differing_rounds: Annotated[int, Metric("Rounds with other outputs than the first.")]
    accuracy: Annotated[
        Number, Metric("Right answers over right and wrong ones, truncated ones aside.", "accuracy", show=_accuracy)
    ]
    answers: Annotated[dict[str, int] | None, Metric("Numbers of right, wrong and truncated (`cut`) answers.")]
    compiled: Annotated[
        int,
        Metric("Kernels that were compiled while the clock ran: 0 is good.", "compiled", digits=0, tone=_compiled_tone),
    ]
    compiled_kernels: Annotated[list[str], Metric("Their names.")]
    lossless: Annotated[
        Lossless,
        Metric(
            "Requests whose tokens equal autoregressive decoding with the same seeds, over requests compared.",
            "lossless",
            show=_lossless,
            tone=lossless_tone,
        ),
    ]
    speedup_decode: Annotated[Number, Metric("Decode rate over the baseline's.", "decode speedup", digits=2, unit="×")]
    speedup_wall: Annotated[Number, Metric("Wall rate over the baseline's.", "wall speedup", digits=2, unit="×")]
    speedup_decode_interval: list[float] | None
    speedup_wall_interval: list[float] | None
    prediction: Prediction | None


class ThroughputResult(MethodResult):
    """One method at one concurrency."""

    concurrency: Annotated[int, Metric("Requests at a time, at most.", "concurrency", digits=0)]
    distinct_prompts: Annotated[int, Metric("Different prompts among the requests.")]
    inter_token_ms: Annotated[
        Quantiles, Metric("Time of a step per token.", "between tokens ms p50/p90", digits=2, parts="p50/p90")
    ]


_OUTPUTS = ("accuracy", "num_cut", "num_parsed", "compiled")
_WIDE = ("acceptance_rate", "step_ms", "num_cut", "num_parsed", "compiled")
GENERATE = columns(
    MethodResult, "method", "decode_tokens_per_s", "wall_tokens_per_s", "step_ms/mean", "step_ms",
    "tokens_per_step", "acceptance_rate", "ttft_ms", "speedup_decode", "lossless", *_OUTPUTS,
    wide=(*_WIDE, "wall_tokens_per_s", "ttft_ms"),
)  # fmt: skip
COMPARE = columns(
    MethodResult, "data", "method", "speedup_decode", "prediction/predicted", "tokens_per_step", "acceptance_at",
    "acceptance_rate", "step_ms/mean", "experts", "lossless", *_OUTPUTS, wide=_WIDE,
)  # fmt: skip
THROUGHPUT = columns(
    ThroughputResult, "concurrency", "method", "wall_tokens_per_s", "speedup_wall", "ttft_ms", "inter_token_ms",
    "tokens_per_step", *_OUTPUTS, wide=_WIDE,
)  # fmt: skip
