# mypy: ignore-errors
"""Which tokens of a filtered row tell its threshold.

One program per row. A value C is found that the maxima of at most SLOTS groups reach, and of three quarters as many
unless maxima are equal. These groups hold every token from C on. If the threshold is not below C, they are enough: they
become the slots of the row (top-k up to SLOTS always ends here, and top-p unless the distribution is flat). All other
rows are deferred to `kernel_nucleus`. Then `kernel_settle` finds the thresholds of both.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.overlap import let_next_kernel_start, overlapped, wait_for_kernel_ahead
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling import kernel_nucleus as nucleus
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.kernel_settle import settle, slot_values
from specdec_kernels.sampling.types import SamplingTensors

GROUP_SIZE = 64  # tokens of a group
_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class Kept(NamedTuple):
    """The weight that filters leave: of slots, of chunks, or of all strips, as the row's state says.

    Without `ids` slot i is group i, all rows go by their slots, and there are no chunks.
    """

    ids: torch.Tensor | None  # [R, SLOTS] int32: the group in each slot
    slots: torch.Tensor | None  # [R, SLOTS] float32
    state: torch.Tensor | None  # [6, R] float32, see `kernel_nucleus`
    chunks: torch.Tensor | None  # [R, chunks] float32


@triton.jit
def strip_masses(sums, tops, top, scale, PROBS: tl.constexpr):
    """Weights of the strips of each row, relative to the row's largest value, from their sums and largest values."""
    if not PROBS:
        sums = sums * d.weigh(tops, top[:, None], scale[:, None], False)
    return sums


