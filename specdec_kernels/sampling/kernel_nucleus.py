# mypy: ignore-errors
"""Thresholds of deferred rows: those whose kept tokens do not fit the slots of a program of `kernel_filter`.

All other rows are not read here. The deferred rows stand in a queue, so that their chunks spread over the whole device
however many there are. Two launches:

1. list, chunk by chunk: five edges around a sampled guess of the threshold part the row's values. The weight above
   each edge is summed, and the values of each of the four classes between them are written down in the order of the
   row.
2. resolve, one program per row: the weights above the edges tell the class that holds the threshold. It is found there
   by bisection over the class in registers, and so is the kept weight of every chunk. A draw selects a chunk by them,
   and reads that chunk alone again.

So a row is read twice in all, counting the statistics, however flat it is. A threshold outside the edges (they lie six
standard deviations from the guess), a chunk with more values of the class than there is room for, and a top-k beyond
the slots are settled by bisection over the row in memory instead.
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
LIST = tl.constexpr(1)  # top-p and min-p: the threshold is looked for among the edges
COUNT = tl.constexpr(2)  # top-k beyond the slots: the threshold has to be found in the whole row
_STEPS = tl.constexpr((-6.0, -2.8, 0.0, 2.8, 6.0))  # of the edges from the guess, in its standard deviations
NUM_EDGES, STATES = 5, 5
_EDGES, _CLASSES = tl.constexpr(NUM_EDGES), tl.constexpr(NUM_EDGES - 1)
_HALVINGS = tl.constexpr(12)
_LANES_OF_EDGES = tl.constexpr(8)
_COUNT_BITS = tl.constexpr(8)  # of the counts of the four classes, which share an integer
_MOST = tl.constexpr(255)


@triton.jit
def store_state(state_ptr, row, in_row, rows, mode, goal, lowest, everything, top):
    """What the launches after selection need of a row, [5, R] float32."""
    tl.store(state_ptr + row, mode.to(tl.float32), mask=in_row)
    tl.store(state_ptr + rows + row, goal, mask=in_row)
    tl.store(state_ptr + 2 * rows + row, lowest, mask=in_row)
    tl.store(state_ptr + 3 * rows + row, everything, mask=in_row)
    tl.store(state_ptr + 4 * rows + row, d.finite(top), mask=in_row)


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
def guess_threshold(
    value, complete, reached, goal, everything, top, scale,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Where the threshold of top-p should lie, as the base-2 logarithm of its weight, and the standard deviation of
    this guess in natural units.

    The weight `reached` at or above the key `complete` is known. What lies below is estimated from the values of
    `sample_groups`: every warp searches its own part of them, and the guess is the mean over the warps. The sample also
    gives the density of weight around the guess.
    """
    value = d.usable(value)
    limit = d.key_value(complete.to(tl.int32), SHIFT)
    weight = tl.where(value < limit[:, None], d.weigh(value, top[:, None], scale[:, None], PROBS), 0.0)
    weight = d.by_warps(weight, WARPS, VECTOR)
    sampled = d.warp_sums(weight)
    below = everything - reached
    share = tl.minimum(tl.maximum((goal - reached) / tl.where(below > 0, below, 1.0), 0.0), 1.0)
    share = d.spread_rows(share)
    # By halves of an interval of the weight's logarithm, because floats have as many keys near zero as elsewhere.
    high = tl.log2(tl.maximum(d.weigh(limit, top, scale, PROBS), 1e-30))
    high = d.spread_rows(high) + tl.zeros_like(sampled)
    low = high - 32.0
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        above = d.warp_sums(tl.where(weight > tl.exp2(middle), weight, 0.0))
        low, high = tl.where(above < share * sampled, low, middle), tl.where(above < share * sampled, middle, high)
    # Some trust in every warp leaves the first guess of a sample without weight as it is.
    trust = tl.maximum(sampled, 1e-30)
    guess = d.sum_of_all(high * trust) / d.sum_of_all(trust)
    center = d.spread_rows(tl.exp2(guess))
    off = tl.where(weight > center, 1.0 - share, share) * weight
    near = (weight > 0.78 * center) & (weight < 1.28 * center)
    density = d.sum_of_all(tl.where(near, weight, 0.0)) * 2.0  # a natural unit of the logarithm
    spread = tl.sqrt(d.sum_of_all(off * off))
    spread = tl.where(density > 0, spread / tl.where(density > 0, density, 1.0), 2.0)
    return guess, tl.minimum(tl.maximum(spread, 1e-4), 2.0)


