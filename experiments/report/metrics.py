"""The figures of one decoding, as plain numbers. docs/reading_a_report.md explains them to readers.

Over all steps of all requests, with `a` the accepted drafts of a step (the bonus token excluded):

    tokens_per_step      mean(a + 1), pooled; tokens that the last step drew past the stop count (num_truncated)
    acceptance           of the steps that reached position i: accepted #(a > i), rejected #(a = i, with a draft there),
                         no_draft #(a = i, without one)
    acceptance_at[i]     accepted / (accepted + rejected) at i: conditional on being reached and drafted
    ..._interval         of 95 %: tokens_per_step takes requests as independent, and acceptance_at steps (Wilson)
    acceptance_rate      accepted drafts / drafted tokens, as vLLM defines it; all nodes of a tree count as drafted
    decode_tokens_per_s  output tokens / time of the steps (the decode clock), all rounds together
    wall_tokens_per_s    output tokens / time of the whole call, with prefill and scheduling (the wall clock)
    request_tokens_per_s output tokens of a request / its time in the batch; the median over requests
    speedup_decode       decode_tokens_per_s over the baseline's, of the same engine, requests and clock
    speedup_wall         wall_tokens_per_s over the baseline's
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.app.hardware import INTERPRETER
from experiments.report import repeats

if TYPE_CHECKING:
    from algorithms.runtime.request import Completion
    from algorithms.runtime.session import Generation

Score = Callable[[int, str], bool]
Look = Callable[[int, Mapping[str, Any]], dict[str, Any]]
LOW_ACCEPTANCE = 0.05
FEWEST_REQUESTS = 4
"""From how many requests an interval of tokens per step is told."""
NOT_A_GPU = {
    INTERPRETER: "Times are of Triton's interpreter on the CPU and say nothing about a GPU.",
    "reference": "Times are of plain torch on the CPU and say nothing about a GPU.",
}


def quantiles(values: Sequence[float], **points: float) -> dict[str, float | None]:
    """`points` maps a name to a quantile in [0, 1]; None where there are no values."""
    return {name: float(np.quantile(values, q)) if values else None for name, q in points.items()}


def num_accepted_histogram(accepted_counts: Sequence[int], max_depth: int) -> list[int]:
    """Entry k: steps that accepted exactly k drafts, for k from 0 to `max_depth`."""
    counts = Counter(accepted_counts)
    return [counts[k] for k in range(max_depth + 1)]


def acceptance_by_position(steps: Sequence[tuple[int, bool]], max_depth: int) -> dict[str, list[int]]:
    """`accepted`, `rejected` and `no_draft`: entry i counts the steps that reached draft i + 1, by what became of it.

    A step is (accepted drafts, whether the accepted path ended where nothing was drafted).
    """
    ends = Counter(steps)
    histogram = [ends[k, False] + ends[k, True] for k in range(max_depth + 1)]
    return {
        "accepted": [sum(histogram[i + 1 :]) for i in range(max_depth)],
        "rejected": [ends[i, False] for i in range(max_depth)],
        "no_draft": [ends[i, True] for i in range(max_depth)],
    }


def conditional_acceptance(counts: Mapping[str, Sequence[int]]) -> list[float | None]:
    """Entry i: of the steps that reached draft i + 1 and had one, the share that accepted it; None where none did."""
    pairs = zip(counts["accepted"], counts["rejected"], strict=True)
    return [ratio(accepted, accepted + rejected) for accepted, rejected in pairs]


def acceptance_intervals(counts: Mapping[str, Sequence[int]]) -> list[list[float] | None]:
    """The 95 % interval (Wilson) of each entry of `conditional_acceptance`; it takes the steps as independent."""
    pairs = zip(counts["accepted"], counts["rejected"], strict=True)
    return [repeats.wilson(accepted, accepted + rejected) for accepted, rejected in pairs]


def ratio(numerator: float, denominator: float) -> float | None:
    """`numerator / denominator`, None for a denominator of 0."""
    return numerator / denominator if denominator else None


def summarize_method(
    generation: Generation, max_depth: int, rounds: Sequence[Generation] | None = None
) -> dict[str, Any]:
    """The figures of one decoding of all requests; times are those of `rounds`, of this decoding alone if None."""
    completions = generation.completions
    accepted = [count for completion in completions for count in completion.accepted_counts]
    drafted = sum(count for completion in completions for count in completion.drafted_counts)
    ends = [step for c in completions for step in zip(c.accepted_counts, c.ran_out, strict=True)]
    positions = acceptance_by_position(ends, max_depth)
    output_tokens = sum(len(completion.token_ids) for completion in completions)
    emitted = [sum(c.accepted_counts) + len(c.accepted_counts) for c in completions]
    return {
        "num_requests": len(completions),
        "num_failed": sum(bool(completion.error) for completion in completions),
        "num_cut": sum(completion.finish_reason == "length" for completion in completions),
        "num_constrained": sum(completion.parsed is not None for completion in completions),
        "num_parsed": sum(bool(completion.parsed) for completion in completions),
        "output_tokens": output_tokens,
        "num_truncated": sum(completion.num_truncated for completion in completions),
        "tokens_per_step": ratio(sum(emitted), len(accepted)),
        "tokens_per_step_interval": _interval_of_steps(emitted, completions) if max_depth else None,
        "num_accepted_histogram": num_accepted_histogram(accepted, max_depth),
        "acceptance": positions,
        "acceptance_at": conditional_acceptance(positions),
        "acceptance_at_interval": acceptance_intervals(positions),
        "num_accepted": sum(accepted),
        "num_drafted": drafted,
        "acceptance_rate": ratio(sum(accepted), drafted),
        **summarize_times([generation] if rounds is None else rounds),
        "finish_reasons": dict(Counter(completion.finish_reason for completion in completions)),
    }


def _interval_of_steps(emitted: Sequence[int], completions: Sequence[Completion]) -> list[float] | None:
    """The interval of tokens per step, from requests that `emitted` so many tokens; None for so few that it would be
    wider than the figure."""
    if len(completions) < FEWEST_REQUESTS:
        return None
    return repeats.ratio_interval(emitted, [len(c.accepted_counts) for c in completions])


def summarize_times(rounds: Sequence[Generation]) -> dict[str, Any]:
    """The times of decodings of the same requests: rates are pooled, sums are means over the rounds."""

    def mean(values: Sequence[float]) -> float:
        return fmean(values) if values else 0.0

    def rates(times: Sequence[float]) -> list[float]:
        return [ratio(count * 1e3, ms) or 0.0 for count, ms in zip(tokens, times, strict=True)]

    tokens = [sum(len(c.token_ids) for c in g.completions) for g in rounds]
    decode, wall = [g.decode_ms for g in rounds], [g.wall_ms for g in rounds]
    by_round = {"decode_tokens_per_s": rates(decode), "wall_tokens_per_s": rates(wall)}
    pooled = {
        "decode_tokens_per_s": ratio(sum(tokens) * 1e3, sum(decode)),
        "wall_tokens_per_s": ratio(sum(tokens) * 1e3, sum(wall)),
    }
    phases = rounds[0].ledger_ms if rounds else {}
    num_steps = rounds[0].num_steps if rounds else 0
    steps = quantiles([ms for g in rounds for ms in g.step_ms], median=0.5, p20=0.2, p80=0.8)
    request_rates = [1e3 * len(c.token_ids) / c.total_ms for g in rounds for c in g.completions if c.total_ms]
    return {
        **pooled,
        **{f"{key}_interval": repeats.interval(pooled[key], by_round[key]) for key in pooled},
        "rounds": by_round,
        "request_tokens_per_s": quantiles(request_rates, median=0.5)["median"],
        "num_steps": num_steps,
        "row_steps": sum(len(c.accepted_counts) for c in rounds[0].completions) if rounds else 0,
        "launched_rows": rounds[0].launched_rows if rounds else 0,
        "ttft_ms": quantiles([c.ttft_ms for g in rounds for c in g.completions], p50=0.5, p90=0.9),
        "step_ms": {"mean": ratio(mean(decode), num_steps), **steps},
        "prefill_ms": mean([g.prefill_ms for g in rounds]),
        "decode_ms": mean(decode),
        "wall_ms": mean(wall),
        "ledger_ms": {phase: mean([g.ledger_ms[phase] for g in rounds]) for phase in phases},
        "launch_ms": mean([g.launch_ms for g in rounds]),
    }


def compilations(names: Sequence[str]) -> dict[str, Any]:
    """How many kernels were compiled while the clock ran, and which; `names` has one entry per compilation."""
    return {"compiled": len(names), "compiled_kernels": sorted(set(names))}


def against_baseline(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Speedups of `row` over `baseline` on both clocks with their intervals, and what predicts the decode speedup."""
    speedups = {
        f"speedup_{clock}": ratio(row[f"{clock}_tokens_per_s"] or 0.0, baseline[f"{clock}_tokens_per_s"] or 0.0)
        for clock in repeats.CLOCKS
    }
    intervals = repeats.speedup_intervals({**row, **speedups}, baseline)
    return {**speedups, **intervals, "prediction": predict_speedup(row, baseline)}


