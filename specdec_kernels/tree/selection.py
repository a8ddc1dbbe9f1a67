"""Which candidates of a drafter become nodes of the tree."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.tree import reference
from specdec_kernels.tree.links import expect_nodes
from specdec_kernels.tree.types import DraftTopk, Expansion, Selection

MAX_CHILDREN = 64
MAX_DEPTH = 32
MAX_CANDIDATES = 4096


def draft_topk(logits: torch.Tensor, k: int, temperature: torch.Tensor | None = None, impl: str = "auto") -> DraftTopk:
    """The k largest logits of each row as probabilities, in falling order, without sorting the vocabulary.

    p = exp((l - max l) / T) / sum_i exp((l_i - max l) / T) over the whole row; among equals the lowest id comes
    first. NaN counts as -inf and +inf as the largest float32. Where fewer than k entries are above -inf the
    rest is filled by further ids of probability 0. A temperature of 0 gives the first entry probability 1.

    Args:
        logits: [R, V] float32, float16 or bfloat16, V >= k; the last dimension has stride 1, rows may be strided.
        k: 1 to 64.
        temperature: [R] float32 or None for 1.
        impl: `auto`, `triton` or `reference`.

    Returns:
        DraftTopk: probs [R, k] float32, tokens [R, k] int64, all different within a row.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, k out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("logits", logits, (None, None))
    expect_dtype("logits", logits, torch.float32, torch.float16, torch.bfloat16)
    _expect_unit_stride("logits", logits)
    _expect_within("k", k, 1, min(MAX_CHILDREN, logits.shape[1]))
    if temperature is not None:
        expect_shape("temperature", temperature, (logits.shape[0],))
        expect_dtype("temperature", temperature, torch.float32)
        expect_contiguous(temperature=temperature)
    expect_same_device(logits=logits, temperature=temperature)
    if use_triton(impl, logits):
        import specdec_kernels.tree.topk_kernel as topk_kernel

        return topk_kernel.draft_topk(logits, k, temperature)
    return reference.draft_topk(logits, k, temperature)


def expand_tree(scores: torch.Tensor, probs: torch.Tensor, width: int, impl: str = "auto") -> Expansion:
    """One drafting step of EAGLE-2 (arXiv 2406.16858): the best children of all open nodes.

    A child's score is its parent's times its own probability; the `width` largest are kept in falling order,
    among equals the lowest flat index parent * C + child first. A NaN product counts, and is returned, as -inf.

    Args:
        scores: [B, P] float32, contiguous, of the open nodes.
        probs: [B, P, C] float32 of their children; the last dimension has stride 1, the others any (marginals that
            do not depend on the parent may be expanded over P). P * C <= 4096.
        width: T, 1 to min(64, P * C).
        impl: `auto`, `triton` or `reference`.

    Returns:
        Expansion: scores [B, T] float32, index [B, T] int32, path_scores [B, P, C] float32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, `width` out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("scores", scores, (None, None))
    expect_shape("probs", probs, (*scores.shape, None))
    expect_dtype("scores", scores, torch.float32)
    expect_dtype("probs", probs, torch.float32)
    expect_same_device(scores=scores, probs=probs)
    expect_contiguous(scores=scores)
    _expect_unit_stride("probs", probs)
    _expect_within("P * C of probs", probs.shape[1] * probs.shape[2], 1, MAX_CANDIDATES)
    _expect_within("width", width, 1, min(MAX_CHILDREN, probs.shape[1] * probs.shape[2]))
    if use_triton(impl, scores):
        import specdec_kernels.tree.selection_kernel as selection_kernel

        return selection_kernel.expand_tree(scores, probs, width)
    return reference.expand_tree(scores, probs, width)


def rerank_tree(
    path_scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    last_tokens: torch.Tensor,
    num_nodes: int,
    impl: str = "auto",
) -> Selection:
    """The tree of the best candidates (EAGLE-2, arXiv 2406.16858): the N - 1 largest path scores in candidate order.

    Among equal scores the lowest candidate id is kept, so a child never displaces its own parent. Scores of NaN
    and -inf are no candidates. A node whose parent was not selected, or is not before it, keeps its place and
    gets parent -2: it is never linked. Nodes that no candidate is left for get token 0, parent -2, candidate -1.

    Args:
        path_scores: [B, M] float32, contiguous, 1 <= M <= 4096.
        tokens: [B, M] int64, contiguous.
        parents: [B, M] int32, contiguous: candidate id of the parent, -1 for the root; parents before children.
        last_tokens: [B] int64, token of each root.
        num_nodes: N, nodes with the root, 1 to 256.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Selection: tokens [B, N] int64, parents [B, N] int32, candidates [B, N] int32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, sizes out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("path_scores", path_scores, (None, None))
    expect_shape("tokens", tokens, tuple(path_scores.shape))
    expect_shape("parents", parents, tuple(path_scores.shape))
    expect_shape("last_tokens", last_tokens, (path_scores.shape[0],))
    expect_dtype("path_scores", path_scores, torch.float32)
    expect_dtype("tokens", tokens, torch.int64)
    expect_dtype("parents", parents, torch.int32)
    expect_dtype("last_tokens", last_tokens, torch.int64)
    expect_same_device(path_scores=path_scores, tokens=tokens, parents=parents, last_tokens=last_tokens)
    expect_contiguous(path_scores=path_scores, tokens=tokens, parents=parents, last_tokens=last_tokens)
    _expect_within("M of path_scores", path_scores.shape[1], 1, MAX_CANDIDATES)
    expect_nodes("num_nodes", num_nodes)
    if use_triton(impl, path_scores):
        import specdec_kernels.tree.selection_kernel as selection_kernel

        return selection_kernel.rerank_tree(path_scores, tokens, parents, last_tokens, num_nodes)
    return reference.rerank_tree(path_scores, tokens, parents, last_tokens, num_nodes)


