"""What the words of a page mean: one sentence for each heading of a table, and for the words of the charts."""

from __future__ import annotations

from collections.abc import Iterable

COLUMNS = {
    "decode tokens/s": "Output tokens over the time of the steps, all rounds together; prefill and scheduling are "
    "outside. ± is the half-width of the 95 % interval over rounds.",
    "wall tokens/s": "Output tokens over the time from the first request to the last token, prefill included.",
    "decode speedup": "Decode tokens/s over those of autoregressive decoding, the same engine and requests.",
    "wall speedup": "Wall tokens/s over those of autoregressive decoding.",
    "predicted": "The decode speedup that tokens/step and the mean times of a step promise.",
    "ms/step": "Mean time of a step: draft, verify, accept, commit and the host's work.",
    "ms/step 20–80%": "The 20 % and 80 % quantiles of the time of a step.",
    "tokens/step": "Accepted drafts plus the bonus token, averaged over all steps of all requests.",
    "accepted / drafted": "Accepted drafts over all drafted tokens; every node of a tree counts as drafted.",
    "acceptance % at 1…6": "Acceptance by position of the first six positions.",
    "first token ms p50/p90": "Median and 90 % quantile of the time from the start of a request to its first token.",
    "between tokens ms p50/p90": "Median and 90 % quantile of the time of a step shared by its tokens.",
    "lossless": "Requests whose tokens equal autoregressive decoding with the same seeds, over requests checked.",
    "accuracy": "Right answers over right and wrong ones; answers that the length limit cut count as neither.",
    "cut": "Requests whose text ended at its length limit.",
    "parsed": "Whole texts of their grammar, over requests that have one; a text that the length limit cut is none.",
    "compiled": "Kernels that were compiled while the clock ran; the times are good if it is 0.",
}
CHARTS = {
    "acceptance by position": "Of the steps that reached a draft position and had a draft there, the share that "
    "accepted it.",
    "no draft": "Steps that reached a position at which nothing was drafted; they are neither accepted nor rejected.",
    "ledger": "The time of a step by phase: draft, verify, accept, commit, host.",
}


def glossary(titles: Iterable[str]) -> dict[str, str]:
    """Word to meaning, for the headings `titles` that have one and for the charts."""
    return {title: COLUMNS[title] for title in titles if title in COLUMNS} | CHARTS