def predict_speedup(method: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float | None]:
    """The decode speedup that tokens per step and step times promise, and the factors between it and the measured one.

    predicted = tokens_per_step / step_time_ratio, where the ratio is of mean step times. Exactly,

        speedup_decode = predicted * occupancy * kept
        occupancy      = rows per step over the baseline's; below 1 where the last requests run almost alone
        kept           = output tokens / emitted tokens, over the baseline's; below 1 where drafts pass the stop
    """

    def per_step(side: Mapping[str, Any], key: str) -> float:
        return side[key] / max(1, side["num_steps"])

    def kept(side: Mapping[str, Any]) -> float:
        return side["output_tokens"] / max(1, side["output_tokens"] + side["num_truncated"])

    tokens = ratio(method["tokens_per_step"] or 0.0, baseline["tokens_per_step"] or 0.0)
    slower = ratio(per_step(method, "decode_ms"), per_step(baseline, "decode_ms"))
    return {
        "predicted": ratio(tokens, slower) if tokens and slower else None,
        "step_time_ratio": slower,
        "occupancy": ratio(per_step(method, "row_steps"), per_step(baseline, "row_steps")),
        "kept": ratio(kept(method), kept(baseline)),
    }


def lossless(
    completions: Sequence[Completion],
    baseline: Sequence[Completion] | None,
    look: Look | None = None,
    ties_possible: bool = True,
) -> dict[str, Any]:
    """How many requests have exactly the tokens of the baseline, and where the first that differs does so.

    `look(index, difference)` adds the logits at a difference and says whether it is a near tie. The difference that is
    reported is the first one that is no near tie, if there is one. Where no difference can be a near tie, that one
    alone is looked at.
    """
    if baseline is None:
        return {"checked": 0, "identical": 0, "near_ties": 0, "first_difference": None}
    pairs = list(zip(completions, baseline, strict=True))
    found = [(i, first_difference(*pair)) for i, pair in enumerate(pairs) if pair[0].token_ids != pair[1].token_ids]
    looked = found if ties_possible else found[:1]
    known = {i: look(i, difference) for i, difference in looked} if look else {}
    seen = [difference | known.get(i, {}) for i, difference in found]
    faults = [difference for difference in seen if not difference.get("near_tie")]
    return {
        "checked": len(pairs),
        "identical": len(pairs) - len(seen),
        "near_ties": len(seen) - len(faults),
        "first_difference": next(iter([*faults, *seen]), None),
    }


