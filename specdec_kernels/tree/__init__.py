"""Draft trees on the device: candidates, their selection, links and ancestor masks.

A drafter scores candidates (`draft_topk`, `expand_tree`), and the best of them become nodes, described by a parent
array (`rerank_tree`, `best_first_tree`), or it samples the tokens of a given tree (`sample_children`). `build_tree`
computes from the parents the left-child / right-sibling links (Knuth, The Art of Computer Programming 1, 2.3.2), the
positions, and one bit per (node, ancestor) pair for attention (SpecInfer, arXiv 2305.09781). Node 0, the root, is the
last committed token.
"""

from specdec_kernels.tree.api import (
    best_first_tree,
    build_chain,
    build_tree,
    draft_topk,
    expand_tree,
    links_from_mask,
    merge_trees,
    rerank_tree,
    sample_children,
    tree_parents,
)
from specdec_kernels.tree.types import (
    MAX_NODES,
    UNUSED_PARENT,
    Candidates,
    DraftTopk,
    Frontier,
    MergedTree,
    Selection,
    TreeLinks,
    mask_words,
)

__all__ = [
    "MAX_NODES", "UNUSED_PARENT", "Candidates", "DraftTopk", "Frontier", "MergedTree", "Selection", "TreeLinks",
    "best_first_tree", "build_chain", "build_tree", "draft_topk", "sample_children", "expand_tree", "links_from_mask",
    "mask_words", "merge_trees", "rerank_tree", "tree_parents",
]  # fmt: skip
