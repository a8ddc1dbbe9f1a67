"""Insertion in two launches: first every new request gets a text, one after the other; then tokens are written."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows_given"])
def new_texts_kernel(
    rows_ptr,  # [B] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    stamps_ptr,  # [TEXTS] int64, read and written
    owners_ptr,  # [TEXTS] int32, read and written
    slots_ptr,  # [R] int32, read and written
    clock_ptr,  # [1] int64, read and written
    rows_given,
    TEXTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: which text is the oldest free one depends on the requests before."""
    slot = tl.arange(0, BLOCK)
    inside = slot < TEXTS
    stamps = tl.load(stamps_ptr + slot, mask=inside, other=0)
    owners = tl.load(owners_ptr + slot, mask=inside, other=0)
    clock = tl.load(clock_ptr)
    for entry in range(rows_given):
        row = tl.load(rows_ptr + entry)
        begins = (tl.load(start_ptr + entry) == 0) & (tl.load(counts_ptr + entry) > 0)
        if begins:
            before = tl.load(slots_ptr + row)
            owners = tl.where(slot == before, -1, owners)
            age = tl.where(inside & (owners < 0), stamps, 0x7FFFFFFFFFFFFFFF)
            oldest = tl.min(age, 0)
            chosen = tl.min(tl.where(age == oldest, slot, BLOCK), 0)
            clock += 1
            stamps = tl.where(slot == chosen, clock, stamps)
            owners = tl.where(slot == chosen, row.to(tl.int32), owners)
            tl.store(slots_ptr + row, chosen)
    tl.store(stamps_ptr + slot, stamps, mask=inside)
    tl.store(owners_ptr + slot, owners, mask=inside)
    tl.store(clock_ptr, clock)


@triton.jit(do_not_specialize=["row_stride", "width", "context"])
def write_texts_kernel(
    history_ptr,  # [B, context] int64
    rows_ptr,  # [B] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    tokens_ptr,  # [S, context] int32, written
    lengths_ptr,  # [S] int32, written
    slots_ptr,  # [R] int32
    row_stride,
    width,
    context,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + entry)
    count = tl.minimum(tl.load(counts_ptr + entry).to(tl.int64), width)
    slot = tl.load(slots_ptr + tl.load(rows_ptr + entry)).to(tl.int64)
    if (count > 0) & (start >= 0) & (slot >= 0):
        column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place = start + column
        live = (column <= count) & (place < context)
        token = tl.load(history_ptr + entry * row_stride + place, mask=live, other=0)
        tl.store(tokens_ptr + slot * context + place, token.to(tl.int32), mask=live)
        if tl.program_id(1) == 0:
            tl.store(lengths_ptr + slot, tl.minimum(start + count + 1, context).to(tl.int32))
