"""Draft trees on the device: candidates, their selection, links and ancestor masks.

A drafter scores candidates (`draft_topk`, `expand_tree`), and the best of them become nodes, described by a parent
array (`rerank_tree`, `best_first_tree`); or it draws the tokens of a tree of given shape (`draw_children`). From the
parents `build_tree` computes the left-child / right-sibling links (Knuth, The Art of Computer Programming 1, 2.3.2)
that acceptance walks, the positions for RoPE and sampling keys, and for attention one bit per (node, ancestor) pair, as
in tree attention of SpecInfer (arXiv 2305.09781). A chain is the tree in which node i is the child of node i - 1. Node
0, the root, is the last committed token.
"""

from specdec_kernels.tree.api import (
    best_first_tree,
    build_chain,
    build_tree,
    draft_topk,
    draw_children,
    expand_tree,
    links_from_mask,
    merge_trees,
    rerank_tree,
    tree_parents,
)
from specdec_kernels.tree.types import (
    UNUSED_PARENT,
    Candidates,
    DraftTopk,
    Frontier,
    MergedTree,
    Selection,
    TreeLinks,
)

__all__ = [
    "UNUSED_PARENT",
    "Candidates",
    "DraftTopk",
    "Frontier",
    "MergedTree",
    "Selection",
    "TreeLinks",
    "best_first_tree",
    "build_chain",
    "build_tree",
    "draft_topk",
    "draw_children",
    "expand_tree",
    "links_from_mask",
    "merge_trees",
    "rerank_tree",
    "tree_parents",
]
