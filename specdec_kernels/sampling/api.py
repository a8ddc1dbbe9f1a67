"""The public functions of token selection.

A draw is the inverse of the cumulative distribution at one uniform u: the first token j with
sum_{i <= j} w_i > u * sum_i w_i, where w_i = exp((l_i - max l) / T). The uniform comes from the counter-based generator
Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the request's seed and
the position of the row. A token therefore depends neither on the batch it was drawn in nor on whether it was drawn
alone or while verifying a block. No step sorts the vocabulary or waits for the host.

Random stream: (seed, position, stream, slot) -> k < 2^52 -> u = (k + 1/2) / 2^52, float64, never 0 and never 1.
`position` is the position of the row's input token; the drawn token will stand one further. The streams of `types` keep
the target's draws, the drafter's and those of the rejection rules apart.

Filters act on the distribution at its temperature, in this order, and each keeps ties:
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

from collections.abc import Sequence

import torch

from specdec_kernels.checks import expect_dtype, expect_shape, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling.types import MASK_BITS, TARGET_STREAM, Picked, SamplingTensors

LOGITS = (torch.float32, torch.float16, torch.bfloat16)
_GREEDY = SamplingTensors()


def pick_tokens(
    logits: torch.Tensor,
    sampling: SamplingTensors = _GREEDY,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    *,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
    impl: str = "auto",
) -> Picked:
    """Choose one token per row.

    NaN counts as -inf and +inf as the largest float32. A row that holds nothing but -inf and NaN gives token 0 and
    `valid` False. In all other rows no token is chosen that has logit -inf, is filtered or lies outside the vocabulary.

    Args:
        logits: [R, V] float32, float16 or bfloat16, V >= 1; the last dimension has stride 1, rows may be strided.
        sampling: R entries. A row draws where its temperature is above 0, and takes its argmax (lowest id among equals)
            elsewhere.
        positions: [R] int64; needed with `sampling.seeds` to draw, unless `uniforms` is given.
        uniforms: [R] float64 in [0, 1), replaces the generator (tests of the exact distribution).
        return_logprobs: also return log softmax(logits) (temperature 1, unfiltered) at the token, -inf where not valid.
        stream: the use of randomness that the draws belong to; a drafter gives DRAFT_STREAM.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Picked: tokens [R] int64, valid [R] bool, logprobs [R] float32 or None.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, temperature without a source of uniforms, a stream below 0,
            unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_rows("logits", logits, (None, None), *LOGITS)
    rows = logits.shape[:1]
    expect_tensors(
        {"logits": logits}, **sampling.expected(rows[0]), positions=(positions, rows, torch.int64),
        uniforms=(uniforms, rows, torch.float64),
    )  # fmt: skip
    expect_randomness(sampling, positions, uniforms)
    if stream < 0:
        raise ValueError(f"stream: expected at least 0, got {stream}")
    pick = dispatch("pick_tokens", __package__, impl, logits)
    return pick(logits, sampling, positions, uniforms, return_logprobs=return_logprobs, stream=stream)


