"""Insertion in two launches: rows that begin a new request exchange their texts; then tokens are written."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _begins(rows_ptr, start_ptr, counts_ptr, entry, entries):
    """Row of each entry, and whether it begins a new request."""
    inside = entry < entries
    row = tl.load(rows_ptr + entry, mask=inside, other=0)
    start = tl.load(start_ptr + entry, mask=inside, other=-1)
    return row, inside & (start == 0) & (tl.load(counts_ptr + entry, mask=inside, other=0) > 0)


@triton.jit(do_not_specialize=["entries"])
def exchange_texts_kernel(
    rows_ptr,  # [B] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    lengths_ptr,  # [S] int32, written
    stamps_ptr,  # [S] int64, written
    slots_ptr,  # [R] int32, read and written
    queue_ptr,  # [RING] int32, read and written
    clock_ptr,  # [1] int64, read and written
    entries,
    KEPT: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the n-th row that begins puts its text behind the queue and takes the n-th of the queue, which may
    be the text of a row before it."""
    clock = tl.load(clock_ptr)
    begun = clock
    for first in range(0, entries, BLOCK):
        row, begins = _begins(rows_ptr, start_ptr, counts_ptr, first + tl.arange(0, BLOCK), entries)
        number = begun + tl.cumsum(begins.to(tl.int64), 0) - 1
        text = tl.load(slots_ptr + row, mask=begins, other=0)
        tl.store(queue_ptr + (number + KEPT) % RING, text, mask=begins)
        begun += tl.sum(begins.to(tl.int64), 0)
    tl.debug_barrier()
    begun = clock
    for first in range(0, entries, BLOCK):
        row, begins = _begins(rows_ptr, start_ptr, counts_ptr, first + tl.arange(0, BLOCK), entries)
        number = begun + tl.cumsum(begins.to(tl.int64), 0) - 1
        text = tl.load(queue_ptr + number % RING, mask=begins, other=0)
        tl.store(slots_ptr + row, text, mask=begins)
        tl.store(stamps_ptr + text, number + 1, mask=begins)
        tl.store(lengths_ptr + text, 0, mask=begins)
        begun += tl.sum(begins.to(tl.int64), 0)
    tl.store(clock_ptr, begun)


@triton.jit(do_not_specialize=["entries", "row_stride", "width", "context"])
def write_texts_kernel(
    history_ptr,  # [B, context] int64
    rows_ptr,  # [B] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    tokens_ptr,  # [S, context] int32, written
    lengths_ptr,  # [S] int32, written
    slots_ptr,  # [R] int32
    entries,
    row_stride,
    width,
    context,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry, column = lane // (width + 1), lane % (width + 1)
    inside = entry < entries
    start = tl.load(start_ptr + entry, mask=inside, other=-1)
    count = tl.minimum(tl.load(counts_ptr + entry, mask=inside, other=0).to(tl.int64), width)
    place = start + column
    live = (count > 0) & (column <= count) & (start >= 0) & (place < context)
    row = tl.load(rows_ptr + entry, mask=live, other=0)
    text = tl.load(slots_ptr + row, mask=live, other=0).to(tl.int64)
    token = tl.load(history_ptr + entry * row_stride + place, mask=live, other=0)
    tl.store(tokens_ptr + text * context + place, token.to(tl.int32), mask=live)
    end = tl.minimum(start + count + 1, context)
    tl.store(lengths_ptr + text, end.to(tl.int32), mask=live & (column == 0))
