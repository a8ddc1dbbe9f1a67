"""Drafting: one program a request builds its tree from its best matches.

What followed the matches is compared two by two: `alike[i, j]` says for how many tokens matches i and j have gone on
alike. The nodes of the trie that match i reaches first, of all matches in their order, are those from depth `split` of
i on, the largest `alike` with one before it. So each node of the trie has one match, and each match a path of nodes,
which hangs below a node of the match `above` it.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.texts import types

WEIGHT_STEPS, FULL_SHARE = tl.constexpr(types.WEIGHT_STEPS), tl.constexpr(types.FULL_SHARE)
MAX_SIBLINGS = tl.constexpr(types.MAX_SIBLINGS)
CONFIDENCE_STEPS, LEAST_STEPS = tl.constexpr(types.CONFIDENCE_STEPS), tl.constexpr(types.LEAST_STEPS)
TOGETHER = tl.constexpr(4)
"""Tokens of a way that are loaded before the first of them is compared, so that loads do not wait for each other."""


@triton.jit
def _best_matches(ranks_ptr, MATCHES: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M] int64: the best ranks, the best first, -1 behind the last."""
    rank = tl.load(ranks_ptr + tl.arange(0, RANKS))
    match = tl.arange(0, BLOCK_M)
    best = tl.full((BLOCK_M,), -1, tl.int64)
    taken = 0
    top = tl.max(rank, 0)
    while (taken < MATCHES) & (top >= 0):
        best = tl.where(match == taken, top, best)
        rank = tl.where(rank == top, -1, rank)
        top = tl.max(rank, 0)
        taken += 1
    return best


