# mypy: ignore-errors
"""Thresholds of filtered rows, and the weight that they leave: one program per row.

- A row whose threshold lies within its slots (`kernel_filter`): bisection over the slots' groups in registers.
- A deferred row (`kernel_nucleus`): the weights above the edges give the class that holds the threshold, and bisection
  over that class in registers finds it. A threshold outside the edges, a class with more values in a chunk than there
  is room for, and a top-k beyond the slots are settled by bisection over the row in memory.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling import kernel_nucleus as nucleus
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.kernel_stats import Rows

_LANES_OF_EDGES = tl.constexpr(8)


class Kept(NamedTuple):
    """The weight that filters leave: of slots, of chunks, or of all strips, as the row's state says. Without `ids` slot
    i is group i, and there are no chunks."""

    ids: Tensor | None  # [R, SLOTS] int32: the group in each slot
    slots: Tensor | None  # [R, SLOTS] float32
    state: Tensor | None  # [6, R] float32, see `kernel_nucleus`
    chunks: Tensor | None  # [R, chunks] float32


@triton.jit
def slot_values(values_ptr, row, in_row, group, row_stride, STATIC: tl.constexpr):
    """Values [R, SLOTS * WIDTH] of the groups [R, SLOTS]. A group is read once for a slot, not once for each token."""
    WIDTH: tl.constexpr = STATIC.WIDTH
    column = group[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    live = in_row[:, None, None] & (column < STATIC.VOCAB)
    value = d.load_values(values_ptr, row[:, None, None], column, row_stride, live)
    return tl.reshape(value, (row.shape[0], STATIC.SLOTS * WIDTH))


@triton.jit
def _floor_in_slots(value, near, complete, limits, WHOLE: tl.constexpr, STATIC: tl.constexpr):
    """Threshold of the rows that are `near`, and the weight [R, SLOTS] that it leaves of each slot; the values from the
    key `complete` on are all that the row has."""
    SHIFT: tl.constexpr = STATIC.SHIFT
    value = d.by_warps(value, STATIC.WARPS, STATIC.VECTOR)
    weight = d.weigh(value, d.spread_rows(limits.top), d.spread_rows(limits.scale), STATIC.PROBS)
    key_top = d.sort_key(limits.top, SHIFT).to(tl.int64)
    by_count = near & (limits.wanted > 0)
    by_mass = near & (limits.share < 1)
    lowest_key = d.kth_key(value, limits.wanted, complete, tl.where(by_count, key_top + 1, complete + 1), SHIFT)
    reach = d.spread_rows(d.key_value(lowest_key.to(tl.int32), SHIFT))
    in_reach = d.sum_of_all(tl.where(value >= reach, weight, 0.0))
    goal = limits.share * tl.where(by_count | WHOLE, in_reach, limits.everything)
    lowest_key = d.mass_key(value, weight, goal, lowest_key - 1, tl.where(by_mass, key_top, lowest_key), SHIFT)
    cut = tl.where(by_count | by_mass, d.key_value(lowest_key.to(tl.int32), SHIFT), float("-inf"))
    floor = tl.maximum(cut, limits.lowest)
    kept = tl.where(value >= d.spread_rows(floor), weight, 0.0)
    return floor, tl.sum(tl.reshape(kept, (value.shape[0], STATIC.SLOTS, STATIC.WIDTH)), 2)


@triton.jit
def _settle_near(values_ptr, kept, distribution_ptr, row, near, rows, row_stride, least, limits, STATIC: tl.constexpr):
    """Floor, total and the kept weight of the slots of the rows that are `near`."""
    slot = tl.arange(0, STATIC.SLOTS)[None, :]
    at = row.to(tl.int64)[:, None] * STATIC.SLOTS + slot
    if kept.ids is None:
        group = slot + tl.zeros_like(row)[:, None]
    else:
        group = tl.load(kept.ids + at, mask=near[:, None], other=0)
    value = slot_values(values_ptr, row, near, group, row_stride, STATIC)
    complete = d.sort_key(least, STATIC.SHIFT).to(tl.int64)
    if kept.ids is None:
        key = d.sort_key(value, STATIC.SHIFT)
        complete = tl.min(tl.where(value > float("-inf"), key, 0x7FFFFFFF), 1).to(tl.int64)
    floor, mass = _floor_in_slots(value, near, complete, limits, kept.ids is None, STATIC)
    tl.store(kept.slots + at, mass, mask=near[:, None])
    tl.store(distribution_ptr + rows + row, floor, mask=near)
    tl.store(distribution_ptr + 2 * rows + row, tl.sum(mass, 1), mask=near)


@triton.jit
def _floor_in_memory(values_ptr, row, asks, row_stride, low, high, limits, STATIC: tl.constexpr):
    """Threshold of top-k and top-p from the whole row; without top-k its key lies in (low, high]."""
    VOCAB: tl.constexpr = STATIC.VOCAB
    SHIFT: tl.constexpr = STATIC.SHIFT
    by_count = asks & (limits.wanted > 0)
    by_mass = asks & (limits.share < 1)
    bottom = d.sort_key(tl.full(limits.top.shape, float("-inf"), tl.float32), SHIFT).to(tl.int64)
    key_top = d.sort_key(limits.top, SHIFT).to(tl.int64)
    kth = d.streamed_kth_key(
        values_ptr, row, row_stride, limits.wanted, bottom, tl.where(by_count, key_top + 1, bottom + 1), VOCAB, SHIFT,
        STATIC.CHUNK
    )  # fmt: skip
    counted = d.streamed_mass(
        values_ptr, row, by_count & by_mass, row_stride, (kth - 1).to(tl.int32), limits.top, limits.scale, VOCAB, SHIFT,
        STATIC.PROBS, STATIC.CHUNK,
    )  # fmt: skip
    goal = limits.share * tl.where(by_count, counted, limits.everything)
    low = tl.where(by_count, kth - 1, low)
    high = tl.where(by_count, key_top, high)
    found = d.streamed_mass_key(
        values_ptr, row, row_stride, goal, low, tl.where(by_mass, high, low + 1), limits.top, limits.scale, VOCAB,
        SHIFT, STATIC.PROBS, STATIC.CHUNK,
    )  # fmt: skip
    return tl.where(by_mass, found, kth)


@triton.jit
def _search_members(
    value, fits, left, low_key, high_key, found, far, limits,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Threshold of each row, and the weight [R, BLOCK_C] that it leaves of the classes of the rows that `fits`, which
    lack the weight `left`; the key of the rows that are `far` is `found` already."""
    value = d.by_warps(tl.minimum(value, d.FLOAT32_MAX), STATIC.WARPS, STATIC.VECTOR)
    weight = d.weigh(value, d.spread_rows(limits.top), d.spread_rows(limits.scale), STATIC.PROBS)
    searched = d.mass_key(value, weight, left, low_key, tl.where(fits, high_key, low_key + 1), STATIC.SHIFT)
    found = tl.where(fits, searched, found)
    floor = tl.where(far | fits, d.key_value(found.to(tl.int32), STATIC.SHIFT), float("-inf"))
    floor = tl.maximum(floor, limits.lowest)
    kept = tl.where(value >= d.spread_rows(floor), weight, 0.0)
    return floor, tl.sum(tl.reshape(kept, (BLOCK_R, BLOCK_C, STATIC.KEEP)), 2)


