# mypy: ignore-errors
"""Lists of deferred rows: those whose kept tokens do not fit the slots of a program of `kernel_filter`.

These rows wait in a queue, so that their chunks spread over the whole device. Five edges around a sampled guess of the
threshold split the values of a row. The weight above each edge is summed, and the values of each of the four classes
between them are stored in the order of the row; `kernel_settle` finds the threshold there. The order of the queue
depends on timing, and no result does: chunks are added in their order.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.kernel_stats import Rows

# What a row is sampled by.
NEAR = tl.constexpr(-1)  # its slots
WHOLE = tl.constexpr(0)  # its strips and groups: no filter cuts
# Its chunks, and what is to be done for them first:
LIST = tl.constexpr(1)  # top-p and min-p: the threshold is looked for among the edges
COUNT = tl.constexpr(2)  # top-k beyond the slots: the threshold has to be found in the whole row
_STEPS = tl.constexpr((-6.0, -2.8, 0.0, 2.8, 6.0))  # of the edges from the guess, in its standard deviations
NUM_EDGES, STATES = 5, 6
EDGES, CLASSES = tl.constexpr(NUM_EDGES), tl.constexpr(NUM_EDGES - 1)
_HALVINGS = tl.constexpr(12)
COUNT_BITS = tl.constexpr(8)  # of the counts of the four classes, which share an integer
MOST = tl.constexpr(255)


class Static(NamedTuple):
    """Compile-time sizes of the kernels over filtered rows."""

    PER_REQUEST: int  # rows
    VOCAB: int
    GROUPS: int
    STRIPS: int
    SLOTS: int
    WIDTH: int  # tokens of a group
    CHUNK: int  # tokens
    CHUNKS: int
    KEEP: int
    PARTS: int  # warps of a program of a chunk
    WARPS: int  # of a program of a row
    VECTOR: int  # values that a thread reads at once
    SHIFT: int  # of keys
    PROBS: bool


class Lists(NamedTuple):
    """What is known of the chunks of deferred rows."""

    parts: Any  # [5, R, CHUNKS, PARTS] float32: weight above each edge that each warp has of each chunk
    counts: Any  # [R, CHUNKS] int32: values of each class, in bits of its own; all bits set where these are too few
    members: Any  # [R, CHUNKS, 4, KEEP], of the row's type: the first values of each class


@triton.jit
def store_state(state_ptr, row, in_row, rows, mode, goal, least, limits):
    """The state of a row for the following launches, [6, R] float32."""
    tl.store(state_ptr + row, mode.to(tl.float32), mask=in_row)
    tl.store(state_ptr + rows + row, goal, mask=in_row)
    tl.store(state_ptr + 2 * rows + row, limits.lowest, mask=in_row)
    tl.store(state_ptr + 3 * rows + row, limits.everything, mask=in_row)
    tl.store(state_ptr + 4 * rows + row, d.finite(limits.top), mask=in_row)
    tl.store(state_ptr + 5 * rows + row, least, mask=in_row)


@triton.jit
def sample_groups(values_ptr, row, asks, row_stride, STATIC: tl.constexpr):
    """Values [R, SLOTS * WIDTH] of groups that are spread over the row."""
    SLOTS: tl.constexpr = STATIC.SLOTS
    WIDTH: tl.constexpr = STATIC.WIDTH
    member = tl.arange(0, SLOTS * WIDTH)[None, :]
    column = member // WIDTH * (STATIC.GROUPS // SLOTS) * WIDTH + member % WIDTH + tl.zeros_like(row)[:, None]
    return d.load_entries(values_ptr, row[:, None], column, row_stride, asks[:, None] & (column < STATIC.VOCAB))


@triton.jit
def guess_threshold(value, complete, reached, goal, limits, STATIC: tl.constexpr):
    """A guess of top-p's threshold, as the base-2 logarithm of its weight, and its standard deviation in natural units.

    The weight `reached` at or above the key `complete` is known. The rest is estimated from the values of
    `sample_groups`: every warp searches its own part of them, and the guess is the mean over the warps.
    """
    PROBS: tl.constexpr = STATIC.PROBS
    value = d.usable(value)
    limit = d.key_value(complete.to(tl.int32), STATIC.SHIFT)
    weight = tl.where(value < limit[:, None], d.weigh(value, limits.top[:, None], limits.scale[:, None], PROBS), 0.0)
    weight = d.by_warps(weight, STATIC.WARPS, STATIC.VECTOR)
    sampled = d.warp_sums(weight)
    below = limits.everything - reached
    share = tl.minimum(tl.maximum((goal - reached) / tl.where(below > 0, below, 1.0), 0.0), 1.0)
    share = d.spread_rows(share)
    # By halves of an interval of the weight's logarithm, because floats have as many keys near zero as elsewhere.
    high = tl.log2(tl.maximum(d.weigh(limit, limits.top, limits.scale, PROBS), 1e-30))
    high = d.spread_rows(high) + tl.zeros_like(sampled)
    low = high - 32.0
    for _ in range(_HALVINGS):
        middle = (low + high) * 0.5
        above = d.warp_sums(tl.where(weight > tl.exp2(middle), weight, 0.0))
        lacks = above < share * sampled
        low = tl.where(lacks, low, middle)
        high = tl.where(lacks, middle, high)
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
def store_edges(edges_ptr, row, asks, rows, searched, center, spread, complete, limits, STATIC: tl.constexpr):
    """The edges [5, R] in rising order. If min-p cuts above them or alone, all are the greatest value that it leaves
    out."""
    PROBS: tl.constexpr = STATIC.PROBS
    limit = d.key_value(complete.to(tl.int32), STATIC.SHIFT)
    middle = tl.exp2(center) if PROBS else tl.minimum(limits.top + center / limits.scale, limit)
    unit = spread * d.LOG2E
    highest = _STEPS[EDGES - 1] * unit
    highest = tl.minimum(middle * tl.exp2(highest) if PROBS else middle + highest / limits.scale, limit)
    fixed = (searched == 0) | (limits.lowest > highest)
    left_out = d.next_below(limits.lowest)
    for edge in tl.static_range(EDGES):
        step = _STEPS[edge] * unit
        value = tl.minimum(middle * tl.exp2(step) if PROBS else middle + step / limits.scale, limit)
        tl.store(edges_ptr + edge * rows + row, tl.where(fixed, left_out, value), mask=asks)


@triton.jit
def enqueue(queue_ptr, row, deferred):
    """Append rows to the queue: its length, then the rows."""
    place = tl.atomic_add(queue_ptr + row * 0, 1, mask=deferred, sem="relaxed")
    tl.store(queue_ptr + 1 + place, row, mask=deferred)


@triton.jit
def _store_above(parts_ptr, edges_ptr, value, weight, row, chunk, there, asks, rows, STATIC: tl.constexpr):
    """Store the weight above each edge that each warp has, and return the class of each value, -1 below all edges and
    4 above."""
    kind = tl.full(value.shape, -1, tl.int32)
    warp = tl.arange(0, STATIC.PARTS)[None, :]
    for edge in tl.static_range(EDGES):
        over = value > tl.load(edges_ptr + edge * rows + row, mask=there, other=0.0)[:, None]
        kind += over.to(tl.int32)
        place = ((edge * rows + row).to(tl.int64) * STATIC.CHUNKS + chunk)[:, None] * STATIC.PARTS + warp
        part = d.warp_sums(d.by_warps(tl.where(over, weight, 0.0), STATIC.PARTS, STATIC.VECTOR))
        tl.store(parts_ptr + place, tl.reshape(part, place.shape), mask=asks[:, None])
    return kind


@triton.jit(do_not_specialize=["rows"])
def _list_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    queue_ptr,  # [1 + R] int32
    state_ptr,  # [6, R] float32
    edges_ptr,  # [5, R] float32
    lists,  # Lists, written
    rows,
    row_stride,
    BLOCK_T: tl.constexpr,
    STATIC: tl.constexpr,  # Static
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = STATIC.CHUNKS
    KEEP: tl.constexpr = STATIC.KEEP
    begin(PDL)
    end = tl.load(queue_ptr) * CHUNKS
    for start in range(tl.program_id(0) * BLOCK_T, end, tl.num_programs(0) * BLOCK_T):
        task = start + tl.arange(0, BLOCK_T)
        there = task < end
        row = tl.load(queue_ptr + 1 + task // CHUNKS, mask=there, other=0)
        chunk = task % CHUNKS
        column = chunk[:, None] * STATIC.CHUNK + tl.arange(0, STATIC.CHUNK)[None, :]
        value = d.load_entries(values_ptr, row[:, None], column, row_stride, there[:, None] & (column < STATIC.VOCAB))
        asks = there & (tl.load(state_ptr + row, mask=there, other=0.0) != COUNT)
        temperature = tl.load(temperature_ptr + row // STATIC.PER_REQUEST, mask=there, other=1.0)
        top = tl.load(state_ptr + 4 * rows + row, mask=there, other=0.0)
        # No usable value is above the top, so this replaces an infinity; NaN fails every comparison.
        capped = tl.minimum(value, top[:, None])
        weight = d.weigh(capped, top[:, None], d.exponent_scale(temperature)[:, None], STATIC.PROBS)
        kind = _store_above(lists.parts, edges_ptr, value, weight, row, chunk, there, asks, rows, STATIC)
        inside = asks[:, None] & (kind >= 0) & (kind < CLASSES)
        bits = tl.where(inside, kind, 0) * COUNT_BITS
        one = inside.to(tl.int32) << bits
        place = row * CHUNKS + chunk
        countable = d.sum_of_all(d.by_warps(inside.to(tl.int32), STATIC.PARTS, STATIC.VECTOR)) <= MOST
        counts = d.sum_of_all(d.by_warps(one, STATIC.PARTS, STATIC.VECTOR))
        tl.store(lists.counts + place, tl.where(countable, counts, -1), mask=asks)
        rank = (tl.cumsum(one, 1) >> bits) & MOST
        slot = bits // COUNT_BITS * KEEP + rank - 1
        mine = (lists.members + place.to(tl.int64) * (CLASSES * KEEP))[:, None]
        tl.store(mine + slot, value, mask=inside & countable[:, None] & (rank <= KEEP))


def list_values(rows: Rows, queue: Tensor, state: Tensor, edges: Tensor, static: Static) -> Lists:
    """The `Lists` of the rows in `queue` [1 + R]; `state` [6, R], `edges` [5, R]."""
    values, sampling, config = rows.values, rows.sampling, SELECTION[current_chip(rows.values)]
    count, chunks = len(values), static.CHUNKS
    out = partial(torch.empty, device=values.device)
    lists = Lists(
        out(NUM_EDGES, count, chunks, static.PARTS, dtype=torch.float32), out(count, chunks, dtype=torch.int32),
        out(count, chunks, NUM_EDGES - 1, static.KEEP, dtype=values.dtype),
    )  # fmt: skip
    if sampling.top_p is not None or sampling.min_p is not None:
        block_t = d.rows_per_program(count * chunks, config.max_rows, config.chunk)
        launch(
            _list_kernel, (min(triton.cdiv(count * chunks, block_t), config.programs),), values, sampling.temperature,
            queue, state, edges, lists, count, values.stride(0), num_warps=static.PARTS, BLOCK_T=block_t,
            STATIC=static,
        )  # fmt: skip
    return lists
