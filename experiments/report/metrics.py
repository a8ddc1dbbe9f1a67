"""What a run amounts to, as plain numbers: the content of summary.json, defined here and nowhere else.

Over all steps of all requests, with `a` the accepted drafts of a step (the bonus token excluded):

    tokens_per_step      mean(a + 1), pooled; what the last step drew beyond the stop counts (num_truncated)
    acceptance_at[i]     #(a > i) / #(a >= i): steps whose i-th draft was accepted over those that reached it
    decode_tokens_per_s  output tokens / time of the steps; end_to_end also counts prefill and scheduling
    speedup              decode_tokens_per_s over the baseline's, of the same engine, requests and clock
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from algorithms.runtime.engine import Generation
    from algorithms.runtime.request import Completion

PHASES = ("draft", "verify", "accept", "commit", "host")
WHOLE_STEP = "graph"
LOW_ACCEPTANCE = 0.05


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
    """`numerator / denominator`, None where that means nothing."""
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
        "end_to_end_tokens_per_s": ratio(output_tokens * 1e3, generation.wall_ms),
        "ttft_ms": quantiles([c.ttft_ms for c in completions], p50=0.5, p90=0.9),
        "step_ms": quantiles(generation.step_ms, median=0.5, p20=0.2, p80=0.8),
        "prefill_ms": generation.prefill_ms,
        "decode_ms": generation.decode_ms,
        "wall_ms": generation.wall_ms,
        "ledger_ms": ledger(generation.ledger_ms),
        "launch_ms": generation.launch_ms,
        "row_steps": len(accepted),
        "finish_reasons": dict(Counter(completion.finish_reason for completion in completions)),
    }


def ledger(ledger_ms: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by phase; `graph` only where one graph was the whole step."""
    phases = {phase: ledger_ms.get(phase, 0.0) for phase in PHASES}
    return phases | ({WHOLE_STEP: ledger_ms[WHOLE_STEP]} if ledger_ms.get(WHOLE_STEP) else {})


def predict_speedup(method: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float | None]:
    """What tokens per step and step times promise, and the two factors that lie between that and what was measured.

    predicted = tokens_per_step / (t_step / t_autoregressive), with mean step times. Exactly,

        speedup = predicted * occupancy * kept,   occupancy = (rows a step) / (the baseline's rows a step)
                                                  kept = output tokens / tokens emitted, over the baseline's

    so a batch whose last requests run almost alone, or tokens drawn past a stop, show by name.
    """

    def step_ms(side: Mapping[str, Any]) -> float:
        return side["decode_ms"] / max(1, side["num_steps"])

    def rows(side: Mapping[str, Any]) -> float:
        return side["row_steps"] / max(1, side["num_steps"])

    def kept(side: Mapping[str, Any]) -> float:
        return side["output_tokens"] / max(1, side["output_tokens"] + side["num_truncated"])

    tokens = ratio(method["tokens_per_step"] or 0.0, baseline["tokens_per_step"] or 0.0)
    slower = ratio(step_ms(method), step_ms(baseline))
    return {
        "predicted": ratio(tokens, slower) if tokens and slower else None,
        "step_time_ratio": slower,
        "occupancy": ratio(rows(method), rows(baseline)),
        "kept": ratio(kept(method), kept(baseline)),
    }


def lossless(completions: Sequence[Completion], baseline: Sequence[Completion] | None) -> dict[str, Any]:
    """How many requests have exactly the tokens of the baseline, and where the first that has not departs."""
    if baseline is None:
        return {"checked": 0, "identical": 0, "first_difference": None}
    pairs = list(zip(completions, baseline, strict=True))
    different = [(ours, plain) for ours, plain in pairs if ours.token_ids != plain.token_ids]
    first = first_difference(*different[0]) if different else None
    return {"checked": len(pairs), "identical": len(pairs) - len(different), "first_difference": first}


def first_difference(ours: Completion, plain: Completion) -> dict[str, Any]:
    """Where two token sequences part; a token is None where its sequence has ended."""
    pairs = zip(ours.token_ids, plain.token_ids, strict=False)
    shorter = min(len(ours.token_ids), len(plain.token_ids))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

    def token(completion: Completion) -> int | None:
        return completion.token_ids[at] if at < len(completion.token_ids) else None

    return {"request": ours.request_id, "position": at, "token": token(ours), "baseline_token": token(plain)}


def accuracy(completions: Sequence[Completion], score: Callable[[int, str], bool] | None) -> float | None:
    """Share of right answers; `score(index, text)` judges one, None where the prompt set has no answers."""
    if score is None or not completions:
        return None
    return sum(score(i, completion.text) for i, completion in enumerate(completions)) / len(completions)


def acceptance_warnings(rates: Sequence[float | None]) -> list[str]:
    """What the acceptance of the first draft says of the drafter."""
    first = rates[0] if rates else None
    if first is None or first >= LOW_ACCEPTANCE:
        return []
    return [
        f"only {first:.1%} of first drafts were accepted: the drafter is probably wired wrongly, or was "
        "trained for another target"
    ]


def warnings(summary: dict[str, Any]) -> list[str]:
    """What a reader of the figures should be told."""
    found = acceptance_warnings(summary["acceptance_at"])
    checked, identical = summary["lossless"]["checked"], summary["lossless"]["identical"]
    if identical < checked:
        reason = (
            "low precision rounds one row and many rows differently; runtime.dtype=float32 is exact"
            if summary["dtype"] != "float32"
            else "in float32 this means a near tie of two logits or a fault"
        )
        found.append(f"{checked - identical} of {checked} requests differ from autoregressive decoding: {reason}")
    return found
