# mypy: ignore-errors
"""The union of two trees: one program per request, nodes of the union in its lanes.

The nodes of the second tree are taken one after the other. Parents come first, so the parent of a node has its place in
the union by then, and the node is in the union if a child of that place carries its token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import lanes, launch
from specdec_kernels.tree.types import UNUSED_PARENT, MergedTree

_UNUSED_PARENT = tl.constexpr(UNUSED_PARENT)
_NOWHERE = tl.constexpr(-1)


@triton.jit
def _merge_kernel(
    tokens_ptr,  # [B, FIRST] int64
    parents_ptr,  # [B, FIRST] int32
    other_tokens_ptr,  # [B, SECOND] int64
    other_parents_ptr,  # [B, SECOND] int32
    out_tokens_ptr,  # [B, FIRST + SECOND - 1] int64
    out_parents_ptr,  # [B, FIRST + SECOND - 1] int32
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    token = tl.load(tokens_ptr + request * FIRST + node, mask=node < FIRST, other=0)
    parent = tl.load(parents_ptr + request * FIRST + node, mask=node < FIRST, other=_UNUSED_PARENT)
    parent = tl.where((parent >= 0) & (parent < node), parent, _UNUSED_PARENT)
    parent = tl.where(node == 0, -1, parent)
    second = tl.arange(0, BLOCK_S)
    place = tl.where(second == 0, 0, _NOWHERE)  # of the second tree's nodes in the union
    for number in range(1, SECOND):
        theirs = tl.load(other_parents_ptr + request * SECOND + number)
        wanted = tl.load(other_tokens_ptr + request * SECOND + number)
        # No node that is still to come has a place.
        above = tl.max(tl.where(second == theirs, place, _NOWHERE), 0)
        same = (parent == above) & (token == wanted)
        found = tl.min(tl.where(same, node, BLOCK_N), 0)
        new = FIRST + number - 1
        is_new = (node == new) & (found == BLOCK_N) & (above >= 0)
        token = tl.where(node == new, wanted, token)
        parent = tl.where(is_new, above, parent)
        there = tl.where(above >= 0, tl.where(found < BLOCK_N, found, new), _NOWHERE)
        place = tl.where(second == number, there, place)
    out = request * (FIRST + SECOND - 1)
    live = node < FIRST + SECOND - 1
    tl.store(out_tokens_ptr + out + node, token, mask=live)
    tl.store(out_parents_ptr + out + node, parent, mask=live)


def merge_trees(
    tokens: torch.Tensor, parents: torch.Tensor, other_tokens: torch.Tensor, other_parents: torch.Tensor
) -> MergedTree:
    """See `specdec_kernels.merge_trees`, which has checked the arguments."""
    (batch, first), second = tokens.shape, other_tokens.shape[1]
    size = first + second - 1
    merged = MergedTree(tokens.new_empty(batch, size), parents.new_empty(batch, size))
    # One warp: a step is a few reductions in a row, and within a warp they need no barrier.
    launch(
        _merge_kernel,
        (batch,),
        *(tokens, parents, other_tokens, other_parents, *merged),
        num_warps=1,
        FIRST=first,
        SECOND=second,
        BLOCK_N=lanes(size),
        BLOCK_S=lanes(second),
    )
    return merged
