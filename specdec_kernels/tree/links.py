"""Links, positions and masks of draft trees, from parents, candidate lists or another mask."""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.tree import reference
from specdec_kernels.tree.types import MAX_NODES, TreeLinks, mask_words


def build_tree(
    parents: torch.Tensor, lengths: torch.Tensor, orphans_see_root: bool = False, impl: str = "auto"
) -> TreeLinks:
    """Links, depths, positions and ancestor masks of a batch of trees.

    Node 0 is the root whatever its entry says. A node i > 0 is linked under `parents[b, i]` when that lies in
    [0, i); otherwise the node is unused: nothing links to it, its depth is 0 and it sees only itself. So no
    array of integers can make a cycle, and a node under an unused one is not reachable from the root either.
    Children appear in the sibling list in the order of their index. Two children may carry one token.

    Args:
        parents: [B, N] int32, contiguous, 1 <= N <= 256; parents come before children.
        lengths: [B] int64, committed tokens of each request.
        orphans_see_root: an unused node counts as one step below the root in depth, positions and mask, though
            nothing links to it. That is SGLang's contract for entries whose parent was not selected.
        impl: `auto`, `triton` or `reference`.

    Returns:
        TreeLinks: first_child, next_sibling, depth [B, N] int32, positions [B, N] int64, mask [B, N,
            ceil(N/64)] int64.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, or an unknown `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("parents", parents, (None, None))
    expect_shape("lengths", lengths, (parents.shape[0],))
    expect_dtype("parents", parents, torch.int32)
    expect_dtype("lengths", lengths, torch.int64)
    expect_same_device(parents=parents, lengths=lengths)
    expect_contiguous(parents=parents, lengths=lengths)
    expect_nodes("parents", parents.shape[1])
    if use_triton(impl, parents):
        import specdec_kernels.tree.kernel as kernel

        return kernel.build_tree(parents, lengths, orphans_see_root)
    return reference.build_tree(parents, lengths, orphans_see_root)


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
    expect_shape("lengths", lengths, (None,))
    expect_dtype("lengths", lengths, torch.int64)
    expect_contiguous(lengths=lengths)
    if num_nodes < 1:
        raise ValueError(f"num_nodes: expected at least 1 (the root), got {num_nodes}")
    if use_triton(impl, lengths):
        import specdec_kernels.tree.kernel as kernel

        return kernel.build_chain(lengths, num_nodes)
    return reference.build_chain(lengths, num_nodes)


def links_from_mask(mask: torch.Tensor, lengths: torch.Tensor, impl: str = "auto") -> TreeLinks:
    """Links, depths and positions of the trees that ancestor masks describe.

    The parent of node i is the last node before i that row i sees; a node i > 0 that sees none is unused. The
    rest of a row is not looked at: its own bit, bits of later nodes and of nodes beyond N have no meaning, and
    a row that is not its parent's row plus itself is replaced by that in the returned mask. So
    `links_from_mask(build_tree(p, L).mask, L) == build_tree(p, L)`. The order needs only ancestors before
    descendants. SGLang's `reconstruct_indices_from_tree_mask` computes the same from well-formed masks.

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
    expect_shape("mask", mask, (None, num_nodes, columns))
    expect_shape("lengths", lengths, (mask.shape[0],))
    expect_dtype("lengths", lengths, torch.int64)
    expect_same_device(mask=mask, lengths=lengths)
    expect_contiguous(mask=mask, lengths=lengths)
    if use_triton(impl, mask):
        import specdec_kernels.tree.kernel as kernel

        return kernel.links_from_mask(mask, lengths)
    return reference.links_from_mask(mask, lengths)


def expect_nodes(name: str, num_nodes: int) -> None:
    """Raise ValueError unless a tree may have this many nodes."""
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{name}: expected 1 (at least one node, the root) to {MAX_NODES} nodes, got {num_nodes}")
