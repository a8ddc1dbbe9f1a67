"""Matching: requests are filed by their last tokens; passes over all texts find the matches of all requests; then one
program a request builds its tree.

A pass reads each position of each text once, for all requests together. Its time grows with the tokens and the matches,
and not with their product with the requests. A lane compares its position with the request whose own text it is, and
with the requests whose last two tokens stand there. What follows a match of one token in the text of another is the
same for all requests with that last token. So each such token has one list of its latest positions, and a request takes
from it what its own list leaves room for.

A match is ranked by one 63-bit number: length (6 bits), own text (1), how late the text is (16), text (16), position
(24). Lists hold the best ranks in falling order. A lane brings its rank in by atomic maxima, entry after entry, and
carries on the smaller of the two: so each entry ends as the largest of what the entries before it left, in whatever
order lanes run. Entries only grow, so what is below the last one is dropped. The latest texts are read in a pass of
their own, before the others: where a token is frequent they fill its list, and few others enter it.

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
CONFIDENCE_STEPS, LEAST_STEPS = tl.constexpr(types.CONFIDENCE_STEPS), tl.constexpr(types.LEAST_STEPS)


@triton.jit
def _first_cell(key, BITS: tl.constexpr):
    """Where probing for a key begins in a table of 2^BITS cells."""
    mixed = key.to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93
    return (mixed >> (64 - BITS)).to(tl.int64)


@triton.jit
def _pair(before, token):
    """The key of two neighbouring tokens, at least 0."""
    return ((before & 0x7FFFFFFF) << 32) | (token & 0xFFFFFFFF)


@triton.jit
def _file(keys_ptr, key, filing, BITS: tl.constexpr):
    """The cell of each key, which is entered where it is not there yet."""
    cell = _first_cell(key, BITS)
    searching = filing
    while tl.max(searching.to(tl.int32), 0) > 0:
        # A lane that has found its cell swaps "empty" for "empty" there.
        seen = tl.atomic_cas(keys_ptr + cell, key * 0 - 1, tl.where(searching, key, -1), sem="relaxed")
        searching = searching & (seen != -1) & (seen != key)
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)
    return cell


@triton.jit
def _find(keys_ptr, key, wanted, BITS: tl.constexpr):
    """The cell of each key, -1 where it is not filed."""
    cell = _first_cell(key, BITS)
    searching = wanted
    found = wanted & (key < 0)
    while tl.max(searching.to(tl.int32), 0) > 0:
        seen = tl.load(keys_ptr + cell, mask=searching, other=-1)
        found |= searching & (seen == key)
        searching = searching & (seen != -1) & (seen != key)
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)
    return tl.where(found, cell, -1)


@triton.jit(do_not_specialize=["requests", "row_stride", "context"])
def file_requests_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    rows_ptr,  # [B] int64
    slots_ptr,  # [R] int32
    owners_ptr,  # [S] int64, -1; out: the request whose own text it is
    tokens_ptr,  # [2^BITS] int64, -1; out: last tokens
    pairs_ptr,  # [2^BITS] int64, -1; out: keys of the last two tokens
    heads_ptr,  # [2^BITS] int64, -1; out: a request with these
    others_ptr,  # [B] int64, -1; out: another request with these, -1 behind the last
    homes_ptr,  # [B] int64, -1; out: the cell of the last token
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
    begun = inside & (length > 0)
    row = tl.load(rows_ptr + request, mask=begun, other=0)
    text = tl.load(slots_ptr + row, mask=begun, other=0)
    tl.store(owners_ptr + text, request, mask=begun)
    last_ptr = history_ptr + request * row_stride + length
    last = tl.load(last_ptr, mask=inside, other=0)
    before = tl.load(last_ptr - 1, mask=begun, other=0)
    home = _file(tokens_ptr, last & 0xFFFFFFFF, inside, BITS)
    tl.store(homes_ptr + request, home, mask=inside)
    cell = _file(pairs_ptr, _pair(before, last), begun, BITS)
    other = tl.atomic_xchg(heads_ptr + cell, request, mask=begun, sem="relaxed")
    tl.store(others_ptr + request, other, mask=begun)


@triton.jit
def _offer(list_ptr, rank, MATCHES: tl.constexpr):
    """Bring `rank` [BLOCK], -1 for none, into the lists that begin at `list_ptr` [BLOCK]."""
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


@triton.jit
def _match_length(history_ptr, length, text_ptr, position, going, WINDOW: tl.constexpr):
    """[BLOCK] int64: how many last tokens of a request stand in a text up to `position`; pointers are one a lane, to
    the token at position 0 and at `position`."""
    matched = position * 0
    back = 0
    while (back < WINDOW) & (tl.max(going.to(tl.int32), 0) > 0):
        going = going & (position >= back) & (length >= back)
        wanted = tl.load(history_ptr + length - back, mask=going, other=-1)
        given = tl.load(text_ptr - back, mask=going, other=0).to(tl.int64)
        going = going & (given == wanted)
        matched += going.to(tl.int64)
        back += 1
    return matched


@triton.jit(do_not_specialize=["row_stride", "context"])
def scan_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    stamps_ptr,  # [S] int64
    clock_ptr,  # [1] int64
    owners_ptr,  # [S] int64
    filed_ptr,  # [2^BITS] int64: last tokens
    pairs_ptr,  # [2^BITS] int64
    heads_ptr,  # [2^BITS] int64
    others_ptr,  # [B] int64
    ranks_ptr,  # [B, MATCHES] int64, -1; out
    latest_ptr,  # [2^BITS, MATCHES] int64, -1; out: of each last token its latest positions
    row_stride,
    context,
    WINDOW: tl.constexpr,
    TEXTS: tl.constexpr,
    SHARED: tl.constexpr,
    YOUNGEST: tl.constexpr,  # ages of the texts that are read
    OLDEST: tl.constexpr,
    MATCHES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    text, position = place // context, place % context
    inside = text < TEXTS
    size = tl.load(sizes_ptr + text, mask=inside, other=0)
    age = tl.minimum(tl.load(clock_ptr) - tl.load(stamps_ptr + text, mask=inside, other=0), MAX_AGE)
    live = (position < size - 1) & (age >= YOUNGEST) & (age <= OLDEST)
    if tl.max(live.to(tl.int32), 0) > 0:
        own = tl.load(owners_ptr + text, mask=live, other=-1)
        late = MAX_AGE - age
        whose = (late << 40) | (text << 24) | position
        following = place * 0 - 1
        if SHARED:
            token = tl.load(tokens_ptr + place, mask=live, other=0).to(tl.int64)
            cell = _find(filed_ptr, token & 0xFFFFFFFF, live, BITS)
            _offer(latest_ptr + cell * MATCHES, tl.where(cell >= 0, (1 << 57) | whose, -1), MATCHES)
            paired = (cell >= 0) & (position > 0)
            before = tl.load(tokens_ptr + place - 1, mask=paired, other=0).to(tl.int64)
            cell = _find(pairs_ptr, _pair(before, token), paired, BITS)
            following = tl.load(heads_ptr + cell, mask=cell >= 0, other=-1)
        request = own
        while tl.max(tl.maximum(request, following), 0) >= 0:
            comparing = request >= 0
            length = tl.load(lengths_ptr + request, mask=comparing, other=0)
            text_ptr = history_ptr + request * row_stride
            matched = _match_length(text_ptr, length, tokens_ptr + place, position, comparing, WINDOW)
            counts = (matched > 1) | ((matched > 0) & (request == own))
            rank = (matched << 57) | ((request == own).to(tl.int64) << 56) | whose
            _offer(ranks_ptr + request * MATCHES, tl.where(counts, rank, -1), MATCHES)
            request = tl.where(following == own, -1, following)
            following = tl.load(others_ptr + following, mask=following >= 0, other=-1)


@triton.jit
def _all_matches(ranks_ptr, latest_ptr, homes_ptr, request, MATCHES, BLOCK_M: tl.constexpr):
    """[BLOCK_M] int64: the request's own list, and behind it the latest positions of its last token that are not in it,
    all of them in texts of others; the best first, -1 behind the last."""
    match = tl.arange(0, BLOCK_M)
    rank = tl.load(ranks_ptr + request * MATCHES + match, mask=match < MATCHES, other=-1)
    home = tl.load(homes_ptr + request)
    further = tl.load(latest_ptr + home * MATCHES + match, mask=(match < MATCHES) & (home >= 0), other=-1)
    place = 0xFFFFFFFFFF
    held = ((rank & place)[None, :] == (further & place)[:, None]) & (rank >= 0)[None, :]
    kept = (further >= 0) & (tl.max(held.to(tl.int32), 1) == 0)
    behind = tl.sum((rank >= 0).to(tl.int32), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
    moved = tl.where((behind[None, :] == match[:, None]) & kept[None, :], further[None, :], -1)
    return tl.where(match < MATCHES, tl.maximum(rank, tl.max(moved, 1)), -1)


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
    latest_ptr,  # [2^BITS, MATCHES] int64, likewise
    homes_ptr,  # [B] int64: list of the request in `latest`
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    rank = _all_matches(ranks_ptr, latest_ptr, homes_ptr, request, MATCHES, BLOCK_M)
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
    order = tl.where((score > 0) & (value * LEAST_STEPS >= votes * LEAST), order, 0)
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
