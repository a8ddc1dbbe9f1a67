"""Scanning: the ends of the requests are entered in hash tables; then all histories are read once for all requests.

The time of a pass grows with the tokens of the histories, not with their product with the requests. It writes hits:
bucket of the requests that the hit concerns (17 bits), history (16), position (24).

Few requests: a position that holds a request's last token is a hit. Each request reads all hits.

Many requests: a position that ends with the last two tokens of a request is a hit. Hits are sorted by bucket, and a
request reads those of its own bucket. The continuation of a one-token match in another request's history is the same
for all requests with that last token, so each last token has one list of its latest positions, in falling order. A lane
inserts a position by atomic maxima, entry after entry, and carries the smaller of the two on: each entry ends as the
largest of what the entries before it passed on, in any order of the lanes. Entries only grow, so a position below the
last one is dropped. The ends of the latest histories are read in a pass of their own, before the rest: positions of a
frequent token fill its list there, and few others enter it.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from specdec_kernels.history import configs, types

MAX_AGE, NEW_HISTORIES = tl.constexpr(types.MAX_AGE), tl.constexpr(configs.NEW_HISTORIES)


@triton.jit
def _first_bucket(key, BITS: tl.constexpr):
    """First bucket to probe for a key in a table of 2^BITS buckets."""
    mixed = key.to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93
    return (mixed >> (64 - BITS)).to(tl.int64)


@triton.jit
def _bigram_key(before, token):
    """The key of two adjacent tokens, at least 0."""
    return ((before & 0x7FFFFFFF) << 32) | (token & 0xFFFFFFFF)


@triton.jit
def _enter(keys_ptr, key, entering, BITS: tl.constexpr):
    """The bucket of each key, which is entered where it is not in the table yet; -1 where not `entering`."""
    bucket = _first_bucket(key, BITS)
    searching = entering
    while tl.max(searching.to(tl.int32), 0) > 0:
        # A lane that has found its bucket swaps "empty" for "empty" there.
        seen = tl.atomic_cas(keys_ptr + bucket, key * 0 - 1, tl.where(searching, key, -1), sem="relaxed")
        searching = searching & (seen != -1) & (seen != key)
        bucket = tl.where(searching, (bucket + 1) & ((1 << BITS) - 1), bucket)
    return tl.where(entering, bucket, -1)


@triton.jit
def _look_up(keys_ptr, key, wanted, BITS: tl.constexpr):
    """The bucket of each key, -1 where the table does not have it."""
    bucket = _first_bucket(key, BITS)
    searching = wanted
    found = bucket * 0 - 1
    while tl.max(searching.to(tl.int32), 0) > 0:
        seen = tl.load(keys_ptr + bucket, mask=searching, other=-1)
        found = tl.where(searching & (seen == key), bucket, found)
        searching = searching & (seen != -1) & (seen != key)
        bucket = tl.where(searching, (bucket + 1) & ((1 << BITS) - 1), bucket)
    return found


@triton.jit(do_not_specialize=["requests", "row_stride", "context"])
def hash_requests_kernel(
    history_ptr,  # [B, context] int64
    lengths_ptr,  # [B] int64
    tokens_ptr,  # [2^BITS] int64, -1; out: last tokens
    bigrams_ptr,  # [2^BITS] int64, -1; out where BIGRAMS: keys of the last two tokens
    token_buckets_ptr,  # [B] int64, out: bucket of the last token, -1 where it lies outside
    bigram_buckets_ptr,  # [B] int64, out where BIGRAMS: bucket of the last two tokens, -1 where there are no two
    requests,
    row_stride,
    context,
    BIGRAMS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + request, mask=request < requests, other=-1)
    inside = (length >= 0) & (length < context)
    last_ptr = history_ptr + request * row_stride + length
    last = tl.load(last_ptr, mask=inside, other=0)
    bucket = _enter(tokens_ptr, last & 0xFFFFFFFF, inside, BITS)
    tl.store(token_buckets_ptr + request, bucket, mask=request < requests)
    if BIGRAMS:
        has_two = inside & (length > 0)
        before = tl.load(last_ptr - 1, mask=has_two, other=0)
        bucket = _enter(bigrams_ptr, _bigram_key(before, last), has_two, BITS)
        tl.store(bigram_buckets_ptr + request, bucket, mask=request < requests)


@triton.jit
def _insert_latest(list_ptr, rank, CANDIDATES: tl.constexpr):
    """Insert `rank` [BLOCK], -1 for none, into the sorted lists that begin at `list_ptr` [BLOCK]."""
    least = tl.load(list_ptr + CANDIDATES - 1, mask=rank >= 0, other=0)
    rank = tl.where(rank > least, rank, -1)
    entry = 0
    while (entry < CANDIDATES) & (tl.max(rank, 0) >= 0):
        # Without this load, an atomic would run where the entry is larger already and the rank only moves on.
        held = tl.load(list_ptr + entry, mask=rank >= 0, other=0, volatile=True)
        enters = rank > held
        before = tl.atomic_max(list_ptr + entry, rank, mask=enters, sem="relaxed")
        rank = tl.where(enters, tl.minimum(rank, before), rank)
        entry += 1


@triton.jit(do_not_specialize=["context"])
def scan_kernel(
    store,  # HistoryStore
    last_tokens_ptr,  # [2^BITS] int64: hash table of last tokens
    bigrams_ptr,  # [2^BITS] int64: hash table of last two tokens
    latest_ptr,  # [2^BITS, CANDIDATES] int64, -1; out: latest positions of each last token
    hits_ptr,  # [H * context] int64, out
    total_ptr,  # [1] int64, -1; out: number of hits, less one
    counts_ptr,  # [2^BITS] int64, -1; out: number of hits of each bucket, less one
    context,
    HISTORIES: tl.constexpr,
    BIGRAMS: tl.constexpr,
    NEWEST: tl.constexpr,  # where BIGRAMS: read the ends of the newest histories, or everything else
    CANDIDATES: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,  # positions of one history that a program reads
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    history = tl.program_id(0).to(tl.int64) * (BLOCK // WIDTH) + lane // WIDTH
    size = tl.load(store.lengths + history, mask=history < HISTORIES, other=0)
    position = (size - 1 - WIDTH if NEWEST else tl.program_id(1) * WIDTH) + lane % WIDTH
    live = (position >= 0) & (position < size - 1)  # no token follows the last one
    if BIGRAMS:
        stamp = tl.load(store.stamps + history, mask=live, other=0)
        age = tl.minimum(tl.load(store.clock) - stamp, MAX_AGE)
        newest = (age < NEW_HISTORIES) & (position >= size - 1 - WIDTH)
        live = live & (newest if NEWEST else newest == 0)
    if tl.max(live.to(tl.int32), 0) > 0:
        place_ptr = store.tokens + history * context + position
        token = tl.load(place_ptr, mask=live, other=0).to(tl.int64)
        bucket = _look_up(last_tokens_ptr, token & 0xFFFFFFFF, live, BITS)
        if BIGRAMS:
            rank = ((MAX_AGE - age) << 40) | (history << 24) | position | (1 << 57)
            _insert_latest(latest_ptr + bucket * CANDIDATES, tl.where(bucket >= 0, rank, -1), CANDIDATES)
            has_two = (bucket >= 0) & (position > 0)
            before = tl.load(place_ptr - 1, mask=has_two, other=0).to(tl.int64)
            bucket = _look_up(bigrams_ptr, _bigram_key(before, token), has_two, BITS)
            tl.atomic_add(counts_ptr + bucket, 1, mask=bucket >= 0, sem="relaxed")
        hit = bucket >= 0
        if tl.max(hit.to(tl.int32), 0) > 0:
            number = tl.cumsum(hit.to(tl.int64), 0)
            # The counter begins at -1, and numbers at 1.
            first = tl.atomic_add(total_ptr, tl.max(number, 0), sem="relaxed")
            tl.store(hits_ptr + first + number, (bucket << 40) | (history << 24) | position, mask=hit)


@triton.jit
def bucket_offsets_kernel(
    counts_ptr,  # [2^BITS] int64: hits of each bucket, less one
    total_ptr,  # [1] int64, -1; written
    begins_ptr,  # [2^BITS] int64, out: where the hits of each bucket begin, in any order of the buckets
    BLOCK: tl.constexpr,
):
    bucket = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + bucket) + 1
    first = tl.atomic_add(total_ptr, tl.sum(count, 0), sem="relaxed") + 1
    tl.store(begins_ptr + bucket, first + tl.cumsum(count, 0) - count)


@triton.jit
def sort_hits_kernel(
    hits_ptr,  # [H * context] int64
    total_ptr,  # [1] int64: number of hits, less one
    begins_ptr,  # [2^BITS] int64: where the hits of each bucket begin; becomes where they end
    sorted_ptr,  # [H * context] int64, out: the hits of each bucket together, in any order
    BLOCK: tl.constexpr,
):
    total = tl.load(total_ptr) + 1
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < total
        hit = tl.load(hits_ptr + place, mask=inside, other=-1)
        target = tl.atomic_add(begins_ptr + (hit >> 40), 1, mask=inside, sem="relaxed")
        tl.store(sorted_ptr + target, hit, mask=inside)