def first_difference(ours: Completion, plain: Completion) -> dict[str, Any]:
    """The first position at which two token sequences differ; a token is None where its sequence has ended."""
    pairs = zip(ours.token_ids, plain.token_ids, strict=False)
    shorter = min(len(ours.token_ids), len(plain.token_ids))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

    def token(completion: Completion) -> int | None:
        return completion.token_ids[at] if at < len(completion.token_ids) else None

    return {"request": ours.request_id, "position": at, "token": token(ours), "baseline_token": token(plain)}


def answer_verdict(completion: Completion, index: int, score: Score | None) -> str | None:
    """right, wrong or cut: a text that reached its length limit before the answer. None for a set without answers."""
    if score is None:
        return None
    if score(index, completion.text):
        return "right"
    return "cut" if completion.finish_reason == "length" else "wrong"


def accuracy(completions: Sequence[Completion], score: Score | None) -> dict[str, Any]:
    """Numbers of right, wrong and cut answers, and `accuracy`: the share of right ones among the right and wrong.

    `score(index, text)` judges one answer and is None for a prompt set without answers; then all figures are None.
    """
    if score is None:
        return {"accuracy": None, "answers": None}
    counts = Counter(answer_verdict(completion, i, score) for i, completion in enumerate(completions))
    answers = {verdict: counts[verdict] for verdict in ("right", "wrong", "cut")}
    return {"accuracy": ratio(answers["right"], answers["right"] + answers["wrong"]), "answers": answers}


