"""Before an insertion: which tokens it enters, their stamps, and room for their n-grams.

`plan` is one program over the rows. It says whether the store has room; it almost always has, and then the programs of
the other three launches return at once. Where it has not, `count_ages` counts the nodes by the age of their last use,
`drop_nodes` frees what is older than the ages that fit half of the capacity and clears the table and the lists, and
`enter_nodes` puts the kept nodes back, because single keys cannot be taken out of a hash table with linear probing.
Each of these passes over the store with many programs.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ngram import kernel_layout as layout
from specdec_kernels.ngram.kernel_insert import append_child
from specdec_kernels.ngram.kernel_lookup import child_key, first_cell


@triton.jit
def _usable(start_ptr, counts_ptr, row, rows, width, context):
    """Start of a row, and how many of its new tokens lie in the history and in the width of the call, int64."""
    start = tl.load(start_ptr + row, mask=row < rows, other=0)
    count = tl.load(counts_ptr + row, mask=row < rows, other=0).to(tl.int64)
    count = tl.minimum(tl.minimum(count, width), context - start)
    return start, tl.where(start >= 0, tl.maximum(count, 0), 0)


@triton.jit
def _total(start_ptr, counts_ptr, rows, width, context, limit, BLOCK: tl.constexpr):
    """Tokens of all rows, of each row at most `limit`."""
    total = limit * 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        _, count = _usable(start_ptr, counts_ptr, row, rows, width, context)
        total += tl.sum(tl.minimum(count, limit), 0)
    return total


@triton.jit(do_not_specialize=["rows", "width", "context"])
def plan_kernel(
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    begin_ptr,  # [B] int64, out: the first token of each row that is entered
    kept_ptr,  # [B] int32, out: how many are
    stamps_ptr,  # [B] int64, out: the stamp of the first of them
    counters_ptr,  # [8] int64
    rows,
    width,
    context,
    CAPACITY: tl.constexpr,
    DEPTH: tl.constexpr,
    MOST: tl.constexpr,  # tokens that one insertion enters
    BLOCK: tl.constexpr,
):
    clock = tl.load(counters_ptr + layout.CLOCK)
    live = tl.load(counters_ptr + layout.LIVE)
    limit = clock * 0 + width
    total = _total(start_ptr, counts_ptr, rows, width, context, limit, BLOCK)
    more = clock * 0
    if total > MOST:
        # The largest equal limit of all rows; the first rows that have more may enter one token more.
        low = clock * 0
        while low < limit:
            middle = (low + limit + 1) // 2
            if _total(start_ptr, counts_ptr, rows, width, context, middle, BLOCK) <= MOST:
                low = middle
            else:
                limit = middle - 1
        total = _total(start_ptr, counts_ptr, rows, width, context, limit, BLOCK)
        more = MOST - total
    done = clock * 0
    longer_rows = clock * 0
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        start, count = _usable(start_ptr, counts_ptr, row, rows, width, context)
        longer = (count > limit).to(tl.int64)
        rank = longer_rows + tl.cumsum(longer, 0) - longer
        kept = tl.minimum(count, limit + tl.where(rank < more, longer, 0))
        tl.store(begin_ptr + row, start + count - kept, mask=row < rows)
        tl.store(kept_ptr + row, kept.to(tl.int32), mask=row < rows)
        tl.store(stamps_ptr + row, clock + done + tl.cumsum(kept, 0) - kept, mask=row < rows)
        longer_rows += tl.sum(longer, 0)
        done += tl.sum(kept, 0)
    tl.store(counters_ptr + layout.BASE, clock)
    tl.store(counters_ptr + layout.CLOCK, clock + done)
    tl.store(counters_ptr + layout.EPOCH, tl.load(counters_ptr + layout.EPOCH) + 1)
    tl.store(counters_ptr + layout.CUT, clock * 0)
    tl.store(counters_ptr + layout.NUM_WORK, clock * 0)
    tl.store(counters_ptr + layout.NUM_FREED, clock * 0)
    tl.store(counters_ptr + layout.FULL, (live + done * DEPTH > CAPACITY).to(tl.int64))


@triton.jit
def _age_bin(age):
    """Ages below 2^11 have bins of their own; older ones share one where their first 11 bits are equal."""
    shift = age * 0
    for bit in tl.static_range(layout.AGE_BITS, layout.MAX_AGE_BITS):
        shift += (age >= (1 << bit)).to(tl.int64)
    # Ages past the last bin are counted in it.
    return tl.minimum((shift << (layout.AGE_BITS - 1)) + (age >> shift), layout.NUM_BINS - 1)


@triton.jit
def _youngest(age_bin):
    """The lowest age of a bin."""
    shift = tl.maximum((age_bin >> (layout.AGE_BITS - 1)) - 1, 0)
    return (age_bin - (shift << (layout.AGE_BITS - 1))) << shift


@triton.jit
def count_ages_kernel(
    times_ptr,  # [2, CAPACITY] int64
    ages_ptr,  # [NUM_BINS] int32, zeros; out: nodes by bin
    counters_ptr,  # [8] int64
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(counters_ptr + layout.FULL) != 0:
        epoch = tl.load(counters_ptr + layout.EPOCH)
        for first in range(tl.program_id(0) * BLOCK, CAPACITY, tl.num_programs(0) * BLOCK):
            node = first + tl.arange(0, BLOCK)
            used = tl.load(times_ptr + layout.USED * CAPACITY + node, mask=node < CAPACITY, other=-1)
            age_bin = _age_bin(tl.where(used >= 0, epoch - used, 0))
            tl.atomic_add(ages_ptr + age_bin, 1, mask=used >= 0, sem="relaxed")


@triton.jit
def _ages_that_fit(ages_ptr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """The first bin that does not fit half of the capacity together with those before it, and the nodes of these. BLOCK
    divides the number of bins."""
    fitting = tl.zeros([], dtype=tl.int32)
    kept = tl.zeros([], dtype=tl.int32)
    running = tl.zeros([], dtype=tl.int32)
    for first in range(0, layout.NUM_BINS, BLOCK):
        age_bin = first + tl.arange(0, BLOCK)
        number = tl.load(ages_ptr + age_bin)
        sums = running + tl.cumsum(number, 0)
        fits = sums <= CAPACITY // 2
        fitting += tl.sum(fits.to(tl.int32), 0)
        kept = tl.maximum(kept, tl.max(tl.where(fits, sums, 0), 0))
        running += tl.sum(number, 0)
    return fitting, kept


@triton.jit
def _fill(ptr, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """This program's share of `SIZE` entries."""
    for first in range(tl.program_id(0) * BLOCK, SIZE, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(ptr + place, value, mask=place < SIZE)


@triton.jit
def drop_nodes_kernel(
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    ints_ptr,  # [7, CAPACITY] int32
    times_ptr,  # [2, CAPACITY] int64
    lists_ptr,  # [2, CAPACITY, LISTED] int32
    counters_ptr,  # [8] int64
    ages_ptr,  # [NUM_BINS] int32
    CAPACITY: tl.constexpr,
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(counters_ptr + layout.FULL) != 0:
        fitting, kept = _ages_that_fit(ages_ptr, CAPACITY, BLOCK)
        cut = tl.load(counters_ptr + layout.EPOCH) - _youngest(fitting.to(tl.int64)) + 1
        if tl.program_id(0) == 0:
            tl.store(counters_ptr + layout.CUT, cut)
            tl.store(counters_ptr + layout.LIVE, kept.to(tl.int64))
        for first in range(tl.program_id(0) * BLOCK, CAPACITY, tl.num_programs(0) * BLOCK):
            node = first + tl.arange(0, BLOCK)
            used = tl.load(times_ptr + layout.USED * CAPACITY + node, mask=node < CAPACITY, other=-1)
            dead = (node < CAPACITY) & (used < cut)
            tl.store(ints_ptr + layout.TOKEN * CAPACITY + node, -1, mask=dead)
            tl.store(ints_ptr + layout.COUNT * CAPACITY + node, 0, mask=dead)
            tl.store(times_ptr + layout.STAMP * CAPACITY + node, -1, mask=dead)
            tl.store(times_ptr + layout.USED * CAPACITY + node, -1, mask=dead)
            number = dead.to(tl.int32)
            freed = tl.atomic_add(counters_ptr + layout.NUM_FREED, tl.sum(number, 0).to(tl.int64), sem="relaxed")
            place = kept + freed + tl.cumsum(number, 0) - 1
            tl.store(ints_ptr + layout.FREE * CAPACITY + place, node, mask=dead)
        _fill(keys_ptr, layout.EMPTY, 1 << BITS, BLOCK)
        _fill(nodes_ptr, -1, 1 << BITS, BLOCK)
        _fill(lists_ptr, -1, 2 * CAPACITY * LISTED, BLOCK)


@triton.jit
def enter_nodes_kernel(
    keys_ptr,  # [2^BITS] int64
    nodes_ptr,  # [2^BITS] int32
    ints_ptr,  # [7, CAPACITY] int32
    counters_ptr,  # [8] int64
    ages_ptr,  # [NUM_BINS] int32
    CAPACITY: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(counters_ptr + layout.FULL) != 0:
        _fill(ages_ptr, 0, layout.NUM_BINS, BLOCK)
        for first in range(tl.program_id(0) * BLOCK, CAPACITY, tl.num_programs(0) * BLOCK):
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
