"""Matching in two launches: programs read one text each for one request; then one program a request builds its tree.

A match is ranked by one 63-bit number: length (6 bits), own text (1), stamp (32), position (24). A program keeps the
best ranks of its text. The tree is built from a square of matches: `same[i, j]` says that matches i and j have gone on
alike so far, so its rows are the nodes of the trie at the current depth, each once for the best match that runs
through it.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _match_length(history_ptr, text_ptr, position, length, live, WINDOW: tl.constexpr):
    """[BLOCK] int32: how many last tokens of the request stand in the text, up to each position."""
    matched = tl.zeros_like(position).to(tl.int32)
    back = 0
    while (back < WINDOW) & (back <= length) & (tl.max(live.to(tl.int32), 0) > 0):
        wanted = tl.load(history_ptr + length - back)
        token = tl.load(text_ptr + position - back, mask=live & (position >= back), other=-1)
        live = live & (position >= back) & (token.to(tl.int64) == wanted)
        matched += live.to(tl.int32)
        back += 1
    return matched


@triton.jit(do_not_specialize=["row_stride", "context"])
def scan_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    rows_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    stamps_ptr,  # [S] int64
    slots_ptr,  # [R] int32
    ranks_ptr,  # [B, texts read, KEPT] int64, out: -1 where there is no match
    row_stride,
    context,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    MOST: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    own = tl.load(slots_ptr + tl.load(rows_ptr + request)).to(tl.int64)
    slot = tl.program_id(1).to(tl.int64) if SHARED else own
    lane = tl.arange(0, KEPT)
    # Lanes past MOST hold what no rank exceeds, so they are never replaced; they are written as no match.
    best = tl.where(lane < MOST, -1, 0x7FFFFFFFFFFFFFFF).to(tl.int64)
    if (length >= 0) & (length < context) & (slot >= 0):
        size = tl.load(sizes_ptr + slot)
        stamp = tl.load(stamps_ptr + slot) & 0xFFFFFFFF
        mine = (slot == own).to(tl.int64)
        for first in range(0, size - 1, BLOCK):
            position = first + tl.arange(0, BLOCK)
            live = position < size - 1
            text_ptr = tokens_ptr + slot * context
            matched = _match_length(history_ptr + request * row_stride, text_ptr, position, length, live, WINDOW)
            rank = (matched.to(tl.int64) << 57) | (mine << 56) | (stamp << 24) | position
            rank = tl.where(matched > 0, rank, -1)
            top = tl.max(rank, 0)
            least = tl.min(best, 0)
            while top > least:
                place = tl.min(tl.where(best == least, lane, KEPT), 0)
                best = tl.where(lane == place, top, best)
                rank = tl.where(rank == top, -1, rank)
                top = tl.max(rank, 0)
                least = tl.min(best, 0)
    out = (request * tl.num_programs(1) + tl.program_id(1)) * KEPT + lane
    tl.store(ranks_ptr + out, tl.where(lane < MOST, best, -1))


@triton.jit
def _best_matches(ranks_ptr, own, MATCHES, SHARED, RANKS, KEPT, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M] each: rank of the best matches, the best first, -1 behind the last; and their texts."""
    place = tl.arange(0, BLOCK_R)
    rank = tl.load(ranks_ptr + place, mask=place < RANKS, other=-1)
    match = tl.arange(0, BLOCK_M)
    ranks = tl.full((BLOCK_M,), -1, tl.int64)
    slots = tl.zeros((BLOCK_M,), tl.int64)
    taken = 0
    top = tl.max(rank, 0)
    while (taken < MATCHES) & (top >= 0):
        at = tl.min(tl.where(rank == top, place, BLOCK_R), 0)
        slot = (at // KEPT).to(tl.int64) if SHARED else own
        ranks = tl.where(match == taken, top, ranks)
        slots = tl.where(match == taken, slot, slots)
        rank = tl.where(place == at, -1, rank)
        top = tl.max(rank, 0)
        taken += 1
    return ranks, slots


@triton.jit
def _merge(follow, weight, depth, limit, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] int32 each: weight of the node that match i reaches at depth j + 1, at the best match that
    reaches it and 0 elsewhere; and that best match."""
    match = tl.arange(0, BLOCK_M)
    same = tl.full((BLOCK_M, BLOCK_M), 1, tl.int32) > 0
    score = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    step = 0
    while step < limit:
        token = tl.sum(tl.where(depth == step, follow, 0), 1)
        same = same & (token[:, None] == token[None, :]) & (token >= 0)[:, None]
        through = tl.sum(tl.where(same, weight[None, :], 0), 1)
        leader = tl.min(tl.where(same, match[None, :], BLOCK_M), 1)
        through = tl.where(leader == match, through, 0)
        score = tl.where(depth == step, through[:, None], score)
        first = tl.where(depth == step, leader[:, None], first)
        step += 1
    return score, first


@triton.jit(do_not_specialize=["row_stride", "context"])
def draft_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    rows_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    slots_ptr,  # [R] int32
    ranks_ptr,  # [B, RANKS] int64
    draft_tokens_ptr,  # [B, NODES] int64, out
    parents_ptr,  # [B, NODES] int32, out
    strength_ptr,  # [B] float32, out
    confidence_ptr,  # [B, NODES] float32, out
    row_stride,
    context,
    NODES: tl.constexpr,
    MATCHES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    SHARED: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    own = tl.load(slots_ptr + tl.load(rows_ptr + request)).to(tl.int64)
    rank, slot = _best_matches(ranks_ptr + request * RANKS, own, MATCHES, SHARED, RANKS, KEPT, BLOCK_R, BLOCK_M)
    found = rank >= 0
    matched = tl.where(found, (rank >> 57).to(tl.int32), 0)
    longest = tl.max(matched, 0)
    behind = longest - matched
    weight = tl.where(found & (behind <= STEPS), 1 << (2 * tl.maximum(STEPS - behind, 0)), 0)
    total = tl.sum(weight, 0)

    depth = tl.arange(0, BLOCK_N)[None, :]
    place = (rank & 0xFFFFFF)[:, None] + 1 + depth
    size = tl.load(sizes_ptr + slot, mask=found, other=0)
    live = found[:, None] & (place < size[:, None])
    follow = tl.load(tokens_ptr + slot[:, None] * context + place, mask=live, other=-1)
    limit = tl.minimum(longest * PER_TOKEN // 1024, NODES)
    score, first = _merge(follow, weight, depth, limit, BLOCK_M, BLOCK_N)

    match = tl.arange(0, BLOCK_M)[:, None]
    # A draft at depth d + 1 holds with probability m / (m + d + 1) behind a match of m tokens; in parts of a vote.
    value = score.to(tl.int64) * longest * PARTS // (longest + depth + 1)
    order = (value << 16) | ((255 - depth) << 8) | (255 - match)
    order = tl.where((score > 0) & (score.to(tl.int64) * 1024 >= total.to(tl.int64) * LEAST_SHARE), order, 0)
    number = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    node = tl.arange(0, BLOCK_N)
    length = tl.load(lengths_ptr + request)
    inside = (length >= 0) & (length < context)
    last = tl.load(history_ptr + request * row_stride + length, mask=inside, other=0)
    out_token = tl.where(node == 0, last, 0)
    out_parent = tl.where(node == 0, -1, -2)
    votes = tl.maximum(total, 1).to(tl.int64) * PARTS
    taken = tl.where(node == 0, votes, 0)
    count = 1
    sum_taken = votes * 0
    top = tl.max(tl.max(order, 1), 0)
    while (count < NODES) & (top > 0):
        chosen = order == top
        at = tl.sum(tl.sum(tl.where(chosen, depth, 0), 1), 0)
        lead = tl.sum(tl.sum(tl.where(chosen, match, 0), 1), 0)
        token = tl.sum(tl.sum(tl.where(chosen, follow, 0), 1), 0)
        above = tl.sum(tl.sum(tl.where((match == lead) & (depth == at - 1), first, 0), 1), 0)
        parent = tl.sum(tl.sum(tl.where((match == above) & (depth == at - 1), number, 0), 1), 0)
        number = tl.where(chosen, count, number)
        out_token = tl.where(node == count, token.to(tl.int64), out_token)
        out_parent = tl.where(node == count, parent, out_parent)
        taken = tl.where(node == count, top >> 16, taken)
        sum_taken += top >> 16
        order = tl.where(chosen, 0, order)
        top = tl.max(tl.max(order, 1), 0)
        count += 1
    tl.store(draft_tokens_ptr + request * NODES + node, out_token, mask=node < NODES)
    tl.store(parents_ptr + request * NODES + node, out_parent, mask=node < NODES)
    tl.store(strength_ptr + request, sum_taken.to(tl.float32) / votes.to(tl.float32))
    confidence = taken.to(tl.float32) / votes.to(tl.float32)
    tl.store(confidence_ptr + request * NODES + node, confidence, mask=node < NODES)
