"""Links, positions and masks of draft trees, and which candidates of a drafter become their nodes."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_at_least, expect_dtype, expect_shape, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.tree.types import (
    MAX_NODES,
    Candidates,
    DraftTopk,
    Frontier,
    MergedTree,
    Selection,
    TreeLinks,
    mask_words,
)

MAX_CHILDREN = 64
MAX_DEPTH = 32
MAX_CANDIDATES = 4096


def build_tree(
    parents: torch.Tensor, lengths: torch.Tensor, longest_walk: int | None = None, impl: str = "auto"
) -> TreeLinks:
    """Links, depths, positions and ancestor masks of a batch of trees.

    Node 0 is the root whatever its entry says. A node i > 0 is linked under `parents[b, i]` when that lies in
    [0, i); otherwise the node is unused: nothing links to it, its depth is 0 and it sees only itself. So no
    array of integers can make a cycle, and a node under an unused one is not reachable from the root either.
    Children appear in the sibling list in the order of their index. Two children may carry one token.

    Args:
        parents: [B, N] int32, contiguous, 1 <= N <= 256; parents come before children.
        lengths: [B] int64, committed tokens of each request.
        longest_walk: None, or the rules of SGLang's tree builder. A parent may then stand anywhere in [0, N), also
            behind its child or at the child itself. Every node sees the root and itself. Its depth is the number of
            nodes on the walk from it to the root, the root left out; the walk ends where a node has no parent, and
            after `longest_walk` nodes, at least 1.
        impl: `auto`, `triton` or `reference`.

    Returns:
        TreeLinks: first_child, next_sibling, depth [B, N] int32, positions [B, N] int64, mask [B, N,
            ceil(N/64)] int64.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(parents=(parents, (None, None), torch.int32), lengths=(lengths, parents.shape[:1], torch.int64))
    expect_nodes("parents", parents.shape[1])
    if longest_walk is not None and longest_walk < 1:
        raise ValueError(f"longest_walk: expected at least 1, got {longest_walk}")
    return dispatch("build_tree", __package__, impl, parents)(parents, lengths, longest_walk)


