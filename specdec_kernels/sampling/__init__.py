"""One token a row of logits: the argmax, or an exact draw from softmax(logits / T) under filters, without a sort and
without a host round trip.

A draw is the inverse of the cumulative law at one uniform u: the first token j with sum_{i <= j} w_i > u * sum_i w_i,
w_i = exp((l_i - max l) / T). The uniform comes from the counter-based generator Philox 4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the request's seed and the position of the row, so a
token depends neither on the batch it was drawn in nor on whether it was drawn alone or while verifying a block.

Random stream: (seed, position, stream, slot) -> word -> u = (word >> 8) / 2^24 in [0, 1). `position` is the position of
the row's input token; the drawn token will stand one further. The streams of `types` keep the target's draws, the
drafter's and those of the rejection rules apart.

Filters act on the law at its temperature, in this order, and each keeps ties:
    top-k   keeps what is at least the k-th largest value;
    top-p   sorts the rest in falling order and keeps a token iff the mass before it is < p * the mass of the rest, the
            first always; of equal tokens all are kept if one is. Equivalently: the smallest value v with mass{> v} <
            p * mass is the threshold;
    min-p   keeps probability >= min_p * the largest probability, that is l >= max l + T ln(min_p).
Every filter is therefore one threshold on the logit, exact for top-k. Kernel (float32 sums) and reference (float64) may
disagree about a token whose mass before it lies within 1e-6 * mass of p * mass, or whose logit lies within 4 float32
roundings of the min-p limit, and about nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.sampling import penalties, reference
from specdec_kernels.sampling.checks import check_filters, check_sources, expect_row_layout, expect_rows, expect_vectors
from specdec_kernels.sampling.types import (
    ACCEPT_STREAM,
    BONUS_STREAM,
    DRAFT_STREAM,
    RECOVER_STREAM,
    TARGET_STREAM,
    Filters,
    Picked,
)

__all__ = [
    "ACCEPT_STREAM",
    "BONUS_STREAM",
    "DRAFT_STREAM",
    "RECOVER_STREAM",
    "TARGET_STREAM",
    "Filters",
    "Picked",
    "apply_penalties",
    "count_tokens",
    "filtered_probs",
    "pick_tokens",
    "top_k_renorm",
    "top_p_renorm",
]

_LOGITS = (torch.float32, torch.float16, torch.bfloat16)


def pick_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
    impl: str = "auto",
) -> Picked:
    """Choose one token a row.

    NaN counts as -inf and +inf as the largest float32. A row in which nothing else than -inf and NaN stands gives token
    0 and `valid` False. A token of logit -inf is never chosen otherwise, nor a filtered one, nor one outside the
    vocabulary.

    Args:
        logits: [R, V] float32, float16 or bfloat16, V >= 1; the last dimension has stride 1, rows may be strided.
        temperature: [R] float32 or None. A row draws where it is above 0 and takes its argmax (lowest id among equals)
            elsewhere; None is 0 for all rows.
        seeds: [R] int64, any value; needed with `temperature` unless `uniforms` is given.
        positions: [R] int64; needed with `temperature` unless `uniforms` is given.
        uniforms: [R] float32 in [0, 1), replaces the generator (tests of the exact law).
        top_k: [R] int32 or None; <= 0 or >= V is off.
        top_p: [R] float32 or None; >= 1 or NaN is off, <= 0 keeps the largest only.
        min_p: [R] float32 or None; <= 0 or NaN is off, above 1 counts as 1.
        return_logprobs: also return log softmax(logits) (temperature 1, unfiltered) at the token, -inf where not valid.
        stream: the use of randomness that the draws belong to; a drafter gives DRAFT_STREAM.
        impl: `auto`, `triton` or `reference`.

    Filters do not move an argmax, so rows at temperature 0 ignore them.

    Returns:
        Picked: tokens [R] int64, valid [R] bool, logprobs [R] float32 or None.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, temperature without a source of uniforms, a stream below 0,
            unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_rows("logits", logits, *_LOGITS)
    rows = logits.shape[0]
    check_sources(rows, (rows,), temperature, seeds, positions, uniforms)
    filters: dict[str, Any] = dict(top_k=top_k, top_p=top_p, min_p=min_p)
    check_filters(rows, Filters(**filters))
    if stream < 0:
        raise ValueError(f"stream: expected at least 0, got {stream}")
    keys: dict[str, Any] = dict(temperature=temperature, seeds=seeds, positions=positions, uniforms=uniforms)
    expect_same_device(logits=logits, **keys, **filters)
    if use_triton(impl, logits):
        import specdec_kernels.sampling.kernel as kernel

        return kernel.pick_tokens(logits, **keys, **filters, return_logprobs=return_logprobs, stream=stream)
    return reference.pick_tokens(logits, **keys, **filters, return_logprobs=return_logprobs, stream=stream)


