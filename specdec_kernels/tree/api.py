"""Links, positions and masks of draft trees, and which candidates of a drafter become their nodes."""

import torch
from torch import Tensor

from specdec_kernels.checks import (
    expect_at_least,
    expect_at_least_one,
    expect_between,
    expect_fields,
    expect_shape,
    expect_strided,
    expect_tensors,
)
from specdec_kernels.launch import dispatch
from specdec_kernels.sampling.api import expect_randomness
from specdec_kernels.tree.types import (
    MAX_NODES,
    Candidates,
    ChildSampling,
    DraftTopk,
    Expansion,
    Frontier,
    MergedTree,
    Selection,
    TreeLinks,
    TwoTrees,
    mask_words,
)

MAX_CHILDREN = 64
MAX_DEPTH = 32
MAX_CANDIDATES = 4096


def build_tree(parents: Tensor, lengths: Tensor, impl: str = "auto") -> TreeLinks:
    """Links, depths, positions and ancestor masks of a batch of trees.

    Node 0 is the root; its entry is ignored. A node i > 0 is linked under `parents[b, i]` when that lies in [0, i),
    after the children of lower index; otherwise it is unused: nothing links to it, its depth is 0 and it sees only
    itself.

    Args:
        parents: [B, N] int32, contiguous, 1 <= N <= 256; parents come before children.
        lengths: [B] int64, committed tokens of each request.
    """
    expect_tensors(parents=(parents, (None, None), torch.int32), lengths=(lengths, parents.shape[:1], torch.int64))
    expect_nodes("parents", parents.shape[1])
    return dispatch("build_tree", __package__, impl, parents)(parents, lengths)


def build_chain(lengths: Tensor, num_nodes: int, impl: str = "auto") -> TreeLinks:
    """`build_tree` of chains of `num_nodes` nodes: node i is the child of node i - 1. `lengths` [B] int64."""
    expect_tensors(lengths=(lengths, (None,), torch.int64))
    expect_at_least_one(num_nodes=num_nodes)
    return dispatch("build_chain", __package__, impl, lengths)(lengths, num_nodes)


def links_from_mask(mask: Tensor, lengths: Tensor, impl: str = "auto") -> TreeLinks:
    """Links, depths and positions of the trees that ancestor masks describe.

    The parent of node i is the last node before i that row i sees; a node i > 0 that sees none is unused. The rest of a
    row is ignored, and the returned mask is made new from the parents.

    Args:
        mask: [B, N, ceil(N/64)] int64 words (bit j of row i: node i sees node j) or [B, N, N] bool,
            contiguous, 1 <= N <= 256.
        lengths: [B] int64, committed tokens of each request.
    """
    _expect_mask(mask, torch.int64, torch.bool)
    expect_tensors({"mask": mask}, lengths=(lengths, mask.shape[:1], torch.int64))
    return dispatch("links_from_mask", __package__, impl, mask)(mask, lengths)


def tree_parents(mask: Tensor, impl: str = "auto") -> Tensor:
    """[B, N] int32: the parents of trees from masks [B, N, ceil(N/64)] int64 as in `TreeLinks`: the last node before a
    node that it sees, -1 for the root and for unused nodes."""
    _expect_mask(mask, torch.int64)
    return dispatch("tree_parents", __package__, impl, mask)(mask)


def merge_trees(
    tokens: Tensor, parents: Tensor, other_tokens: Tensor, other_parents: Tensor, impl: str = "auto"
) -> MergedTree:
    """The union of two trees per request: every path from the root that one of them has, once.

    The nodes of the first tree keep their numbers. Node j > 0 of the second one becomes node N_a + j - 1, unless a
    child of its parent's place in the union carries its token: then the first such child takes its place, and node N_a
    + j - 1 is outside of the tree, as it is where node j is unused or below an unused node. `tokens` [B, N_a] int64 and
    `parents` [B, N_a] int32 are the first tree, [B, N_b] the second; N_a + N_b - 1 <= 256.
    """
    expect_fields(TwoTrees(tokens, parents, other_tokens, other_parents))
    first, second = tokens.shape[1], other_tokens.shape[1]
    for name, size in dict(tokens=first, other_tokens=second, union=first + second - 1).items():
        expect_nodes(name, size)
    tree, other = MergedTree(tokens, parents), MergedTree(other_tokens, other_parents)
    return dispatch("merge_trees", __package__, impl, tokens)(tree, other)