@triton.jit
def _load_edges(parts_ptr, edges_ptr, row, in_row, rows, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """The weight above each edge, and its value: [R, 8] each."""
    edge = tl.arange(0, _LANES_OF_EDGES)[None, :]
    part = tl.arange(0, BLOCK_P)[None, :]
    place = edge * rows + row[:, None]
    value = tl.load(edges_ptr + place, mask=in_row[:, None] & (edge < nucleus.EDGES), other=0.0)
    above = tl.zeros_like(value)
    for k in tl.static_range(nucleus.EDGES):
        at = parts_ptr + (k * rows + row).to(tl.int64)[:, None] * PARTS + part
        of_parts = tl.load(at, mask=in_row[:, None] & (part < PARTS), other=0.0)
        above = tl.where(edge == k, tl.sum(of_parts, 1)[:, None], above)
    return above, value


@triton.jit
def _settle_deferred(
    values_ptr, lists, mass_ptr, distribution_ptr, row, asks, listed, above, edges, rows, row_stride, goal, limits,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Floor, total and the kept weight of the chunks of the rows in `asks`; those in `listed` have a list."""
    CHUNKS: tl.constexpr = STATIC.CHUNKS
    KEEP: tl.constexpr = STATIC.KEEP
    PARTS: tl.constexpr = STATIC.PARTS
    SHIFT: tl.constexpr = STATIC.SHIFT
    # How many edges lie below the threshold, 0 to 5; whether min-p put it there; and the edges around it.
    known = listed[:, None] & (tl.arange(0, _LANES_OF_EDGES)[None, :] < nucleus.EDGES)
    by_mass = known & (above >= goal[:, None])
    rises = by_mass | (known & (edges < limits.lowest[:, None]))
    low = tl.max(tl.where(rises, edges, float("-inf")), 1)
    high = tl.min(tl.where(known & (rises == 0), edges, float("inf")), 1)
    below = tl.sum(rises.to(tl.int32), 1)
    pinned = below > tl.sum(by_mass.to(tl.int32), 1)
    between = listed & (below > 0) & (below < nucleus.EDGES)
    kind = tl.where(between, below - 1, 0)
    low_key = d.sort_key(low, SHIFT).to(tl.int64)
    high_key = d.sort_key(tl.minimum(high, limits.top), SHIFT).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)[None, :]
    in_chunks = chunk < CHUNKS
    place = row[:, None] * CHUNKS + chunk
    # Values are read before it is known how many there are, so that no load waits for another.
    member = tl.arange(0, KEEP)[None, None, :]
    base = lists.members + row.to(tl.int64)[:, None] * (CHUNKS * nucleus.CLASSES * KEEP) + kind[:, None] * KEEP
    base = (base + chunk * (nucleus.CLASSES * KEEP))[:, :, None]
    there = between[:, None] & in_chunks
    value = tl.load(base + member, mask=there[:, :, None], other=float("-inf")).to(tl.float32)
    counts = tl.load(lists.counts + place, mask=there, other=0)
    counts = (counts >> (kind * nucleus.COUNT_BITS)[:, None]) & nucleus.MOST
    fits = between & (tl.max(counts, 1) <= KEEP)
    live = (member < counts[:, :, None]) & fits[:, None, None]
    value = tl.reshape(tl.where(live, value, float("-inf")), (BLOCK_R, BLOCK_C * KEEP))
    far = asks & (fits == 0) & ((pinned == 0) | (below < nucleus.EDGES))
    # The weight above the class; where min-p cuts above all edges, above the last.
    over = lists.parts + (tl.minimum(below, nucleus.EDGES - 1) * rows).to(tl.int64)[:, None] * (CHUNKS * PARTS)
    mass = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for part in tl.static_range(PARTS):
        mass += tl.load(over + place * PARTS + part, mask=listed[:, None] & in_chunks, other=0.0)
    left = tl.where(pinned, float("inf"), goal - tl.sum(mass, 1))
    found = low_key
    if tl.max(far.to(tl.int32), 0) > 0:
        found = _floor_in_memory(values_ptr, row, far, row_stride, low_key, high_key, limits, STATIC)
        cut = tl.maximum(d.key_value(found.to(tl.int32), SHIFT), limits.lowest)
        for number in range(0, CHUNKS):
            column = number * STATIC.CHUNK + tl.arange(0, STATIC.CHUNK)[None, :]
            of_chunk = d.load_values(
                values_ptr, row[:, None], column, row_stride, far[:, None] & (column < STATIC.VOCAB)
            )
            weight = d.weigh(of_chunk, limits.top[:, None], limits.scale[:, None], STATIC.PROBS)
            kept = tl.sum(tl.where(of_chunk >= cut[:, None], weight, 0.0), 1)
            tl.store(mass_ptr + row * CHUNKS + number, kept, mask=far)
        tl.debug_barrier()
        mass = tl.where(far[:, None], tl.load(mass_ptr + place, mask=far[:, None] & in_chunks, other=0.0), mass)
    floor, of_members = _search_members(
        value, fits, left, low_key, high_key, found, far, limits, BLOCK_R, BLOCK_C, STATIC
    )
    mass += of_members
    tl.store(mass_ptr + place, mass, mask=asks[:, None] & in_chunks)
    tl.store(distribution_ptr + rows + row, floor, mask=asks)
    tl.store(distribution_ptr + 2 * rows + row, tl.sum(mass, 1), mask=asks)


@triton.jit(do_not_specialize=["rows"])
def _settle_kernel(
    values_ptr,  # [R, STATIC.VOCAB], row stride row_stride
    sampling,  # SamplingTensors
    kept,  # Kept, whose slots and chunks are written
    edges_ptr,  # [5, R] float32, or None where no row is deferred
    lists,  # Lists, or None
    distribution_ptr,  # [4, R] float32: floor and total are written, the second and the third
    rows,
    row_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STATIC: tl.constexpr,  # nucleus.Static
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin(PDL)
    # No load before the wait: all is written by the kernels of this family just before. Loads that
    # depend on no other load come first.
    in_row = row < rows
    request = row // STATIC.PER_REQUEST
    task = tl.load(kept.state + row, mask=in_row, other=0.0)
    goal = tl.load(kept.state + rows + row, mask=in_row, other=0.0)
    lowest = tl.load(kept.state + 2 * rows + row, mask=in_row, other=0.0)
    everything = tl.load(kept.state + 3 * rows + row, mask=in_row, other=0.0)
    top = tl.load(kept.state + 4 * rows + row, mask=in_row, other=0.0)
    least = tl.load(kept.state + 5 * rows + row, mask=in_row, other=0.0)
    scale = d.exponent_scale(tl.load(sampling.temperature + request, mask=in_row, other=1.0))
    wanted, share = d.count_and_share(sampling, request, in_row, STATIC.VOCAB)
    limits = d.Limits(wanted, share, lowest, everything, top, scale)
    near = in_row & (task == nucleus.NEAR)
    if tl.max(near.to(tl.int32), 0) > 0:
        _settle_near(
            values_ptr, kept, distribution_ptr, row, near, rows, row_stride, least, limits, STATIC,
        )  # fmt: skip
    if edges_ptr is not None:
        asks = in_row & (task > nucleus.WHOLE)
        if tl.max(asks.to(tl.int32), 0) > 0:
            above, edges = _load_edges(lists.parts, edges_ptr, row, in_row, rows, STATIC.CHUNKS * STATIC.PARTS, BLOCK_P)
            _settle_deferred(
                values_ptr, lists, kept.chunks, distribution_ptr, row, asks, asks & (task != nucleus.COUNT), above,
                edges, rows, row_stride, goal, limits, BLOCK_R, BLOCK_C, STATIC,
            )  # fmt: skip


def settle(
    rows: Rows,
    kept: Kept,
    edges: Tensor | None,
    lists: nucleus.Lists | None,
    distribution: Tensor,
    static: nucleus.Static,
) -> None:
    """Write floor and total of every filtered row to `distribution` [4, R], and the kept weight: of the slots of the
    rows that are not deferred, of the chunks of the others."""
    values, config = rows.values, SELECTION[current_chip(rows.values)]
    count = len(values)
    block_c = max(triton.next_power_of_2(static.CHUNKS), d.MIN_SCAN)
    block_r = d.rows_per_program(count, config.max_rows, max(config.chunk, block_c * config.keep))
    launch(
        _settle_kernel, (triton.cdiv(count, block_r),), values, rows.sampling, kept, edges, lists, distribution, count,
        values.stride(0), num_warps=static.WARPS, BLOCK_R=block_r, BLOCK_C=block_c,
        BLOCK_P=triton.next_power_of_2(static.CHUNKS * static.PARTS), STATIC=static,
    )  # fmt: skip