def filtered_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """The law that `pick_tokens` draws from, written out: what a drafter records as its own probabilities.

    Rows at temperature 0 are one at the argmax; rows without a usable logit are zero.

    Args:
        logits: [R, V] float32, float16 or bfloat16, vocabulary contiguous.
        temperature: [R] float32 or None (all rows at 0).
        top_k: [R] int32 or None.
        top_p: [R] float32 or None.
        min_p: [R] float32 or None.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [R, V] float32, each row summing to 1 (or 0) within rounding; exactly 0 where filtered.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_rows("logits", logits, *_LOGITS)
    filters: dict[str, Any] = dict(top_k=top_k, top_p=top_p, min_p=min_p)
    expect_vectors(logits.shape[0], temperature=(temperature, torch.float32))
    check_filters(logits.shape[0], Filters(**filters))
    expect_same_device(logits=logits, temperature=temperature, **filters)
    if use_triton(impl, logits):
        import specdec_kernels.sampling.kernel as kernel

        return kernel.filtered_probs(logits, temperature, **filters)
    return reference.filtered_probs(logits, temperature, **filters)


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Keep what is at least the k-th largest probability (ties kept) and renormalise.

    Args:
        probs: [R, V] float32, vocabulary contiguous; negative entries and NaN count as 0.
        top_k: [R] int32; <= 0 or >= V is off.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [R, V] float32; zeros for a row without a positive entry.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    return _renormalised(probs, Filters(top_k=top_k), impl)


def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Keep, in falling order, a probability iff the sum before it is < p * the row's sum (the first and ties always),
    and renormalise.

    Args:
        probs: [R, V] float32, vocabulary contiguous; negative entries and NaN count as 0.
        top_p: [R] float32; >= 1 is off.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [R, V] float32; zeros for a row without a positive entry.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    return _renormalised(probs, Filters(top_p=top_p), impl)


def _renormalised(probs: torch.Tensor, filters: Filters, impl: str) -> torch.Tensor:
    expect_rows("probs", probs, torch.float32)
    check_filters(probs.shape[0], filters)
    expect_same_device(probs=probs, **filters._asdict())
    if use_triton(impl, probs):
        import specdec_kernels.sampling.kernel as kernel

        return kernel.filtered_probs(probs, None, *filters, probabilities=True)
    return reference.filtered_probs(probs, None, *filters, probabilities=True)


def apply_penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor | None,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str = "auto",
) -> None:
    """Change the logits of a draft tree in place by what has been said, tokens drafted inside the block included.

    A node's row is judged as if its path had been accepted: its counts are those of the output so far and of the
    tokens from the root's child down to the node itself. (The root's own token is part of the output already.) With
    these counts c(v), in this order:
        repetition  l / r where l > 0 and l * r elsewhere, for tokens of the prompt or with c > 0;
        frequency   l - f c;
        presence    l - s where c > 0;
        bias        l + b.
    A row without any of them stays as it is, bit for bit.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, vocabulary contiguous, [B, N] mergeable; changed.
        tokens: [B, N] int64, contiguous; entries outside the vocabulary count as nothing.
        mask: [B, N, ceil(N / 64)] int64, contiguous: `TreeLinks.mask`.
        output_counts: [B, V] int32, contiguous: how often the request has said each token.
        prompt_seen: [B, V] bool, contiguous, or None.
        repetition: [B] float32 > 0; 1 is off.
        presence: [B] float32; 0 is off.
        frequency: [B] float32; 0 is off.
        bias: [B, V] float32, contiguous, or None.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("logits", logits, (None, None, None))
    batch, num_nodes, vocab = logits.shape
    expect_dtype("logits", logits, *_LOGITS)
    expect_row_layout("logits", logits)
    if batch > 1 and num_nodes > 1 and logits.stride(0) != num_nodes * logits.stride(1):
        raise ValueError(f"logits: expected [B, N] to merge into one dimension, got strides {logits.stride()}")
    tables = {
        "tokens": (tokens, (batch, num_nodes), torch.int64),
        "mask": (mask, (batch, num_nodes, -(-num_nodes // 64)), torch.int64),
        "output_counts": (output_counts, (batch, vocab), torch.int32),
        "prompt_seen": (prompt_seen, (batch, vocab), torch.bool),
        "bias": (bias, (batch, vocab), torch.float32),
    }
    for name, (tensor, shape, dtype) in tables.items():
        if tensor is not None:
            expect_shape(name, tensor, shape)
            expect_dtype(name, tensor, dtype)
            expect_contiguous(**{name: tensor})
    strengths = dict(repetition=repetition, presence=presence, frequency=frequency)
    expect_vectors(batch, **{name: (tensor, torch.float32) for name, tensor in strengths.items()})
    given: dict[str, Any] = dict(
        tokens=tokens, mask=mask, output_counts=output_counts, prompt_seen=prompt_seen, **strengths, bias=bias
    )  # fmt: skip
    expect_same_device(logits=logits, **given)
    if use_triton(impl, logits):
        import specdec_kernels.sampling.penalties_kernel as kernel

        kernel.apply_penalties(logits, **given)
    else:
        penalties.apply_penalties(logits, **given)


def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, num: torch.Tensor, *, impl: str = "auto") -> None:
    """Add the first `num` tokens of each row to the request's counts, in place; equal tokens add up.

    Args:
        counts: [B, V] int32, contiguous; changed.
        tokens: [B, W] int64, contiguous; entries outside the vocabulary count as nothing.
        num: [B] int32, how many tokens of each row were said (num_accepted + 1 after a step, 0 for a padding row).
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("counts", counts, (None, None))
    expect_dtype("counts", counts, torch.int32)
    expect_shape("tokens", tokens, (counts.shape[0], None))
    expect_dtype("tokens", tokens, torch.int64)
    expect_vectors(counts.shape[0], num=(num, torch.int32))
    expect_contiguous(counts=counts, tokens=tokens)
    expect_same_device(counts=counts, tokens=tokens, num=num)
    if use_triton(impl, counts):
        import specdec_kernels.sampling.penalties_kernel as kernel

        kernel.count_tokens(counts, tokens, num)
    else:
        penalties.count_tokens(counts, tokens, num)