def filtered_probs(logits: torch.Tensor, sampling: SamplingTensors = _GREEDY, *, impl: str = "auto") -> torch.Tensor:
    """The distribution that `pick_tokens` draws from: what a drafter records as its own probabilities.

    Rows at temperature 0 are one at the argmax; rows without a usable logit are zero.

    Args:
        logits: [R, V] float32, float16 or bfloat16, vocabulary contiguous.
        sampling: R entries; seeds are not used.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [R, V] float32, each row summing to 1 (or 0) within rounding; exactly 0 where filtered.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_rows("logits", logits, (None, None), *LOGITS)
    expect_tensors({"logits": logits}, **sampling.expected(logits.shape[0]))
    return dispatch("filtered_probs", __package__, impl, logits)(logits, sampling)


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
    return _renormalised(probs, SamplingTensors(top_k=top_k), impl)


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
    return _renormalised(probs, SamplingTensors(top_p=top_p), impl)


def _renormalised(probs: torch.Tensor, filters: SamplingTensors, impl: str) -> torch.Tensor:
    expect_rows("probs", probs, (None, None), torch.float32)
    expect_tensors({"probs": probs}, **filters.expected(probs.shape[0]))
    return dispatch("filtered_probs", __package__, impl, probs)(probs, filters, probabilities=True)


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
    """Change the logits of a draft tree in place by the tokens written so far, those drafted in the block included.

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
        tokens: [B, N] int64, contiguous; entries outside the vocabulary are not counted.
        mask: [B, N, ceil(N / 64)] int64, contiguous: `TreeLinks.mask`.
        output_counts: [B, V] int32, contiguous: how often each token stands in the request's output.
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
    expect_rows("logits", logits, (None, None, None), *LOGITS)
    batch, num_nodes, vocab = logits.shape
    expect_tensors(
        {"logits": logits},
        tokens=(tokens, (batch, num_nodes), torch.int64),
        mask=(mask, (batch, num_nodes, -(-num_nodes // 64)), torch.int64),
        output_counts=(output_counts, (batch, vocab), torch.int32),
        prompt_seen=(prompt_seen, (batch, vocab), torch.bool),
        repetition=(repetition, (batch,), torch.float32),
        presence=(presence, (batch,), torch.float32),
        frequency=(frequency, (batch,), torch.float32),
        bias=(bias, (batch, vocab), torch.float32),
    )
    apply = dispatch("apply_penalties", __package__, impl, logits, kernel="kernel_penalties")
    apply(logits, tokens, mask, output_counts, prompt_seen, repetition, presence, frequency, bias)


def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, num: torch.Tensor, *, impl: str = "auto") -> None:
    """Add the first `num` tokens of each row to the request's counts, in place; equal tokens add up.

    Args:
        counts: [B, V] int32, contiguous; changed.
        tokens: [B, W] int64, contiguous; entries outside the vocabulary are not counted.
        num: [B] int32, how many tokens of each row to add (num_accepted + 1 after a step, 0 for a padding row).
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    batch = counts.shape[:1]
    expect_tensors(
        counts=(counts, (None, None), torch.int32), tokens=(tokens, (*batch, None), torch.int64),
        num=(num, batch, torch.int32),
    )  # fmt: skip
    dispatch("count_tokens", __package__, impl, counts, kernel="kernel_penalties")(counts, tokens, num)


def forbid_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    words: torch.Tensor,
    until: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Set to -inf, in place, the logits of tokens that would complete a forbidden sequence behind a node's path.

    The text of a node is the committed text up to the root and the path from there to the node; its row chooses the
    token at position p + 1, where p is the node's position. The last token of a sequence is forbidden in that row if
    the text ends in the tokens before it and p + 1 < `until`. Before the text there is nothing that a token equals.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, vocabulary contiguous, [B, N] mergeable; changed.
        tokens: [B, N] int64, contiguous; node 0 is the last committed token.
        mask: [B, N, ceil(N / 64)] int64, contiguous: `TreeLinks.mask`.
        positions: [B, N] int64, contiguous: `TreeLinks.positions`.
        history: [B, C] int64, rows may be strided: the committed text.
        lengths: [B] int64: the position of node 0; history is read before it.
        words: [B, W, K] int64, contiguous: sequences that end in column K - 1, -1 in front of them; a sequence whose
            last token is outside the vocabulary forbids nothing.
        until: [B, W] int64, contiguous: the position from which on a sequence is allowed.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_rows("logits", logits, (None, None, None), *LOGITS)
    batch, num_nodes = logits.shape[:2]
    expect_shape("history", history, (batch, None))
    expect_dtype("history", history, torch.int64)
    expect_shape("words", words, (batch, None, None))
    expect_tensors(
        {"logits": logits, "history": history},
        tokens=(tokens, (batch, num_nodes), torch.int64),
        mask=(mask, (batch, num_nodes, -(-num_nodes // 64)), torch.int64),
        positions=(positions, (batch, num_nodes), torch.int64),
        lengths=(lengths, (batch,), torch.int64),
        words=(words, (batch, None, None), torch.int64),
        until=(until, tuple(words.shape[:2]), torch.int64),
    )
    if words.shape[-1] < 1:
        raise ValueError(f"words: expected sequences of at least 1 token, got shape {list(words.shape)}")
    if history.stride(1) != 1:
        raise ValueError(f"history: expected stride 1 in the last dimension, got strides {history.stride()}")
    forbid = dispatch("forbid_tokens", __package__, impl, logits, kernel="kernel_forbid")
    forbid(logits, tokens, mask, positions, history, lengths, words, until)


def mask_tokens(logits: torch.Tensor, bits: torch.Tensor, constrained: torch.Tensor, *, impl: str = "auto") -> None:
    """Set to -inf, in place, the logits of tokens whose bit is 0, for the requests that are constrained.

    Token v of a node is allowed iff bit v % 32 of word v / 32 of its mask is set, which is the bitmask of xgrammar
    (Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models",
    arXiv 2411.15100). Requests that are not constrained keep their logits, whatever their mask holds.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, vocabulary contiguous, [B, N] mergeable; changed.
        bits: [B, N, ceil(V / 32)] int32, contiguous; bits behind the vocabulary have no meaning.
        constrained: [B] int32, 0 where nothing is masked.
        impl: `auto`, `triton` or `reference`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_rows("logits", logits, (None, None, None), *LOGITS)
    batch, num_nodes, vocab = logits.shape
    expect_tensors(
        {"logits": logits},
        bits=(bits, (batch, num_nodes, -(-vocab // MASK_BITS)), torch.int32),
        constrained=(constrained, (batch,), torch.int32),
    )
    dispatch("mask_tokens", __package__, impl, logits, kernel="kernel_mask")(logits, bits, constrained)


def expect_rows(name: str, values: torch.Tensor, shape: Sequence[int | None], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `values` [..., V] are rows that a kernel can walk: the vocabulary contiguous and not
    empty, the dimensions before it mergeable into one strided dimension."""
    expect_shape(name, values, shape)
    expect_dtype(name, values, *dtypes)
    if values.shape[-1] < 1:
        raise ValueError(f"{name}: expected a vocabulary of at least 1, got shape {list(values.shape)}")
    if values.shape[-1] > 1 and values.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the vocabulary dimension, got strides {values.stride()}")
    if values.ndim == 3:
        batch, num_nodes = values.shape[:2]
        if batch > 1 and num_nodes > 1 and values.stride(0) != num_nodes * values.stride(1):
            raise ValueError(f"{name}: expected [B, N] to merge into one dimension, got strides {values.stride()}")


def expect_randomness(sampling: SamplingTensors, positions: torch.Tensor | None, uniforms: torch.Tensor | None) -> None:
    """Raise ValueError if rows are to be drawn and there is nothing to draw them with."""
    if sampling.temperature is not None and uniforms is None and (sampling.seeds is None or positions is None):
        raise ValueError("temperature: expected seeds and positions, or uniforms, to draw with; got neither")
