# mypy: ignore-errors
"""Which candidates become nodes: one program per request, candidates in its lanes.

Scores are compared as integers of the same order (`sort_key`), whose maximum is one instruction of a warp.
`expand_tree` takes the largest candidate T times. `rerank_tree` finds the smallest kept score bit by bit.
`best_first_tree` keeps one offer per node, the value of its next unused child; the best offer becomes a node.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import lanes, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling.device import key_value, sort_key
from specdec_kernels.tree.reference import SMALLEST_PRODUCT
from specdec_kernels.tree.types import UNUSED_PARENT, WORD_BITS, Candidates, Expansion, Frontier, Selection

_UNUSED_PARENT = tl.constexpr(UNUSED_PARENT)
_WORD_BITS = tl.constexpr(WORD_BITS)
_SMALLEST_PRODUCT = tl.constexpr(SMALLEST_PRODUCT)
# Below the key of every float, -inf included.
NO_SCORE = tl.constexpr(-(1 << 31))
_MINUS_INFINITY = tl.constexpr(-(1 << 31) + 0x7FFFFF)  # the key of -inf
_LANES_PER_WARP = 512  # more warps must meet at a barrier in every reduction
_MIN_LANES = 32  # a whole warp, whose integer maximum is one instruction


@triton.jit(do_not_specialize=["first", "slot"])
def _expand_kernel(
    probs_ptr,  # [B, PARENTS, CHILDREN] float32
    tokens_ptr,  # [B, PARENTS, CHILDREN] int64
    vocabulary_ptr,  # [V] int64, or None
    frontier,  # Frontier of PARENTS nodes, or None for the root
    candidates,  # Candidates, written
    following,  # Frontier of WIDTH nodes, written, or None after the last level
    first,
    slot,
    PARENTS: tl.constexpr,
    CHILDREN: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    SEEN: tl.constexpr,
    WORDS: tl.constexpr,
    ROOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, BLOCK_M)
    live = child < PARENTS * CHILDREN
    row = request * (PARENTS * CHILDREN)
    out = request * CANDIDATES + first
    begin(PDL)
    path_score = tl.load(probs_ptr + row + child, mask=live, other=0.0)
    above = child * 0 - 1
    if frontier is not None:
        parent = request * PARENTS + child // CHILDREN
        path_score = tl.load(frontier.scores + parent, mask=live, other=0.0) * path_score
        above = tl.load(frontier.candidates + parent, mask=live, other=-1)
    path_score = tl.where(path_score == path_score, path_score, float("-inf"))
    tl.store(candidates.path_scores + out + child, path_score, mask=live)
    tl.store(candidates.parents + out + child, above, mask=live)
    token = _target_token(tokens_ptr + row + child, vocabulary_ptr, live)
    tl.store(candidates.tokens + out + child, token, mask=live)

    if WIDTH > 0:
        image = tl.where(live, sort_key(path_score, 0), NO_SCORE)
        node = tl.arange(0, BLOCK_T)
        index = node * 0
        key = node * 0
        for rank in range(WIDTH):
            best = tl.max(image, 0)
            winner = tl.min(tl.where(image == best, child, BLOCK_M), 0)  # among equals the lowest candidate
            index = tl.where(node == rank, winner, index)
            key = tl.where(node == rank, best, key)
            image = tl.where(child == winner, NO_SCORE, image)
        kept = node < WIDTH
        at = request * WIDTH + node
        tl.store(following.scores + at, key_value(key, 0), mask=kept)
        tl.store(following.candidates + at, first + index, mask=kept)
        tl.store(following.tokens + at, _target_token(tokens_ptr + row + index, vocabulary_ptr, kept), mask=kept)
        tl.store(following.parents + at, (index // CHILDREN).to(tl.int64), mask=kept)
        # A node sees what its parent sees, and its own slot.
        own = slot + node
        one = tl.full(node.shape, 1, tl.int64)
        for word in tl.static_range(WORDS):
            bits = tl.where(own // _WORD_BITS == word, one << (own % _WORD_BITS).to(tl.int64), 0)
            if frontier is not None:
                if word < SEEN:
                    seen = (request * PARENTS + index // CHILDREN) * SEEN
                    bits |= tl.load(frontier.mask + seen + word, mask=kept, other=0)
            elif word == 0 and ROOT:
                bits |= one
            tl.store(following.mask + at * WORDS + word, bits, mask=kept)


@triton.jit
def _target_token(token_ptr, vocabulary_ptr, live):
    """The target's id of the drafter's token at `token_ptr`."""
    token = tl.load(token_ptr, mask=live, other=0)
    if vocabulary_ptr is not None:
        token += tl.load(vocabulary_ptr + token, mask=live, other=0)
    return token


@triton.jit
def _rerank_kernel(
    candidates,  # Candidates
    last_tokens_ptr,  # [B] int64
    tree,  # Selection, written
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_M)
    live = candidate < CANDIDATES
    row = request * CANDIDATES
    score = tl.load(candidates.path_scores + row + candidate, mask=live, other=float("-inf"))
    image = sort_key(tl.where(score == score, score, float("-inf")), 0)
    image = tl.where(image > _MINUS_INFINITY, image, NO_SCORE)

    wanted = tl.minimum(tl.sum((image > NO_SCORE).to(tl.int32), 0), NODES - 1)
    # The `wanted`-th largest image, from the sign bit down.
    threshold = tl.where(tl.sum((image >= 0).to(tl.int32), 0) >= wanted, 0, NO_SCORE)
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        threshold = tl.where(tl.sum((image >= trial).to(tl.int32), 0) >= wanted, trial, threshold)
    ties_wanted = wanted - tl.sum((image > threshold).to(tl.int32), 0)
    is_tie = image == threshold
    kept = (image > threshold) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= ties_wanted))
    node = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0), _UNUSED_PARENT)

    parent = tl.load(candidates.parents + row + candidate, mask=live, other=_UNUSED_PARENT)
    before = (parent >= 0) & (parent < candidate)
    parent_node = tl.gather(node, tl.where(before, parent, 0), 0)
    parent_node = tl.where(before, parent_node, tl.where(parent == -1, 0, _UNUSED_PARENT))
    token = tl.load(candidates.tokens + row + candidate, mask=kept, other=0)
    out = request * NODES
    tl.store(tree.tokens + out + node, token, mask=kept)
    tl.store(tree.parents + out + node, parent_node, mask=kept)
    tl.store(tree.candidates + out + node, candidate, mask=kept)
    tl.store(tree.scores + out + node, score, mask=kept)

    other = tl.arange(0, BLOCK_N)
    rest = (other < NODES) & ((other == 0) | (other > wanted))
    last_token = tl.load(last_tokens_ptr + request)
    tl.store(tree.tokens + out + other, tl.where(other == 0, last_token, 0), mask=rest)
    tl.store(tree.parents + out + other, tl.where(other == 0, -1, _UNUSED_PARENT), mask=rest)
    tl.store(tree.candidates + out + other, other * 0 - 1, mask=rest)
    tl.store(tree.scores + out + other, tl.where(other == 0, 1.0, 0.0), mask=rest)


@triton.jit
def _offer(value, prob):
    """Value of a child of probability `prob`, as the bits of a float: 0 where it is no candidate."""
    product = value * tl.where(prob > 0, tl.minimum(prob, 1.0), 0.0)
    return tl.where(product >= _SMALLEST_PRODUCT, product, 0.0).to(tl.int32, bitcast=True)


@triton.jit
def _best_first_kernel(
    probs_ptr,  # [B, DEPTHS, CHILDREN] float32
    tokens_ptr,  # [B, DEPTHS, CHILDREN] int64
    last_tokens_ptr,  # [B] int64
    tree,  # Selection, written
    DEPTHS: tl.constexpr,
    CHILDREN: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = request * (DEPTHS * CHILDREN)
    out = request * NODES
    tl.store(tree.tokens + out, tl.load(last_tokens_ptr + request))
    tl.store(tree.parents + out, -1)
    tl.store(tree.candidates + out, -1)
    tl.store(tree.scores + out, 1.0)

    lane = tl.arange(0, BLOCK_N)
    value = tl.where(lane == 0, 1.0, 0.0)
    depth = lane * 0
    next_rank = lane * 0
    offer = _offer(value, tl.load(probs_ptr + row + depth, mask=lane == 0, other=0.0))
    for node in range(1, NODES):
        best = tl.max(offer, 0)
        found = best > 0
        parent = tl.min(tl.where(offer == best, lane, BLOCK_N), 0)
        is_parent = (lane == parent) & found
        candidate = tl.max(tl.where(is_parent, depth * CHILDREN + next_rank, -1), 0)
        token = tl.load(tokens_ptr + row + candidate, mask=found, other=0)
        tl.store(tree.tokens + out + node, token)
        tl.store(tree.parents + out + node, tl.where(found, parent, _UNUSED_PARENT))
        tl.store(tree.candidates + out + node, candidate)
        tl.store(tree.scores + out + node, best.to(tl.float32, bitcast=True))

        is_new = (lane == node) & found
        value = tl.where(is_new, best.to(tl.float32, bitcast=True), value)
        depth = tl.where(is_new, candidate // CHILDREN + 1, depth)
        next_rank += is_parent.to(tl.int32)
        moved = is_parent | is_new
        there = moved & (depth < DEPTHS) & (next_rank < CHILDREN)
        prob = tl.load(probs_ptr + row + depth * CHILDREN + next_rank, mask=there, other=0.0)
        offer = tl.where(moved, _offer(value, prob), offer)


def expand_tree(call: Expansion) -> Frontier | None:
    frontier, probs, mask, width = call.frontier, call.probs, call.mask, call.width
    batch, parents, children = probs.shape
    following = None
    if mask is not None:
        ids = [probs.new_empty(batch, width, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int64)]
        following = Frontier(probs.new_empty(batch, width), *ids, mask)
    block_m = _lanes(parents * children)
    launch(
        _expand_kernel, (batch,), probs, call.tokens, call.vocabulary, frontier, call.candidates, following,
        call.first, call.slot, PARENTS=parents, CHILDREN=children,
        CANDIDATES=call.candidates.path_scores.shape[1], WIDTH=width,
        SEEN=0 if frontier is None else frontier.mask.shape[2], WORDS=0 if mask is None else mask.shape[2],
        ROOT=call.root_is_stored, BLOCK_M=block_m, BLOCK_T=lanes(width), num_warps=_warps(block_m),
    )  # fmt: skip
    return following


def rerank_tree(call: Candidates, last_tokens: Tensor, num_nodes: int) -> Selection:
    batch, candidates = call.path_scores.shape
    selection = empty_selection(last_tokens, num_nodes)
    block_m = _lanes(candidates)
    launch(
        _rerank_kernel, (batch,), call, last_tokens, selection,
        CANDIDATES=candidates, NODES=num_nodes, BLOCK_M=block_m, BLOCK_N=_lanes(num_nodes),
        num_warps=_warps(block_m),
    )  # fmt: skip
    return selection


def best_first_tree(probs: Tensor, tokens: Tensor, last_tokens: Tensor, num_nodes: int) -> Selection:
    batch, depths, children = probs.shape
    selection = empty_selection(last_tokens, num_nodes)
    # One warp: a step is a few reductions in a row, and within a warp they need no barrier.
    launch(
        _best_first_kernel, (batch,), probs, tokens, last_tokens, selection,
        DEPTHS=depths, CHILDREN=children, NODES=num_nodes, BLOCK_N=_lanes(num_nodes), num_warps=1,
    )  # fmt: skip
    return selection


def empty_selection(last_tokens: Tensor, num_nodes: int) -> Selection:
    shape = (last_tokens.shape[0], num_nodes)
    dtypes = (torch.int64, torch.int32, torch.int32, torch.float32)
    return Selection(*(last_tokens.new_empty(shape, dtype=dtype) for dtype in dtypes))


def _lanes(count: int) -> int:
    return max(_MIN_LANES, triton.next_power_of_2(count))


def _warps(lanes: int) -> int:
    return max(1, min(8, lanes // _LANES_PER_WARP))
