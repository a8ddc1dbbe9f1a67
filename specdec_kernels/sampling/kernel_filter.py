# mypy: ignore-errors
"""The tokens of a filtered row among which its threshold lies, one program per row.

A value C is found that the maxima of at most SLOTS groups reach, and of three quarters as many unless maxima are equal.
These groups hold every token from C on. If the threshold is not below C they become the slots of the row; all other
rows are deferred to `kernel_nucleus`. Then `kernel_settle` finds the thresholds of both.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling import kernel_nucleus as nucleus
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.kernel_settle import Kept, settle, slot_values
from specdec_kernels.sampling.kernel_stats import GROUP_SIZE, Rows, Strips

_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def strip_masses(sums, tops, top, scale, PROBS: tl.constexpr):
    """Weights of the strips of each row, relative to the row's largest value, from their sums and largest values."""
    if not PROBS:
        sums = sums * d.weigh(tops, top[:, None], scale[:, None], False)
    return sums


@triton.jit
def _choose_groups(ids_ptr, row, in_row, group_max, wanted, least, STATIC: tl.constexpr):
    """The groups [R, SLOTS] of the largest maxima in the order of their ids, GROUPS where there are fewer, and the key
    from which on they hold all of the row's values. `ids_ptr` [R, SLOTS] is written."""
    SLOTS: tl.constexpr = STATIC.SLOTS
    SHIFT: tl.constexpr = STATIC.SHIFT
    GROUPS: tl.constexpr = STATIC.GROUPS
    group = tl.arange(0, group_max.shape[1])[None, :]
    key_max = d.sort_key(group_max, SHIFT)
    if STATIC.STRIPS > SLOTS:  # every strip has a group that reaches `least`, the smallest of the strips' maxima
        low = d.sort_key(least, SHIFT).to(tl.int64)
    else:
        low = tl.min(tl.where(group < GROUPS, key_max, 0x7FFFFFFF), 1).to(tl.int64) - 1
    high = tl.max(key_max, 1).to(tl.int64) + 1
    most = tl.full(row.shape, SLOTS, tl.int32)
    # A group for every token of top-k, where there is room.
    enough = tl.maximum(most * 3 // 4, tl.minimum(wanted, most))
    pairs = d.by_warps(group_max, STATIC.WARPS, 2)  # a row of maxima is only aligned to them
    complete = d.key_of_few(pairs, most, enough, low, high, SHIFT)
    chosen = in_row[:, None] & (key_max >= complete.to(tl.int32)[:, None]) & (group < GROUPS)
    slot = tl.cumsum(chosen.to(tl.int32), 1) - 1
    ids_row = row.to(tl.int64)[:, None] * SLOTS
    tl.store(ids_ptr + ids_row + slot, group + tl.zeros_like(slot), mask=chosen)
    tl.debug_barrier()
    number = tl.arange(0, SLOTS)[None, :]
    filled = in_row[:, None] & (number < tl.sum(chosen.to(tl.int32), 1)[:, None])
    held = tl.load(ids_ptr + ids_row + number, mask=filled, other=GROUPS)
    tl.store(ids_ptr + ids_row + number, held, mask=in_row[:, None] & (filled == 0))
    return held, complete


@triton.jit
def _filter(
    values_ptr, kept, queue_ptr, edges_ptr, row, in_row, filtered, rows, row_stride, group_max, sample, least, limits,
    STATIC: tl.constexpr,
):  # fmt: skip
    """Choose the groups of every row, and defer the filtered rows whose threshold lies outside of these."""
    group, complete = _choose_groups(kept.ids, row, in_row, group_max, limits.wanted, least, STATIC)
    value = slot_values(values_ptr, row, in_row, group, row_stride, STATIC)
    value = d.by_warps(value, STATIC.WARPS, STATIC.VECTOR)
    from_least = d.key_value(complete.to(tl.int32), STATIC.SHIFT)
    weight = d.weigh(value, d.spread_rows(limits.top), d.spread_rows(limits.scale), STATIC.PROBS)
    reached = d.sum_of_all(tl.where(value >= d.spread_rows(from_least), weight, 0.0))
    by_count = limits.wanted > 0
    by_mass = limits.share < 1
    # Top-p after top-k takes its share of what top-k keeps.
    known = tl.where(
        by_count,
        d.count_from(value, from_least) >= limits.wanted,
        (by_mass == 0) | (reached >= limits.share * limits.everything),
    )
    known &= by_count | by_mass | (limits.lowest >= from_least)
    near = filtered & known
    deferred = filtered & (known == 0)
    listed = deferred & (limits.wanted == 0)
    searched = listed & by_mass
    goal = tl.where(by_mass, limits.share * limits.everything, float("inf"))
    nucleus.enqueue(queue_ptr, row, deferred)
    mode = tl.where(listed, nucleus.LIST, nucleus.COUNT)
    mode = tl.where(deferred, mode, tl.where(near, nucleus.NEAR, nucleus.WHOLE))
    if tl.max(listed.to(tl.int32), 0) > 0:
        center, spread = nucleus.guess_threshold(sample, complete, reached, goal, limits, STATIC)
        nucleus.store_edges(edges_ptr, row, listed, rows, searched, center, spread, complete, limits, STATIC)
    nucleus.store_state(kept.state, row, in_row, rows, mode, goal, from_least, limits)


@triton.jit(do_not_specialize=["rows"])
def _filter_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    sampling,  # SamplingTensors
    strips,  # Strips; the length of its queue is 0 before
    kept,  # Kept, whose ids and state are written; without ids the row fits the slots, and none can be deferred
    edges_ptr,  # [5, R] float32, or None
    distribution_ptr,  # [4, R] float32: floor and total of the unfiltered row, the second and the third
    rows,
    row_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STATIC: tl.constexpr,  # nucleus.Static
    PDL: tl.constexpr,
):
    GROUPS: tl.constexpr = STATIC.GROUPS
    SLOTS: tl.constexpr = STATIC.SLOTS
    STRIPS: tl.constexpr = STATIC.STRIPS
    PROBS: tl.constexpr = STATIC.PROBS
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // STATIC.PER_REQUEST
    in_row = row < rows
    strip = tl.arange(0, BLOCK_N)[None, :]
    place = row.to(tl.int64)[:, None] * STRIPS + strip
    in_strips = in_row[:, None] & (strip < STRIPS)
    begin(PDL)
    # No load before the wait: the statistics come from `_stats_kernel` just before, which starts before older kernels
    # have ended. Loads that depend on no other load come first.
    tops = tl.load(strips.tops + place, mask=in_strips, other=float("-inf"))
    sums = tl.load(strips.sums + place, mask=in_strips, other=0.0)
    temperature = tl.load(sampling.temperature + request, mask=in_row, other=0.0)
    wanted, share = d.count_and_share(sampling, request, in_row, STATIC.VOCAB)
    if GROUPS > SLOTS:
        group = tl.arange(0, BLOCK_G)[None, :]
        at = strips.groups + row.to(tl.int64)[:, None] * GROUPS + group
        group_max = tl.load(at, mask=in_row[:, None] & (group < GROUPS), other=float("-inf"))
        sample = nucleus.sample_groups(values_ptr, row, in_row, row_stride, STATIC)

    top = tl.max(tops, 1)
    least = tl.min(tl.where(in_strips, tops, float("inf")), 1)
    valid = top > 0 if PROBS else top > float("-inf")
    scale = d.exponent_scale(temperature)
    mass = strip_masses(sums, tops, top, scale, PROBS)
    lowest = tl.full(request.shape, float("-inf"), tl.float32)
    if sampling.min_p is not None:
        min_p = tl.load(sampling.min_p + request, mask=in_row, other=0.0)
        min_p = tl.minimum(tl.where(min_p > 0, min_p, 0.0), 1.0)
        lowest = top * min_p if PROBS else d.finite(top) + tl.log2(min_p) / scale
        lowest = tl.where(min_p > 0, lowest, float("-inf"))
    filtered = in_row & valid & (temperature > 0) & ((wanted > 0) | (share < 1) | (lowest > float("-inf")))
    total = tl.sum(mass, 1)
    limits = d.Limits(wanted, share, lowest, total, top, scale)
    if GROUPS > SLOTS:
        _filter(
            values_ptr, kept, strips.queue, edges_ptr, row, in_row, filtered, rows, row_stride, group_max, sample,
            least, limits, STATIC,
        )  # fmt: skip
    else:
        mode = tl.full(row.shape, nucleus.NEAR, tl.int32)
        nucleus.store_state(kept.state, row, in_row, rows, mode, total, top, limits)
    tl.store(distribution_ptr + rows + row, tl.full(row.shape, float("-inf"), tl.float32), mask=in_row)
    tl.store(distribution_ptr + 2 * rows + row, total, mask=in_row)