@triton.jit
def _lowest(min_p_ptr, request, in_row, top, scale, PROBS: tl.constexpr):
    """The value below which min-p cuts, -inf where it is off."""
    lowest = tl.full(request.shape, float("-inf"), tl.float32)
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + request, mask=in_row, other=0.0)
        least = tl.minimum(tl.where(least > 0, least, 0.0), 1.0)
        lowest = top * least if PROBS else d.finite(top) + tl.log2(least) / scale
        lowest = tl.where(least > 0, lowest, float("-inf"))
    return lowest


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
def _defer(
    sample, queue_ptr, state_ptr, edges_ptr, row, in_row, near, deferred, rows, complete, reached, wanted, share,
    lowest, everything, top, scale, least,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Tell the kernels behind what to do for each row, and where the thresholds of the deferred rows should lie."""
    listed = deferred & (wanted == 0)
    searched = listed & (share < 1)
    goal = tl.where(share < 1, share * everything, float("inf"))
    nucleus.enqueue(queue_ptr, row, deferred)
    mode = tl.where(listed, nucleus.LIST, nucleus.COUNT)
    mode = tl.where(deferred, mode, tl.where(near, nucleus.NEAR, nucleus.WHOLE))
    if tl.max(listed.to(tl.int32), 0) > 0:
        center, spread = nucleus.guess_threshold(
            sample, complete, reached, goal, everything, top, scale, SHIFT, PROBS, WARPS, VECTOR
        )
        nucleus.store_edges(
            edges_ptr, row, listed, rows, searched, center, spread, complete, lowest, top, scale, SHIFT, PROBS
        )
    nucleus.store_state(state_ptr, row, in_row, rows, mode, goal, lowest, everything, top, least)


@triton.jit
def _filter(
    values_ptr, ids_ptr, queue_ptr, state_ptr, edges_ptr, row, in_row, filtered, rows, row_stride, group_max, sample,
    wanted, share, lowest, least, top, scale, total,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, STRIPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, WARPS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Choose the groups of every row, and defer the filtered rows of which these do not tell all."""
    group, complete = _choose_groups(
        ids_ptr, row, in_row, group_max, wanted, least, GROUPS, STRIPS, SLOTS, SHIFT, WARPS
    )  # fmt: skip
    value = slot_values(values_ptr, row, in_row, group, row_stride, VOCAB, SLOTS, WIDTH)
    value = d.by_warps(value, WARPS, VECTOR)
    from_least = d.key_value(complete.to(tl.int32), SHIFT)
    weight = d.weigh(value, d.spread_rows(top), d.spread_rows(scale), PROBS)
    reached = d.sum_of_all(tl.where(value >= d.spread_rows(from_least), weight, 0.0))
    by_count, by_mass = wanted > 0, share < 1
    # Top-p behind top-k takes its share of what top-k keeps.
    known = tl.where(by_count, d.count_from(value, from_least) >= wanted, (by_mass == 0) | (reached >= share * total))
    known &= by_count | by_mass | (lowest >= from_least)
    _defer(
        sample, queue_ptr, state_ptr, edges_ptr, row, in_row, filtered & known, filtered & (known == 0), rows, complete,
        reached, wanted, share, lowest, total, top, scale, from_least, SHIFT, PROBS, WARPS, VECTOR,
    )  # fmt: skip


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
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // PER_REQUEST
    in_row = row < rows
    strip = tl.arange(0, BLOCK_N)[None, :]
    place = row.to(tl.int64)[:, None] * STRIPS + strip
    in_strips = in_row[:, None] & (strip < STRIPS)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    # All that does not depend on other loads is read first.
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
    lowest = _lowest(min_p_ptr, request, in_row, top, scale, PROBS)
    filtered = in_row & valid & (temperature > 0) & ((wanted > 0) | (share < 1) | (lowest > float("-inf")))
    total = tl.sum(mass, 1)
    if GROUPS > SLOTS:
        _filter(
            values_ptr, ids_ptr, queue_ptr, state_ptr, edges_ptr, row, in_row, filtered, rows, row_stride, group_max,
            sample, wanted, share, lowest, least, top, scale, total, VOCAB, GROUPS, STRIPS, SLOTS, WIDTH, SHIFT, PROBS,
            WARPS, VECTOR,
        )  # fmt: skip
    else:
        mode = tl.full(row.shape, nucleus.NEAR, tl.int32)
        nucleus.store_state(state_ptr, row, in_row, rows, mode, total, lowest, total, top, top)
    tl.store(distribution_ptr + rows + row, tl.full(row.shape, float("-inf"), tl.float32), mask=in_row)
    tl.store(distribution_ptr + 2 * rows + row, total, mask=in_row)


def keep(
    values: torch.Tensor,
    sampling: SamplingTensors,
    tops: torch.Tensor,
    sums: torch.Tensor,
    groups: torch.Tensor,
    queue: torch.Tensor,
    distribution: torch.Tensor,
    *,
    per_request: int,
    probabilities: bool,
) -> Kept:
    """What the filters leave of every row; floor and total go to `distribution` [4, R]. `queue` [1 + R] is empty."""
    (rows, vocab), chip = values.shape, current_chip(values)
    config, shift = SELECTION[chip], _KEY_SHIFT[values.dtype]
    width, num_groups, num_strips = GROUP_SIZE, groups.shape[1], tops.shape[1]
    block_g = max(triton.next_power_of_2(num_groups), d.MIN_SCAN)
    slots = min(config.slots, block_g)
    may_defer = num_groups > slots
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    ids = out(rows, slots, dtype=torch.int32) if may_defer else None
    state, edges = out(nucleus.STATES, rows), out(nucleus.NUM_EDGES, rows) if may_defer else None
    of_slots = out(rows, slots)
    block_r = d.rows_per_program(rows, config.max_rows, max(slots * width, block_g))
    shared = dict(
        PER_REQUEST=per_request, VOCAB=vocab, PROBS=probabilities, VECTOR=d.VECTOR_BYTES // values.element_size(),
        **overlapped(chip),
    )  # fmt: skip
    launch(
        _filter_kernel, (triton.cdiv(rows, block_r),), values, sampling.temperature, *sampling.filters, tops, sums,
        groups, ids, queue if may_defer else None, state, edges, distribution, rows, values.stride(0),
        num_warps=config.select_warps, GROUPS=num_groups, STRIPS=num_strips, SHIFT=shift, BLOCK_R=block_r,
        BLOCK_N=max(triton.next_power_of_2(num_strips), d.MIN_SCAN), BLOCK_G=block_g, SLOTS=slots, WIDTH=width,
        WARPS=config.select_warps, **shared,
    )  # fmt: skip
    shared |= dict(CHUNKS=triton.cdiv(vocab, config.chunk), KEEP=config.keep)
    lists = None
    if may_defer:
        lists = nucleus.list_values(
            values, sampling, queue, state, edges, config, shared | dict(WARPS=config.chunk_warps)
        )  # fmt: skip
    chunks = settle(
        values, sampling, ids, state, edges, lists, of_slots, distribution, config,
        shared | dict(WIDTH=width, SHIFT=shift),
    )  # fmt: skip
    return Kept(ids, of_slots, state, chunks)
