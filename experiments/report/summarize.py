"""Computes the figures that `metrics` declares from what the engine returned."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from algorithms.engine.request import Completion
from algorithms.engine.session import Generation
from experiments.report import metrics
from experiments.report.intervals import interval, ratio_interval, wilson

Score = Callable[[int, str], bool]
Look = Callable[[int, Mapping[str, Any]], dict[str, Any]]
CLOCKS = ("decode", "wall")
FEWEST_REQUESTS = 4  # from how many requests tokens per step have an interval


def quantiles(values: Sequence[float], **points: float) -> Any:
    """`points` maps a name to a quantile in [0, 1]; None where there are no values."""
    return {name: float(np.quantile(values, q)) if values else None for name, q in points.items()}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """`numerator / denominator`; None where one is missing, and for a denominator of 0."""
    return None if numerator is None or not denominator else numerator / denominator


def acceptance_figures(
    steps: Sequence[tuple[int, bool]], produced: Sequence[int], num_steps: Sequence[int], output_tokens: int, depth: int
) -> metrics.AcceptanceFigures:
    """Figures of `steps`, each of (accepted drafts, whether the accepted path ended where nothing was drafted);
    `produced` tokens and `num_steps` are by request."""
    ends = Counter(steps)
    histogram = [ends[k, False] + ends[k, True] for k in range(depth + 1)]
    accepted, rejected = [sum(histogram[i + 1 :]) for i in range(depth)], [ends[i, False] for i in range(depth)]
    drafted = [(yes, yes + no) for yes, no in zip(accepted, rejected, strict=True)]
    return {
        "num_requests": len(produced),
        "output_tokens": output_tokens,
        "row_steps": len(steps),
        "tokens_per_step": ratio(sum(produced), len(steps)),
        "tokens_per_step_interval": ratio_interval(produced, num_steps),
        "num_accepted_histogram": histogram,
        "acceptance": {"accepted": accepted, "rejected": rejected, "no_draft": [ends[i, True] for i in range(depth)]},
        "acceptance_at": [ratio(*pair) for pair in drafted],
        "acceptance_at_interval": [wilson(*pair) for pair in drafted],
    }


def summarize_outputs(completions: Sequence[Completion], max_depth: int) -> metrics.Counts:
    """Figures of one decoding of all requests that do not depend on a clock."""
    steps = [step for c in completions for step in zip(c.accepted_counts, c.ran_out, strict=True)]
    num_steps = [len(c.accepted_counts) for c in completions]
    produced = [sum(c.accepted_counts) + count for c, count in zip(completions, num_steps, strict=True)]
    output_tokens = sum(len(c.token_ids) for c in completions)
    shared = acceptance_figures(steps, produced, num_steps, output_tokens, max_depth)
    if not max_depth or len(completions) < FEWEST_REQUESTS:
        shared["tokens_per_step_interval"] = None
    accepted, drafted = sum(count for count, _ in steps), sum(sum(c.drafted_counts) for c in completions)
    return {
        **shared,
        "num_failed": sum(bool(c.error) for c in completions),
        "num_cut": sum(c.finish_reason == "length" for c in completions),
        "num_constrained": sum(c.parsed is not None for c in completions),
        "num_parsed": sum(bool(c.parsed) for c in completions),
        "num_truncated": sum(c.num_truncated for c in completions),
        "num_accepted": accepted,
        "num_drafted": drafted,
        "acceptance_rate": ratio(accepted, drafted),
        "finish_reasons": dict(Counter(c.finish_reason for c in completions)),
    }


def summarize_times(rounds: Sequence[Generation]) -> metrics.Times:
    """The times of decodings of the same requests: rates are pooled, sums are means over the rounds."""

    def mean(values: Sequence[float]) -> float:
        return fmean(values) if values else 0.0

    tokens = [sum(len(c.token_ids) for c in g.completions) for g in rounds]
    times = {"decode": [g.decode_ms for g in rounds], "wall": [g.wall_ms for g in rounds]}
    pooled = {clock: ratio(sum(tokens) * 1e3, sum(of_rounds)) for clock, of_rounds in times.items()}
    decode, wall = ([ratio(n * 1e3, ms) or 0.0 for n, ms in zip(tokens, each, strict=True)] for each in times.values())
    num_steps = rounds[0].num_steps if rounds else 0
    rates = [1e3 * len(c.token_ids) / c.total_ms for g in rounds for c in g.completions if c.total_ms]
    steps: Any = {
        "mean": ratio(mean(times["decode"]), num_steps),
        **quantiles([ms for g in rounds for ms in g.step_ms], median=0.5, p20=0.2, p80=0.8),
    }
    phases = rounds[0].phase_times_ms if rounds else {}
    return {
        "decode_tokens_per_s": pooled["decode"],
        "wall_tokens_per_s": pooled["wall"],
        "decode_tokens_per_s_interval": interval(pooled["decode"], decode),
        "wall_tokens_per_s_interval": interval(pooled["wall"], wall),
        "rounds": {"decode_tokens_per_s": decode, "wall_tokens_per_s": wall},
        "request_tokens_per_s": quantiles(rates, median=0.5)["median"],
        "num_steps": num_steps,
        "experts": rounds[0].experts if rounds else None,
        "ttft_ms": quantiles([c.ttft_ms for g in rounds for c in g.completions], p50=0.5, p90=0.9),
        "step_ms": steps,
        "prefill_ms": mean([g.prefill_ms for g in rounds]),
        "decode_ms": mean(times["decode"]),
        "wall_ms": mean(times["wall"]),
        "phase_times_ms": {phase: mean([g.phase_times_ms[phase] for g in rounds]) for phase in phases},
        "launch_ms": mean([g.launch_ms for g in rounds]),
    }


def summarize_method(
    generation: Generation, max_depth: int, rounds: Sequence[Generation] | None = None
) -> dict[str, Any]:
    """The figures of one decoding of all requests; times are those of `rounds`, of this decoding alone if None."""
    times = summarize_times([generation] if rounds is None else rounds)
    return {**summarize_outputs(generation.completions, max_depth), **times}


def against_baseline(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Speedups of `result` over `baseline` on both clocks with their intervals, and the predicted decode speedup."""
    found: dict[str, Any] = {}
    for clock in CLOCKS:
        key = f"{clock}_tokens_per_s"
        pairs = zip(result["rounds"][key], baseline["rounds"][key], strict=False)
        speedup = ratio(result[key], baseline[key])
        found[f"speedup_{clock}"] = speedup
        found[f"speedup_{clock}_interval"] = interval(speedup, [a / b for a, b in pairs if b])
    return found | {"prediction": predict_speedup(result, baseline)}