def keep(rows: Rows, strips: Strips, distribution: Tensor) -> Kept:
    """The weight that the filters leave of every row; floor and total go to `distribution` [4, R]."""
    values, sampling, config = rows.values, rows.sampling, SELECTION[current_chip(rows.values)]
    count, vocab = values.shape
    num_groups, num_strips = strips.groups.shape[1], strips.tops.shape[1]
    block_g = max(triton.next_power_of_2(num_groups), d.MIN_SCAN)
    slots, chunks = min(config.slots, block_g), triton.cdiv(vocab, config.chunk)
    may_defer = num_groups > slots
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    kept = Kept(
        out(count, slots, dtype=torch.int32) if may_defer else None, out(count, slots), out(nucleus.STATES, count),
        out(count, chunks) if may_defer else None,
    )  # fmt: skip
    edges = out(nucleus.NUM_EDGES, count) if may_defer else None
    block_r = d.rows_per_program(count, config.max_rows, max(slots * GROUP_SIZE, block_g))
    static = nucleus.Static(
        PER_REQUEST=rows.per_request, VOCAB=vocab, GROUPS=num_groups, STRIPS=num_strips, SLOTS=slots, WIDTH=GROUP_SIZE,
        CHUNK=config.chunk, CHUNKS=chunks, KEEP=config.keep, PARTS=config.chunk_warps, WARPS=config.select_warps,
        VECTOR=d.VECTOR_BYTES // values.element_size(), SHIFT=_KEY_SHIFT[values.dtype], PROBS=rows.probabilities,
    )  # fmt: skip
    launch(
        _filter_kernel, (triton.cdiv(count, block_r),), values, sampling, strips, kept, edges, distribution, count,
        values.stride(0), num_warps=config.select_warps, BLOCK_R=block_r,
        BLOCK_N=max(triton.next_power_of_2(num_strips), d.MIN_SCAN), BLOCK_G=block_g, STATIC=static,
    )  # fmt: skip
    lists = nucleus.list_values(rows, strips.queue, kept.state, edges, static) if may_defer else None
    settle(rows, kept, edges, lists, distribution, static)
    return kept
