"""Finding: requests are filed by their last tokens; then the texts are read once for all requests together.

A pass reads each position of each text once. Its time grows with the tokens of the texts, and not with their product
with the requests. It writes hits, each with the cell in which the requests that it concerns are filed: cell (17 bits),
text (16), position (24).

Few requests: a position where a request's last token stands is a hit. Each request reads all hits.

Many requests: a hit is a position where the last two tokens of a request stand. Hits are sorted by cell, so that a
request reads those of its own cell alone. What follows a match of one token in the text of another is the same for all
requests with that last token, so each last token has one list of its latest positions, in falling order. A lane brings
a position in by atomic maxima, entry after entry, and carries on the smaller of the two: so each entry ends as the
largest of what the entries before it left, in whatever order lanes run. Entries only grow, so what is below the last
one is dropped. The ends of the latest texts are read in a pass of their own, before the rest: where a token is frequent
they fill its list, and few others enter it.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.texts import configs, types

MAX_AGE, NEW_TEXTS = tl.constexpr(types.MAX_AGE), tl.constexpr(configs.NEW_TEXTS)


@triton.jit
def _first_cell(key, BITS: tl.constexpr):
    """Where probing for a key begins in a table of 2^BITS cells."""
    mixed = key.to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93
    return (mixed >> (64 - BITS)).to(tl.int64)


@triton.jit
def _pair(before, token):
    """The key of two neighbouring tokens, at least 0."""
    return ((before & 0x7FFFFFFF) << 32) | (token & 0xFFFFFFFF)


@triton.jit
def _file(keys_ptr, key, filing, BITS: tl.constexpr):
    """The cell of each key, which is entered where it is not there yet; -1 where none is filed."""
    cell = _first_cell(key, BITS)
    searching = filing
    while tl.max(searching.to(tl.int32), 0) > 0:
        # A lane that has found its cell swaps "empty" for "empty" there.
        seen = tl.atomic_cas(keys_ptr + cell, key * 0 - 1, tl.where(searching, key, -1), sem="relaxed")
        searching = searching & (seen != -1) & (seen != key)
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)
    return tl.where(filing, cell, -1)


@triton.jit
def _find(keys_ptr, key, wanted, BITS: tl.constexpr):
    """The cell of each key, -1 where it is not filed."""
    cell = _first_cell(key, BITS)
    searching = wanted
    found = cell * 0 - 1
    while tl.max(searching.to(tl.int32), 0) > 0:
        seen = tl.load(keys_ptr + cell, mask=searching, other=-1)
        found = tl.where(searching & (seen == key), cell, found)
        searching = searching & (seen != -1) & (seen != key)
        cell = tl.where(searching, (cell + 1) & ((1 << BITS) - 1), cell)
    return found


@triton.jit(do_not_specialize=["requests", "row_stride", "context"])
def file_requests_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [2^BITS] int64, -1; out: last tokens
    pairs_ptr,  # [2^BITS] int64, -1; out where PAIRS: keys of the last two tokens
    homes_ptr,  # [B] int64, out: cell of the last token, -1 where it lies outside
    cells_ptr,  # [B] int64, out where PAIRS: cell of the last two tokens, -1 where there are no two
    requests,
    row_stride,
    context,
    PAIRS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + request, mask=request < requests, other=-1)
    inside = (length >= 0) & (length < context)
    last_ptr = history_ptr + request * row_stride + length
    last = tl.load(last_ptr, mask=inside, other=0)
    home = _file(tokens_ptr, last & 0xFFFFFFFF, inside, BITS)
    tl.store(homes_ptr + request, home, mask=request < requests)
    if PAIRS:
        begun = inside & (length > 0)
        before = tl.load(last_ptr - 1, mask=begun, other=0)
        cell = _file(pairs_ptr, _pair(before, last), begun, BITS)
        tl.store(cells_ptr + request, cell, mask=request < requests)


@triton.jit
def _offer(list_ptr, rank, MATCHES: tl.constexpr):
    """Bring `rank` [BLOCK], -1 for none, into the lists that begin at `list_ptr` [BLOCK]."""
    least = tl.load(list_ptr + MATCHES - 1, mask=rank >= 0, other=0)
    rank = tl.where(rank > least, rank, -1)
    entry = 0
    while (entry < MATCHES) & (tl.max(rank, 0) >= 0):
        # An entry that is larger already would only hand the rank on.
        held = tl.load(list_ptr + entry, mask=rank >= 0, other=0, volatile=True)
        enters = rank > held
        before = tl.atomic_max(list_ptr + entry, rank, mask=enters, sem="relaxed")
        rank = tl.where(enters, tl.minimum(rank, before), rank)
        entry += 1


@triton.jit(do_not_specialize=["context"])
def find_kernel(
    tokens_ptr,  # [S, context] int32
    sizes_ptr,  # [S] int32
    stamps_ptr,  # [S] int64
    clock_ptr,  # [1] int64
    filed_ptr,  # [2^BITS] int64: last tokens
    pairs_ptr,  # [2^BITS] int64: keys of the last two tokens
    latest_ptr,  # [2^BITS, MATCHES] int64, -1; out: of each last token its latest positions
    hits_ptr,  # [S * context] int64, out
    total_ptr,  # [1] int64, -1; out: how many hits there are, less one
    counts_ptr,  # [2^BITS] int64, -1; out: how many of each cell, less one
    context,
    TEXTS: tl.constexpr,
    PAIRS: tl.constexpr,
    NEWEST: tl.constexpr,  # where PAIRS: read the ends of the newest texts, or everything else
    MATCHES: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # positions of one text that a program reads
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    text = tl.program_id(0).to(tl.int64) * (BLOCK // WIDTH) + lane // WIDTH
    size = tl.load(sizes_ptr + text, mask=text < TEXTS, other=0)
    position = (size - 1 - WIDTH if NEWEST else tl.program_id(1) * WIDTH) + lane % WIDTH
    live = (position >= 0) & (position < size - 1)
    if PAIRS:
        stamp = tl.load(stamps_ptr + text, mask=live, other=0)
        age = tl.minimum(tl.load(clock_ptr) - stamp, MAX_AGE)
        newest = (age < NEW_TEXTS) & (position >= size - 1 - WIDTH)
        live = live & (newest if NEWEST else newest == 0)
    if tl.max(live.to(tl.int32), 0) > 0:
        place_ptr = tokens_ptr + text * context + position
        token = tl.load(place_ptr, mask=live, other=0).to(tl.int64)
        cell = _find(filed_ptr, token & 0xFFFFFFFF, live, BITS)
        if PAIRS:
            rank = ((MAX_AGE - age) << 40) | (text << 24) | position | (1 << 57)
            _offer(latest_ptr + cell * MATCHES, tl.where(cell >= 0, rank, -1), MATCHES)
            paired = (cell >= 0) & (position > 0)
            before = tl.load(place_ptr - 1, mask=paired, other=0).to(tl.int64)
            cell = _find(pairs_ptr, _pair(before, token), paired, BITS)
            tl.atomic_add(counts_ptr + cell, 1, mask=cell >= 0, sem="relaxed")
        hit = cell >= 0
        if tl.max(hit.to(tl.int32), 0) > 0:
            number = tl.cumsum(hit.to(tl.int64), 0)
            # The counter begins at -1, and numbers at 1.
            first = tl.atomic_add(total_ptr, tl.max(number, 0), sem="relaxed")
            tl.store(hits_ptr + first + number, (cell << 40) | (text << 24) | position, mask=hit)


@triton.jit
def divide_kernel(
    counts_ptr,  # [2^BITS] int64: hits of each cell, less one
    total_ptr,  # [1] int64, -1; written
    begins_ptr,  # [2^BITS] int64, out: where the hits of each cell begin, in any order of the cells
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + cell) + 1
    first = tl.atomic_add(total_ptr, tl.sum(count, 0), sem="relaxed") + 1
    tl.store(begins_ptr + cell, first + tl.cumsum(count, 0) - count)


@triton.jit
def sort_kernel(
    hits_ptr,  # [S * context] int64
    total_ptr,  # [1] int64: how many there are, less one
    begins_ptr,  # [2^BITS] int64: where the hits of each cell begin; becomes where they end
    sorted_ptr,  # [S * context] int64, out: the hits of each cell together, in any order
    BLOCK: tl.constexpr,
):
    total = tl.load(total_ptr) + 1
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < total
        hit = tl.load(hits_ptr + place, mask=inside, other=-1)
        target = tl.atomic_add(begins_ptr + (hit >> 40), 1, mask=inside, sem="relaxed")
        tl.store(sorted_ptr + target, hit, mask=inside)
