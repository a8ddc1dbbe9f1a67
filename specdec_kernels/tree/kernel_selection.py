# mypy: ignore-errors
"""Which candidates become nodes: one program per request, candidates in its lanes.

Scores are compared as integers of the same order (`sort_key`), because the largest integer of a warp is found by one
instruction. `expand_tree` takes the largest candidate T times. `rerank_tree` needs a set in candidate order, so it
finds the smallest kept score bit by bit, with 32 counts whatever N is, and a running sum gives every kept candidate its
node. `best_first_tree` keeps one offer per node, the value of its next unused child: the best offer becomes a node, its
parent proceeds to the next rank, and the new node makes an offer of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import launch
from specdec_kernels.sampling.device import key_value, sort_key
from specdec_kernels.tree.reference import SMALLEST_PRODUCT
from specdec_kernels.tree.types import UNUSED_PARENT, Expansion, Selection

_UNUSED_PARENT = tl.constexpr(UNUSED_PARENT)
_SMALLEST_PRODUCT = tl.constexpr(SMALLEST_PRODUCT)
# Below the key of every float, -inf included.
NO_SCORE = tl.constexpr(-(1 << 31))
_MINUS_INFINITY = tl.constexpr(-(1 << 31) + 0x7FFFFF)  # the key of -inf
_LANES_PER_WARP = 512  # more warps must meet at a barrier in every reduction
_MIN_LANES = 32  # a whole warp, whose integer maximum is one instruction


@triton.jit(do_not_specialize=["request_stride", "parent_stride"])
def _expand_kernel(
    scores_ptr,  # [B, P] float32
    probs_ptr,  # [B, P, CHILDREN] float32, strides request_stride, parent_stride, 1
    best_ptr,  # [B, WIDTH] float32
    index_ptr,  # [B, WIDTH] int32
    path_scores_ptr,  # [B, P, CHILDREN] float32
    request_stride,
    parent_stride,
    PARENTS: tl.constexpr,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_M)
    live = candidate < PARENTS * CHILDREN
    parent = candidate // CHILDREN
    score = tl.load(scores_ptr + request * PARENTS + parent, mask=live, other=0.0)
    place = request * request_stride + parent.to(tl.int64) * parent_stride + candidate % CHILDREN
    path_score = score * tl.load(probs_ptr + place, mask=live, other=0.0)
    path_score = tl.where(path_score == path_score, path_score, float("-inf"))
    tl.store(path_scores_ptr + request * (PARENTS * CHILDREN) + candidate, path_score, mask=live)

    image = tl.where(live, sort_key(path_score, 0), NO_SCORE)
    for rank in range(WIDTH):
        best = tl.max(image, 0)
        winner = tl.min(tl.where(image == best, candidate, BLOCK_M), 0)
        tl.store(best_ptr + request * WIDTH + rank, key_value(best, 0))
        tl.store(index_ptr + request * WIDTH + rank, winner)
        image = tl.where(candidate == winner, NO_SCORE, image)


@triton.jit
def _smallest_kept(image, wanted):
    """The `wanted`-th largest of the images, found from the sign bit down; images are above NO_SCORE or not
    candidates."""
    threshold = tl.where(tl.sum((image >= 0).to(tl.int32), 0) >= wanted, 0, NO_SCORE)
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        threshold = tl.where(tl.sum((image >= trial).to(tl.int32), 0) >= wanted, trial, threshold)
    return threshold


@triton.jit
def _rerank_kernel(
    path_scores_ptr,  # [B, CANDIDATES] float32
    tokens_ptr,  # [B, CANDIDATES] int64
    parents_ptr,  # [B, CANDIDATES] int32
    last_tokens_ptr,  # [B] int64
    out_tokens_ptr,  # [B, NODES] int64
    out_parents_ptr,  # [B, NODES] int32
    out_candidates_ptr,  # [B, NODES] int32
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_M)
    live = candidate < CANDIDATES
    row = request * CANDIDATES
    score = tl.load(path_scores_ptr + row + candidate, mask=live, other=float("-inf"))
    image = sort_key(tl.where(score == score, score, float("-inf")), 0)
    image = tl.where(image > _MINUS_INFINITY, image, NO_SCORE)

    wanted = tl.minimum(tl.sum((image > NO_SCORE).to(tl.int32), 0), NODES - 1)
    threshold = _smallest_kept(image, wanted)
    ties_wanted = wanted - tl.sum((image > threshold).to(tl.int32), 0)
    is_tie = image == threshold
    kept = (image > threshold) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= ties_wanted))
    node = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0), _UNUSED_PARENT)

    parent = tl.load(parents_ptr + row + candidate, mask=live, other=_UNUSED_PARENT)
    before = (parent >= 0) & (parent < candidate)
    parent_node = tl.gather(node, tl.where(before, parent, 0), 0)
    parent_node = tl.where(before, parent_node, tl.where(parent == -1, 0, _UNUSED_PARENT))
    token = tl.load(tokens_ptr + row + candidate, mask=kept, other=0)
    out = request * NODES
    tl.store(out_tokens_ptr + out + node, token, mask=kept)
    tl.store(out_parents_ptr + out + node, parent_node, mask=kept)
    tl.store(out_candidates_ptr + out + node, candidate, mask=kept)

    other = tl.arange(0, BLOCK_N)
    rest = (other < NODES) & ((other == 0) | (other > wanted))
    last_token = tl.load(last_tokens_ptr + request)
    tl.store(out_tokens_ptr + out + other, tl.where(other == 0, last_token, 0), mask=rest)
    tl.store(out_parents_ptr + out + other, tl.where(other == 0, -1, _UNUSED_PARENT), mask=rest)
    tl.store(out_candidates_ptr + out + other, other * 0 - 1, mask=rest)


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
    out_tokens_ptr,  # [B, NODES] int64
    out_parents_ptr,  # [B, NODES] int32
    out_candidates_ptr,  # [B, NODES] int32
    DEPTHS: tl.constexpr,
    CHILDREN: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row, out = request * (DEPTHS * CHILDREN), request * NODES
    tl.store(out_tokens_ptr + out, tl.load(last_tokens_ptr + request))
    tl.store(out_parents_ptr + out, -1)
    tl.store(out_candidates_ptr + out, -1)

    lane = tl.arange(0, BLOCK_N)
    value = tl.where(lane == 0, 1.0, 0.0)
    depth, next_rank = lane * 0, lane * 0
    offer = _offer(value, tl.load(probs_ptr + row + depth, mask=lane == 0, other=0.0))
    for node in range(1, NODES):
        best = tl.max(offer, 0)
        found = best > 0
        parent = tl.min(tl.where(offer == best, lane, BLOCK_N), 0)
        is_parent = (lane == parent) & found
        candidate = tl.max(tl.where(is_parent, depth * CHILDREN + next_rank, -1), 0)
        token = tl.load(tokens_ptr + row + candidate, mask=found, other=0)
        tl.store(out_tokens_ptr + out + node, token)
        tl.store(out_parents_ptr + out + node, tl.where(found, parent, _UNUSED_PARENT))
        tl.store(out_candidates_ptr + out + node, candidate)

        is_new = (lane == node) & found
        value = tl.where(is_new, best.to(tl.float32, bitcast=True), value)
        depth = tl.where(is_new, candidate // CHILDREN + 1, depth)
        next_rank += is_parent.to(tl.int32)
        moved = is_parent | is_new
        there = moved & (depth < DEPTHS) & (next_rank < CHILDREN)
        prob = tl.load(probs_ptr + row + depth * CHILDREN + next_rank, mask=there, other=0.0)
        offer = tl.where(moved, _offer(value, prob), offer)


def expand_tree(scores: torch.Tensor, probs: torch.Tensor, width: int) -> Expansion:
    """See `specdec_kernels.tree.expand_tree`."""
    batch, parents, children = probs.shape
    result = Expansion(
        scores.new_empty(batch, width),
        scores.new_empty(batch, width, dtype=torch.int32),
        scores.new_empty(batch, parents, children),
    )
    block_m = _lanes(parents * children)
    launch(
        _expand_kernel, (batch,), scores, probs, *result, probs.stride(0), probs.stride(1),
        PARENTS=parents, CHILDREN=children, WIDTH=width, BLOCK_M=block_m, num_warps=_warps(block_m),
    )  # fmt: skip
    return result


def rerank_tree(
    path_scores: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, last_tokens: torch.Tensor, num_nodes: int
) -> Selection:
    """See `specdec_kernels.tree.rerank_tree`."""
    batch, candidates = path_scores.shape
    selection = _empty_selection(last_tokens, num_nodes)
    block_m = _lanes(candidates)
    launch(
        _rerank_kernel, (batch,), path_scores, tokens, parents, last_tokens, *selection,
        CANDIDATES=candidates, NODES=num_nodes, BLOCK_M=block_m, BLOCK_N=_lanes(num_nodes),
        num_warps=_warps(block_m),
    )  # fmt: skip
    return selection


def best_first_tree(probs: torch.Tensor, tokens: torch.Tensor, last_tokens: torch.Tensor, num_nodes: int) -> Selection:
    """See `specdec_kernels.tree.best_first_tree`."""
    batch, depths, children = probs.shape
    selection = _empty_selection(last_tokens, num_nodes)
    # One warp: a step is a few reductions in a row, and within a warp they need no barrier.
    launch(
        _best_first_kernel, (batch,), probs, tokens, last_tokens, *selection,
        DEPTHS=depths, CHILDREN=children, NODES=num_nodes, BLOCK_N=_lanes(num_nodes), num_warps=1,
    )  # fmt: skip
    return selection


def _empty_selection(last_tokens: torch.Tensor, num_nodes: int) -> Selection:
    shape = (last_tokens.shape[0], num_nodes)
    return Selection(last_tokens.new_empty(shape), *(last_tokens.new_empty(shape, dtype=torch.int32) for _ in range(2)))


def _lanes(count: int) -> int:
    return max(_MIN_LANES, triton.next_power_of_2(count))


def _warps(lanes: int) -> int:
    return max(1, min(8, lanes // _LANES_PER_WARP))