@triton.jit
def store_edges(
    edges_ptr, row, asks, rows, searched, center, spread, complete, lowest, top, scale,
    SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """The edges [5, R] in rising order. Where min-p cuts above them or alone, all are the greatest value that it leaves
    out."""
    limit = d.key_value(complete.to(tl.int32), SHIFT)
    middle = tl.exp2(center) if PROBS else tl.minimum(top + center / scale, limit)
    unit = spread * d.LOG2E
    highest = _STEPS[_EDGES - 1] * unit
    highest = tl.minimum(middle * tl.exp2(highest) if PROBS else middle + highest / scale, limit)
    fixed = (searched == 0) | (lowest > highest)
    left_out = d.next_below(lowest)
    for edge in tl.static_range(_EDGES):
        step = _STEPS[edge] * unit
        value = tl.minimum(middle * tl.exp2(step) if PROBS else middle + step / scale, limit)
        tl.store(edges_ptr + edge * rows + row, tl.where(fixed, left_out, value), mask=asks)


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
    top = tl.load(state_ptr + 4 * rows + row, mask=asks, other=0.0)
    # No usable value is above the top, so this replaces an infinity; NaN fails every comparison.
    capped = tl.minimum(value, top[:, None])
    return d.weigh(capped, top[:, None], d.exponent_scale(temperature)[:, None], PROBS)


@triton.jit
def _store_above(
    parts_ptr, edges_ptr, value, weight, row, chunk, there, asks, rows,
    CHUNKS: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the weight above each edge that each warp has, and return the class of each value, -1 below all edges and
    4 above."""
    kind = tl.full(value.shape, -1, tl.int32)
    warp = tl.arange(0, WARPS)[None, :]
    for edge in tl.static_range(_EDGES):
        over = value > tl.load(edges_ptr + edge * rows + row, mask=there, other=0.0)[:, None]
        kind += over.to(tl.int32)
        place = ((edge * rows + row).to(tl.int64) * CHUNKS + chunk)[:, None] * WARPS + warp
        part = d.warp_sums(d.by_warps(tl.where(over, weight, 0.0), WARPS, VECTOR))
        tl.store(parts_ptr + place, tl.reshape(part, place.shape), mask=asks[:, None])
    return kind


@triton.jit(do_not_specialize=["rows"])
def _list_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    queue_ptr,  # [1 + R] int32
    state_ptr,  # [5, R] float32
    edges_ptr,  # [5, R] float32
    parts_ptr,  # [5, R, CHUNKS, WARPS] float32: weight above each edge that each warp has of each chunk
    counts_ptr,  # [R, CHUNKS] int32: values of each class, in bits of its own; all bits set where these are too few
    members_ptr,  # [R, CHUNKS, 4, KEEP], of the row's type: the first values of each class
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEEP: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WARPS: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    end = tl.load(queue_ptr) * CHUNKS
    for start in range(tl.program_id(0) * BLOCK_T, end, tl.num_programs(0) * BLOCK_T):
        row, chunk, there = _task(queue_ptr, start, end, CHUNKS, BLOCK_T)
        value = _chunk_values(values_ptr, row, chunk, there, row_stride, VOCAB, BLOCK_V)
        asks = there & (tl.load(state_ptr + row, mask=there, other=0.0) != COUNT)
        weight = _chunk_weights(value, temperature_ptr, state_ptr, row, there, rows, PER_REQUEST, PROBS)
        kind = _store_above(
            parts_ptr, edges_ptr, value, weight, row, chunk, there, asks, rows, CHUNKS, WARPS, VECTOR
        )  # fmt: skip
        inside = asks[:, None] & (kind >= 0) & (kind < _CLASSES)
        bits = tl.where(inside, kind, 0) * _COUNT_BITS
        one = inside.to(tl.int32) << bits
        place = row * CHUNKS + chunk
        countable = d.sum_of_all(d.by_warps(inside.to(tl.int32), WARPS, VECTOR)) <= _MOST
        counts = d.sum_of_all(d.by_warps(one, WARPS, VECTOR))
        tl.store(counts_ptr + place, tl.where(countable, counts, -1), mask=asks)
        rank = (tl.cumsum(one, 1) >> bits) & _MOST
        slot = bits // _COUNT_BITS * KEEP + rank - 1
        mine = (members_ptr + place.to(tl.int64) * (_CLASSES * KEEP))[:, None]
        tl.store(mine + slot, value.to(members_ptr.dtype.element_ty), mask=inside & countable[:, None] & (rank <= KEEP))


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
def _search_members(
    value, fits, top, scale, left, low_key, high_key, found, far, lowest,
    KEEP: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Threshold of each row, and the weight [R, BLOCK_C] that it leaves of the classes of the rows that `fits`.

    `left` is the weight that these rows still lack; the key of the rows that are `far` is `found` already.
    """
    value = d.by_warps(tl.minimum(value, d.FLOAT32_MAX), WARPS, VECTOR)
    weight = d.weigh(value, d.spread_rows(top), d.spread_rows(scale), PROBS)
    searched = d.mass_key(value, weight, left, low_key, tl.where(fits, high_key, low_key + 1), SHIFT)
    found = tl.where(fits, searched, found)
    floor = tl.where(far | fits, d.key_value(found.to(tl.int32), SHIFT), float("-inf"))
    floor = tl.maximum(floor, lowest)
    kept = tl.where(value >= d.spread_rows(floor), weight, 0.0)
    return floor, tl.sum(tl.reshape(kept, (BLOCK_R, BLOCK_C, KEEP)), 2)


@triton.jit
def _class_of_threshold(above, value, in_row, goal, lowest):
    """How many of the edges [R, 8], of `value`, lie below the threshold, 0 to 5; whether min-p put it there; and the
    edges around it, infinite where there is none. `above` [R, 8] is the weight above each."""
    known = in_row[:, None] & (tl.arange(0, _LANES_OF_EDGES)[None, :] < _EDGES)
    by_mass = known & (above >= goal[:, None])
    rises = by_mass | (known & (value < lowest[:, None]))
    low = tl.max(tl.where(rises, value, float("-inf")), 1)
    high = tl.min(tl.where(known & (rises == 0), value, float("inf")), 1)
    below = tl.sum(rises.to(tl.int32), 1)
    return below, below > tl.sum(by_mass.to(tl.int32), 1), low, high


@triton.jit
def _load_edges(parts_ptr, edges_ptr, row, in_row, rows, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The weight above each edge, and its value: [R, 8] each."""
    edge, part = tl.arange(0, _LANES_OF_EDGES)[None, :], tl.arange(0, BLOCK_P)[None, :]
    place = edge * rows + row[:, None]
    value = tl.load(edges_ptr + place, mask=in_row[:, None] & (edge < _EDGES), other=0.0)
    above = tl.zeros_like(value)
    for k in tl.static_range(_EDGES):
        at = parts_ptr + (k * rows + row).to(tl.int64)[:, None] * PARTS + part
        of_parts = tl.load(at, mask=in_row[:, None] & (part < PARTS), other=0.0)
        above = tl.where(edge == k, tl.sum(of_parts, 1)[:, None], above)
    return above, value


@triton.jit(do_not_specialize=["rows"])
def _resolve_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    top_k_ptr,  # [R / PER_REQUEST] int32, or None
    top_p_ptr,  # [R / PER_REQUEST] float32, or None
    state_ptr,  # [5, R] float32
    edges_ptr,  # [5, R] float32
    parts_ptr,  # [5, R, CHUNKS, WARPS] float32
    counts_ptr,  # [R, CHUNKS] int32
    members_ptr,  # [R, CHUNKS, 4, KEEP], of the row's type
    mass_ptr,  # [R, CHUNKS] float32: the weight that is kept
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
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WARPS: tl.constexpr,
    SEARCH_WARPS: tl.constexpr,
    VECTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    # All that does not depend on other loads is read first.
    in_row, request = row < rows, row // PER_REQUEST
    task = tl.load(state_ptr + row, mask=in_row, other=0.0)
    goal = tl.load(state_ptr + rows + row, mask=in_row, other=0.0)
    lowest = tl.load(state_ptr + 2 * rows + row, mask=in_row, other=0.0)
    top = tl.load(state_ptr + 4 * rows + row, mask=in_row, other=0.0)
    temperature = tl.load(temperature_ptr + request, mask=in_row, other=1.0)
    above, edges = _load_edges(parts_ptr, edges_ptr, row, in_row, rows, CHUNKS * WARPS, BLOCK_P)
    asks = in_row & (task > WHOLE)
    if tl.max(asks.to(tl.int32), 0) > 0:
        scale = d.exponent_scale(temperature)
        listed = asks & (task != COUNT)
        below, pinned, low, high = _class_of_threshold(above, edges, listed, goal, lowest)
        between = listed & (below > 0) & (below < _EDGES)
        kind = tl.where(between, below - 1, 0)
        low_key = d.sort_key(low, SHIFT).to(tl.int64)
        high_key = d.sort_key(tl.minimum(high, top), SHIFT).to(tl.int64)
        chunk = tl.arange(0, BLOCK_C)[None, :]
        in_chunks = chunk < CHUNKS
        place = row[:, None] * CHUNKS + chunk
        # Values are read before it is known how many there are, so that no load waits for another.
        member = tl.arange(0, KEEP)[None, None, :]
        base = members_ptr + row.to(tl.int64)[:, None] * (CHUNKS * _CLASSES * KEEP) + kind[:, None] * KEEP
        base = (base + chunk * (_CLASSES * KEEP))[:, :, None]
        there = between[:, None] & in_chunks
        value = tl.load(base + member, mask=there[:, :, None], other=float("-inf")).to(tl.float32)
        counts = tl.load(counts_ptr + place, mask=there, other=0)
        counts = (counts >> (kind * _COUNT_BITS)[:, None]) & _MOST
        fits = between & (tl.max(counts, 1) <= KEEP)
        live = (member < counts[:, :, None]) & fits[:, None, None]
        value = tl.reshape(tl.where(live, value, float("-inf")), (BLOCK_R, BLOCK_C * KEEP))
        far = asks & (fits == 0) & ((pinned == 0) | (below < _EDGES))
        # The weight above the class; where min-p cuts above all edges, above the last.
        over = parts_ptr + (tl.minimum(below, _EDGES - 1) * rows).to(tl.int64)[:, None] * (CHUNKS * WARPS)
        mass = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for warp in tl.static_range(WARPS):
            mass += tl.load(over + place * WARPS + warp, mask=listed[:, None] & in_chunks, other=0.0)
        left = tl.where(pinned, float("inf"), goal - tl.sum(mass, 1))
        found = low_key
        if tl.max(far.to(tl.int32), 0) > 0:
            everything = tl.load(state_ptr + 3 * rows + row, mask=far, other=0.0)
            wanted, share = d.count_and_share(top_k_ptr, top_p_ptr, request, far, VOCAB)
            found = _floor_in_memory(
                values_ptr, row, far, row_stride, low_key, high_key, wanted, share, everything, top, scale, VOCAB,
                SHIFT, PROBS, BLOCK_V,
            )  # fmt: skip
            cut = tl.maximum(d.key_value(found.to(tl.int32), SHIFT), lowest)
            _store_kept_mass(values_ptr, mass_ptr, row, far, row_stride, cut, top, scale, VOCAB, CHUNKS, PROBS, BLOCK_V)
            mass = tl.where(far[:, None], tl.load(mass_ptr + place, mask=far[:, None] & in_chunks, other=0.0), mass)
        floor, of_members = _search_members(
            value, fits, top, scale, left, low_key, high_key, found, far, lowest, KEEP, SHIFT,
            PROBS, BLOCK_R, BLOCK_C, SEARCH_WARPS, VECTOR,
        )  # fmt: skip
        mass += of_members
        tl.store(mass_ptr + place, mass, mask=asks[:, None] & in_chunks)
        tl.store(distribution_ptr + rows + row, floor, mask=asks)
        tl.store(distribution_ptr + 2 * rows + row, tl.sum(mass, 1), mask=asks)


def resolve(
    values: torch.Tensor,
    sampling: SamplingTensors,
    queue: torch.Tensor,
    state: torch.Tensor,
    edges: torch.Tensor,
    distribution: torch.Tensor,
    config: SelectionConfig,
    *,
    per_request: int,
    probabilities: bool,
    shift: int,
) -> torch.Tensor:
    """Kept weight [R, chunks] of the rows that were deferred in `state` [5, R] and stand in `queue` [1 + R], with
    `edges` [5, R]; their floor and total go to `distribution` [4, R]."""
    rows, vocab = values.shape
    temperature, chunk, keep = sampling.temperature, config.chunk, config.keep
    chunks = triton.cdiv(vocab, chunk)
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    warps = config.chunk_warps
    parts, mass = out(NUM_EDGES, rows, chunks, warps), out(rows, chunks)
    counts = out(rows, chunks, dtype=torch.int32)
    members = out(rows, chunks, NUM_EDGES - 1, keep, dtype=values.dtype)
    block_c = max(triton.next_power_of_2(chunks), d.MIN_SCAN)
    block_t = d.rows_per_program(rows * chunks, config.max_rows, chunk)
    stride = values.stride(0)
    sizes = dict(
        PER_REQUEST=per_request, VOCAB=vocab, CHUNKS=chunks, KEEP=keep, PROBS=probabilities, BLOCK_V=chunk, WARPS=warps,
        VECTOR=d.VECTOR_BYTES // values.element_size(), **overlapped(current_chip(values)),
    )  # fmt: skip
    if sampling.top_p is not None or sampling.min_p is not None:
        launch(
            _list_kernel, (min(triton.cdiv(rows * chunks, block_t), config.programs),), values, temperature, queue,
            state, edges, parts, counts, members, rows, stride, num_warps=warps, BLOCK_T=block_t, **sizes,
        )  # fmt: skip
    block_r = d.rows_per_program(rows, config.max_rows, max(chunk, block_c * keep))
    launch(
        _resolve_kernel, (triton.cdiv(rows, block_r),), values, temperature, sampling.top_k, sampling.top_p, state,
        edges, parts, counts, members, mass, distribution, rows, stride, num_warps=config.select_warps, SHIFT=shift,
        BLOCK_R=block_r, BLOCK_C=block_c, BLOCK_P=triton.next_power_of_2(chunks * warps),
        SEARCH_WARPS=config.select_warps, **sizes,
    )  # fmt: skip
    return mass
