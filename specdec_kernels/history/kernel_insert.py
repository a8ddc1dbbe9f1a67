"""Insertion in two launches: slots that start a new request take another history; then tokens are written."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _started_slots(slots_ptr, start_ptr, counts_ptr, entry, entries):
    """Batch slot of each entry, and whether it starts a new request."""
    inside = entry < entries
    slot = tl.load(slots_ptr + entry, mask=inside, other=0)
    start = tl.load(start_ptr + entry, mask=inside, other=-1)
    return slot, inside & (start == 0) & (tl.load(counts_ptr + entry, mask=inside, other=0) > 0)


@triton.jit(do_not_specialize=["entries"])
def replace_histories_kernel(
    slots_ptr,  # [B] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    lengths_ptr,  # [H] int32, written
    stamps_ptr,  # [H] int64, written
    of_slot_ptr,  # [R] int32, read and written
    ring_ptr,  # [RING] int32, read and written
    clock_ptr,  # [1] int64, read and written
    entries,
    KEPT: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the n-th slot that starts puts its history at the ring's end and takes the ring's n-th history,
    possibly just put there by an earlier slot."""
    clock = tl.load(clock_ptr)
    started = clock
    for first in range(0, entries, BLOCK):
        slot, starts = _started_slots(slots_ptr, start_ptr, counts_ptr, first + tl.arange(0, BLOCK), entries)
        number = started + tl.cumsum(starts.to(tl.int64), 0) - 1
        history = tl.load(of_slot_ptr + slot, mask=starts, other=0)
        tl.store(ring_ptr + (number + KEPT) % RING, history, mask=starts)
        started += tl.sum(starts.to(tl.int64), 0)
    tl.debug_barrier()  # the second loop reads ring entries that other threads stored in the first
    started = clock
    for first in range(0, entries, BLOCK):
        slot, starts = _started_slots(slots_ptr, start_ptr, counts_ptr, first + tl.arange(0, BLOCK), entries)
        number = started + tl.cumsum(starts.to(tl.int64), 0) - 1
        history = tl.load(ring_ptr + number % RING, mask=starts, other=0)
        tl.store(of_slot_ptr + slot, history, mask=starts)
        tl.store(stamps_ptr + history, number + 1, mask=starts)
        tl.store(lengths_ptr + history, 0, mask=starts)
        started += tl.sum(starts.to(tl.int64), 0)
    tl.store(clock_ptr, started)


@triton.jit(do_not_specialize=["entries", "row_stride", "width", "context"])
def write_histories_kernel(
    history_ptr,  # [B, context] int64
    slots_ptr,  # [B] int64
    start_ptr,  # [B] int64
    counts_ptr,  # [B] int32
    tokens_ptr,  # [H, context] int32, written
    lengths_ptr,  # [H] int32, written
    of_slot_ptr,  # [R] int32
    entries,
    row_stride,
    width,
    context,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # One column more than `width`: the last token of a request follows the counted ones.
    entry, column = lane // (width + 1), lane % (width + 1)
    inside = entry < entries
    start = tl.load(start_ptr + entry, mask=inside, other=-1)
    count = tl.minimum(tl.load(counts_ptr + entry, mask=inside, other=0).to(tl.int64), width)
    place = start + column
    live = (count > 0) & (column <= count) & (start >= 0) & (place < context)
    slot = tl.load(slots_ptr + entry, mask=live, other=0)
    target = tl.load(of_slot_ptr + slot, mask=live, other=0).to(tl.int64)
    token = tl.load(history_ptr + entry * row_stride + place, mask=live, other=0)
    tl.store(tokens_ptr + target * context + place, token.to(tl.int32), mask=live)
    end = tl.minimum(start + count + 1, context)
    tl.store(lengths_ptr + target, end.to(tl.int32), mask=live & (column == 0))
