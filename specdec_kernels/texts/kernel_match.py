"""Matching in two launches: programs read texts, or parts of one, for one request; then one program a request builds
its tree.

A match is ranked by one 63-bit number: length (6 bits), own text (1), how late the text is (16), text (16), position
(24). A program keeps the best ranks of what it reads. The tree is built from a square of matches: `same[i, j]` says
that matches i and j have gone on alike so far, so its rows are the nodes of the trie at the current depth, each once
for the best match that runs through it.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.texts import types

WEIGHT_STEPS, FULL_SHARE = tl.constexpr(types.WEIGHT_STEPS), tl.constexpr(types.FULL_SHARE)
MAX_AGE, MAX_SIBLINGS = tl.constexpr(types.MAX_AGE), tl.constexpr(types.MAX_SIBLINGS)
CONFIDENCE_STEPS = tl.constexpr(types.CONFIDENCE_STEPS)


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


@triton.jit
def _own_text(slots_ptr, rows_ptr, request, length):
    """The text of the request, or -1 before anything of it was written: then its row has that of another."""
    own = tl.load(slots_ptr + tl.load(rows_ptr + request)).to(tl.int64)
    return tl.where(length > 0, own, -1)


@triton.jit(do_not_specialize=["row_stride", "context"])
def scan_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    rows_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    stamps_ptr,  # [S] int64
    slots_ptr,  # [R] int32
    clock_ptr,  # [1] int64
    ranks_ptr,  # [B, READERS * PARTS, KEPT] int64, out: -1 where there is no match
    row_stride,
    context,
    WINDOW: tl.constexpr,
    TEXTS: tl.constexpr,  # how many are read; 1 is the request's own where SHARED is false
    SHARED: tl.constexpr,
    READERS: tl.constexpr,  # programs that share the texts
    PARTS: tl.constexpr,  # programs that share one text
    MATCHES: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) % PARTS
    length = tl.load(lengths_ptr + request)
    own = _own_text(slots_ptr, rows_ptr, request, length)
    lane = tl.arange(0, KEPT)
    # Lanes past MATCHES hold what no rank exceeds, so they are never replaced; they are written as no match.
    best = tl.where(lane < MATCHES, -1, 0x7FFFFFFFFFFFFFFF).to(tl.int64)
    turn = tl.program_id(1) // PARTS
    while turn < TEXTS:
        text = turn.to(tl.int64) if SHARED else own
        readable = (length >= 0) & (length < context) & (text >= 0)
        size = tl.load(sizes_ptr + text, mask=readable, other=0)
        late = MAX_AGE - tl.minimum(tl.load(clock_ptr) - tl.load(stamps_ptr + text, mask=readable, other=0), MAX_AGE)
        whose = ((text == own).to(tl.int64) << 56) | (late << 40) | (text << 24)
        for first in range(part * BLOCK, size - 1, PARTS * BLOCK):
            position = first + tl.arange(0, BLOCK)
            live = position < size - 1
            text_ptr = tokens_ptr + text * context
            matched = _match_length(history_ptr + request * row_stride, text_ptr, position, length, live, WINDOW)
            rank = tl.where(matched > 0, (matched.to(tl.int64) << 57) | whose | position, -1)
            top = tl.max(rank, 0)
            least = tl.min(best, 0)
            while top > least:
                place = tl.min(tl.where(best == least, lane, KEPT), 0)
                best = tl.where(lane == place, top, best)
                rank = tl.where(rank == top, -1, rank)
                top = tl.max(rank, 0)
                least = tl.min(best, 0)
        turn += READERS
    out = (request * READERS * PARTS + tl.program_id(1)) * KEPT + lane
    tl.store(ranks_ptr + out, tl.where(lane < MATCHES, best, -1))


@triton.jit
def _best_matches(ranks_ptr, MATCHES, RANKS, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M] int64: rank of the best matches, the best first, -1 behind the last."""
    place = tl.arange(0, BLOCK_R)
    rank = tl.load(ranks_ptr + place, mask=place < RANKS, other=-1)
    match = tl.arange(0, BLOCK_M)
    ranks = tl.full((BLOCK_M,), -1, tl.int64)
    taken = 0
    top = tl.max(rank, 0)
    while (taken < MATCHES) & (top >= 0):
        ranks = tl.where(match == taken, top, ranks)
        rank = tl.where(rank == top, -1, rank)
        top = tl.max(rank, 0)
        taken += 1
    return ranks


