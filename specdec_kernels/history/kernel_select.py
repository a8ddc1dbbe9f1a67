"""Selection: a few programs a request compare its end with its own history and with the hits that concern it, and keep
the best matches.

A match is ranked by one 63-bit number: length (6 bits), own history (1), how late the history is (16), history (16),
position (24).
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specdec_kernels.history import types

MAX_AGE = tl.constexpr(types.MAX_AGE)
NONE = tl.constexpr(-(1 << 62))
"""Less than every rank, and than every empty entry of a list."""
UNROLL = tl.constexpr(4)
"""Tokens that are loaded before the first of them is compared, so that the loads do not wait for each other."""


class Scan(NamedTuple):
    """Result of reading the histories, int64; without shared histories nothing of it is read."""

    buckets: Any  # [B]: bucket of the hits that concern the request, -1 for none
    hits: Any  # [H * context], sorted by bucket where SORTED
    counts: Any  # number of hits, less one: [2^BITS] of each bucket, or [1] of all
    ends: Any  # [2^BITS]: where the hits of each bucket end
    latest: Any  # [2^BITS, CANDIDATES]: places of each last token, falling, -1 after the last; only where SORTED
    token_buckets: Any  # [B]: list of the request in `latest`, -1 for none


@triton.jit
def _match_length(last_ptr, length, place_ptr, position, matching, MAX_NGRAM: tl.constexpr):
    """[BLOCK] int32: how many last tokens of the request end at `position` of a history, to which `place_ptr` points;
    `last_ptr` points to the request's last token, at position `length`."""
    matched = position * 0
    back = 0
    while (back < MAX_NGRAM) & (tl.max(matching.to(tl.int32), 0) > 0):
        reading = matching
        for ahead in tl.static_range(UNROLL):
            exists = (back + ahead < MAX_NGRAM) & (back + ahead <= length)
            wanted = tl.load(last_ptr - back - ahead, mask=exists, other=0)
            reads = reading & exists & (position >= back + ahead)
            given = tl.load(place_ptr - back - ahead, mask=reads, other=0).to(tl.int64)
            matching = matching & reads & (given == wanted)
            matched += matching.to(tl.int32)
        back += UNROLL
    return matched


@triton.jit
def _keep_best(best, rank):
    """`best` with the entries of `rank` that are larger."""
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
    slots_ptr,  # [B] int64
    store,  # HistoryStore
    scan,  # Scan
    ranks_ptr,  # [B, PARTS, KEPT] int64, out: the best matches of each program, below 0 where there are fewer
    row_stride,
    context,
    MAX_NGRAM: tl.constexpr,
    SHARED: tl.constexpr,
    SORTED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    kept = tl.arange(0, KEPT)
    length = tl.load(lengths_ptr + request)
    # Before anything of a request was written, its slot has the history of another request.
    written = (length > 0) & (length < context)
    own = tl.load(store.of_slot + tl.load(slots_ptr + request, mask=written, other=0), mask=written, other=-1)
    own = own.to(tl.int64)
    last_ptr = history_ptr + request * row_stride + length
    clock = tl.load(store.clock)
    # Entries past CANDIDATES hold what no rank exceeds. Empty ones differ, so that one is replaced at a time.
    best = tl.where(kept < CANDIDATES, -1 - kept.to(tl.int64), 0x7FFFFFFFFFFFFFFF)

    end_of_own = tl.load(store.lengths + own, mask=written, other=1) - 1  # no token follows the last one
    late = MAX_AGE - tl.minimum(clock - tl.load(store.stamps + own, mask=written, other=0), MAX_AGE)
    own_rank = (1 << 56) | (late << 40) | (own << 24)
    for first in range(part * BLOCK, end_of_own, parts * BLOCK):
        position = first + lane
        place_ptr = store.tokens + own * context + position
        matched = _match_length(last_ptr, length, place_ptr, position, position < end_of_own, MAX_NGRAM)
        best = _keep_best(best, tl.where(matched > 0, (matched.to(tl.int64) << 57) | own_rank | position, NONE))

    if SHARED:
        bucket = tl.load(scan.buckets + request)
        if SORTED:
            end = tl.load(scan.ends + bucket, mask=bucket >= 0, other=0)
            begin = end - 1 - tl.load(scan.counts + bucket, mask=bucket >= 0, other=-1)
        else:
            end = tl.load(scan.counts) + 1
            begin = end * 0
        for first in range(begin + part * BLOCK, end, parts * BLOCK):
            hit = tl.load(scan.hits + first + lane, mask=first + lane < end, other=NONE)
            other = (hit >> 24) & 0xFFFF
            position = (hit & 0xFFFFFF).to(tl.int32)
            matching = (hit >> 40 == bucket) & (other != own)
            if tl.max(matching.to(tl.int32), 0) > 0:
                place_ptr = store.tokens + other * context + position
                matched = _match_length(last_ptr, length, place_ptr, position, matching, MAX_NGRAM)
                age = tl.minimum(clock - tl.load(store.stamps + other, mask=matching, other=0), MAX_AGE)
                rank = (matched.to(tl.int64) << 57) | ((MAX_AGE - age) << 40) | (hit & 0xFFFFFFFFFF)
                # Sorted hits match two tokens; with `max_ngram` 1 they are no better than the listed ones of one token.
                best = _keep_best(best, tl.where(matched > (1 if SORTED else 0), rank, NONE))
    out_ptr = ranks_ptr + (request * parts + part) * KEPT + kept
    tl.store(out_ptr, tl.where(kept < CANDIDATES, best, -1))