def draft_topk(logits: Tensor, k: int, impl: str = "auto") -> DraftTopk:
    """The k largest logits of each row as probabilities, in falling order, among equals the lowest id first.

    p = exp(l - max l) / sum_i exp(l_i - max l) over the whole row. NaN counts as -inf and +inf as the largest float32;
    ids of probability 0 fill the rest.

    Args:
        logits: [R, V] float32, float16 or bfloat16, V >= k; the last dimension has stride 1, rows may be strided.
        k: 1 to 64.
    """
    expect_strided(logits=(logits, (None, None), (torch.float32, torch.float16, torch.bfloat16)))
    expect_between("k", k, 1, min(MAX_CHILDREN, logits.shape[1]))
    return dispatch("draft_topk", __package__, impl, logits, kernel="kernel_topk")(logits, k)


def sample_children(
    tokens: Tensor,
    probs: Tensor,
    children: Tensor,
    rows: Tensor,
    top_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor | None,
    positions: Tensor | None,
    *,
    replacement: bool,
    uniforms: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Sample the tokens of children from their parents' distributions, in place.

    A sample is the inverse of the cumulative distribution at one uniform, as in `pick_tokens`. The children of a parent
    are sampled one after the other, with replacement or from the tokens that are left; where none is left a child
    repeats the token of the first one. The uniform of node n is keyed by (seed, position, DRAFT_STREAM, slot n). At
    temperature 0 the children take the top tokens one after the other. Verification takes `probs` as `draft_probs`.

    Args:
        tokens: [B, N] int64, contiguous; entries of `children` are written.
        probs: [B, R, V] float32, contiguous; rows need not sum to 1, NaN and negative entries count as 0. A row without
            a positive entry gives token 0.
        children: [P, K] int32, contiguous: the children of each parent, 0 <= n < N and none twice, -1 in unused places.
        rows: [P] int32: the row of `probs` of each parent, 0 <= r < R.
        top_tokens: [B, R, C] int64, contiguous, C >= 1: tokens at temperature 0 by the place of the child; the last one
            serves all further places.
        temperature: [B] float32.
        seeds: [B] int64, or None with `uniforms`.
        positions: [B] int64, the root's, or None with `uniforms`.
        replacement: whether siblings may carry one token.
        uniforms: [B, N] float64 in [0, 1), one per node, replaces the generator.
    """
    call = ChildSampling(tokens, probs, children, rows, top_tokens, temperature, seeds, positions, uniforms)
    expect_fields(call)
    expect_at_least_one(**{"V of probs": probs.shape[2], "C of top_tokens": top_tokens.shape[2]})
    expect_randomness(seeds, positions, uniforms)
    dispatch("sample_children", __package__, impl, probs, kernel="kernel_sample")(call, replacement)


def expand_tree(
    frontier: Frontier | None,
    probs: Tensor,
    tokens: Tensor,
    candidates: Candidates,
    first: int,
    width: int,
    mask: Tensor | None = None,
    *,
    slot: int = 0,
    root_is_stored: bool = False,
    vocabulary: Tensor | None = None,
    impl: str = "auto",
) -> Frontier | None:
    """One drafting step of EAGLE-2 (arXiv 2406.16858): the children of all frontier nodes, and the best of them.

    Child c of frontier node p becomes candidate `first` + p * C + c, of its parent's score times its own probability; a
    NaN product counts as -inf. The `width` largest scores are the next frontier, among equals the lowest candidate
    first. Its node t is in slot `slot` + t of the drafter's cache, and sees that slot and what its parent sees.

    Args:
        frontier: P nodes, or None for the root alone, whose score is 1.
        probs: [B, P, C] float32, contiguous; P is 1 for the root, P * C <= 4096.
        tokens: [B, P, C] int64, contiguous: ids of the children.
        candidates: M candidates, contiguous; entries `first` to `first` + P * C - 1 are written.
        first: 0 to M - P * C.
        width: T, 0 to min(64, P * C). With 0, after the last level, there is no next frontier.
        mask: [B, T, W] int64, contiguous, written: the next frontier's mask; None with `width` 0.
        slot: slot of the next frontier's first node.
        root_is_stored: slot 0 is the root, which all nodes see.
        vocabulary: [V] int64: what is added to id i of `tokens` to give the target's id; None adds nothing.
    """
    call = Expansion(frontier, probs, tokens, candidates, first, width, mask, slot, root_is_stored, vocabulary)
    expect_fields(call, T=width)
    batch, parents, children = probs.shape
    expect_fields(candidates, others=dict(probs=probs), B=batch)
    if frontier is not None:
        expect_fields(frontier, others=dict(probs=probs), B=batch, P=parents)
    elif parents != 1:
        raise ValueError(f"probs: expected one parent without a frontier, got {parents}")
    expect_between("P * C of probs", parents * children, 1, MAX_CANDIDATES)
    expect_between("first", first, 0, candidates.path_scores.shape[1] - parents * children)
    expect_between("width", width, 0, min(MAX_CHILDREN, parents * children))
    _check_mask(mask, width, slot, 0 if frontier is None else frontier.mask.shape[2])
    return dispatch("expand_tree", __package__, impl, probs, kernel="kernel_selection")(call)


def _check_mask(mask: Tensor | None, width: int, slot: int, seen_words: int) -> None:
    if (mask is None) != (width == 0):
        raise ValueError(f"mask: expected with a width above 0 only, got width {width} and {type(mask).__name__}")
    if mask is not None:
        least = max(mask_words(slot + width), seen_words)
        expect_between("W of mask", mask.shape[2], least, max(least, mask.shape[2]))
        expect_at_least("slot", slot, 0)


def rerank_tree(
    path_scores: Tensor, tokens: Tensor, parents: Tensor, last_tokens: Tensor, num_nodes: int, impl: str = "auto"
) -> Selection:
    """The tree of the best candidates (EAGLE-2, arXiv 2406.16858): the N - 1 largest path scores in candidate order.

    Among equal scores the lowest candidate id is kept. Scores of NaN and -inf are no candidates. A node whose parent
    was not selected, or is not before it, gets parent -2; nodes without a candidate get token 0, parent -2, candidate
    -1.

    Args:
        path_scores: [B, M] float32, contiguous, 1 <= M <= 4096.
        tokens: [B, M] int64, contiguous.
        parents: [B, M] int32, contiguous: candidate id of the parent, -1 for the root; parents before children.
        last_tokens: [B] int64, token of each root: the last committed one.
        num_nodes: N, nodes with the root, 1 to 256.
    """
    candidates = Candidates(path_scores, tokens, parents)
    expect_fields(candidates, others=dict(last_tokens=last_tokens))
    expect_tensors(last_tokens=(last_tokens, path_scores.shape[:1], torch.int64))
    expect_between("M of path_scores", path_scores.shape[1], 1, MAX_CANDIDATES)
    expect_nodes("num_nodes", num_nodes)
    rerank = dispatch("rerank_tree", __package__, impl, path_scores, kernel="kernel_selection")
    return rerank(candidates, last_tokens, num_nodes)


def best_first_tree(
    probs: Tensor, tokens: Tensor, last_tokens: Tensor, num_nodes: int, impl: str = "auto"
) -> Selection:
    """The most likely tree under independent marginals of every depth, grown best first (DDTree).

    A node's value is its parent's times the probability of its rank at its depth, in float32. The tree grows by the
    largest value among the next unused rank of every node in it; among equals the earliest parent wins. An entry that
    is not positive ends its depth's list, one above 1 counts as 1, and a product below the smallest normal float32 is
    no candidate. Nodes without a candidate get token 0, parent -2. Candidate ids are depth index * C + rank.

    Args:
        probs: [B, D, C] float32, contiguous, in falling order over C; 1 <= D <= 32, 1 <= C <= 64.
        tokens: [B, D, C] int64, contiguous, the token of each rank.
        last_tokens: [B] int64, token of each root.
        num_nodes: N, nodes with the root, 1 to 256.
    """
    expect_tensors(
        probs=(probs, (None, None, None), torch.float32),
        tokens=(tokens, probs.shape, torch.int64),
        last_tokens=(last_tokens, probs.shape[:1], torch.int64),
    )
    expect_between("D of probs", probs.shape[1], 1, MAX_DEPTH)
    expect_between("C of probs", probs.shape[2], 1, MAX_CHILDREN)
    expect_nodes("num_nodes", num_nodes)
    grow = dispatch("best_first_tree", __package__, impl, probs, kernel="kernel_selection")
    return grow(probs, tokens, last_tokens, num_nodes)


def _expect_mask(mask: Tensor, *dtypes: torch.dtype) -> None:
    expect_shape("mask", mask, (None, None, None))
    num_nodes = mask.shape[1]
    expect_nodes("mask", num_nodes)
    columns = num_nodes if mask.dtype == torch.bool else mask_words(num_nodes)
    expect_tensors(mask=(mask, (None, num_nodes, columns), dtypes))


def expect_nodes(name: str, num_nodes: int) -> None:
    """Raise ValueError unless a tree may have this many nodes."""
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{name}: expected 1 (at least one node, the root) to {MAX_NODES} nodes, got {num_nodes}")
