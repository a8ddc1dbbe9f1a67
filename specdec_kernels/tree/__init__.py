"""Draft-tree links, positions and ancestor bit masks, built on the device from a parent array.

A drafter gives each node's parent. Verification wants left-child / right-sibling links (Knuth, The Art of
Computer Programming 1, 2.3.2) to walk, positions for RoPE and sampling keys, and for attention a bit per
(node, ancestor) pair, as in tree attention of SpecInfer (arXiv 2305.09781). A chain is the tree whose node i
hangs on node i - 1.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.tree import reference
from specdec_kernels.tree.types import TreeLinks

__all__ = ["TreeLinks", "build_chain", "build_tree"]


def build_tree(parents: torch.Tensor, lengths: torch.Tensor, impl: str = "auto") -> TreeLinks:
    """Links, depths, positions and ancestor masks of a batch of trees.

    Node 0 is the root whatever its entry says. A node i > 0 is linked under `parents[b, i]` when that lies in
    [0, i); otherwise the node is unused: nothing links to it, its depth is 0 and it sees only itself.
    Children appear in the sibling list in the order of their index.

    Args:
        parents: [B, N] int32, contiguous, N >= 1; parents come before children.
        lengths: [B] int64, committed tokens of each request.
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
    if parents.shape[1] < 1:
        raise ValueError(f"parents: expected at least one node (the root), got {list(parents.shape)}")
    if use_triton(impl, parents):
        import specdec_kernels.tree.kernel as kernel

        return kernel.build_tree(parents, lengths)
    return reference.build_tree(parents, lengths)


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
