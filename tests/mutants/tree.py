"""Bugs in links, masks, and in the choice of a draft tree."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant, parity

_KERNEL = "specdec_kernels/tree/kernel.py"
_SELECTION = "specdec_kernels/tree/kernel_selection.py"
_TOPK = "specdec_kernels/tree/kernel_topk.py"
_case = partial(parity, "tree")

MUTANTS = (
    Mutant(
        "siblings_swapped",
        _KERNEL,
        "is_sibling = (of_other == parent[:, :, None]) & (of_other >= 0) & (other_index > node[:, :, None])",
        "is_sibling = (of_other == parent[:, :, None]) & (of_other >= 0) & (other_index != node[:, :, None])",
        _case("tree_star"),
        "a sibling list that runs backwards and in circles",
    ),
    Mutant(
        "padding_is_a_child_of_the_root",
        _KERNEL,
        "return tl.where((parent >= 0) & (parent < node), parent, -1)",
        "return tl.where(node > 0, tl.where((parent >= 0) & (parent < node), parent, 0), -1)",
        _case("tree_unused"),
        "unused nodes hang under the root and may be accepted",
    ),
    Mutant(
        "ancestors_without_self",
        _KERNEL,
        "bits = word_bit((node + depth)[:, :, None], word)",
        "bits = word_bit((node + depth)[:, :, None], word) & (node == 0)[:, :, None].to(tl.int64)",
        _case("tree_odd"),
        "a node does not see itself",
    ),
    Mutant(
        "mask_bit_of_the_wrong_word",
        _KERNEL,
        "return tl.where(word == (node // _WORD_BITS), one << (node % _WORD_BITS).to(tl.int64), 0)",
        "return tl.where(word == ((node - 1) // _WORD_BITS), one << (node % _WORD_BITS).to(tl.int64), 0)",
        _case("tree_65"),
        "node 64 sets a bit in the word of node 63",
    ),
    Mutant(
        "position_is_the_slot",
        _KERNEL,
        "tl.store(positions_ptr + row + node, length + depth, mask=live)",
        "tl.store(positions_ptr + row + node, length + node, mask=live)",
        _case("tree_odd"),
        "siblings are rotated as if one followed the other",
    ),
    Mutant(
        "length_in_32_bits",
        _KERNEL,
        "tl.store(positions_ptr + row + node, length + depth, mask=live)",
        "tl.store(positions_ptr + row + node, length.to(tl.int32) + depth, mask=live)",
        _case("tree_odd"),
        "positions are computed in 32 bits",
    ),
    Mutant(
        "expansion_ties_to_the_last",
        _SELECTION,
        "winner = tl.min(tl.where(image == best, child, BLOCK_M), 0)",
        "winner = tl.max(tl.where(image == best, child, -1), 0)",
        _case("expand_ties"),
        "equal scores go to the higher index, so the tree differs from its definition",
    ),
    Mutant(
        "expansion_by_the_edge_alone",
        _SELECTION,
        "path_score = tl.load(scores_ptr + parent, mask=live, other=0.0) * path_score",
        "path_score = tl.load(scores_ptr + parent, mask=live, other=0.0) * 0 + path_score",
        _case("expand_odd"),
        "children are ranked without the probability of their parent",
    ),
    Mutant(
        "rerank_keeps_every_tie",
        _SELECTION,
        "kept = (image > threshold) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= ties_wanted))",
        "kept = image >= threshold",
        _case("rerank_ties"),
        "more nodes than the tree holds, written past its end",
    ),
    Mutant(
        "best_first_forgets_siblings",
        _SELECTION,
        "        next_rank += is_parent.to(tl.int32)\n",
        "",
        _case("first_64"),
        "a node offers its best child for ever",
    ),
    Mutant(
        "topk_of_one_tile",
        _TOPK,
        "image = tl.where(column == winner, NO_SCORE, image)",
        "image = tl.where(column // TILE == winner // TILE, NO_SCORE, image)",
        _case("topk_all"),
        "each tile gives one token, although it may hold several of the best",
    ),
    Mutant(
        "topk_ties_to_the_last_tile",
        _TOPK,
        "winner = tl.min(tl.where(image == best, tile, NO_TILE), 0)",
        "winner = tl.max(tl.where(image == best, tile, -1), 0)",
        _case("topk_equal_tiles"),
        "of tiles with one maximum the last is searched, so the lowest ids are missed",
    ),
    Mutant(
        "frontier_blind_to_itself",
        _SELECTION,
        "own = slot + node",
        "own = slot + node * 0",
        _case("expand_odd"),
        "every token of a level sees the first slot of the level instead of its own",
    ),
    Mutant(
        "topk_tail_of_the_vocabulary",
        _TOPK,
        'return tl.load(logits_ptr + row_offset + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)',
        "return tl.load(logits_ptr + row_offset + column, mask=column < VOCAB, other=0.0).to(tl.float32)",
        _case("topk_odd"),
        "historical: lanes past the vocabulary win against negative logits (vLLM GHSA-8wr5-jm2h-8r4f)",
    ),
    Mutant(
        "shared_path_drafted_twice",
        "specdec_kernels/tree/kernel_merge.py",
        "found = tl.min(tl.where(same, node, BLOCK_N), 0)",
        "found = tl.min(tl.where(same & (node == 0), node, BLOCK_N), 0)",
        _case("merge_alike"),
        "what both drafters draft is two nodes, and the walk loses the continuation of one",
    ),
)