def predict_speedup(method: Mapping[str, Any], baseline: Mapping[str, Any]) -> metrics.Prediction:
    """The decode speedup that tokens per step and step times predict, and the factors between it and the measured one.

    predicted = tokens_per_step / step_time_ratio, where the ratio is of mean step times. Exactly,

        speedup_decode = predicted * occupancy * kept
        occupancy      = requests per step over the baseline's; below 1 where the last requests run almost alone
        kept           = output tokens / produced tokens, over the baseline's; below 1 where drafts pass the end
    """

    def per_step(side: Mapping[str, Any], key: str) -> float:
        return side[key] / max(1, side["num_steps"])

    def kept(side: Mapping[str, Any]) -> float:
        return side["output_tokens"] / max(1, side["output_tokens"] + side["num_truncated"])

    slower = ratio(per_step(method, "decode_ms"), per_step(baseline, "decode_ms"))
    return {
        "predicted": ratio(ratio(method["tokens_per_step"], baseline["tokens_per_step"]), slower),
        "step_time_ratio": slower,
        "occupancy": ratio(per_step(method, "row_steps"), per_step(baseline, "row_steps")),
        "kept": ratio(kept(method), kept(baseline)),
    }


def lossless(
    completions: Sequence[Completion],
    baseline: Sequence[Completion],
    look: Look = lambda index, found: {},
    ties_possible: bool = True,
) -> metrics.Lossless:
    """How many requests have exactly the tokens of the baseline, and where the first that differs does so.
    `look(index, difference)` adds the logits at a difference and says whether it is a numerical tie. The reported
    difference is the first that is no tie, else the first. Without `ties_possible` only the first is looked at."""
    pairs = list(zip(completions, baseline, strict=True))
    found = [(i, first_difference(*pair)) for i, pair in enumerate(pairs) if pair[0].token_ids != pair[1].token_ids]
    for i, difference in found if ties_possible else found[:1]:
        difference.update(look(i, difference))  # type: ignore[misc, typeddict-item]
    faults = [difference for _, difference in found if not difference.get("numerical_tie")]
    return {
        "checked": len(pairs),
        "identical": len(pairs) - len(found),
        "near_ties": len(found) - len(faults),
        "first_difference": next(iter([*faults, *(difference for _, difference in found)]), None),
    }


def first_difference(ours: Completion, plain: Completion) -> metrics.Difference:
    """The first position at which two token sequences differ; a token is None where its sequence has ended."""
    pairs = zip(ours.token_ids, plain.token_ids, strict=False)
    shorter = min(len(ours.token_ids), len(plain.token_ids))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    token, baseline_token = (next(iter(side.token_ids[place:]), None) for side in (ours, plain))
    return {"request": ours.request_id, "position": place, "token": token, "baseline_token": baseline_token}


def answer_verdict(completion: Completion, index: int, score: Score | None) -> str | None:
    """right, wrong or cut: an output that reached its length limit before the answer. None without a judge."""
    if score is None:
        return None
    if score(index, completion.text):
        return "right"
    return "cut" if completion.finish_reason == "length" else "wrong"


def accuracy(completions: Sequence[Completion], score: Score | None) -> dict[str, Any]:
    """Numbers of right, wrong and cut answers, and `accuracy`: the share of right ones among the right and wrong.
    `score(index, text)` judges one answer and is None for a prompt set without answers; then all figures are None."""
    if score is None:
        return {"accuracy": None, "answers": None}
    counts = Counter(answer_verdict(completion, i, score) for i, completion in enumerate(completions))
    answers = {verdict: counts[verdict] for verdict in ("right", "wrong", "cut")}
    return {"accuracy": ratio(answers["right"], answers["right"] + answers["wrong"]), "answers": answers}


def compilations(names: Sequence[str]) -> dict[str, Any]:
    """How many kernels were compiled while the clock ran, and which; `names` has one entry per compilation."""
    return {"compiled": len(names), "compiled_kernels": sorted(set(names))}
