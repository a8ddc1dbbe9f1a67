"""Insertion of n-grams by programs that run at the same time.

Three launches, so that each reads only what an earlier one wrote. `find_beginnings` looks up, for every row, the nodes
of the 1 to D - 1 tokens before its new ones. `insert` has a lane for every window that holds a new token: the D - 1
windows that begin before the new tokens, and one for each new token. A lane follows its window. At every new token it
finds or creates the child, counts and stamps it, and adds it to the chain of its parent if it is the first to touch it.
`list_children` gives every parent with a chain to one lane, which offers the children on the chain to the two lists of
the parent.

A child is created by compare-and-swap of its key into the first empty cell of its probe sequence, so equal n-grams
meet in one cell in any order of execution. The winner takes a number and publishes it in `nodes` with release
semantics; the others wait for it there with acquire semantics. The wait ends, because the winner waits for nothing
between its swap and its publication. The first lane to touch a child is the one whose atomic maximum returns a stamp
from before this insertion.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ngram import kernel_layout as layout
from specdec_kernels.ngram.kernel_lookup import child_key, find_suffix, first_cell, is_token


@triton.jit
def append_child(ints_ptr, counters_ptr, parent, child, mask, CAPACITY: tl.constexpr):
    """Add `child` to the chain of `parent`; the first child on a chain puts the parent on the list of work."""
    after = tl.atomic_xchg(ints_ptr + layout.HEAD * CAPACITY + parent, child, mask=mask, sem="relaxed")
    tl.store(ints_ptr + layout.NEXT * CAPACITY + child, after, mask=mask)
    first = mask & (after < 0)
    place = tl.atomic_add(counters_ptr + layout.NUM_WORK + child * 0, 1, mask=first, sem="relaxed")
    tl.store(ints_ptr + layout.WORK * CAPACITY + place, parent, mask=first)


@triton.jit
def find_or_create(
    keys_ptr,
    nodes_ptr,
    ints_ptr,
    counters_ptr,
    parent,
    token,
    active,
    CAPACITY: tl.constexpr,
    BITS: tl.constexpr,
):
    """Node of the child, created where there is none; any number of lanes and programs may ask for it at once."""
    key = tl.where(active, child_key(parent, token), 0)
    cell = first_cell(key, BITS)
    searching = active
    won = active & (token < 0)
    while tl.max(searching.to(tl.int32), 0) > 0:
        seen = tl.load(keys_ptr + cell, mask=searching, other=0)
        trying = searching & (seen == layout.EMPTY)
        # A lane that is not trying swaps EMPTY for EMPTY in its own cell.
        old = tl.atomic_cas(keys_ptr + cell, key * 0 + layout.EMPTY, tl.where(trying, key, layout.EMPTY), sem="relaxed")
        won |= trying & (old == layout.EMPTY)
        seen = tl.where(trying, old, seen)
        searching = searching & (seen != key) & ~(trying & (old == layout.EMPTY))
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)

    rank = tl.atomic_add(counters_ptr + layout.LIVE + cell * 0, 1, mask=won, sem="relaxed")
    fresh = tl.load(ints_ptr + layout.FREE * CAPACITY + rank, mask=won, other=0)
    tl.store(ints_ptr + layout.PARENT * CAPACITY + fresh, parent, mask=won)
    tl.store(ints_ptr + layout.TOKEN * CAPACITY + fresh, token.to(tl.int32), mask=won)
    tl.atomic_xchg(nodes_ptr + cell, fresh, mask=won, sem="release")
    node = tl.load(nodes_ptr + cell, mask=active & ~won, other=0)
    node = tl.where(won, fresh, node)
    waiting = active & (node < 0)
    while tl.max(waiting.to(tl.int32), 0) > 0:
        published = tl.atomic_max(nodes_ptr + cell, -1, mask=waiting, sem="acquire")
        node = tl.where(waiting, published, node)
        waiting = waiting & (node < 0)
    return node


@triton.jit(do_not_specialize=["rows", "row_stride"])
def find_beginnings_kernel(
    history_ptr,  # [B, context] int64
    start_ptr,  # [B] int64: of the tokens that are entered
    counts_ptr,  # [B] int32: how many are
    beginnings_ptr,  # [B, DEPTH - 1] int32, out: entry n - 1 is the node of the n tokens before the new ones
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    times_ptr,  # [2, CAPACITY] int64
    counters_ptr,  # [8] int64
    rows,
    row_stride,
    CAPACITY: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = lane // (DEPTH - 1)
    start = tl.load(start_ptr + row, mask=row < rows, other=0)
    live = tl.load(counts_ptr + row, mask=row < rows, other=0) > 0
    text_ptr = history_ptr + row.to(tl.int64) * row_stride
    epoch = tl.load(counters_ptr + layout.EPOCH)
    size = lane % (DEPTH - 1) + 1
    node = find_suffix(keys_ptr, nodes_ptr, times_ptr, text_ptr, start, size, live, epoch, CAPACITY, BITS, TOUCH=True)
    tl.store(beginnings_ptr + lane, node, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "row_stride", "width"])
def insert_kernel(
    history_ptr,  # [B, context] int64
    start_ptr,  # [B] int64: of the tokens that are entered
    counts_ptr,  # [B] int32: how many are, at most `width`
    stamps_ptr,  # [B] int64: of each row's first new token
    beginnings_ptr,  # [B, DEPTH - 1] int32
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    counters_ptr,  # [8] int64
    rows,
    row_stride,
    width,
    CAPACITY: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = lane // (DEPTH - 1 + width)
    window = lane % (DEPTH - 1 + width)
    start = tl.load(start_ptr + row, mask=row < rows, other=0)
    end = start + tl.load(counts_ptr + row, mask=row < rows, other=0)
    stamp = tl.load(stamps_ptr + row, mask=row < rows, other=0) - start
    text_ptr = history_ptr + row.to(tl.int64) * row_stride
    epoch, base, cut = (
        tl.load(counters_ptr + layout.EPOCH),
        tl.load(counters_ptr + layout.BASE),
        tl.load(counters_ptr + layout.CUT),
    )

    begun = (window < DEPTH - 1) & (row < rows)
    parent = tl.load(beginnings_ptr + row * (DEPTH - 1) + window, mask=begun, other=layout.ROOT)
    depth = tl.where(begun, window + 1, 0)
    position = tl.where(begun, start, start + window - (DEPTH - 1))
    active = (position < end) & tl.where(begun, parent >= 0, row < rows)
    while tl.max(active.to(tl.int32), 0) > 0:
        token = tl.load(text_ptr + position, mask=active, other=-1)
        active = active & is_token(token)
        node = find_or_create(keys_ptr, nodes_ptr, ints_ptr, counters_ptr, parent, token, active, CAPACITY, BITS)
        tl.atomic_add(ints_ptr + layout.COUNT * CAPACITY + node, 1, mask=active, sem="relaxed")
        tl.atomic_max(times_ptr + layout.USED * CAPACITY + node, epoch, mask=active, sem="relaxed")
        before = tl.atomic_max(times_ptr + layout.STAMP * CAPACITY + node, stamp + position, mask=active, sem="relaxed")
        # An eviction has put all nodes it kept on their parents' chains.
        first = active & (before < base) & (parent >= 0) & ((cut == 0) | (before < 0))
        append_child(ints_ptr, counters_ptr, parent, node, first, CAPACITY)
        parent = tl.where(active, node, parent)
        position += 1
        depth += 1
        active = active & (depth < DEPTH) & (position < end)


@triton.jit
def _recency(times_ptr, node, mask, CAPACITY: tl.constexpr):
    return tl.load(times_ptr + layout.STAMP * CAPACITY + node, mask=mask, other=-1)


@triton.jit
def _frequency(ints_ptr, node, mask, CAPACITY: tl.constexpr):
    """More occurrences first, then the lower token: one number, -1 where not `mask`."""
    count = tl.load(ints_ptr + layout.COUNT * CAPACITY + node, mask=mask, other=0).to(tl.int64)
    token = tl.load(ints_ptr + layout.TOKEN * CAPACITY + node, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, (count << 32) | (-token + layout.MAX_TOKEN), -1)


@triton.jit
def _offer(nodes, scores, node, score, live, LISTED: tl.constexpr):
    """Take `node` [P] into the sets `nodes` [P, LISTED] if it is not there and beats the worst."""
    lane = tl.arange(0, LISTED)[None, :]
    present = tl.max((nodes == node[:, None]).to(tl.int32), 1) > 0
    worst = tl.min(scores, 1)
    place = tl.min(tl.where(scores == worst[:, None], lane, LISTED), 1)
    replace = (live & ~present & (score > worst))[:, None] & (lane == place[:, None])
    return tl.where(replace, node[:, None], nodes), tl.where(replace, score[:, None], scores)


@triton.jit
def _store_sorted(list_ptr, nodes, scores):
    """Write each node of a row at its rank; lists never shrink, so the entries behind the last are -1 already."""
    rank = tl.sum((scores[:, None, :] > scores[:, :, None]).to(tl.int32), 2)
    tl.store(list_ptr + rank, nodes, mask=nodes >= 0)


@triton.jit
def list_children_kernel(
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    lists_ptr,  # [2, CAPACITY, LISTED] int32
    counters_ptr,  # [8] int64
    CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
    PARENTS: tl.constexpr,
):
    num_work = tl.load(counters_ptr + layout.NUM_WORK)
    place = tl.arange(0, LISTED)[None, :]
    first = tl.program_id(0).to(tl.int64) * PARENTS
    while first < num_work:
        index = first + tl.arange(0, PARENTS)
        mine = index < num_work
        parent = tl.load(ints_ptr + layout.WORK * CAPACITY + index, mask=mine, other=0).to(tl.int64)
        child = tl.load(ints_ptr + layout.HEAD * CAPACITY + parent, mask=mine, other=-1)
        recent_ptr = lists_ptr + (parent + layout.RECENT * CAPACITY)[:, None] * LISTED
        frequent_ptr = lists_ptr + (parent + layout.FREQUENT * CAPACITY)[:, None] * LISTED
        recent = tl.load(recent_ptr + place, mask=mine[:, None], other=-1)
        frequent = tl.load(frequent_ptr + place, mask=mine[:, None], other=-1)
        recent_score = _recency(times_ptr, recent, recent >= 0, CAPACITY)
        frequent_score = _frequency(ints_ptr, frequent, frequent >= 0, CAPACITY)
        while tl.max(child, 0) >= 0:
            live = child >= 0
            score = _recency(times_ptr, child, live, CAPACITY)
            recent, recent_score = _offer(recent, recent_score, child, score, live, LISTED)
            score = _frequency(ints_ptr, child, live, CAPACITY)
            frequent, frequent_score = _offer(frequent, frequent_score, child, score, live, LISTED)
            child = tl.load(ints_ptr + layout.NEXT * CAPACITY + child, mask=live, other=-1)
        tl.debug_barrier()
        _store_sorted(recent_ptr, recent, recent_score)
        _store_sorted(frequent_ptr, frequent, frequent_score)
        tl.store(ints_ptr + layout.HEAD * CAPACITY + parent, -1, mask=mine)
        first += tl.num_programs(0).to(tl.int64) * PARENTS
