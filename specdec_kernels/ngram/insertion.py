"""Insertion of n-grams by programs that run at the same time.

Three launches, so that each reads only what an earlier one wrote. `find_beginnings` looks up, for every row, the nodes
of the 1 to D - 1 tokens before its new ones. `insert` has a lane for every window that holds a new token: the D - 1
that begin before them, and one for each of them. A lane follows its window, at every new token finds or creates the
child, counts and stamps it, and hangs it on its parent's chain if it is the first to touch it. `list_children` gives
every parent with a chain to one lane, which offers the chain's children to the parent's two lists.

A child is created by compare-and-swap of its key into the first empty cell of its probe sequence, so equal n-grams
meet in one cell whoever comes first. The winner takes a number and publishes it in `nodes` with release semantics; the
others wait for it there with acquire semantics. The wait ends, since the winner waits for nothing between its swap and
its publication. First to touch is who sees a stamp from before this insertion in the atomic maximum.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ngram.lookup import child_key, find_suffix, first_cell, is_token
from specdec_kernels.ngram.types import (
    BASE,
    COUNT,
    CUT,
    EMPTY,
    EPOCH,
    FREE,
    FREQUENT,
    HEAD,
    LIVE,
    MAX_TOKEN,
    NEXT,
    NUM_WORK,
    PARENT,
    RECENT,
    ROOT,
    STAMP,
    TOKEN,
    USED,
    WORK,
)

_EMPTY = tl.constexpr(EMPTY)
_ROOT = tl.constexpr(ROOT)
_MAX_TOKEN = tl.constexpr(MAX_TOKEN)
_PARENT = tl.constexpr(PARENT)
_TOKEN = tl.constexpr(TOKEN)
_COUNT = tl.constexpr(COUNT)
_HEAD = tl.constexpr(HEAD)
_NEXT = tl.constexpr(NEXT)
_FREE = tl.constexpr(FREE)
_WORK = tl.constexpr(WORK)
_STAMP = tl.constexpr(STAMP)
_USED = tl.constexpr(USED)
_RECENT = tl.constexpr(RECENT)
_FREQUENT = tl.constexpr(FREQUENT)
_LIVE = tl.constexpr(LIVE)
_EPOCH = tl.constexpr(EPOCH)
_BASE = tl.constexpr(BASE)
_CUT = tl.constexpr(CUT)
_NUM_WORK = tl.constexpr(NUM_WORK)


@triton.jit
def usable_count(start, count, width, context):
    """New tokens of a row that lie in the history and in the width of the call, int64."""
    count = tl.minimum(tl.minimum(count.to(tl.int64), width), context - start)
    return tl.where(start >= 0, tl.maximum(count, 0), 0)


@triton.jit
def append_child(ints_ptr, counters_ptr, parent, child, mask, CAPACITY: tl.constexpr):
    """Hang `child` on the chain of `parent`; the first on a chain puts the parent on the list of work."""
    after = tl.atomic_xchg(ints_ptr + _HEAD * CAPACITY + parent, child, mask=mask, sem="relaxed")
    tl.store(ints_ptr + _NEXT * CAPACITY + child, after, mask=mask)
    first = mask & (after < 0)
    place = tl.atomic_add(counters_ptr + _NUM_WORK + child * 0, 1, mask=first, sem="relaxed")
    tl.store(ints_ptr + _WORK * CAPACITY + place, parent, mask=first)


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
    """Node of the child, created if need be; any number of lanes and programs may ask for it at once."""
    key = tl.where(active, child_key(parent, token), 0)
    cell = first_cell(key, BITS)
    searching = active
    won = active & (token < 0)
    while tl.max(searching.to(tl.int32), 0) > 0:
        seen = tl.load(keys_ptr + cell, mask=searching, other=0)
        trying = searching & (seen == _EMPTY)
        # A lane that is not trying swaps EMPTY for EMPTY in its own cell.
        old = tl.atomic_cas(keys_ptr + cell, key * 0 + _EMPTY, tl.where(trying, key, _EMPTY), sem="relaxed")
        won |= trying & (old == _EMPTY)
        seen = tl.where(trying, old, seen)
        searching = searching & (seen != key) & ~(trying & (old == _EMPTY))
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)

    rank = tl.atomic_add(counters_ptr + _LIVE + cell * 0, 1, mask=won, sem="relaxed")
    fresh = tl.load(ints_ptr + _FREE * CAPACITY + rank, mask=won, other=0)
    tl.store(ints_ptr + _PARENT * CAPACITY + fresh, parent, mask=won)
    tl.store(ints_ptr + _TOKEN * CAPACITY + fresh, token.to(tl.int32), mask=won)
    tl.atomic_xchg(nodes_ptr + cell, fresh, mask=won, sem="release")
    node = tl.load(nodes_ptr + cell, mask=active & ~won, other=0)
    node = tl.where(won, fresh, node)
    waiting = active & (node < 0)
    while tl.max(waiting.to(tl.int32), 0) > 0:
        published = tl.atomic_max(nodes_ptr + cell, -1, mask=waiting, sem="acquire")
        node = tl.where(waiting, published, node)
        waiting = waiting & (node < 0)
    return node


@triton.jit(do_not_specialize=["rows", "row_stride", "width", "context"])
def find_beginnings_kernel(
    history_ptr,  # [B, context] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    beginnings_ptr,  # [B, DEPTH - 1] int32, out: entry n - 1 is the node of the n tokens before the new ones
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    times_ptr,  # [2, CAPACITY] int64
    counters_ptr,  # [6] int64
    rows,
    row_stride,
    width,
    context,
    CAPACITY: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = lane // (DEPTH - 1)
    start = tl.load(start_ptr + row, mask=row < rows, other=0)
    count = tl.load(counts_ptr + row, mask=row < rows, other=0)
    live = usable_count(start, count, width, context) > 0
    text_ptr = history_ptr + row.to(tl.int64) * row_stride
    epoch = tl.load(counters_ptr + _EPOCH)
    size = lane % (DEPTH - 1) + 1
    node = find_suffix(keys_ptr, nodes_ptr, times_ptr, text_ptr, start, size, live, epoch, CAPACITY, BITS, TOUCH=True)
    tl.store(beginnings_ptr + lane, node, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "row_stride", "width", "context"])
def insert_kernel(
    history_ptr,  # [B, context] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    stamps_ptr,  # [B] int64: of each row's first new token
    beginnings_ptr,  # [B, DEPTH - 1] int32
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    counters_ptr,  # [6] int64
    rows,
    row_stride,
    width,
    context,
    CAPACITY: tl.constexpr,
    DEPTH: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = lane // (DEPTH - 1 + width)
    window = lane % (DEPTH - 1 + width)
    start = tl.load(start_ptr + row, mask=row < rows, other=0)
    count = tl.load(counts_ptr + row, mask=row < rows, other=0)
    count = usable_count(start, count, width, context)
    end = start + count
    stamp = tl.load(stamps_ptr + row, mask=row < rows, other=0) - start
    text_ptr = history_ptr + row.to(tl.int64) * row_stride
    epoch, base, cut = (tl.load(counters_ptr + _EPOCH), tl.load(counters_ptr + _BASE), tl.load(counters_ptr + _CUT))

    begun = (window < DEPTH - 1) & (row < rows)
    parent = tl.load(beginnings_ptr + row * (DEPTH - 1) + window, mask=begun, other=_ROOT)
    depth = tl.where(begun, window + 1, 0)
    position = tl.where(begun, start, start + window - (DEPTH - 1))
    active = (position < end) & tl.where(begun, parent >= 0, row < rows)
    while tl.max(active.to(tl.int32), 0) > 0:
        token = tl.load(text_ptr + position, mask=active, other=-1)
        active = active & is_token(token)
        node = find_or_create(keys_ptr, nodes_ptr, ints_ptr, counters_ptr, parent, token, active, CAPACITY, BITS)
        tl.atomic_add(ints_ptr + _COUNT * CAPACITY + node, 1, mask=active, sem="relaxed")
        tl.atomic_max(times_ptr + _USED * CAPACITY + node, epoch, mask=active, sem="relaxed")
        before = tl.atomic_max(times_ptr + _STAMP * CAPACITY + node, stamp + position, mask=active, sem="relaxed")
        # An eviction has put all nodes it kept on their parents' chains.
        first = active & (before < base) & (parent >= 0) & ((cut == 0) | (before < 0))
        append_child(ints_ptr, counters_ptr, parent, node, first, CAPACITY)
        parent = tl.where(active, node, parent)
        position += 1
        depth += 1
        active = active & (depth < DEPTH) & (position < end)


@triton.jit
def _recency(times_ptr, node, mask, CAPACITY: tl.constexpr):
    return tl.load(times_ptr + _STAMP * CAPACITY + node, mask=mask, other=-1)


@triton.jit
def _frequency(ints_ptr, node, mask, CAPACITY: tl.constexpr):
    """More occurrences first, then the lower token: one number, -1 where not `mask`."""
    count = tl.load(ints_ptr + _COUNT * CAPACITY + node, mask=mask, other=0).to(tl.int64)
    token = tl.load(ints_ptr + _TOKEN * CAPACITY + node, mask=mask, other=0).to(tl.int64)
    return tl.where(mask, (count << 32) | (-token + _MAX_TOKEN), -1)


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
    """Write each node of a row at its rank; lists never shrink, so what lies behind the last is -1 already."""
    rank = tl.sum((scores[:, None, :] > scores[:, :, None]).to(tl.int32), 2)
    tl.store(list_ptr + rank, nodes, mask=nodes >= 0)


@triton.jit
def list_children_kernel(
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    lists_ptr,  # [2, CAPACITY, LISTED] int32
    counters_ptr,  # [6] int64
    CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
    PARENTS: tl.constexpr,
):
    num_work = tl.load(counters_ptr + _NUM_WORK)
    place = tl.arange(0, LISTED)[None, :]
    first = tl.program_id(0).to(tl.int64) * PARENTS
    while first < num_work:
        index = first + tl.arange(0, PARENTS)
        mine = index < num_work
        parent = tl.load(ints_ptr + _WORK * CAPACITY + index, mask=mine, other=0).to(tl.int64)
        child = tl.load(ints_ptr + _HEAD * CAPACITY + parent, mask=mine, other=-1)
        recent_ptr = lists_ptr + (parent + _RECENT * CAPACITY)[:, None] * LISTED
        frequent_ptr = lists_ptr + (parent + _FREQUENT * CAPACITY)[:, None] * LISTED
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
            child = tl.load(ints_ptr + _NEXT * CAPACITY + child, mask=live, other=-1)
        tl.debug_barrier()
        _store_sorted(recent_ptr, recent, recent_score)
        _store_sorted(frequent_ptr, frequent, frequent_score)
        tl.store(ints_ptr + _HEAD * CAPACITY + parent, -1, mask=mine)
        first += tl.num_programs(0).to(tl.int64) * PARENTS
