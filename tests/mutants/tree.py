"""Bugs in links, masks, and in the choice of a draft tree."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import bugs_in, parity

_kernel = bugs_in("specdec_kernels/tree/kernel.py")
_selection = bugs_in("specdec_kernels/tree/kernel_selection.py")
_topk = bugs_in("specdec_kernels/tree/kernel_topk.py")
_case = partial(parity, "tree")

MUTANTS = (
    _kernel(
        "siblings_swapped",
        "is_sibling = (of_other == parent[:, :, None]) & (of_other >= 0) & (other_index {{> -> !=}} node[:, :, None])",
        _case("tree_star"),
        "a sibling list that runs backwards and in circles",
    ),
    _kernel("padding_is_a_child_of_the_root",
            "return{{ ->  tl.where(node > 0,}} tl.where((parent >= 0) & (parent < node), parent, {{ -> 0), }}-1)",
            _case("tree_unused"), "unused nodes hang under the root and may be accepted"),
    _kernel(
        "mask_bit_of_the_wrong_word",
        "return tl.where(word == ({{node -> (node - 1)}} // _WORD_BITS), one << (node % _WORD_BITS).to(tl.int64), 0)",
        _case("tree_65"),
        "node 64 sets a bit in the word of node 63",
    ),
    _kernel("position_is_the_slot", "tl.store(links.positions + row + node, length + {{depth -> node}}, mask=live)",
            _case("tree_odd"), "siblings are rotated as if one followed the other"),
    _kernel("length_in_32_bits",
            "tl.store(links.positions + row + node, length{{ -> .to(tl.int32)}} + depth, mask=live)", _case("tree_odd"),
            "positions are computed in 32 bits"),
    _selection("expansion_ties_to_the_last",
               "winner = tl.{{min -> max}}(tl.where(image == best, child, {{BLOCK_M -> -1}}), 0)", _case("expand_ties"),
               "equal scores go to the higher index, so the tree differs from its definition"),
    _selection("rerank_keeps_every_tie",
               "kept = {{(image > threshold) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= ties_wanted)) -> "
               "image >= threshold}}", _case("rerank_ties"), "more nodes than the tree holds, written past its end"),
    _topk("topk_ties_to_the_last_tile", "winner = tl.{{min -> max}}(tl.where(image == best, tile, {{TILES -> -1}}), 0)",
          _case("topk_equal_tiles"), "of tiles with one maximum the last is searched, so the lowest ids are missed"),
    _topk("topk_tail_of_the_vocabulary",
          "logit = {{ -> tl.where(column >= VOCAB, 0.0, }}d.load_entries(logits_ptr, row, column, row_stride, "
          "column < VOCAB){{ -> )}}", _case("topk_odd"),
          "historical: lanes past the vocabulary win against negative logits (vLLM GHSA-8wr5-jm2h-8r4f)"),
    _kernel("shared_path_drafted_twice", "found = tl.min(tl.where(same{{ ->  & (node == 0)}}, node, BLOCK_N), 0)",
            _case("merge_alike"), "what both drafters draft is two nodes, and the walk loses the continuation of one"),
)  # fmt: skip
