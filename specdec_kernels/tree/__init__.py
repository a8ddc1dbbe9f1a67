"""Draft trees on the device: candidates, their selection, links, ancestor masks and exports.

A drafter scores candidates (`draft_topk`, `expand_tree`), the best of them become nodes (`rerank_tree`,
`best_first_tree`) and a parent array. From that come the left-child / right-sibling links (Knuth, The Art of
Computer Programming 1, 2.3.2) that acceptance walks, positions for RoPE and sampling keys, and for attention
a bit per (node, ancestor) pair, as in tree attention of SpecInfer (arXiv 2305.09781). A chain is the tree whose
node i hangs on node i - 1.
"""

from specdec_kernels.tree.links import build_chain, build_tree, links_from_mask
from specdec_kernels.tree.selection import best_first_tree, draft_topk, expand_tree, rerank_tree
from specdec_kernels.tree.types import DraftTopk, Expansion, Selection, TreeLinks

__all__ = [
    "DraftTopk",
    "Expansion",
    "Selection",
    "TreeLinks",
    "best_first_tree",
    "build_chain",
    "build_tree",
    "draft_topk",
    "expand_tree",
    "links_from_mask",
    "rerank_tree",
]
