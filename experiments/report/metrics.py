"""The figures of one decoding, as plain numbers. docs/reading_a_report.md explains them to readers.

Over all steps of all requests, with `a` the accepted drafts of a step (the bonus token excluded):

    tokens_per_step      mean(a + 1), pooled; tokens that the last step drew past the stop count (num_truncated)
    acceptance_at[i]     #(a > i) / #(a >= i): steps whose i-th draft was accepted over steps that reached it
    decode_tokens_per_s  output tokens / time of the steps (the decode clock)
    wall_tokens_per_s    output tokens / time of the whole call, with prefill and scheduling (the wall clock)
    speedup_decode       decode_tokens_per_s over the baseline's, of the same engine, requests and clock
    speedup_wall         wall_tokens_per_s over the baseline's
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from algorithms.runtime.engine import Generation
    from algorithms.runtime.request import Completion

LOW_ACCEPTANCE = 0.05
NOT_A_GPU = {
    "triton-interpreter": "Times are of Triton's interpreter on the CPU and say nothing about a GPU; tokens, "
    "acceptance and identity do not depend on it.",
    "reference": "Times are of plain torch on the CPU and say nothing about a GPU.",
}


def quantiles(values: Sequence[float], **points: float) -> dict[str, float | None]:
    """`points` maps a name to a quantile in [0, 1]; None where there are no values."""
    return {name: float(np.quantile(values, q)) if values else None for name, q in points.items()}


def num_accepted_histogram(accepted_counts: Sequence[int], max_depth: int) -> list[int]:
    """Entry k: steps that accepted exactly k drafts, for k from 0 to `max_depth`."""
    counts = Counter(accepted_counts)
    return [counts[k] for k in range(max_depth + 1)]


def acceptance_at(histogram: Sequence[int]) -> list[float | None]:
    """Entry i: steps whose i-th draft was accepted over steps that reached it; None where none did."""
    reached = [sum(histogram[i:]) for i in range(len(histogram))]
    return [reached[i + 1] / reached[i] if reached[i] else None for i in range(len(histogram) - 1)]


def ratio(numerator: float, denominator: float) -> float | None:
    """`numerator / denominator`, None for a denominator of 0."""
    return numerator / denominator if denominator else None


def summarize_method(generation: Generation, max_depth: int) -> dict[str, Any]:
    """The figures of one decoding of all requests."""
    completions = generation.completions
    accepted = [count for completion in completions for count in completion.accepted_counts]
    output_tokens = sum(len(completion.token_ids) for completion in completions)
    histogram = num_accepted_histogram(accepted, max_depth)
    return {
        "num_requests": len(completions),
        "output_tokens": output_tokens,
        "num_steps": generation.num_steps,
        "num_truncated": sum(completion.num_truncated for completion in completions),
        "tokens_per_step": ratio(sum(accepted) + len(accepted), len(accepted)),
        "num_accepted_histogram": histogram,
        "acceptance_at": acceptance_at(histogram),
        "decode_tokens_per_s": ratio(output_tokens * 1e3, generation.decode_ms),
        "wall_tokens_per_s": ratio(output_tokens * 1e3, generation.wall_ms),
        "ttft_ms": quantiles([c.ttft_ms for c in completions], p50=0.5, p90=0.9),
        "step_ms": quantiles(generation.step_ms, median=0.5, p20=0.2, p80=0.8),
        "prefill_ms": generation.prefill_ms,
        "decode_ms": generation.decode_ms,
        "wall_ms": generation.wall_ms,
        "ledger_ms": dict(generation.ledger_ms),
        "launch_ms": generation.launch_ms,
        "row_steps": len(accepted),
        "finish_reasons": dict(Counter(completion.finish_reason for completion in completions)),
    }


def against_baseline(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Speedups of `row` over `baseline` on both clocks, and what predicts the decode speedup."""
    return {
        f"speedup_{clock}": ratio(row[f"{clock}_tokens_per_s"] or 0.0, baseline[f"{clock}_tokens_per_s"] or 0.0)
        for clock in ("decode", "wall")
    } | {"prediction": predict_speedup(row, baseline)}


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


def lossless(completions: Sequence[Completion], baseline: Sequence[Completion] | None) -> dict[str, Any]:
    """How many requests have exactly the tokens of the baseline, and where the first that differs does so."""
    if baseline is None:
        return {"checked": 0, "identical": 0, "first_difference": None}
    pairs = list(zip(completions, baseline, strict=True))
    different = [(ours, plain) for ours, plain in pairs if ours.token_ids != plain.token_ids]
    first = first_difference(*different[0]) if different else None
    return {"checked": len(pairs), "identical": len(pairs) - len(different), "first_difference": first}


def first_difference(ours: Completion, plain: Completion) -> dict[str, Any]:
    """The first position at which two token sequences differ; a token is None where its sequence has ended."""
    pairs = zip(ours.token_ids, plain.token_ids, strict=False)
    shorter = min(len(ours.token_ids), len(plain.token_ids))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

    def token(completion: Completion) -> int | None:
        return completion.token_ids[at] if at < len(completion.token_ids) else None

    return {"request": ours.request_id, "position": at, "token": token(ours), "baseline_token": token(plain)}


def accuracy(completions: Sequence[Completion], score: Callable[[int, str], bool] | None) -> float | None:
    """Share of right answers; `score(index, text)` judges one answer and is None for a prompt set without answers."""
    if score is None or not completions:
        return None
    return sum(score(i, completion.text) for i, completion in enumerate(completions)) / len(completions)


def warnings(row: Mapping[str, Any], dtype: str) -> list[str]:
    """What a reader of a row must know: a drafter that is never right, tokens that differ from the baseline's."""
    found = []
    first = row["acceptance_at"][0] if row.get("acceptance_at") else None
    if first is not None and first < LOW_ACCEPTANCE:
        found.append(
            f"only {first:.1%} of first drafts were accepted: the drafter is probably wired wrongly, or was "
            "trained for another target"
        )
    checked, identical = (row["lossless"][key] if "lossless" in row else 0 for key in ("checked", "identical"))
    if identical < checked:
        reason = (
            "low precision rounds one row and many rows differently; runtime.dtype=float32 is exact"
            if dtype != "float32"
            else "in float32 this means a near tie of two logits or a fault"
        )
        found.append(f"{checked - identical} of {checked} requests differ from autoregressive decoding: {reason}")
    return found
