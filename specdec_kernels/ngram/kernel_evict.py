"""Before an insertion: stamps for its rows, and room for its n-grams.

One program, because it almost always reads a counter and has nothing else to do. Once in many thousand tokens it evicts
and makes a few passes over the store: a bisection for the oldest insertion to keep, clearing, and entering the kept
nodes again, because single keys cannot be taken out of a hash table with linear probing.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ngram import kernel_layout as layout
from specdec_kernels.ngram.kernel_insert import append_child, usable_count
from specdec_kernels.ngram.kernel_lookup import child_key, first_cell


@triton.jit
def _stamp_rows(start_ptr, counts_ptr, stamps_ptr, clock, rows, width, context, BLOCK: tl.constexpr):
    """Write the stamp of the first new token of every row, and return the number of new tokens."""
    total = clock * 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        start = tl.load(start_ptr + row, mask=row < rows, other=0)
        count = tl.load(counts_ptr + row, mask=row < rows, other=0)
        count = usable_count(start, count, width, context)
        tl.store(stamps_ptr + row, clock + total + tl.cumsum(count, 0) - count, mask=row < rows)
        total += tl.sum(count, 0)
    return total


@triton.jit
def _count_used(times_ptr, cut, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Number of nodes that an insertion from `cut` on went through."""
    total = 0
    for first in range(0, CAPACITY, BLOCK):
        node = first + tl.arange(0, BLOCK)
        used = tl.load(times_ptr + layout.USED * CAPACITY + node, mask=node < CAPACITY, other=-1)
        total += tl.sum((used >= cut).to(tl.int32), 0)
    return total


@triton.jit
def _oldest_kept(times_ptr, epoch, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """The first insertion from which on the nodes used last fit half of the capacity."""
    low = epoch * 0
    high = epoch
    while low < high:
        middle = (low + high) // 2
        if _count_used(times_ptr, middle, CAPACITY, BLOCK) <= CAPACITY // 2:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _drop_nodes(ints_ptr, times_ptr, cut, kept, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Free every node last used before `cut`."""
    num_free = kept
    for first in range(0, CAPACITY, BLOCK):
        node = first + tl.arange(0, BLOCK)
        inside = node < CAPACITY
        used = tl.load(times_ptr + layout.USED * CAPACITY + node, mask=inside, other=-1)
        dead = inside & (used < cut)
        tl.store(ints_ptr + layout.TOKEN * CAPACITY + node, -1, mask=dead)
        tl.store(ints_ptr + layout.COUNT * CAPACITY + node, 0, mask=dead)
        tl.store(times_ptr + layout.STAMP * CAPACITY + node, -1, mask=dead)
        tl.store(times_ptr + layout.USED * CAPACITY + node, -1, mask=dead)
        place = num_free + tl.cumsum(dead.to(tl.int32), 0) - 1
        tl.store(ints_ptr + layout.FREE * CAPACITY + place, node, mask=dead)
        num_free += tl.sum(dead.to(tl.int32), 0)


@triton.jit
def _fill(ptr, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, SIZE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(ptr + place, value, mask=place < SIZE)


@triton.jit
def _enter_nodes(
    keys_ptr, nodes_ptr, ints_ptr, counters_ptr, CAPACITY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Put every live node into the empty hash table, and on its parent's chain of changed children."""
    for first in range(0, CAPACITY, BLOCK):
        node = first + tl.arange(0, BLOCK)
        token = tl.load(ints_ptr + layout.TOKEN * CAPACITY + node, mask=node < CAPACITY, other=-1)
        live = token >= 0
        parent = tl.load(ints_ptr + layout.PARENT * CAPACITY + node, mask=live, other=-1)
        key = tl.where(live, child_key(parent, token.to(tl.int64)), 0)
        cell = first_cell(key, BITS)
        searching = live
        while tl.max(searching.to(tl.int32), 0) > 0:
            wanted = tl.where(searching, key, layout.EMPTY)
            seen = tl.atomic_cas(keys_ptr + cell, key * 0 + layout.EMPTY, wanted, sem="relaxed")
            searching = searching & (seen != layout.EMPTY)
            cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)
        tl.store(nodes_ptr + cell, node, mask=live)
        append_child(ints_ptr, counters_ptr, parent, node, live & (parent >= 0), CAPACITY)


@triton.jit(do_not_specialize=["rows", "width", "context"])
def make_room_kernel(
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    stamps_ptr,  # [B] int64, out
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    lists_ptr,  # [2, CAPACITY, LISTED] int32
    counters_ptr,  # [6] int64
    rows,
    width,
    context,
    CAPACITY: tl.constexpr,
    DEPTH: tl.constexpr,
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    clock = tl.load(counters_ptr + layout.CLOCK)
    epoch = tl.load(counters_ptr + layout.EPOCH) + 1
    live = tl.load(counters_ptr + layout.LIVE)
    total = _stamp_rows(start_ptr, counts_ptr, stamps_ptr, clock, rows, width, context, BLOCK)
    tl.debug_barrier()
    tl.store(counters_ptr + layout.BASE, clock)
    tl.store(counters_ptr + layout.CLOCK, clock + total)
    tl.store(counters_ptr + layout.EPOCH, epoch)
    tl.store(counters_ptr + layout.NUM_WORK, epoch * 0)
    cut = epoch * 0
    if live + total * DEPTH > CAPACITY:
        cut = _oldest_kept(times_ptr, epoch, CAPACITY, BLOCK)
        kept = _count_used(times_ptr, cut, CAPACITY, BLOCK)
        _drop_nodes(ints_ptr, times_ptr, cut, kept, CAPACITY, BLOCK)
        _fill(keys_ptr, layout.EMPTY, 1 << BITS, BLOCK)
        _fill(nodes_ptr, -1, 1 << BITS, BLOCK)
        _fill(lists_ptr, -1, 2 * CAPACITY * LISTED, BLOCK)
        tl.store(counters_ptr + layout.LIVE, kept.to(tl.int64))
        tl.debug_barrier()
        _enter_nodes(keys_ptr, nodes_ptr, ints_ptr, counters_ptr, CAPACITY, BITS, BLOCK)
    tl.store(counters_ptr + layout.CUT, cut)
