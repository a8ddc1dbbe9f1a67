# mypy: ignore-errors
"""Thresholds of deferred rows: those whose kept tokens do not fit the slots of a program of `kernel_filter`.

All other rows are not read here. The deferred rows stand in a queue, so that their chunks spread over the whole device
however many there are. Four launches:

1. pivots, twice: the weight above each of six trial thresholds (pivots) around a sampled guess, chunk by chunk. Their
   sums enclose the row's threshold between two neighbouring pivots. Only rows that this leaves
   with many values between the pivots, or with a threshold outside all of them, get six more.
2. candidates: the weight above the upper pivot, and the values between the pivots, written down in the order of the
   row.
3. resolve, one program per row: the threshold by bisection over the candidates in registers, and the kept weight of
   every chunk. A draw selects a chunk by them, and reads that chunk alone again.

So a row is read three or four times in all, counting the statistics, however flat it is. A chunk with more candidates
than there is room for, and a top-k beyond the slots, are settled by bisection over the row in memory instead.
The order of the queue depends on timing, and nothing else does: every sum belongs to a chunk, and chunks are added in
their order.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.overlap import let_next_kernel_start, overlapped, wait_for_kernel_ahead
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.configs import SelectionConfig
from specdec_kernels.sampling.types import SamplingTensors

# What a row's draw goes by.
NEAR = tl.constexpr(-1)  # its slots
WHOLE = tl.constexpr(0)  # its strips and groups: no filter cuts
# Its chunks, and what is to be done for them first:
SEARCH = tl.constexpr(1)  # top-p: the first pivots are known
FIXED = tl.constexpr(2)  # min-p alone: the threshold is known, its weight is not
COUNT = tl.constexpr(3)  # top-k beyond the slots: the threshold has to be found in the whole row
PIVOTS = tl.constexpr(6)  # of each of two rounds
_HALVINGS = tl.constexpr(12)
NUM_PIVOTS, STATES = 12, 8
_LANES_OF_PIVOTS = tl.constexpr(16)


@triton.jit
def store_state(state_ptr, row, in_row, rows, mode, goal, ceiling, lowest, everything, top, reached):
    """What the launches after selection need of a row, [8, R] float32; the last is whether it has a second round."""
    tl.store(state_ptr + row, mode.to(tl.float32), mask=in_row)
    tl.store(state_ptr + rows + row, goal, mask=in_row)
    tl.store(state_ptr + 2 * rows + row, ceiling, mask=in_row)
    tl.store(state_ptr + 3 * rows + row, lowest, mask=in_row)
    tl.store(state_ptr + 4 * rows + row, everything, mask=in_row)
    tl.store(state_ptr + 5 * rows + row, d.finite(top), mask=in_row)
    tl.store(state_ptr + 6 * rows + row, reached, mask=in_row)


@triton.jit
def sample_groups(
    values_ptr, row, asks, row_stride,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Values [R, SLOTS * WIDTH] of groups that are spread over the row."""
    member = tl.arange(0, SLOTS * WIDTH)[None, :]
    column = member // WIDTH * (GROUPS // SLOTS) * WIDTH + member % WIDTH + tl.zeros_like(row)[:, None]
    return d.load_entries(values_ptr, row[:, None], column, row_stride, asks[:, None] & (column < VOCAB))


