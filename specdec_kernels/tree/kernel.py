"""Draft-tree links on the device: every lane is one node and follows its own ancestors.

First children and next siblings are minima over node indices, found by comparing a block of nodes with every block; of
a chain they are known.
The union of two trees has one program per request: the nodes of the second tree are taken one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, lanes, launch
from specdec_kernels.tree.configs import CONFIGS
from specdec_kernels.tree.types import UNUSED_PARENT, WORD_BITS, MergedTree, TreeLinks, mask_words

_WORD_BITS = tl.constexpr(WORD_BITS)
_UNUSED_PARENT = tl.constexpr(UNUSED_PARENT)
_NOWHERE = tl.constexpr(-1)
_EXPONENT_PLACE = tl.constexpr(52)  # of a float64
_EXPONENT_BIAS = tl.constexpr(1023)


@triton.jit
def _load_parent(parents_ptr, row, node, live):
    """Parent of each node, -1 at the root, for unused nodes and for lanes that are not `live`."""
    parent = tl.load(parents_ptr + row + node, mask=live, other=-1)
    return tl.where((parent >= 0) & (parent < node), parent, -1)


@triton.jit
def word_bit(node, word):
    """The bit of `node` [...] in word number `word` [W], as int64 [..., W]; node >= 0."""
    one = tl.full((1,), 1, tl.int64)
    return tl.where(word == (node // _WORD_BITS), one << (node % _WORD_BITS).to(tl.int64), 0)


@triton.jit
def _tree_links(
    parents_ptr, request, node, word, batch, NODES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr
):
    """First child and next sibling, NODES or more where there is none, depth and mask bits of each node."""
    live = (request < batch) & (node < NODES)
    row = request.to(tl.int64) * NODES
    parent = _load_parent(parents_ptr, row, node, live)

    depth = tl.zeros((BLOCK_B, BLOCK_N), tl.int32)
    bits = word_bit((node + depth)[:, :, None], word)
    ancestor = parent
    climbing = ancestor >= 0
    while tl.max(tl.max(climbing.to(tl.int32), 1), 0) > 0:
        depth += climbing.to(tl.int32)
        bits |= tl.where(climbing[:, :, None], word_bit(tl.maximum(ancestor, 0)[:, :, None], word), 0)
        ancestor = _load_parent(parents_ptr, row, ancestor, climbing)
        climbing = ancestor >= 0

    first_child = tl.full((BLOCK_B, BLOCK_N), NODES, tl.int32)
    next_sibling = tl.full((BLOCK_B, BLOCK_N), NODES, tl.int32)
    for start in range(0, NODES, BLOCK_N):
        other = (start + tl.arange(0, BLOCK_N))[None, :]
        other_parent = _load_parent(parents_ptr, row, other, (request < batch) & (other < NODES))
        of_other = other_parent[:, None, :]
        other_index = other[:, None, :]
        is_child = of_other == node[:, :, None]
        is_sibling = (of_other == parent[:, :, None]) & (of_other >= 0) & (other_index > node[:, :, None])
        first_child = tl.minimum(first_child, tl.min(tl.where(is_child, other_index, NODES), 2))
        next_sibling = tl.minimum(next_sibling, tl.min(tl.where(is_sibling, other_index, NODES), 2))
    return first_child, next_sibling, depth, bits


@triton.jit
def _chain_links(node, word, NODES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr):
    """`_tree_links` of chains."""
    depth = node + tl.zeros((BLOCK_B, BLOCK_N), tl.int32)
    seen_in_word = depth[:, :, None] + 1 - word * _WORD_BITS
    one = tl.full((1,), 1, tl.int64)
    low_ones = (one << tl.minimum(tl.maximum(seen_in_word, 0), _WORD_BITS - 1).to(tl.int64)) - 1
    bits = tl.where(seen_in_word >= _WORD_BITS, -one, low_ones)
    return depth + 1, depth * 0 + NODES, depth, bits


@triton.jit(do_not_specialize=["batch"])
def _links_kernel(
    parents_ptr,  # [B, N] int32, or None for chains
    lengths_ptr,  # [B] int64
    links,  # TreeLinks, written
    batch,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    node = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    word = tl.arange(0, BLOCK_W)[None, None, :]
    if parents_ptr is not None:
        first_child, next_sibling, depth, bits = _tree_links(
            parents_ptr, request, node, word, batch, NODES, BLOCK_B, BLOCK_N
        )
    else:
        first_child, next_sibling, depth, bits = _chain_links(node, word, NODES, BLOCK_B, BLOCK_N)
    live = (request < batch) & (node < NODES)
    row = request.to(tl.int64) * NODES
    length = tl.load(lengths_ptr + request, mask=request < batch, other=0)
    tl.store(links.first_child + row + node, tl.where(first_child < NODES, first_child, -1), mask=live)
    tl.store(links.next_sibling + row + node, tl.where(next_sibling < NODES, next_sibling, -1), mask=live)
    tl.store(links.depth + row + node, depth, mask=live)
    tl.store(links.positions + row + node, length + depth, mask=live)
    mask_row = ((row + node) * WORDS)[:, :, None]
    tl.store(links.mask + mask_row + word, bits, mask=live[:, :, None] & (word < WORDS))


@triton.jit
def _top_bit(word):
    """Number of the highest set bit of each int64, -1 where there is none."""
    bits = word.to(tl.uint64)
    # Without the bit below the highest one, rounding to a float cannot reach the next power of two.
    exponent = (bits ^ (bits & (bits >> 1))).to(tl.float64).to(tl.int64, bitcast=True) >> _EXPONENT_PLACE
    return tl.where(word == 0, -1, exponent - _EXPONENT_BIAS).to(tl.int32)


@triton.jit(do_not_specialize=["batch"])
def _mask_parents_kernel(
    mask_ptr,  # [B, N, COLUMNS] int64 words, or bool as uint8
    parents_ptr,  # [B, N] int32
    batch,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    node = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    live = (request < batch) & (node < NODES)
    row = request.to(tl.int64) * NODES + node
    parent = tl.full((BLOCK_B, BLOCK_N), -1, tl.int32)
    if PACKED:
        one = tl.full((BLOCK_B, BLOCK_N), 1, tl.int64)
        for number in range(COLUMNS):
            word = tl.load(mask_ptr + row * COLUMNS + number, mask=live, other=0)
            earlier = node - number * _WORD_BITS
            low_ones = (one << tl.minimum(tl.maximum(earlier, 0), _WORD_BITS - 1).to(tl.int64)) - 1
            top = _top_bit(tl.where(earlier >= _WORD_BITS, word, word & low_ones))
            parent = tl.where(top >= 0, number * _WORD_BITS + top, parent)
    else:
        for start in range(0, NODES, BLOCK_N):
            other = (start + tl.arange(0, BLOCK_N))[None, None, :]
            place = row[:, :, None] * COLUMNS + other
            seen = tl.load(mask_ptr + place, mask=live[:, :, None] & (other < COLUMNS), other=0)
            earlier = (seen != 0) & (other < node[:, :, None])
            parent = tl.maximum(parent, tl.max(tl.where(earlier, other, -1), 2))
    tl.store(parents_ptr + row, parent, mask=live)


@triton.jit
def _merge_kernel(
    tree,  # MergedTree of FIRST nodes
    other,  # MergedTree of SECOND nodes
    merged,  # MergedTree, written
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    token = tl.load(tree.tokens + request * FIRST + node, mask=node < FIRST, other=0)
    parent = tl.load(tree.parents + request * FIRST + node, mask=node < FIRST, other=_UNUSED_PARENT)
    parent = tl.where((parent >= 0) & (parent < node), parent, _UNUSED_PARENT)
    parent = tl.where(node == 0, -1, parent)
    second = tl.arange(0, BLOCK_S)
    place = tl.where(second == 0, 0, _NOWHERE)  # of the second tree's nodes in the union
    for number in range(1, SECOND):
        theirs = tl.load(other.parents + request * SECOND + number)
        wanted = tl.load(other.tokens + request * SECOND + number)
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
    tl.store(merged.tokens + out + node, token, mask=live)
    tl.store(merged.parents + out + node, parent, mask=live)


def build_tree(parents: Tensor | None, lengths: Tensor, num_nodes: int | None = None) -> TreeLinks:
    """Without parents, of chains of `num_nodes` nodes."""
    num_nodes = parents.shape[1] if parents is not None else num_nodes or 0
    (batch,), words = lengths.shape, mask_words(num_nodes)
    dtypes = (torch.int32, torch.int32, torch.int32, torch.int64)
    links = TreeLinks(
        *(lengths.new_empty((batch, num_nodes), dtype=dtype) for dtype in dtypes),
        lengths.new_empty((batch, num_nodes, words)),
    )
    grid, num_warps, blocks = _plan(lengths, num_nodes)
    launch(
        _links_kernel, grid, parents, lengths, links, batch, num_warps=num_warps, WORDS=words,
        BLOCK_W=triton.next_power_of_2(words), **blocks,
    )  # fmt: skip
    return links


def build_chain(lengths: Tensor, num_nodes: int) -> TreeLinks:
    return build_tree(None, lengths, num_nodes)


def links_from_mask(mask: Tensor, lengths: Tensor) -> TreeLinks:
    return build_tree(tree_parents(mask), lengths)


def tree_parents(mask: Tensor) -> Tensor:
    """See `specdec_kernels.tree.tree_parents`; bits may also be bools."""
    batch, num_nodes, columns = mask.shape
    parents = torch.empty(batch, num_nodes, dtype=torch.int32, device=mask.device)
    grid, num_warps, blocks = _plan(mask, num_nodes)
    packed = mask.dtype == torch.int64
    launch(
        _mask_parents_kernel, grid, mask if packed else mask.view(torch.uint8), parents, batch,
        COLUMNS=columns, PACKED=packed, num_warps=num_warps, **blocks,
    )  # fmt: skip
    return parents


def merge_trees(tree: MergedTree, other: MergedTree) -> MergedTree:
    (batch, first), second = tree.tokens.shape, other.tokens.shape[1]
    size = first + second - 1
    merged = MergedTree(tree.tokens.new_empty(batch, size), tree.parents.new_empty(batch, size))
    # One warp: a step is a few reductions in a row, and within a warp they need no barrier.
    launch(
        _merge_kernel, (batch,), tree, other, merged, num_warps=1, FIRST=first, SECOND=second, BLOCK_N=lanes(size),
        BLOCK_S=lanes(second),
    )  # fmt: skip
    return merged


def _plan(requests: Tensor, num_nodes: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Grid, warps and compile-time arguments that all kernels share; `requests` has a row for each."""
    config = CONFIGS[current_chip(requests)]
    batch = requests.shape[0]
    # Triton 3.6 cannot compile blocks of one element.
    block_n = min(max(2, triton.next_power_of_2(num_nodes)), config.max_nodes)
    block_b = max(1, config.pair_budget // (block_n * block_n))
    block_b = min(triton.next_power_of_2(max(batch, 1)), config.max_requests, block_b)
    blocks = dict(NODES=num_nodes, BLOCK_B=block_b, BLOCK_N=block_n)
    return (triton.cdiv(batch, block_b), triton.cdiv(num_nodes, block_n)), config.links_warps, blocks
