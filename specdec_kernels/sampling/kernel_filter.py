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

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import launch_dependents, pdl_options, wait_for_predecessor
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
def _choose_groups(
    ids_ptr, row, in_row, group_max, wanted, least,
    GROUPS: tl.constexpr, STRIPS: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The groups [R, SLOTS] of the largest maxima in the order of their ids, GROUPS where there are fewer, and the key
    from which on they hold all of the row's values. `ids_ptr` [R, SLOTS] is written."""
    group = tl.arange(0, group_max.shape[1])[None, :]
    key_max = d.sort_key(group_max, SHIFT)
    if STRIPS > SLOTS:  # every strip has a group that reaches `least`, the smallest of the strips' maxima
        low = d.sort_key(least, SHIFT).to(tl.int64)
    else:
        low = tl.min(tl.where(group < GROUPS, key_max, 0x7FFFFFFF), 1).to(tl.int64) - 1
    high = tl.max(key_max, 1).to(tl.int64) + 1
    most = tl.full(row.shape, SLOTS, tl.int32)
    # A group for every token of top-k, where there is room.
    enough = tl.maximum(most * 3 // 4, tl.minimum(wanted, most))
    pairs = d.by_warps(group_max, WARPS, 2)  # a row of maxima is only aligned to them
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
    values_ptr, ids_ptr, queue_ptr, state_ptr, edges_ptr, row, in_row, filtered, rows, row_stride, group_max, sample,
    least, limits,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, STRIPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Choose the groups of every row, and defer the filtered rows whose threshold lies outside of these."""
    group, complete = _choose_groups(
        ids_ptr, row, in_row, group_max, limits.wanted, least, GROUPS, STRIPS, SLOTS, SHIFT, WARPS
    )  # fmt: skip
    value = slot_values(values_ptr, row, in_row, group, row_stride, VOCAB, SLOTS, WIDTH)
    value = d.by_warps(value, WARPS, VECTOR)
    from_least = d.key_value(complete.to(tl.int32), SHIFT)
    weight = d.weigh(value, d.spread_rows(limits.top), d.spread_rows(limits.scale), PROBS)
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
        center, spread = nucleus.guess_threshold(sample, complete, reached, goal, limits, SHIFT, PROBS, WARPS, VECTOR)
        nucleus.store_edges(edges_ptr, row, listed, rows, searched, center, spread, complete, limits, SHIFT, PROBS)
    nucleus.store_state(state_ptr, row, in_row, rows, mode, goal, from_least, limits)


@triton.jit(do_not_specialize=["rows"])
def _filter_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32
    top_k_ptr,  # [R / PER_REQUEST] int32, or None
    top_p_ptr,  # [R / PER_REQUEST] float32, or None
    min_p_ptr,  # [R / PER_REQUEST] float32, or None
    tops_ptr,  # [R, STRIPS] float32, see `kernel_stats`
    sums_ptr,  # [1 or 2, R, STRIPS] float32: sum at T
    groups_ptr,  # [R, GROUPS] float32: the maxima
    ids_ptr,  # [R, SLOTS] int32, or None where the row fits the slots
    queue_ptr,  # [1 + R] int32, or None where no row can be deferred; its length is 0 before
    state_ptr,  # [6, R] float32
    edges_ptr,  # [5, R] float32, or None
    distribution_ptr,  # [4, R] float32: floor and total of the unfiltered row, the second and the third
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    STRIPS: tl.constexpr,
    PROBS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WARPS: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // PER_REQUEST
    in_row = row < rows
    strip = tl.arange(0, BLOCK_N)[None, :]
    place = row.to(tl.int64)[:, None] * STRIPS + strip
    in_strips = in_row[:, None] & (strip < STRIPS)
    wait_for_predecessor(PDL)
    launch_dependents(PDL)
    # No load before the wait: the statistics come from `stats_kernel` just before, which starts before older kernels
    # have ended. Loads that depend on no other load come first.
    tops = tl.load(tops_ptr + place, mask=in_strips, other=float("-inf"))
    sums = tl.load(sums_ptr + place, mask=in_strips, other=0.0)
    temperature = tl.load(temperature_ptr + request, mask=in_row, other=0.0)
    wanted, share = d.count_and_share(top_k_ptr, top_p_ptr, request, in_row, VOCAB)
    if GROUPS > SLOTS:
        group = tl.arange(0, BLOCK_G)[None, :]
        at = groups_ptr + row.to(tl.int64)[:, None] * GROUPS + group
        group_max = tl.load(at, mask=in_row[:, None] & (group < GROUPS), other=float("-inf"))
        sample = nucleus.sample_groups(values_ptr, row, in_row, row_stride, VOCAB, GROUPS, SLOTS, WIDTH)

    top = tl.max(tops, 1)
    least = tl.min(tl.where(in_strips, tops, float("inf")), 1)
    valid = top > 0 if PROBS else top > float("-inf")
    scale = d.exponent_scale(temperature)
    mass = strip_masses(sums, tops, top, scale, PROBS)
    lowest = tl.full(request.shape, float("-inf"), tl.float32)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + request, mask=in_row, other=0.0)
        min_p = tl.minimum(tl.where(min_p > 0, min_p, 0.0), 1.0)
        lowest = top * min_p if PROBS else d.finite(top) + tl.log2(min_p) / scale
        lowest = tl.where(min_p > 0, lowest, float("-inf"))
    filtered = in_row & valid & (temperature > 0) & ((wanted > 0) | (share < 1) | (lowest > float("-inf")))
    total = tl.sum(mass, 1)
    limits = d.Limits(wanted, share, lowest, total, top, scale)
    if GROUPS > SLOTS:
        _filter(
            values_ptr, ids_ptr, queue_ptr, state_ptr, edges_ptr, row, in_row, filtered, rows, row_stride, group_max,
            sample, least, limits, VOCAB, GROUPS, STRIPS, SLOTS, WIDTH, SHIFT, PROBS,
            WARPS, VECTOR,
        )  # fmt: skip
    else:
        mode = tl.full(row.shape, nucleus.NEAR, tl.int32)
        nucleus.store_state(state_ptr, row, in_row, rows, mode, total, top, limits)
    tl.store(distribution_ptr + rows + row, tl.full(row.shape, float("-inf"), tl.float32), mask=in_row)
    tl.store(distribution_ptr + 2 * rows + row, total, mask=in_row)


def keep(rows: Rows, strips: Strips, distribution: torch.Tensor) -> Kept:
    """The weight that the filters leave of every row; floor and total go to `distribution` [4, R]."""
    values, sampling, chip = rows.values, rows.sampling, current_chip(rows.values)
    (count, vocab), config, shift = values.shape, SELECTION[chip], _KEY_SHIFT[values.dtype]
    num_groups, num_strips = strips.groups.shape[1], strips.tops.shape[1]
    block_g = max(triton.next_power_of_2(num_groups), d.MIN_SCAN)
    slots = min(config.slots, block_g)
    may_defer = num_groups > slots
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    ids = out(count, slots, dtype=torch.int32) if may_defer else None
    state, edges = out(nucleus.STATES, count), out(nucleus.NUM_EDGES, count) if may_defer else None
    block_r = d.rows_per_program(count, config.max_rows, max(slots * GROUP_SIZE, block_g))
    shared = dict(
        PER_REQUEST=rows.per_request, VOCAB=vocab, PROBS=rows.probabilities,
        VECTOR=d.VECTOR_BYTES // values.element_size(), **pdl_options(chip),
    )  # fmt: skip
    launch(
        _filter_kernel, (triton.cdiv(count, block_r),), values, sampling.temperature, *sampling.filters, *strips[:3],
        ids, strips.queue if may_defer else None, state, edges, distribution, count, values.stride(0),
        num_warps=config.select_warps, GROUPS=num_groups, STRIPS=num_strips, SHIFT=shift, BLOCK_R=block_r,
        BLOCK_N=max(triton.next_power_of_2(num_strips), d.MIN_SCAN), BLOCK_G=block_g, SLOTS=slots, WIDTH=GROUP_SIZE,
        WARPS=config.select_warps, **shared,
    )  # fmt: skip
    chunks = triton.cdiv(vocab, config.chunk)
    shared |= dict(CHUNKS=chunks, KEEP=config.keep)
    lists = nucleus.list_values(rows, strips.queue, state, edges, shared) if may_defer else (None, None, None)
    kept = Kept(ids, out(count, slots), state, out(count, chunks) if may_defer else None)
    settle(rows, kept, edges, lists, distribution, shared | dict(WIDTH=GROUP_SIZE, SHIFT=shift))
    return kept
