"""The public functions of token selection.

A sample is the inverse of the cumulative distribution at one uniform u: the first token j with
sum_{i <= j} w_i > u * sum_i w_i, where w_i = exp((l_i - max l) / T). The uniform comes from the counter-based generator
Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the request's seed,
the position of the row's input token and the stream of `types`, so a token does not depend on its batch.

Filters act on the distribution at its temperature, in this order, and each keeps ties:
    top-k   keeps what is at least the k-th largest value;
    top-p   keeps, in falling order, a token iff the mass before it is < p * the mass of the rest, the first always;
    min-p   keeps probability >= min_p * the largest probability.
Top-k is exact. Kernel (float32 sums) and reference (float64) may disagree about a token whose mass before it lies
within 1e-6 * mass of p * mass, or whose logit lies within 4 float32 roundings of the min-p limit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.checks import expect_at_least, expect_at_least_one, expect_fields, expect_strided, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling.types import MASK_BITS, TARGET_STREAM, Forbidden, Penalties, Picked, SamplingTensors

LOGITS = (torch.float32, torch.float16, torch.bfloat16)
_GREEDY = SamplingTensors()


def pick_tokens(
    logits: Tensor,
    sampling: SamplingTensors = _GREEDY,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    *,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
    impl: str = "auto",
) -> Picked:
    """Choose one token per row.

    NaN counts as -inf and +inf as the largest float32. A row that holds nothing but -inf and NaN gives token 0 and
    `valid` False.

    Args:
        logits: [R, V] float32, float16 or bfloat16; the last dimension has stride 1, rows may be strided.
        sampling: R entries. A row is sampled where its temperature is above 0, else it takes its first argmax.
        positions: [R] int64; needed with `sampling.seeds` to sample, unless `uniforms` is given.
        uniforms: [R] float64 in [0, 1), replaces the generator.
        return_logprobs: also return log softmax(logits) (temperature 1, unfiltered) at the token, -inf where not valid.
        stream: the use of randomness; a drafter gives DRAFT_STREAM.
    """
    expect_rows("logits", logits, (None, None), *LOGITS)
    rows = logits.shape[:1]
    expect_fields(sampling, others=dict(logits=logits), B=rows[0])
    sources = dict(positions=(positions, rows, torch.int64), uniforms=(uniforms, rows, torch.float64))
    expect_tensors({"logits": logits}, **sources)
    if sampling.temperature is not None:
        expect_randomness(sampling.seeds, positions, uniforms)
    expect_at_least("stream", stream, 0)
    pick = dispatch("pick_tokens", __package__, impl, logits)
    return pick(logits, sampling, positions, uniforms, return_logprobs=return_logprobs, stream=stream)


def filtered_probs(logits: Tensor, sampling: SamplingTensors = _GREEDY, *, impl: str = "auto") -> Tensor:
    """[R, V] float32: the distribution that `pick_tokens` samples from, exactly 0 where filtered.

    `logits` [R, V] as of `pick_tokens`; seeds are not used. Rows at temperature 0 are one at the argmax; rows without a
    usable logit are zero.
    """
    expect_rows("logits", logits, (None, None), *LOGITS)
    expect_fields(sampling, others=dict(logits=logits), B=len(logits))
    return dispatch("filtered_probs", __package__, impl, logits)(logits, sampling)


def top_k_renorm(probs: Tensor, top_k: Tensor, *, impl: str = "auto") -> Tensor:
    """Keep what is at least the k-th largest probability (ties kept) and renormalise.

    `probs` [R, V] float32, vocabulary contiguous; negative entries and NaN count as 0. `top_k` [R] int32; <= 0 or >= V
    is off. Returns [R, V] float32; zeros for a row without a positive entry.
    """
    return _renormalised(probs, SamplingTensors(top_k=top_k), impl)


def top_p_renorm(probs: Tensor, top_p: Tensor, *, impl: str = "auto") -> Tensor:
    """As `top_k_renorm`, but keep, in falling order, a probability iff the sum before it is < p * the row's sum (the
    first and ties always). `top_p` [R] float32; >= 1 is off."""
    return _renormalised(probs, SamplingTensors(top_p=top_p), impl)


def _renormalised(probs: Tensor, filters: SamplingTensors, impl: str) -> Tensor:
    expect_rows("probs", probs, (None, None), torch.float32)
    expect_fields(filters, others=dict(probs=probs), B=len(probs))
    return dispatch("filtered_probs", __package__, impl, probs)(probs, filters, probabilities=True)


def apply_penalties(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    output_counts: Tensor,
    prompt_seen: Tensor | None,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias: Tensor | None = None,
    *,
    impl: str = "auto",
) -> None:
    """Change the logits of a draft tree in place by the tokens of the output and of each node's path.

    The counts c(v) of a node cover the output so far, which holds the root's token, and the tokens from the root's
    child down to the node. In this order:
        repetition  l / r where l > 0 and l * r elsewhere, for tokens of the prompt or with c > 0;
        frequency   l - f c;
        presence    l - s where c > 0;
        bias        l + b.
    A row without any of them stays as it is, bit for bit.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, vocabulary contiguous, [B, N] mergeable; changed.
        tokens: [B, N] int64, contiguous; entries outside the vocabulary are not counted.
        mask: [B, N, ceil(N / 64)] int64, contiguous: `TreeLinks.mask`.
        output_counts: [B, V] int32, contiguous: how often each token is in the request's output.
        prompt_seen: [B, V] bool, contiguous, or None.
        repetition: [B] float32 > 0; 1 is off.
        presence: [B] float32; 0 is off.
        frequency: [B] float32; 0 is off.
        bias: [B, V] float32, contiguous, or None.
    """
    expect_rows("logits", logits, (None, None, None), *LOGITS)
    batch, num_nodes, vocab = logits.shape
    call = Penalties(logits, tokens, mask, output_counts, prompt_seen, repetition, presence, frequency, bias)
    expect_fields(call, others=dict(logits=logits), B=batch, N=num_nodes, V=vocab)
    dispatch("apply_penalties", __package__, impl, logits, kernel="kernel_logits")(call)


def count_tokens(counts: Tensor, tokens: Tensor, num: Tensor, *, impl: str = "auto") -> None:
    """Add the first `num` [B] int32 of `tokens` [B, W] int64 to the request's `counts` [B, V] int32, in place; tokens
    outside the vocabulary are not counted."""
    batch = counts.shape[:1]
    expect_tensors(
        counts=(counts, (None, None), torch.int32), tokens=(tokens, (*batch, None), torch.int64),
        num=(num, batch, torch.int32),
    )  # fmt: skip
    dispatch("count_tokens", __package__, impl, counts, kernel="kernel_logits")(counts, tokens, num)


def forbid_tokens(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor,
    history: Tensor,
    lengths: Tensor,
    words: Tensor,
    until: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Set to -inf, in place, the logits of tokens that would complete a forbidden sequence after a node's path.

    The text of a node is the committed text and the path from the root to the node; its row chooses the token at
    position p + 1, where p is the node's position. The last token of a sequence is forbidden there if the text ends in
    the tokens before it and p + 1 < `until`.

    Args:
        logits: [B, N, V], rows as of `expect_rows`; changed.
        tokens: [B, N] int64; node 0 is the last committed token. All tensors but `logits` and `history` are contiguous.
        mask: [B, N, ceil(N / 64)] int64: `TreeLinks.mask`.
        positions: [B, N] int64: `TreeLinks.positions`.
        history: [B, C] int64, rows may be strided: the committed text.
        lengths: [B] int64: the position of node 0; history is read before it.
        words: [B, W, K] int64: sequences that end in column K - 1, -1 in front of them.
        until: [B, W] int64: the position from which on a sequence is allowed.
    """
    expect_rows("logits", logits, (None, None, None), *LOGITS)
    batch, num_nodes = logits.shape[:2]
    call = Forbidden(logits, tokens, mask, positions, history, lengths, words, until)
    expect_fields(call, ("history",), others=dict(logits=logits), B=batch, N=num_nodes)
    expect_at_least_one(**{"tokens of the sequences in words": words.shape[-1]})
    dispatch("forbid_tokens", __package__, impl, logits, kernel="kernel_logits")(call)