def best_first_tree(
    probs: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor, num_nodes: int, impl: str = "auto"
) -> Selection:
    """The likeliest tree under independent marginals of every depth, grown best first (DDTree).

    A node's value is its parent's times the probability of its rank at its depth, in float32 along the path. The
    tree grows by the largest value among the next unused rank of every node in it; among equals the earliest
    parent wins. With ranks in falling order these are the N - 1 largest products of all paths, parents first. An
    entry that is not positive (zero, negative, NaN) ends its depth's list, one above 1 counts as 1, and a product
    below the smallest normal float32 is no candidate. Nodes that nothing is left for get token 0, parent -2.

    Args:
        probs: [B, D, C] float32, contiguous, in falling order over C; 1 <= D <= 32, 1 <= C <= 64.
        tokens: [B, D, C] int64, contiguous, the token of each rank.
        last_tokens: [B] int64, token of each root.
        num_nodes: N, nodes with the root, 1 to 256.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Selection: tokens [B, N] int64, parents [B, N] int32, candidates [B, N] int32 (depth index * C + rank).

    Raises:
        ValueError: wrong shape, dtype, strides or devices, sizes out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("probs", probs, (None, None, None))
    expect_shape("tokens", tokens, tuple(probs.shape))
    expect_shape("last_tokens", last_tokens, (probs.shape[0],))
    expect_dtype("probs", probs, torch.float32)
    expect_dtype("tokens", tokens, torch.int64)
    expect_dtype("last_tokens", last_tokens, torch.int64)
    expect_same_device(probs=probs, tokens=tokens, last_tokens=last_tokens)
    expect_contiguous(probs=probs, tokens=tokens, last_tokens=last_tokens)
    _expect_within("D of probs", probs.shape[1], 1, MAX_DEPTH)
    _expect_within("C of probs", probs.shape[2], 1, MAX_CHILDREN)
    expect_nodes("num_nodes", num_nodes)
    if use_triton(impl, probs):
        import specdec_kernels.tree.selection_kernel as selection_kernel

        return selection_kernel.best_first_tree(probs, tokens, last_tokens, num_nodes)
    return reference.best_first_tree(probs, tokens, last_tokens, num_nodes)


def _expect_within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")


def _expect_unit_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got strides {tensor.stride()}")
