"""Insertion in two launches: slots that start a new request take another history; then tokens are written."""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Written(NamedTuple):
    """Where the tokens of each request go."""

    slots: Any  # [B] int64
    start: Any  # [B] int64
    counts: Any  # [B] int32


@triton.jit
def _started_slots(written, entry, entries):
    """Batch slot of each entry, and whether it starts a new request."""
    inside = entry < entries
    slot = tl.load(written.slots + entry, mask=inside, other=0)
    start = tl.load(written.start + entry, mask=inside, other=-1)
    return slot, inside & (start == 0) & (tl.load(written.counts + entry, mask=inside, other=0) > 0)


@triton.jit(do_not_specialize=["entries"])
def replace_histories_kernel(
    written,  # Written
    store,  # HistoryStore, changed
    entries,
    KEPT: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the n-th slot that starts puts its history at the ring's end and takes the ring's n-th history,
    possibly just put there by an earlier slot."""
    clock = tl.load(store.clock)
    started = clock
    for first in range(0, entries, BLOCK):
        slot, starts = _started_slots(written, first + tl.arange(0, BLOCK), entries)
        number = started + tl.cumsum(starts.to(tl.int64), 0) - 1
        history = tl.load(store.of_slot + slot, mask=starts, other=0)
        tl.store(store.ring + (number + KEPT) % RING, history, mask=starts)
        started += tl.sum(starts.to(tl.int64), 0)
    tl.debug_barrier()  # the second loop reads ring entries that other threads stored in the first
    started = clock
    for first in range(0, entries, BLOCK):
        slot, starts = _started_slots(written, first + tl.arange(0, BLOCK), entries)
        number = started + tl.cumsum(starts.to(tl.int64), 0) - 1
        history = tl.load(store.ring + number % RING, mask=starts, other=0)
        tl.store(store.of_slot + slot, history, mask=starts)
        tl.store(store.stamps + history, number + 1, mask=starts)
        tl.store(store.lengths + history, 0, mask=starts)
        started += tl.sum(starts.to(tl.int64), 0)
    tl.store(store.clock, started)


@triton.jit(do_not_specialize=["entries", "row_stride", "width", "context"])
def write_histories_kernel(
    history_ptr,  # [B, context] int64
    written,  # Written
    store,  # HistoryStore, whose tokens and lengths are written
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
    start = tl.load(written.start + entry, mask=inside, other=-1)
    count = tl.minimum(tl.load(written.counts + entry, mask=inside, other=0).to(tl.int64), width)
    place = start + column
    live = (count > 0) & (column <= count) & (start >= 0) & (place < context)
    slot = tl.load(written.slots + entry, mask=live, other=0)
    target = tl.load(store.of_slot + slot, mask=live, other=0).to(tl.int64)
    token = tl.load(history_ptr + entry * row_stride + place, mask=live, other=0)
    tl.store(store.tokens + target * context + place, token.to(tl.int32), mask=live)
    end = tl.minimum(start + count + 1, context)
    tl.store(store.lengths + target, end.to(tl.int32), mask=live & (column == 0))
