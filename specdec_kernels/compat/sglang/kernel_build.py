# mypy: ignore-errors
"""The trees that EAGLE's re-ranking selected, built by one launch: a program holds whole requests in registers.

Parents are found by comparing all pairs of a request's nodes, ancestors by following the parents from lane to lane,
which needs no memory between the parts.
"""

import triton
import triton.language as tl

from specdec_kernels.compat.sglang.configs import CONFIGS
from specdec_kernels.compat.sglang.types import Selected, TreeMaskMode
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.tree.kernel import word_bit
from specdec_kernels.tree.types import WORD_BITS, mask_words

_WORD_BITS = tl.constexpr(WORD_BITS)
_FULL, _PACKED = tl.constexpr(int(TreeMaskMode.FULL_MASK)), tl.constexpr(int(TreeMaskMode.QLEN_ONLY_BITPACKING))
_PAIR_NODES = 64  # nodes that all others are compared with at once
_PREFIXES = tl.constexpr(256)  # lengths that are added at once


@triton.jit
def _selected_parents(
    selected_ptr, parent_list_ptr, request, node, batch, rows, topk,
    NODES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Parent of each node, -1 at the root and where the parent was not selected."""
    entries = selected_ptr + request.to(tl.int64) * (NODES - 1) - 1
    drafted = (request < batch) & (node > 0) & (node < NODES)
    candidate = tl.load(entries + node, mask=drafted, other=-1)
    # In 32 bits, because a division of 64 bits is a long loop.
    recorded = drafted & (candidate >= topk) & (candidate < rows.to(tl.int64) * topk)
    place = request.to(tl.int64) * rows + tl.where(recorded, candidate, 0).to(tl.int32) // topk
    wanted = tl.load(parent_list_ptr + place, mask=recorded, other=-1)
    found = tl.full((BLOCK_B, BLOCK_N), NODES, tl.int32)
    for start in range(0, NODES, BLOCK_O):
        other = (start + tl.arange(0, BLOCK_O))[None, :]
        there = (request < batch) & (other > 0) & (other < NODES)
        id_of = tl.load(entries + other, mask=there, other=-1)
        is_parent = (id_of[:, None, :] == wanted[:, :, None]) & recorded[:, :, None] & there[:, None, :]
        found = tl.minimum(found, tl.min(tl.where(is_parent, other[:, None, :], NODES), 2))
    parent = tl.where(found < NODES, found, -1)
    return tl.where(drafted, tl.where(candidate < topk, 0, parent), -1)


@triton.jit
def _nearest_links(
    parent, node, NODES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr
):  # fmt: skip
    """First child and next sibling of each node, NODES where there is none."""
    first_child = tl.full((BLOCK_B, BLOCK_N), NODES, tl.int32)
    next_sibling = first_child
    for start in range(0, NODES, BLOCK_O):
        other = start + tl.arange(0, BLOCK_O)[None, :] + tl.zeros((BLOCK_B, BLOCK_O), tl.int32)
        of_other = tl.gather(parent, other, 1)[:, None, :]
        later = other[:, None, :]
        is_sibling = (of_other == parent[:, :, None]) & (of_other >= 0) & (later > node[:, :, None])
        first_child = tl.minimum(first_child, tl.min(tl.where(of_other == node[:, :, None], later, NODES), 2))
        next_sibling = tl.minimum(next_sibling, tl.min(tl.where(is_sibling, later, NODES), 2))
    return first_child, next_sibling


@triton.jit
def _lengths_before(lengths_ptr, request, batch, BLOCK_B: tl.constexpr):
    """[BLOCK_B, 1] int64: sum of the lengths of all earlier requests."""
    before = tl.zeros((BLOCK_B, 1), tl.int64)
    for first in range(0, batch, _PREFIXES):
        other = first + tl.arange(0, _PREFIXES)[None, :]
        length = tl.load(lengths_ptr + other, mask=other < batch, other=0)
        before += tl.sum(tl.where((other < request) & (length > 0), length, 0), 1)[:, None]
    return before


@triton.jit
def _store_mask(
    out_mask_ptr, lengths_ptr, bits, length, request, node, batch,
    NODES: tl.constexpr, MODE: tl.constexpr, BLOCK_B: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Store the masks in SGLang's layout."""
    live = (request < batch) & (node < NODES)
    row = request.to(tl.int64) * NODES + node
    number = tl.arange(0, bits.shape[2])[None, None, :]
    if MODE == _PACKED:
        word = tl.sum(tl.where(number == 0, bits, 0), 2)
        tl.store(out_mask_ptr + row, word, mask=live)
    else:
        start = row * NODES
        if MODE == _FULL:  # before the cells of a row lie the prefixes of all rows up to it
            before = _lengths_before(lengths_ptr, request, batch, BLOCK_B)
            start += before * NODES + (node + 1) * tl.maximum(length, 0)
        for first in tl.static_range(0, NODES, CELLS):
            column = first + tl.arange(0, CELLS)[None, None, :]
            word = tl.sum(tl.where(number == first // _WORD_BITS, bits, 0), 2)
            seen = (word[:, :, None] >> (column % _WORD_BITS).to(tl.int64)) & 1
            tl.store(out_mask_ptr + start[:, :, None] + column, seen != 0, mask=live[:, :, None] & (column < NODES))


@triton.jit(do_not_specialize=["batch", "rows", "topk", "depth"])
def _build_kernel(
    selected_ptr,  # [B, NODES - 1] int64
    parent_list_ptr,  # [B, rows] int64
    lengths_ptr,  # [B] int64
    out_mask_ptr,  # see `build_tree_kernel_efficient`
    out,  # BuiltTree, written
    batch,
    rows,
    topk,
    depth,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CELLS: tl.constexpr,
):
    request = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    node = tl.arange(0, BLOCK_N)[None, :]
    live = (request < batch) & (node < NODES)
    length = tl.load(lengths_ptr + request, mask=request < batch, other=0)
    parent = _selected_parents(
        selected_ptr, parent_list_ptr, request, node, batch, rows, topk, NODES, BLOCK_B, BLOCK_N, BLOCK_O
    )
    first_child, next_sibling = _nearest_links(parent, node, NODES, BLOCK_B, BLOCK_N, BLOCK_O)

    word = tl.arange(0, BLOCK_W)[None, None, :]
    steps = (node > 0).to(tl.int32) + tl.zeros((BLOCK_B, BLOCK_N), tl.int32)
    bits = word_bit((node + steps * 0)[:, :, None], word) | word_bit((steps * 0)[:, :, None], word)
    ancestor = parent
    climbing = (ancestor > 0) & (steps < depth)
    while tl.max(tl.max(climbing.to(tl.int32), 1), 0) > 0:
        steps += climbing.to(tl.int32)
        here = tl.maximum(ancestor, 0)
        bits |= tl.where(climbing[:, :, None], word_bit(here[:, :, None], word), 0)
        ancestor = tl.where(climbing, tl.gather(parent, here, 1), -1)
        climbing = (ancestor > 0) & (steps < depth)

    place = request.to(tl.int64) * NODES + node
    tl.store(out.positions + place, length + steps, mask=live)
    tl.store(out.retrive_index + place, place, mask=live)
    tl.store(out.next_token + place, tl.where(first_child < NODES, first_child, -1), mask=live)
    tl.store(out.next_sibling + place, tl.where(next_sibling < NODES, next_sibling, -1), mask=live)
    _store_mask(out_mask_ptr, lengths_ptr, bits, length, request, node, batch, NODES, MODE, BLOCK_B, CELLS)


def build_selected_tree(call: Selected) -> None:
    selected, parent_list, lengths, tree_mask, outputs, topk, depth, mode = call
    batch, nodes = selected.shape[0], selected.shape[1] + 1
    config = CONFIGS[current_chip(lengths)]
    # Triton 3.6 cannot compile blocks of one element.
    block_n = max(2, triton.next_power_of_2(nodes))
    block_b = min(triton.next_power_of_2(max(batch, 1)), config.tree_requests)
    words = mask_words(nodes)
    launch(
        _build_kernel, (triton.cdiv(batch, block_b),), selected, parent_list, lengths, tree_mask, outputs, batch,
        parent_list.shape[1], topk, depth, num_warps=max(1, block_n // 32), NODES=nodes, WORDS=words,
        MODE=int(mode), BLOCK_B=block_b, BLOCK_N=block_n, BLOCK_O=min(block_n, _PAIR_NODES),
        BLOCK_W=triton.next_power_of_2(words), CELLS=min(block_n, WORD_BITS),
    )  # fmt: skip