def num_faults(comparison: Mapping[str, Any]) -> int:
    """Requests that differ from the baseline at no near tie. `comparison` is what `lossless` gives."""
    return int(comparison["checked"] - comparison["identical"] - comparison.get("near_ties", 0))


def describe_difference(found: Mapping[str, Any] | None, dtype: str) -> str:
    """Where two texts part: both tokens, their logits and the gap. Empty where nothing is known."""
    if not found:
        return ""

    def token(prefix: str) -> str:
        number, logit = found[f"{prefix}token"], found.get(f"{prefix}logit")
        return "the end of the text" if number is None else f"token {number}" + _logit(logit)

    text = f"request {found['request']}, position {found['position']}: {token('')}, the baseline has "
    text += token("baseline_")
    if (gap := found.get("gap")) is not None:
        text += f", gap {gap:.2g}"
        if (bound := found.get("bound")) is not None:
            text += f", a near tie in {dtype} is at most {bound:.1g}"
    return text


def _logit(logit: float | None) -> str:
    return "" if logit is None else f" (logit {logit:.6g})"


def failures(row: Mapping[str, Any], dtype: str, exact: bool) -> list[str]:
    """Why the texts of a row are wrong: where a run is `exact` they must be those of autoregressive decoding, near ties
    aside."""
    comparison = row.get("lossless")
    if not comparison or not exact or not num_faults(comparison):
        return []
    differ = (
        f"{num_faults(comparison)} of {comparison['checked']} requests differ from autoregressive decoding in {dtype}"
    )
    return ["; ".join(filter(None, [differ, describe_difference(comparison["first_difference"], dtype)]))]


def warnings(row: Mapping[str, Any], dtype: str, exact: bool) -> list[str]:
    """What a reader of a row must know: a trained drafter that is never right, tokens that differ from the baseline's,
    kernels that the warm-up missed.

    What `failures` tells is not told again.
    """
    found = []
    first = row["acceptance_at"][0] if row.get("acceptance_at") else None
    if row.get("drafts_with_model", True) and first is not None and first < LOW_ACCEPTANCE:
        found.append(
            f"only {first:.1%} of first drafts were accepted: the drafter is probably wired wrongly, or was "
            "trained for another target"
        )
    if unparsed := row.get("num_constrained", 0) - row.get("num_parsed", 0):
        found.append(
            f"no whole text of its grammar: {unparsed} of {row['num_constrained']} texts; "
            f"cut by sampling.max_new_tokens: {row['num_cut']}"
        )
    comparison = row.get("lossless") or {"checked": 0, "identical": 0}
    near, differing = comparison.get("near_ties", 0), comparison["checked"] - comparison["identical"]
    first = comparison.get("first_difference")
    if exact:
        differing = near  # the others are failures
        first = None if num_faults(comparison) else first
    if differing:
        text = (
            f"{differing} of {comparison['checked']} requests differ from autoregressive decoding, {near} at a near tie"
        )
        if not exact:
            text += "; low precision rounds one row and many rows differently, runtime.deterministic=true does not"
        where = describe_difference(first, dtype)
        found.append(f"{text}; first: {where}" if where else text)
    found += repeats.warnings(row)
    if resumed := row.get("num_resumed"):
        found.append(
            f"{resumed} of {row['num_requests']} requests ended before the run was resumed; the times are without them"
        )
    if compiled := row.get("compiled"):
        kernels = ", ".join(row["compiled_kernels"])
        found.append(f"{compiled} kernels were compiled after the warm-up, and the times include that: {kernels}")
    return found


def warnings_of_all(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """What is told of many (label, row) in one line: answers that were cut, rounds that differ."""
    found, answers = [], [(label, row["answers"]) for label, row in rows if row.get("answers")]
    if cut := [f"{label}: {counts['cut']} of {sum(counts.values())}" for label, counts in answers if counts["cut"]]:
        found.append(f"answers cut by sampling.max_new_tokens do not count in accuracy ({repeats.several(cut)})")
    if spreads := repeats.wide_spreads(rows):
        found.append(spreads)
    return found