@triton.jit
def _with_latest(rank, latest_ptr, home, MATCHES: tl.constexpr, BLOCK_M: tl.constexpr):
    """`rank` [BLOCK_M], and behind it the latest positions of the last token that are not in it, all of them in texts
    of others."""
    match = tl.arange(0, BLOCK_M)
    further = tl.load(latest_ptr + home * MATCHES + match, mask=(match < MATCHES) & (home >= 0), other=-1)
    held = ((rank & 0xFFFFFFFFFF)[None, :] == (further & 0xFFFFFFFFFF)[:, None]) & (rank >= 0)[None, :]
    kept = (further >= 0) & (tl.max(held.to(tl.int32), 1) == 0)
    behind = tl.sum((rank >= 0).to(tl.int32), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
    moved = tl.where((behind[None, :] == match[:, None]) & kept[None, :], further[None, :], -1)
    return tl.where(match < MATCHES, tl.maximum(rank, tl.max(moved, 1)), -1)


@triton.jit
def _alike(way_ptr, room, BLOCK_M: tl.constexpr):
    """[BLOCK_M, BLOCK_M] int32: for how many tokens the ways [BLOCK_M] go on alike; each has `room` tokens."""
    both = tl.minimum(room[:, None], room[None, :])
    same = tl.full((BLOCK_M, BLOCK_M), True, tl.int1)
    alike = tl.zeros((BLOCK_M, BLOCK_M), tl.int32)
    limit = tl.max(room, 0)
    step = 0
    while step < limit:
        for ahead in tl.static_range(TOGETHER):
            token = tl.load(way_ptr + step + ahead, mask=step + ahead < room, other=0)
            same = same & (token[:, None] == token[None, :]) & (step + ahead < both)
            alike += same.to(tl.int32)
        step += TOGETHER
    return alike


@triton.jit
def _late_shares(alike, split, above, room, BLOCK_M: tl.constexpr):
    """[BLOCK_M] int32: share of the nodes of each match where the latest come first. An eighth less for each better
    sibling of its first node, MAX_SIBLINGS at most, and for those of the nodes above."""
    match = tl.arange(0, BLOCK_M)
    beside = (match[None, :] < match[:, None]) & (alike == split[:, None])
    beside = beside & (split[None, :] <= split[:, None]) & (room[None, :] > split[:, None])
    lower = tl.minimum(tl.sum(beside.to(tl.int32), 1), MAX_SIBLINGS)
    better = lower
    upper = above
    while tl.max(upper, 0) >= 0:
        there = upper[:, None] == match[None, :]
        better += tl.sum(tl.where(there, lower[None, :], 0), 1)
        upper = tl.sum(tl.where(there, above[None, :] + 1, 0), 1) - 1
    share = tl.full((BLOCK_M,), FULL_SHARE, tl.int32)
    while tl.max(better, 0) > 0:
        share = tl.where(better > 0, share * 7 // 8, share)
        better -= 1
    return share


@triton.jit
def _votes(alike, weight, limit, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] int32: weight of the matches that reach the same node as match i at depth j + 1."""
    depth = tl.arange(0, BLOCK_N)[None, :]
    votes = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    step = 0
    while step < limit:
        vote = tl.sum(tl.where(alike > step, weight[None, :], 0), 1)
        votes = tl.where(depth == step, vote[:, None], votes)
        step += 1
    return votes


@triton.jit
def _take(order, split, above, NODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The nodes of the largest `order` [BLOCK_M, BLOCK_N], [BLOCK_N] each: `order`, 0 at node 0 and behind the last;
    parents. A node comes after the one above it, which has a larger `order`."""
    match, node = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    hook = tl.zeros((BLOCK_M,), tl.int32)  # the node below which the next one of each match hangs
    taken = tl.zeros((BLOCK_N,), tl.int64)
    parents = tl.where(node == 0, -1, -2)
    count = 1
    top = tl.max(tl.max(order, 1), 0)
    while (count < NODES) & (top > 0):
        lead, depth = 255 - (top & 255).to(tl.int32), 255 - ((top >> 8) & 255).to(tl.int32)
        parents = tl.where(node == count, tl.sum(tl.where(match == lead, hook, 0), 0), parents)
        taken = tl.where(node == count, top, taken)
        hook = tl.where((match == lead) | ((above == lead) & (split == depth + 1)), count, hook)
        order = tl.where(order == top, 0, order)
        top = tl.max(tl.max(order, 1), 0)
        count += 1
    return taken, parents


@triton.jit(do_not_specialize=["row_stride", "context"])
def draft_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    ranks_ptr,  # [B, RANKS] int64, below 0 for no match
    latest_ptr,  # [2^BITS, MATCHES] int64, falling, -1 behind the last; read where LATEST
    homes_ptr,  # [B] int64: list of the request in `latest`, -1 for none
    draft_tokens_ptr,  # [B, NODES] int64, out
    parents_ptr,  # [B, NODES] int32, out
    strength_ptr,  # [B] float32, out
    confidence_ptr,  # [B, NODES] float32, out
    row_stride,
    context,
    NODES: tl.constexpr,
    MATCHES: tl.constexpr,
    LEAST: tl.constexpr,  # confidence of a draft, in parts of LEAST_STEPS
    FREQUENT: tl.constexpr,
    LATEST: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rank = _best_matches(ranks_ptr + request * RANKS, MATCHES, RANKS, BLOCK_M)
    if LATEST:
        rank = _with_latest(rank, latest_ptr, tl.load(homes_ptr + request), MATCHES, BLOCK_M)
    found = rank >= 0
    matched = tl.where(found, (rank >> 57).to(tl.int32), 0)
    longest = tl.max(matched, 0)
    behind = longest - matched
    weight = tl.where(found & (behind <= WEIGHT_STEPS), FULL_SHARE >> (2 * tl.minimum(behind, WEIGHT_STEPS)), 0)
    total = tl.sum(weight, 0) if FREQUENT else longest * 0 + FULL_SHARE

    match, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)[None, :]
    text = (rank >> 24) & 0xFFFF
    next_place = (rank & 0xFFFFFF).to(tl.int32) + 1
    size = tl.load(sizes_ptr + text, mask=found, other=0)
    room = tl.where(found, tl.minimum(size - next_place, NODES - 1), 0)
    way = text * context + next_place
    alike = _alike(tokens_ptr + way, room, BLOCK_M)
    before = match[None, :] < match[:, None]
    split = tl.max(tl.where(before, alike, 0), 1)
    above = tl.min(tl.where(before & (alike >= split[:, None]), match[None, :], BLOCK_M), 1)
    above = tl.where(split > 0, above, -1)
    leads = (depth >= split[:, None]) & (depth < room[:, None])
    if FREQUENT:
        score = tl.where(leads, _votes(alike, weight, tl.max(room, 0), BLOCK_M, BLOCK_N), 0)
    else:
        score = tl.where(leads, _late_shares(alike, split, above, room, BLOCK_M)[:, None], 0)

    # A draft at depth d + 1 holds with probability m / (m + d + 1) behind a match of m tokens; in parts of a share.
    held = ((matched * 0 + longest if FREQUENT else matched)[:, None] + depth * 0).to(tl.int64)
    value = score.to(tl.int64) * held * CONFIDENCE_STEPS // (held + depth + 1)
    votes = tl.maximum(total, 1).to(tl.int64) * CONFIDENCE_STEPS
    order = (value << 16) | ((255 - depth) << 8) | (255 - match)[:, None]
    order = tl.where((score > 0) & (value * LEAST_STEPS >= votes * LEAST), order, 0)
    taken, parents = _take(order, split, above, NODES, BLOCK_M, BLOCK_N)

    node = tl.arange(0, BLOCK_N)
    lead, at = 255 - (taken & 255).to(tl.int32), 255 - ((taken >> 8) & 255)
    start = tl.sum(tl.where(lead[:, None] == match[None, :], way[None, :], 0), 1)
    length = tl.load(lengths_ptr + request)
    inside = (length >= 0) & (length < context)
    last = tl.load(history_ptr + request * row_stride + length, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + start + at, mask=taken > 0, other=0).to(tl.int64)
    values = tl.where(node == 0, votes, taken >> 16)
    strength = (tl.sum(values, 0) - votes).to(tl.float32) / votes.to(tl.float32)
    tl.store(draft_tokens_ptr + request * NODES + node, tl.where(node == 0, last, tokens), mask=node < NODES)
    tl.store(parents_ptr + request * NODES + node, parents, mask=node < NODES)
    tl.store(strength_ptr + request, strength)
    tl.store(confidence_ptr + request * NODES + node, values.to(tl.float32) / votes.to(tl.float32), mask=node < NODES)