def mask_tokens(logits: Tensor, bits: Tensor, constrained: Tensor, *, impl: str = "auto") -> None:
    """Set to -inf, in place, the logits of tokens whose bit is 0, for the requests that are constrained.

    `logits` [B, N, V], rows as of `expect_rows`; `bits` [B, N, ceil(V / 32)] int32, the bitmask of xgrammar
    (arXiv 2411.15100): bit v % 32 of word v / 32 allows token v; `constrained` [B] int32, 0 where nothing is masked.
    """
    expect_rows("logits", logits, (None, None, None), *LOGITS)
    batch, num_nodes, vocab = logits.shape
    expect_tensors(
        {"logits": logits},
        bits=(bits, (batch, num_nodes, -(-vocab // MASK_BITS)), torch.int32),
        constrained=(constrained, (batch,), torch.int32),
    )
    dispatch("mask_tokens", __package__, impl, logits, kernel="kernel_logits")(logits, bits, constrained)


def expect_rows(name: str, values: Tensor, shape: Sequence[int | None], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `values` [..., V] are rows that a kernel can read: the vocabulary contiguous and not
    empty, the dimensions before it mergeable into one strided dimension."""
    expect_strided(**{name: (values, shape, dtypes)})
    expect_at_least_one(**{f"vocabulary of {name}": values.shape[-1]})
    if values.ndim == 3:
        batch, num_nodes = values.shape[:2]
        if batch > 1 and num_nodes > 1 and values.stride(0) != num_nodes * values.stride(1):
            raise ValueError(f"{name}: expected [B, N] to merge into one dimension, got strides {values.stride()}")


def expect_randomness(seeds: Tensor | None, positions: Tensor | None, uniforms: Tensor | None) -> None:
    """Raise ValueError if there is nothing to sample with."""
    if uniforms is None and (seeds is None or positions is None):
        raise ValueError("seeds: expected seeds and positions, or uniforms; got neither")
