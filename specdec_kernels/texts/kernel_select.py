"""Selection: a few programs a request compare its end with its own text and with the hits that concern it, and keep the
best matches.

A match is ranked by one 63-bit number: length (6 bits), own text (1), how late the text is (16), text (16), position
(24).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.texts import types

MAX_AGE = tl.constexpr(types.MAX_AGE)
NONE = tl.constexpr(-(1 << 62))
"""Less than every rank, and than every empty entry of a list."""
TOGETHER = tl.constexpr(4)
"""Tokens that are loaded before the first of them is compared, so that the loads do not wait for each other."""


@triton.jit
def _match_length(last_ptr, length, place_ptr, position, going, WINDOW: tl.constexpr):
    """[BLOCK] int32: how many last tokens of the request stand in a text up to `position`, to which `place_ptr` points,
    as `last_ptr` to the request's last token, at position `length`."""
    matched = position * 0
    back = 0
    while (back < WINDOW) & (tl.max(going.to(tl.int32), 0) > 0):
        reading = going
        for ahead in tl.static_range(TOGETHER):
            there = (back + ahead < WINDOW) & (back + ahead <= length)
            wanted = tl.load(last_ptr - back - ahead, mask=there, other=0)
            reads = reading & there & (position >= back + ahead)
            given = tl.load(place_ptr - back - ahead, mask=reads, other=0).to(tl.int64)
            going = going & reads & (given == wanted)
            matched += going.to(tl.int32)
        back += TOGETHER
    return matched


@triton.jit
def _keep(best, rank):
    """`best` with what is larger in `rank`."""
    top = tl.max(rank, 0)
    least = tl.min(best, 0)
    while top > least:
        best = tl.where(best == least, top, best)
        rank = tl.where(rank == top, NONE, rank)
        top = tl.max(rank, 0)
        least = tl.min(best, 0)
    return best


@triton.jit(do_not_specialize=["row_stride", "context"])
def select_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    rows_ptr,  # [B] int64
    slots_ptr,  # [R] int32
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    stamps_ptr,  # [S] int64
    clock_ptr,  # [1] int64
    cells_ptr,  # [B] int64: cell of the hits that concern the request, -1 for none
    hits_ptr,  # [S * context] int64, sorted by cell where SORTED
    counts_ptr,  # how many hits there are, less one: [2^BITS] int64 of each cell, or [1] of all
    ends_ptr,  # [2^BITS] int64: where the hits of each cell end
    ranks_ptr,  # [B, PARTS, KEPT] int64, out: the best matches of each program, below 0 where there are fewer
    row_stride,
    context,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    SORTED: tl.constexpr,
    MATCHES: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane, kept = tl.arange(0, BLOCK), tl.arange(0, KEPT)
    length = tl.load(lengths_ptr + request)
    inside = (length >= 0) & (length < context)
    # Before anything of a request was written, its row has the text of another.
    begun = inside & (length > 0)
    own = tl.load(slots_ptr + tl.load(rows_ptr + request, mask=begun, other=0), mask=begun, other=-1).to(tl.int64)
    last_ptr = history_ptr + request * row_stride + length
    clock = tl.load(clock_ptr)
    # Entries past MATCHES hold what no rank exceeds. Empty ones differ, so that one is replaced at a time.
    best = tl.where(kept < MATCHES, -1 - kept.to(tl.int64), 0x7FFFFFFFFFFFFFFF)

    behind = tl.load(sizes_ptr + own, mask=begun, other=1) - 1  # the last token is followed by none
    late = MAX_AGE - tl.minimum(clock - tl.load(stamps_ptr + own, mask=begun, other=0), MAX_AGE)
    whose = (1 << 56) | (late << 40) | (own << 24)
    for first in range(part * BLOCK, behind, parts * BLOCK):
        position = first + lane
        place_ptr = tokens_ptr + own * context + position
        matched = _match_length(last_ptr, length, place_ptr, position, position < behind, WINDOW)
        best = _keep(best, tl.where(matched > 0, (matched.to(tl.int64) << 57) | whose | position, NONE))

    if SHARED:
        cell = tl.load(cells_ptr + request)
        if SORTED:
            end = tl.load(ends_ptr + cell, mask=cell >= 0, other=0)
            begin = end - 1 - tl.load(counts_ptr + cell, mask=cell >= 0, other=-1)
        else:
            end = tl.load(counts_ptr) + 1
            begin = end * 0
        for first in range(begin + part * BLOCK, end, parts * BLOCK):
            hit = tl.load(hits_ptr + first + lane, mask=first + lane < end, other=NONE)
            text, position = (hit >> 24) & 0xFFFF, (hit & 0xFFFFFF).to(tl.int32)
            going = (hit >> 40 == cell) & (text != own)
            if tl.max(going.to(tl.int32), 0) > 0:
                place_ptr = tokens_ptr + text * context + position
                matched = _match_length(last_ptr, length, place_ptr, position, going, WINDOW)
                age = tl.minimum(clock - tl.load(stamps_ptr + text, mask=going, other=0), MAX_AGE)
                rank = (matched.to(tl.int64) << 57) | ((MAX_AGE - age) << 40) | (hit & 0xFFFFFFFFFF)
                # With a window of 1, those with two last tokens are no better than the rest.
                best = _keep(best, tl.where(matched > (1 if SORTED else 0), rank, NONE))
    out_ptr = ranks_ptr + (request * parts + part) * KEPT + kept
    tl.store(out_ptr, tl.where(kept < MATCHES, best, -1))