@triton.jit
def store_pivots(
    value, pivots_ptr, row, asks, rows, complete, reached, goal, everything, top, scale,
    SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """The first pivots [6, R] in rising order around the value where the threshold of top-p should lie.

    The weight `reached` at or above the key `complete` is known. What lies below is estimated from the values of
    `sample_groups`, which also give the guess's standard deviation and the density of weight around it.
    """
    value = d.usable(value)
    limit = d.key_value(complete.to(tl.int32), SHIFT)
    weight = tl.where(value < limit[:, None], d.weigh(value, top[:, None], scale[:, None], PROBS), 0.0)
    sampled = tl.sum(weight, 1)
    below = everything - reached
    share = tl.minimum(tl.maximum((goal - reached) / tl.where(below > 0, below, 1.0), 0.0), 1.0)
    # By halves of an interval of the weight's logarithm, because floats have as many keys near zero as elsewhere.
    high = tl.log2(tl.maximum(d.weigh(limit, top, scale, PROBS), 1e-30))
    low = high - 32.0
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        above = tl.sum(tl.where(weight > tl.exp2(middle)[:, None], weight, 0.0), 1)
        high = tl.where(above < share * sampled, middle, high)
        low = tl.where(above < share * sampled, low, middle)
    at_center = tl.exp2(high)
    center = at_center if PROBS else tl.minimum(top + high / scale, limit)
    off = tl.where(weight > at_center[:, None], 1.0 - share[:, None], share[:, None]) * weight
    near = (weight > 0.78 * at_center[:, None]) & (weight < 1.28 * at_center[:, None])
    density = tl.sum(tl.where(near, weight, 0.0), 1) * 2.0  # a natural unit of the logarithm
    spread = tl.sqrt(tl.sum(off * off, 1))
    spread = tl.minimum(tl.maximum(tl.where(density > 0, spread / tl.where(density > 0, density, 1.0), 2.0), 1e-4), 2.0)
    for pivot in tl.static_range(PIVOTS):
        side, nth = (-1.0 if pivot < PIVOTS // 2 else 1.0), (2 - pivot if pivot < 3 else pivot - 3)
        step = side * (0.38 if nth == 0 else 1.2 if nth == 1 else 3.2) * spread * d.LOG2E
        place = center * tl.exp2(step) if PROBS else center + step / scale
        tl.store(pivots_ptr + pivot * rows + row, tl.minimum(place, limit), mask=asks)


@triton.jit
def enqueue(queue_ptr, row, deferred):
    """Append rows to the queue: its length, then the rows."""
    place = tl.atomic_add(queue_ptr + row * 0, 1, mask=deferred, sem="relaxed")
    tl.store(queue_ptr + 1 + place, row, mask=deferred)


@triton.jit
def _task(queue_ptr, first, end, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Rows and chunks of the tasks from `first` on, and which of them there are."""
    task = first + tl.arange(0, BLOCK_T)
    there = task < end
    row = tl.load(queue_ptr + 1 + task // CHUNKS, mask=there, other=0)
    return row, task % CHUNKS, there


@triton.jit
def _enclose(
    state_ptr, pivots_ptr, parts_ptr, row, asks, rows, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """The values low and high between which the threshold lies, low < threshold <= high, and the weight between them,
    from the weights above the pivots."""
    goal = tl.load(state_ptr + rows + row, mask=asks, other=0.0)
    ceiling = tl.load(state_ptr + 2 * rows + row, mask=asks, other=0.0)
    everything = tl.load(state_ptr + 4 * rows + row, mask=asks, other=0.0)
    reached = tl.load(state_ptr + 6 * rows + row, mask=asks, other=0.0)
    pivot = tl.arange(0, _LANES_OF_PIVOTS)[None, :]
    known = asks[:, None] & (pivot < PIVOTS)
    if ROUNDS > 1:
        wide = asks & (tl.load(state_ptr + 7 * rows + row, mask=asks, other=0.0) > 0)
        known |= wide[:, None] & (pivot < 2 * PIVOTS)
    part = tl.arange(0, BLOCK_C)[None, None, :]
    place = pivot * rows + row[:, None]
    parts = parts_ptr + place.to(tl.int64)[:, :, None] * CHUNKS + part
    above = tl.sum(tl.load(parts, mask=known[:, :, None] & (part < CHUNKS), other=0.0), 2)
    value = tl.load(pivots_ptr + place, mask=known, other=0.0)
    falls, rises = known & (above < goal[:, None]), known & (above >= goal[:, None])
    high = tl.minimum(tl.min(tl.where(falls, value, float("inf")), 1), ceiling)
    over_high = tl.maximum(tl.max(tl.where(falls, above, 0.0), 1), reached)
    low = tl.max(tl.where(rises, value, float("-inf")), 1)
    over_low = tl.minimum(tl.min(tl.where(rises, above, float("inf")), 1), everything)
    return low, high, over_low - over_high


@triton.jit
def _chunk_values(
    values_ptr, row, chunk, there, row_stride, VOCAB: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Values [T, BLOCK_V] of a chunk of each row, NaN among them."""
    column = chunk[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    return d.load_entries(values_ptr, row[:, None], column, row_stride, there[:, None] & (column < VOCAB))


@triton.jit
def _chunk_weights(
    value, temperature_ptr, state_ptr, row, asks, rows, PER_REQUEST: tl.constexpr, PROBS: tl.constexpr
):  # fmt: skip
    """Weights of the values that are not NaN."""
    temperature = tl.load(temperature_ptr + row // PER_REQUEST, mask=asks, other=1.0)
    top = tl.load(state_ptr + 5 * rows + row, mask=asks, other=0.0)
    # No usable value is above the top, so this replaces an infinity; NaN fails every comparison.
    capped = tl.minimum(value, top[:, None])
    return d.weigh(capped, top[:, None], d.exponent_scale(temperature)[:, None], PROBS)


@triton.jit
def _store_second_pivots(
    temperature_ptr, state_ptr, pivots_ptr, parts_ptr, edges_ptr, row, chunk, asks, rows,
    PER_REQUEST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, ROOM: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Marks between the edges that the first round left, of the rows with about more than ROOM values between them.

    Every chunk of a row computes them for itself and stores them in its own place of `edges_ptr`: to spread the
    result of a sum over the chunk's layout would be expensive, to load it is not. The first chunk publishes them.
    """
    low, high, between = _enclose(state_ptr, pivots_ptr, parts_ptr, row, asks, rows, CHUNKS, BLOCK_C, 1)
    least = tl.load(pivots_ptr + row, mask=asks, other=0.0)
    most = tl.load(pivots_ptr + (PIVOTS - 1) * rows + row, mask=asks, other=0.0)
    top = tl.load(state_ptr + 5 * rows + row, mask=asks, other=0.0)
    temperature = tl.load(temperature_ptr + row // PER_REQUEST, mask=asks, other=1.0)
    below, beyond = low < least, low >= most
    each = d.weigh(tl.where(below, high, (low + high) * 0.5), top, d.exponent_scale(temperature), PROBS)
    wide = asks & (high > low) & (below | (between > each * ROOM))
    first = chunk == 0
    tl.store(state_ptr + 7 * rows + row, wide.to(tl.float32), mask=asks & first)
    place = edges_ptr + (row * CHUNKS + chunk) * (PIVOTS + 1)
    tl.store(place, wide.to(tl.float32), mask=asks)
    for pivot in tl.static_range(PIVOTS):
        # Where the guess missed, ever longer steps away from it.
        away = (most - least) * (0.2 * 3.0**pivot)
        value = tl.where(below, least - away, low + (high - low) * ((pivot + 1) / (PIVOTS + 1)))
        value = tl.minimum(tl.where(beyond, most + away, value), high)
        tl.store(place + pivot + 1, value, mask=asks)
        tl.store(pivots_ptr + (PIVOTS + pivot) * rows + row, value, mask=wide & first)
    tl.debug_barrier()


@triton.jit
def _above(value, weight, limit_ptr, asks):
    """Weight of the values above each row's limit."""
    limit = tl.load(limit_ptr, mask=asks, other=0.0)
    return tl.sum(tl.where(value > limit[:, None], weight, 0.0), 1)


@triton.jit(do_not_specialize=["rows"])
def _pivots_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    queue_ptr,  # [1 + R] int32
    state_ptr,  # [8, R] float32
    pivots_ptr,  # [12, R] float32; the last six are written by the second round
    parts_ptr,  # [12, R, CHUNKS] float32: weight above each pivot in each chunk
    edges_ptr,  # [R, CHUNKS, 7] float32: scratch of the second round
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROOM: tl.constexpr,
    PROBS: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    end = tl.load(queue_ptr) * CHUNKS
    for start in range(tl.program_id(0) * BLOCK_T, end, tl.num_programs(0) * BLOCK_T):
        row, chunk, there = _task(queue_ptr, start, end, CHUNKS, BLOCK_T)
        if SECOND:
            asks = tl.load(state_ptr + row, mask=there, other=0.0) == SEARCH
            _store_second_pivots(
                temperature_ptr, state_ptr, pivots_ptr, parts_ptr, edges_ptr, row, chunk, asks, rows, PER_REQUEST,
                CHUNKS, BLOCK_C, ROOM, PROBS,
            )  # fmt: skip
            mine = edges_ptr + (row * CHUNKS + chunk) * (PIVOTS + 1)
            asks &= tl.load(mine, mask=asks, other=0.0) > 0
            base, step, there = mine + 1, 1, asks
        value = _chunk_values(values_ptr, row, chunk, there, row_stride, VOCAB, BLOCK_V)
        if SECOND == 0:
            asks = tl.load(state_ptr + row, mask=there, other=0.0) == SEARCH
            base, step = pivots_ptr + row, rows
        if tl.max(asks.to(tl.int32), 0) > 0:
            weight = _chunk_weights(value, temperature_ptr, state_ptr, row, asks, rows, PER_REQUEST, PROBS)
            for pivot in tl.static_range(PIVOTS):
                above = _above(value, weight, base + pivot * step, asks)
                place = ((PIVOTS if SECOND else 0) + pivot) * rows + row
                tl.store(parts_ptr + place.to(tl.int64) * CHUNKS + chunk, above, mask=asks)


@triton.jit
def _store_edges(
    state_ptr, pivots_ptr, parts_ptr, edges_ptr, row, chunk, asks, rows, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Store low and high of each row in this chunk's place in `edges_ptr`; where min-p cuts above, or nothing is
    searched for, both are the greatest value that the threshold leaves out."""
    mode = tl.load(state_ptr + row, mask=asks, other=0.0)
    low, high, _ = _enclose(state_ptr, pivots_ptr, parts_ptr, row, asks & (mode == SEARCH), rows, CHUNKS, BLOCK_C, 2)
    lowest = tl.load(state_ptr + 3 * rows + row, mask=asks, other=0.0)
    fixed = (mode == FIXED) | (lowest > high)
    left_out = d.next_below(lowest)
    place = edges_ptr + (row * CHUNKS + chunk) * 2
    tl.store(place, tl.where(fixed, left_out, low), mask=asks)
    tl.store(place + 1, tl.where(fixed, left_out, high), mask=asks)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows"])
def _candidates_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    queue_ptr,  # [1 + R] int32
    state_ptr,  # [8, R] float32
    pivots_ptr,  # [12, R] float32
    parts_ptr,  # [12, R, CHUNKS] float32
    edges_ptr,  # [R, CHUNKS, 2] float32: low and high, the same in every chunk
    mass_ptr,  # [R, CHUNKS] float32: weight above high
    counts_ptr,  # [R, CHUNKS] int32: values above low and not above high
    candidates_ptr,  # [R, CHUNKS, KEEP] float32: the first of these values
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    end = tl.load(queue_ptr) * CHUNKS
    for start in range(tl.program_id(0) * BLOCK_T, end, tl.num_programs(0) * BLOCK_T):
        row, chunk, there = _task(queue_ptr, start, end, CHUNKS, BLOCK_T)
        value = _chunk_values(values_ptr, row, chunk, there, row_stride, VOCAB, BLOCK_V)
        task = tl.load(state_ptr + row, mask=there, other=0.0)
        asks = (task == SEARCH) | (task == FIXED)
        if tl.max(asks.to(tl.int32), 0) > 0:
            _store_edges(state_ptr, pivots_ptr, parts_ptr, edges_ptr, row, chunk, asks, rows, CHUNKS, BLOCK_C)
            weight = _chunk_weights(value, temperature_ptr, state_ptr, row, asks, rows, PER_REQUEST, PROBS)
            place = row * CHUNKS + chunk
            low = tl.load(edges_ptr + place * 2, mask=asks, other=0.0)
            high = tl.load(edges_ptr + place * 2 + 1, mask=asks, other=0.0)
            mass = tl.sum(tl.where(value > high[:, None], weight, 0.0), 1)
            tl.store(mass_ptr + place, mass, mask=asks)
            inside = asks[:, None] & (value > low[:, None]) & (value <= high[:, None])
            running = tl.cumsum(inside.to(tl.int32), 1)
            tl.store(counts_ptr + place, tl.max(running, 1), mask=asks)
            slot = place.to(tl.int64)[:, None] * KEEP + running - 1
            tl.store(candidates_ptr + slot, value, mask=inside & (running <= KEEP))


@triton.jit
def _floor_in_memory(
    values_ptr, row, asks, row_stride, low, high, wanted, share, everything, top, scale,
    VOCAB: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Threshold of top-k and top-p from the whole row; without top-k its key lies in (low, high]."""
    by_count, by_mass = asks & (wanted > 0), asks & (share < 1)
    bottom = d.sort_key(tl.full(top.shape, float("-inf"), tl.float32), SHIFT).to(tl.int64)
    key_top = d.sort_key(top, SHIFT).to(tl.int64)
    kth = d.streamed_kth_key(
        values_ptr, row, row_stride, wanted, bottom, tl.where(by_count, key_top + 1, bottom + 1), VOCAB, SHIFT, BLOCK_V
    )  # fmt: skip
    counted = d.streamed_mass(
        values_ptr, row, by_count & by_mass, row_stride, (kth - 1).to(tl.int32), top, scale, VOCAB, SHIFT, PROBS,
        BLOCK_V,
    )  # fmt: skip
    goal = share * tl.where(by_count, counted, everything)
    low, high = tl.where(by_count, kth - 1, low), tl.where(by_count, key_top, high)
    found = d.streamed_mass_key(
        values_ptr, row, row_stride, goal, low, tl.where(by_mass, high, low + 1), top, scale, VOCAB, SHIFT, PROBS,
        BLOCK_V,
    )  # fmt: skip
    return tl.where(by_mass, found, kth)


@triton.jit
def _store_kept_mass(
    values_ptr, mass_ptr, row, asks, row_stride, floor, top, scale,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store the weight that the threshold leaves in each chunk, for the rows in `asks`."""
    for chunk in range(0, CHUNKS):
        column = chunk * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        value = d.load_values(values_ptr, row[:, None], column, row_stride, asks[:, None] & (column < VOCAB))
        weight = d.weigh(value, top[:, None], scale[:, None], PROBS)
        kept = tl.sum(tl.where(value >= floor[:, None], weight, 0.0), 1)
        tl.store(mass_ptr + row * CHUNKS + chunk, kept, mask=asks)
    tl.debug_barrier()


@triton.jit
def _search_candidates(
    value, live, fits, top, scale, left, low_key, high_key, found, far, lowest,
    KEEP: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Threshold of each row, and the weight [R, BLOCK_C] that it leaves of the candidates of the rows that `fits`.

    `left` is the weight that these rows still lack; the key of the rows that are `far` is `found` already.
    """
    value = tl.minimum(tl.where(live, value, float("-inf")), d.FLOAT32_MAX)
    weight = tl.where(live, d.weigh(value, top[:, None], scale[:, None], PROBS), 0.0)
    key = d.sort_key(value, SHIFT)
    searched = d.mass_key(key, weight, left, low_key, tl.where(fits, high_key, low_key + 1))
    found = tl.where(fits, searched, found)
    floor = tl.where(far | fits, d.key_value(found.to(tl.int32), SHIFT), float("-inf"))
    floor = tl.maximum(floor, lowest)
    # The value from its key again: keeping both through the search would spill.
    kept = tl.where(d.key_value(key, SHIFT) >= floor[:, None], weight, 0.0)
    return floor, tl.sum(tl.reshape(kept, (BLOCK_R, BLOCK_C, KEEP)), 2)


@triton.jit(do_not_specialize=["rows"])
def _resolve_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    top_k_ptr,  # [R / PER_REQUEST] int32, or None
    top_p_ptr,  # [R / PER_REQUEST] float32, or None
    state_ptr,  # [8, R] float32
    edges_ptr,  # [R, CHUNKS, 2] float32
    mass_ptr,  # [R, CHUNKS] float32: weight above the candidates, then the weight that is kept
    counts_ptr,  # [R, CHUNKS] int32
    candidates_ptr,  # [R, CHUNKS, KEEP] float32
    distribution_ptr,  # [4, R] float32: floor and total are written, the second and the third
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP: tl.constexpr,
    PROBS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    task = tl.load(state_ptr + row, mask=row < rows, other=0.0)
    asks = (row < rows) & (task > WHOLE)
    if tl.max(asks.to(tl.int32), 0) > 0:
        request = row // PER_REQUEST
        lowest = tl.load(state_ptr + 3 * rows + row, mask=asks, other=0.0)
        everything = tl.load(state_ptr + 4 * rows + row, mask=asks, other=0.0)
        top = tl.load(state_ptr + 5 * rows + row, mask=asks, other=0.0)
        scale = d.exponent_scale(tl.load(temperature_ptr + request, mask=asks, other=1.0))
        wanted, share = d.count_and_share(top_k_ptr, top_p_ptr, request, asks, VOCAB)
        listed = asks & (task != COUNT)
        low = tl.load(edges_ptr + row * (CHUNKS * 2), mask=listed, other=0.0)
        high = tl.load(edges_ptr + row * (CHUNKS * 2) + 1, mask=listed, other=0.0)
        low_key, high_key = d.sort_key(low, SHIFT).to(tl.int64), d.sort_key(high, SHIFT).to(tl.int64)
        chunk = tl.arange(0, BLOCK_C)[None, :]
        in_chunks = chunk < CHUNKS
        place = row[:, None] * CHUNKS + chunk
        # Read before it is known which are any, so that no load waits for another.
        member = tl.arange(0, BLOCK_C * KEEP)[None, :]
        live = listed[:, None] & (member < CHUNKS * KEEP)
        base = candidates_ptr + row.to(tl.int64)[:, None] * (CHUNKS * KEEP)
        value = tl.load(base + member, mask=live, other=float("-inf"))
        live &= member % KEEP < tl.load(counts_ptr + row[:, None] * CHUNKS + member // KEEP, mask=live, other=0)
        fullest = tl.max(tl.load(counts_ptr + place, mask=listed[:, None] & in_chunks, other=0), 1)
        fits = listed & (low < high) & (fullest <= KEEP)
        far = asks & ((task == COUNT) | ((low < high) & (fits == 0)))
        found = low_key
        if tl.max(far.to(tl.int32), 0) > 0:
            found = _floor_in_memory(
                values_ptr, row, far, row_stride, low_key, high_key, wanted, share, everything, top, scale, VOCAB,
                SHIFT, PROBS, BLOCK_V,
            )  # fmt: skip
            cut = tl.maximum(d.key_value(found.to(tl.int32), SHIFT), lowest)
            _store_kept_mass(values_ptr, mass_ptr, row, far, row_stride, cut, top, scale, VOCAB, CHUNKS, PROBS, BLOCK_V)
        mass = tl.load(mass_ptr + place, mask=asks[:, None] & in_chunks, other=0.0)
        left = share * everything - tl.sum(mass, 1)
        floor, of_candidates = _search_candidates(
            value, live & fits[:, None], fits, top, scale, left, low_key, high_key, found, far, lowest, KEEP, SHIFT,
            PROBS, BLOCK_R, BLOCK_C,
        )  # fmt: skip
        mass += of_candidates
        tl.store(mass_ptr + place, mass, mask=asks[:, None] & in_chunks)
        tl.store(distribution_ptr + rows + row, floor, mask=asks)
        tl.store(distribution_ptr + 2 * rows + row, tl.sum(mass, 1), mask=asks)


def resolve(
    values: torch.Tensor,
    sampling: SamplingTensors,
    queue: torch.Tensor,
    state: torch.Tensor,
    pivots: torch.Tensor,
    distribution: torch.Tensor,
    config: SelectionConfig,
    *,
    per_request: int,
    probabilities: bool,
    shift: int,
) -> torch.Tensor:
    """Kept weight [R, chunks] of the rows that were deferred in `state` [8, R] and stand in `queue` [1 + R]; their
    floor and total go to `distribution` [4, R]."""
    rows, vocab = values.shape
    temperature, chunk, keep = sampling.temperature, config.chunk, config.keep
    chunks = triton.cdiv(vocab, chunk)
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    parts, mass, candidates = out(NUM_PIVOTS, rows, chunks), out(rows, chunks), out(rows, chunks, keep)
    edges, counts = out(rows, chunks, 2), out(rows, chunks, dtype=torch.int32)
    block_c = max(triton.next_power_of_2(chunks), d.MIN_SCAN)
    block_t = d.rows_per_program(rows * chunks, config.max_rows, max(chunk, _LANES_OF_PIVOTS.value * block_c))
    grid = (min(triton.cdiv(rows * chunks, block_t), config.programs),)
    stride = values.stride(0)
    sizes = dict(
        PER_REQUEST=per_request, VOCAB=vocab, CHUNKS=chunks, PROBS=probabilities, BLOCK_V=chunk, BLOCK_C=block_c,
        **overlapped(current_chip(values)),
    )  # fmt: skip
    shared = dict(num_warps=config.chunk_warps, BLOCK_T=block_t, **sizes)
    if sampling.top_p is not None:
        scratch = out(rows, chunks, NUM_PIVOTS // 2 + 1)
        for second in (False, True):
            launch(
                _pivots_kernel, grid, values, temperature, queue, state, pivots, parts, scratch, rows, stride,
                ROOM=keep * chunks // 2, SECOND=second, **shared,
            )  # fmt: skip
    if sampling.top_p is not None or sampling.min_p is not None:
        launch(
            _candidates_kernel, grid, values, temperature, queue, state, pivots, parts, edges, mass, counts, candidates,
            rows, stride, KEEP=keep, **shared,
        )  # fmt: skip
    block_r = d.rows_per_program(rows, config.max_rows, max(chunk, block_c * keep))
    launch(
        _resolve_kernel, (triton.cdiv(rows, block_r),), values, temperature, sampling.top_k, sampling.top_p, state,
        edges, mass, counts, candidates, distribution, rows, stride, num_warps=config.select_warps, KEEP=keep,
        SHIFT=shift, BLOCK_R=block_r, **sizes,
    )  # fmt: skip
    return mass