@triton.jit
def _merge(follow, weight, depth, limit, FREQUENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] int32 each: share of the node that match i reaches at depth j + 1, at the best match that
    reaches it and 0 elsewhere; and that best match."""
    match = tl.arange(0, BLOCK_M)
    same = tl.full((BLOCK_M, BLOCK_M), 1, tl.int32) > 0
    score = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    first = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    share = tl.full((BLOCK_M,), FULL_SHARE, tl.int32)
    step = 0
    while step < limit:
        token = tl.sum(tl.where(depth == step, follow, 0), 1)
        parents = same
        same = parents & (token[:, None] == token[None, :]) & (token >= 0)[:, None]
        leader = tl.min(tl.where(same, match[None, :], BLOCK_M), 1)
        if FREQUENT:
            share = tl.sum(tl.where(same, weight[None, :], 0), 1)
        else:
            sibling = parents & (leader == match)[None, :] & (match[None, :] < leader[:, None])
            better = tl.sum(sibling.to(tl.int32), 1)
            for number in tl.static_range(MAX_SIBLINGS):
                share = tl.where(better > number, share * 7 // 8, share)
        score = tl.where(depth == step, tl.where(leader == match, share, 0)[:, None], score)
        first = tl.where(depth == step, leader[:, None], first)
        step += 1
    return score, first


@triton.jit
def _take(order, follow, first, depth, votes, last, NODES, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The nodes of the largest `order` [BLOCK_M, BLOCK_N]: tokens, parents and values [BLOCK_N]. Node 0 has all
    `votes`."""
    match = tl.arange(0, BLOCK_M)[:, None]
    node = tl.arange(0, BLOCK_N)
    number = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    tokens = tl.where(node == 0, last, 0)
    parents = tl.where(node == 0, -1, -2)
    values = tl.where(node == 0, votes, 0)
    count = 1
    top = tl.max(tl.max(order, 1), 0)
    while (count < NODES) & (top > 0):
        chosen = order == top
        at = tl.sum(tl.sum(tl.where(chosen, depth, 0), 1), 0)
        lead = tl.sum(tl.sum(tl.where(chosen, match, 0), 1), 0)
        token = tl.sum(tl.sum(tl.where(chosen, follow, 0), 1), 0)
        above = tl.sum(tl.sum(tl.where((match == lead) & (depth == at - 1), first, 0), 1), 0)
        parent = tl.sum(tl.sum(tl.where((match == above) & (depth == at - 1), number, 0), 1), 0)
        number = tl.where(chosen, count, number)
        tokens = tl.where(node == count, token.to(tl.int64), tokens)
        parents = tl.where(node == count, parent, parents)
        values = tl.where(node == count, top >> 16, values)
        order = tl.where(chosen, 0, order)
        top = tl.max(tl.max(order, 1), 0)
        count += 1
    return tokens, parents, values


@triton.jit(do_not_specialize=["row_stride", "context"])
def draft_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    ranks_ptr,  # [B, RANKS] int64
    draft_tokens_ptr,  # [B, NODES] int64, out
    parents_ptr,  # [B, NODES] int32, out
    strength_ptr,  # [B] float32, out
    confidence_ptr,  # [B, NODES] float32, out
    row_stride,
    context,
    NODES: tl.constexpr,
    MATCHES: tl.constexpr,
    LEAST: tl.constexpr,  # confidence of a draft, in parts of 1024
    FREQUENT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rank = _best_matches(ranks_ptr + request * RANKS, MATCHES, RANKS, BLOCK_R, BLOCK_M)
    found = rank >= 0
    matched = tl.where(found, (rank >> 57).to(tl.int32), 0)
    longest = tl.max(matched, 0)
    behind = longest - matched
    weight = tl.where(found & (behind <= WEIGHT_STEPS), FULL_SHARE >> (2 * tl.minimum(behind, WEIGHT_STEPS)), 0)
    total = tl.sum(weight, 0) if FREQUENT else longest * 0 + FULL_SHARE

    depth = tl.arange(0, BLOCK_N)[None, :]
    text = (rank >> 24) & 0xFFFF
    place = (rank & 0xFFFFFF)[:, None] + 1 + depth
    size = tl.load(sizes_ptr + text, mask=found, other=0)
    live = found[:, None] & (place < size[:, None]) & (depth < NODES - 1)
    follow = tl.load(tokens_ptr + text[:, None] * context + place, mask=live, other=-1)
    limit = tl.max(tl.sum(live.to(tl.int32), 1), 0)
    score, first = _merge(follow, weight, depth, limit, FREQUENT, BLOCK_M, BLOCK_N)

    match = tl.arange(0, BLOCK_M)[:, None]
    # A draft at depth d + 1 holds with probability m / (m + d + 1) behind a match of m tokens; in parts of a share.
    held = (matched[:, None] + depth * 0 if not FREQUENT else longest + depth * 0 + match * 0).to(tl.int64)
    value = score.to(tl.int64) * held * CONFIDENCE_STEPS // (held + depth + 1)
    votes = tl.maximum(total, 1).to(tl.int64) * CONFIDENCE_STEPS
    order = (value << 16) | ((255 - depth) << 8) | (255 - match)
    order = tl.where((score > 0) & (value * 1024 >= votes * LEAST), order, 0)
    length = tl.load(lengths_ptr + request)
    inside = (length >= 0) & (length < context)
    last = tl.load(history_ptr + request * row_stride + length, mask=inside, other=0)
    tokens, parents, values = _take(order, follow, first, depth, votes, last, NODES, BLOCK_M, BLOCK_N)

    node = tl.arange(0, BLOCK_N)
    drafted = tl.sum(values, 0) - votes
    tl.store(draft_tokens_ptr + request * NODES + node, tokens, mask=node < NODES)
    tl.store(parents_ptr + request * NODES + node, parents, mask=node < NODES)
    tl.store(strength_ptr + request, drafted.to(tl.float32) / votes.to(tl.float32))
    confidence = values.to(tl.float32) / votes.to(tl.float32)
    tl.store(confidence_ptr + request * NODES + node, confidence, mask=node < NODES)