def build_chain(lengths: torch.Tensor, num_nodes: int, impl: str = "auto") -> TreeLinks:
    """Links of chains of `num_nodes` nodes: node i hangs on node i - 1 and sees nodes 0 to i.

    Args:
        lengths: [B] int64, committed tokens of each request.
        num_nodes: N >= 1, nodes of each chain with the root.
        impl: `auto`, `triton` or `reference`.

    Returns:
        TreeLinks, equal to `build_tree` of the parents -1, 0, 1, ..., N - 2.

    Raises:
        ValueError: wrong shape, dtype or strides, `num_nodes` below 1, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(lengths=(lengths, (None,), torch.int64))
    if num_nodes < 1:
        raise ValueError(f"num_nodes: expected at least 1 (the root), got {num_nodes}")
    return dispatch("build_chain", __package__, impl, lengths)(lengths, num_nodes)


def links_from_mask(mask: torch.Tensor, lengths: torch.Tensor, impl: str = "auto") -> TreeLinks:
    """Links, depths and positions of the trees that ancestor masks describe.

    The parent of node i is the last node before i that row i sees; a node i > 0 that sees none is unused. The rest of
    a row is ignored: its own bit, bits of later nodes and of nodes beyond N have no meaning, and the returned mask
    replaces a row that is not its parent's row plus itself by that. So `links_from_mask(build_tree(p, L).mask, L) ==
    build_tree(p, L)`. The order needs only ancestors before descendants. SGLang's `reconstruct_indices_from_tree_mask`
    computes the same from well-formed masks.

    Args:
        mask: [B, N, ceil(N/64)] int64 words (bit j of row i: node i sees node j) or [B, N, N] bool,
            contiguous, 1 <= N <= 256.
        lengths: [B] int64, committed tokens of each request.
        impl: `auto`, `triton` or `reference`.

    Returns:
        TreeLinks as of `build_tree`.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_dtype("mask", mask, torch.int64, torch.bool)
    expect_shape("mask", mask, (None, None, None))
    num_nodes = mask.shape[1]
    expect_nodes("mask", num_nodes)
    columns = mask_words(num_nodes) if mask.dtype == torch.int64 else num_nodes
    expect_tensors(mask=(mask, (None, num_nodes, columns), mask.dtype), lengths=(lengths, mask.shape[:1], torch.int64))
    return dispatch("links_from_mask", __package__, impl, mask)(mask, lengths)


def tree_parents(mask: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    """The parents of trees from their ancestor masks: the last node before a node that it sees.

    Args:
        mask: [B, N, ceil(N/64)] int64 words, contiguous, as in `TreeLinks`; 1 <= N <= 256.
        impl: `auto`, `triton` or `reference`.

    Returns:
        [B, N] int32, -1 for the root and for unused nodes, which see themselves alone.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("mask", mask, (None, None, None))
    expect_nodes("mask", mask.shape[1])
    expect_tensors(mask=(mask, (None, mask.shape[1], mask_words(mask.shape[1])), torch.int64))
    parents: torch.Tensor = dispatch("tree_parents", __package__, impl, mask)(mask)
    return parents


def merge_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    other_tokens: torch.Tensor,
    other_parents: torch.Tensor,
    impl: str = "auto",
) -> MergedTree:
    """The union of two trees per request: every path from the root that one of them has, once.

    The nodes of the first tree keep their numbers, N_a of them. Node j > 0 of the second one becomes node N_a + j - 1,
    unless a child of its parent's place in the union carries its token: then that node takes its place, the first of
    several. Node N_a + j - 1 is then outside of the tree, and so it is where node j is unused or hangs under an unused
    one. A parent that is not in [0, node) makes a node unused, as in `build_tree`. Both roots are one node.

    Args:
        tokens: [B, N_a] int64 and
        parents: [B, N_a] int32: the first tree. All tensors are contiguous.
        other_tokens: [B, N_b] int64 and
        other_parents: [B, N_b] int32: the second one; N_a + N_b - 1 <= 256.
        impl: `auto`, `triton` or `reference`.

    Returns:
        MergedTree of N_a + N_b - 1 nodes. The tokens of nodes outside of the tree are those of the second tree.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(tokens=(tokens, (None, None), torch.int64))
    batch = tokens.shape[0]
    expect_tensors(
        {"tokens": tokens},
        parents=(parents, tuple(tokens.shape), torch.int32),
        other_tokens=(other_tokens, (batch, None), torch.int64),
        other_parents=(other_parents, (batch, other_tokens.shape[-1]), torch.int32),
    )
    for name, size in (("tokens", tokens.shape[1]), ("other_tokens", other_tokens.shape[1])):
        expect_nodes(name, size)
    expect_nodes("union", tokens.shape[1] + other_tokens.shape[1] - 1)
    merge = dispatch("merge_trees", __package__, impl, tokens, kernel="kernel_merge")
    merged: MergedTree = merge(tokens, parents, other_tokens, other_parents)
    return merged


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
    expect_tensors({"logits": logits}, temperature=(temperature, logits.shape[:1], torch.float32))
    return dispatch("draft_topk", __package__, impl, logits, kernel="kernel_topk")(logits, k, temperature)


def draw_children(
    tokens: torch.Tensor,
    probs: torch.Tensor,
    children: torch.Tensor,
    rows: torch.Tensor,
    likeliest: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    *,
    replacement: bool,
    uniforms: torch.Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Draw the tokens of children from their parents' distributions, in place.

    A draw is the inverse of the cumulative distribution at one uniform, as in `pick_tokens`. The children of a parent
    are drawn one after the other, with replacement or from the tokens that are left; where none is left a child repeats
    the token of the first one. The uniform of node n is that of (seed, position, DRAFT_STREAM, slot n), so that with
    the root's position no two draws of a request share one. Where the temperature is 0 nothing is drawn: the children
    take the likeliest tokens in turn. What acceptance needs as `draft_probs` is `probs`, as it is.

    Args:
        tokens: [B, N] int64, contiguous; entries of `children` are written.
        probs: [B, R, V] float32, contiguous; rows need not sum to 1, NaN and negative entries count as 0. A row without
            a positive entry gives token 0.
        children: [P, K] int32, contiguous: the nodes that hang on each parent, 0 <= n < N and none twice, -1 in places
            that are not used.
        rows: [P] int32: the row of `probs` of each parent, 0 <= r < R.
        likeliest: [B, R, C] int64, contiguous, C >= 1: tokens for rows at temperature 0 by the place of the child; the
            last stands for all places behind.
        temperature: [B] float32.
        seeds: [B] int64, or None with `uniforms`.
        positions: [B] int64, the root's, or None with `uniforms`.
        replacement: whether a token may be drawn again by a sibling.
        uniforms: [B, N] float64 in [0, 1), one per node, replaces the generator (tests of the exact distribution).
        impl: `auto`, `triton` or `reference`. The reference reads `children` and `rows` back.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, nothing to draw with, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(tokens=(tokens, (None, None), torch.int64), probs=(probs, (None, None, None), torch.float32))
    batch, num_nodes = tokens.shape
    expect_tensors(
        {"tokens": tokens},
        probs=(probs, (batch, None, None), torch.float32),
        children=(children, (None, None), torch.int32),
        rows=(rows, children.shape[:1], torch.int32),
        likeliest=(likeliest, (batch, probs.shape[1], None), torch.int64),
        temperature=(temperature, (batch,), torch.float32),
        seeds=(seeds, (batch,), torch.int64),
        positions=(positions, (batch,), torch.int64),
        uniforms=(uniforms, (batch, num_nodes), torch.float64),
    )
    for name, size in (("V of probs", probs.shape[2]), ("C of likeliest", likeliest.shape[2])):
        expect_at_least(name, size, 1)
    if uniforms is None and (seeds is None or positions is None):
        raise ValueError("draw_children: expected seeds and positions, or uniforms, to draw with; got neither")
    draw = dispatch("draw_children", __package__, impl, probs, kernel="kernel_draw")
    draw(
        tokens, probs, children, rows, likeliest, temperature, seeds, positions, replacement=replacement,
        uniforms=uniforms,
    )  # fmt: skip


def expand_tree(
    frontier: Frontier | None,
    probs: torch.Tensor,
    tokens: torch.Tensor,
    candidates: Candidates,
    first: int,
    width: int,
    mask: torch.Tensor | None = None,
    *,
    slot: int = 0,
    root_is_stored: bool = False,
    vocabulary: torch.Tensor | None = None,
    impl: str = "auto",
) -> Frontier | None:
    """One drafting step of EAGLE-2 (arXiv 2406.16858): the children of all frontier nodes, and the best of them.

    Child c of frontier node p becomes candidate `first` + p * C + c. Its score is its parent's times its own
    probability, a NaN product counts as -inf. The `width` largest scores are the next frontier, among equals the
    lowest candidate first. Node t of it is stored in slot `slot` + t of the drafter's cache, and sees that slot and
    what its parent sees.

    Args:
        frontier: P nodes, or None for the root alone, whose score is 1.
        probs: [B, P, C] float32, contiguous; P is 1 for the root, P * C <= 4096.
        tokens: [B, P, C] int64, contiguous: ids of the children.
        candidates: M candidates, contiguous; entries `first` to `first` + P * C - 1 are written.
        first: 0 to M - P * C.
        width: T, 0 to min(64, P * C). With 0, after the last level, there is no next frontier.
        mask: [B, T, W] int64, contiguous, written: the next frontier's mask, with 64 W >= `slot` + T and at least
            the words of the frontier's; None with `width` 0.
        slot: slot of the next frontier's first node, at least 0.
        root_is_stored: slot 0 is the root, which all nodes see.
        vocabulary: [V] int64: what is added to id i of `tokens`, 0 <= i < V, to give the target's id; None adds
            nothing.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Frontier of T nodes with `mask`, or None if T is 0.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, sizes out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(probs=(probs, (None, None, None), torch.float32))
    batch, parents, children = probs.shape
    offered = candidates.path_scores.shape[-1]
    expect_tensors(
        {"probs": probs},
        tokens=(tokens, probs.shape, torch.int64),
        path_scores=(candidates.path_scores, (batch, None), torch.float32),
        candidate_tokens=(candidates.tokens, (batch, offered), torch.int64),
        candidate_parents=(candidates.parents, (batch, offered), torch.int32),
        vocabulary=(vocabulary, (None,), torch.int64),
        mask=(mask, (batch, width, None), torch.int64),
    )
    _expect_within("P * C of probs", parents * children, 1, MAX_CANDIDATES)
    _expect_within("first", first, 0, offered - parents * children)
    _expect_within("width", width, 0, min(MAX_CHILDREN, parents * children))
    _check_frontier(frontier, batch, parents)
    if (mask is None) != (width == 0):
        raise ValueError(f"mask: expected with a width above 0 only, got width {width} and {type(mask).__name__}")
    if mask is not None:
        least = max(mask_words(slot + width), 0 if frontier is None else frontier.mask.shape[2])
        _expect_within("W of mask", mask.shape[2], least, max(least, mask.shape[2]))
        expect_at_least("slot", slot, 0)
    expand = dispatch("expand_tree", __package__, impl, probs, kernel="kernel_selection")
    return expand(
        frontier, probs, tokens, candidates, first, width, mask, slot=slot, root_is_stored=root_is_stored,
        vocabulary=vocabulary,
    )  # fmt: skip


def _check_frontier(frontier: Frontier | None, batch: int, parents: int) -> None:
    if frontier is None:
        if parents != 1:
            raise ValueError(f"probs: expected one parent without a frontier, got {parents}")
        return
    rows = (batch, parents)
    expect_tensors(
        scores=(frontier.scores, rows, torch.float32),
        frontier_candidates=(frontier.candidates, rows, torch.int32),
        frontier_mask=(frontier.mask, (*rows, None), torch.int64),
    )


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
    gets parent -2: it is never linked. Nodes without a candidate get token 0, parent -2,
    candidate -1.

    Args:
        path_scores: [B, M] float32, contiguous, 1 <= M <= 4096.
        tokens: [B, M] int64, contiguous.
        parents: [B, M] int32, contiguous: candidate id of the parent, -1 for the root; parents before children.
        last_tokens: [B] int64, token of each root: the last committed one.
        num_nodes: N, nodes with the root, 1 to 256.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Selection: tokens [B, N] int64, parents [B, N] int32, candidates [B, N] int32, scores [B, N] float32.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, sizes out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    shape = path_scores.shape
    expect_tensors(
        path_scores=(path_scores, (None, None), torch.float32),
        tokens=(tokens, shape, torch.int64),
        parents=(parents, shape, torch.int32),
        last_tokens=(last_tokens, shape[:1], torch.int64),
    )
    _expect_within("M of path_scores", shape[1], 1, MAX_CANDIDATES)
    expect_nodes("num_nodes", num_nodes)
    rerank = dispatch("rerank_tree", __package__, impl, path_scores, kernel="kernel_selection")
    return rerank(path_scores, tokens, parents, last_tokens, num_nodes)


def best_first_tree(
    probs: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor, num_nodes: int, impl: str = "auto"
) -> Selection:
    """The likeliest tree under independent marginals of every depth, grown best first (DDTree).

    A node's value is its parent's times the probability of its rank at its depth, in float32 along the path. The
    tree grows by the largest value among the next unused rank of every node in it; among equals the earliest
    parent wins. With ranks in falling order these are the N - 1 largest products of all paths, parents first. An
    entry that is not positive (zero, negative, NaN) ends its depth's list, one above 1 counts as 1, and a product
    below the smallest normal float32 is no candidate. Nodes without a candidate get token 0, parent -2.

    Args:
        probs: [B, D, C] float32, contiguous, in falling order over C; 1 <= D <= 32, 1 <= C <= 64.
        tokens: [B, D, C] int64, contiguous, the token of each rank.
        last_tokens: [B] int64, token of each root.
        num_nodes: N, nodes with the root, 1 to 256.
        impl: `auto`, `triton` or `reference`.

    Returns:
        Selection: tokens [B, N] int64, parents [B, N] int32, candidates [B, N] int32 (depth index * C + rank),
            scores [B, N] float32 (values of the nodes).

    Raises:
        ValueError: wrong shape, dtype, strides or devices, sizes out of range, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_tensors(
        probs=(probs, (None, None, None), torch.float32),
        tokens=(tokens, probs.shape, torch.int64),
        last_tokens=(last_tokens, probs.shape[:1], torch.int64),
    )
    _expect_within("D of probs", probs.shape[1], 1, MAX_DEPTH)
    _expect_within("C of probs", probs.shape[2], 1, MAX_CHILDREN)
    expect_nodes("num_nodes", num_nodes)
    grow = dispatch("best_first_tree", __package__, impl, probs, kernel="kernel_selection")
    return grow(probs, tokens, last_tokens, num_nodes)


def expect_nodes(name: str, num_nodes: int) -> None:
    """Raise ValueError unless a tree may have this many nodes."""
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{name}: expected 1 (at least one node, the root) to {MAX_NODES} nodes, got {num_nodes}")


def _expect_within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")


def _expect_unit_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got strides {tensor.stride()}")
