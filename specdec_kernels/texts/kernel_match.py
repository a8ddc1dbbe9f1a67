"""Matching in three launches: requests are filed by their last tokens; one pass over all texts finds the matches of all
requests; then one program a request builds its tree.

The pass reads each position of each text once, for all requests together. A lane looks up the requests whose last token
stands at its position and compares only these, so the time grows with the tokens and the matches, and not with their
product with the requests. A match is ranked by one 63-bit number: length (6 bits), own text (1), how late the text is
(16), text (16), position (24). Every request has a list of its best ranks in falling order. A lane brings its rank in
by atomic maxima, entry after entry, and carries on the smaller of the two: so each entry ends as the largest of what
the entries before it left, in whatever order lanes run. Entries only grow, so what is below the last one is dropped.

The tree is built from a square of matches: `same[i, j]` says that matches i and j have gone on alike so far, so its
rows are the nodes of the trie at the current depth, each once for the best match that runs through it.
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
def _cell(token, BITS: tl.constexpr):
    """Where requests with this last token are filed, among 2^BITS cells."""
    mixed = token.to(tl.uint64) * 0x9E3779B97F4A7C15
    return (mixed >> (64 - BITS)).to(tl.int64)


@triton.jit(do_not_specialize=["requests", "row_stride", "context"])
def file_requests_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    rows_ptr,  # [B] int64
    slots_ptr,  # [R] int32
    owners_ptr,  # [S] int64, -1; out: the request whose own text it is
    cells_ptr,  # [2^BITS] int64, -1; out: a request
    others_ptr,  # [B] int64, out: another request of the same cell, -1 behind the last
    requests,
    row_stride,
    context,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + request, mask=request < requests, other=-1)
    inside = (length >= 0) & (length < context)
    # Before anything of a request was written, its row has the text of another.
    row = tl.load(rows_ptr + request, mask=inside & (length > 0), other=0)
    text = tl.load(slots_ptr + row, mask=inside & (length > 0), other=0)
    tl.store(owners_ptr + text, request, mask=inside & (length > 0))
    last = tl.load(history_ptr + request * row_stride + length, mask=inside, other=0)
    other = tl.atomic_xchg(cells_ptr + _cell(last, BITS), request, mask=inside, sem="relaxed")
    tl.store(others_ptr + request, other, mask=inside)


@triton.jit
def _offer(ranks_ptr, request, rank, MATCHES: tl.constexpr):
    """Bring `rank` [BLOCK], -1 for none, into the list of its `request` [BLOCK]."""
    list_ptr = ranks_ptr + request * MATCHES
    least = tl.load(list_ptr + MATCHES - 1, mask=rank >= 0, other=0)
    rank = tl.where(rank > least, rank, -1)
    entry = 0
    while (entry < MATCHES) & (tl.max(rank, 0) >= 0):
        # An entry that is larger already would only hand the rank on.
        held = tl.load(list_ptr + entry, mask=rank >= 0, other=0, volatile=True)
        enters = rank > held
        before = tl.atomic_max(list_ptr + entry, rank, mask=enters, sem="relaxed")
        rank = tl.where(enters, tl.minimum(rank, before), rank)
        entry += 1


@triton.jit(do_not_specialize=["row_stride", "context"])
def scan_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    stamps_ptr,  # [S] int64
    clock_ptr,  # [1] int64
    owners_ptr,  # [S] int64
    cells_ptr,  # [2^BITS] int64
    others_ptr,  # [B] int64
    ranks_ptr,  # [B, MATCHES] int64, -1; out, falling
    row_stride,
    context,
    WINDOW: tl.constexpr,
    TEXTS: tl.constexpr,
    SHARED: tl.constexpr,
    MATCHES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    text, position = place // context, place % context
    size = tl.load(sizes_ptr + text, mask=text < TEXTS, other=0)
    live = position < size - 1
    if tl.max(live.to(tl.int32), 0) > 0:
        own = tl.load(owners_ptr + text, mask=live, other=-1)
        late = MAX_AGE - tl.minimum(tl.load(clock_ptr) - tl.load(stamps_ptr + text, mask=live, other=0), MAX_AGE)
        whose = (late << 40) | (text << 24) | position
        if SHARED:
            token = tl.load(tokens_ptr + place, mask=live, other=0)
            request = tl.load(cells_ptr + _cell(token, BITS), mask=live, other=-1)
        else:
            request = own
        while tl.max(request, 0) >= 0:
            comparing = request >= 0
            length = tl.load(lengths_ptr + request, mask=comparing, other=0)
            text_ptr = history_ptr + request * row_stride
            matched = tl.zeros([BLOCK], tl.int64)
            back = 0
            going = comparing
            while (back < WINDOW) & (tl.max(going.to(tl.int32), 0) > 0):
                going = going & (position >= back) & (length >= back)
                wanted = tl.load(text_ptr + length - back, mask=going, other=-1)
                given = tl.load(tokens_ptr + place - back, mask=going, other=0).to(tl.int64)
                going = going & (given == wanted)
                matched += going.to(tl.int64)
                back += 1
            mine = (request == own).to(tl.int64)
            _offer(ranks_ptr, request, tl.where(matched > 0, (matched << 57) | (mine << 56) | whose, -1), MATCHES)
            if SHARED:
                request = tl.load(others_ptr + request, mask=comparing, other=-1)
            else:
                request = tl.full([BLOCK], -1, tl.int64)


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
    ranks_ptr,  # [B, MATCHES] int64, falling, -1 behind the last
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    match = tl.arange(0, BLOCK_M)
    rank = tl.load(ranks_ptr + request * MATCHES + match, mask=match < MATCHES, other=-1)
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

    match = match[:, None]
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
