"""Token selection over a split vocabulary: statistics of every group of tokens, then one look at what matters.

The first kernel visits all groups of all rows at once: m = max l, s = sum exp((l - m) / T). The second kernel runs one
program per row: M = max m and the masses s exp((m - M) / T). Their running sum gives the group that the uniform falls
in, and that group alone is read again.

With filters the second kernel first finds the row's threshold. The SLOTS groups of the largest maxima hold every token
above the next maximum C. If the threshold is not below C, these groups are enough: they are read into registers and
the threshold is found there by bisection (top-k up to SLOTS always ends here, and top-p unless the distribution is
flat). All other rows are deferred to `kernel_nucleus`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling import kernel_nucleus as nucleus
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.types import TARGET_STREAM, Picked, SamplingTensors

_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class Selected(NamedTuple):
    """What `select` found out about each row.

    The rows of `distribution`, [R] each: top; floor; total, with w(v) = exp((v - top) / T) for v >= floor and
    total = sum w; and the log sum exp of the row at temperature 1, unfiltered.
    """

    tokens: torch.Tensor  # [R] int64
    valid: torch.Tensor  # [R] bool
    logprobs: torch.Tensor | None  # [R] float32
    distribution: torch.Tensor | None  # [4, R] float32


@triton.jit
def _masses(value, top, scale, twice, PROBS: tl.constexpr, TWO: tl.constexpr):
    """Sums of a group's weights at its temperature and, where `TWO` and `twice` ask for it, at temperature 1."""
    mass = tl.sum(d.weigh(value, top[:, None], scale[:, None], PROBS), 1)
    plain = mass
    if TWO:
        if twice:
            plain = tl.sum(d.weigh(value, top[:, None], d.LOG2E, PROBS), 1)
    return mass, plain


@triton.jit(do_not_specialize=["rows"])
def _stats_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    stats_ptr,  # [1 to 3, R, GROUPS] float32: maximum, sum at T (with SAMPLE), sum at 1 (with NORMALISE)
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_R * BLOCK_S)
    row = tl.program_id(0) * BLOCK_R + (pair * 0 if BLOCK_R == 1 else pair // BLOCK_S)
    group = tl.program_id(1) * BLOCK_S + pair % BLOCK_S
    live = (row < rows) & (group < GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    in_row = live[:, None] & (column < VOCAB)
    value = d.load_entries(values_ptr, row[:, None], column, row_stride, in_row)
    place = row.to(tl.int64) * GROUPS + group
    plane = rows.to(tl.int64) * GROUPS
    if SAMPLE or NORMALISE:
        temperature = tl.full(row.shape, 1.0, tl.float32)
        if SAMPLE:
            temperature = tl.load(temperature_ptr + row // PER_REQUEST, mask=live, other=1.0)
        scale = d.exponent_scale(temperature)
        twice = tl.max(tl.where((temperature > 0) & (temperature != 1), 1, 0), 0) > 0
        top = tl.max(value, 1)
        mass, plain = _masses(value, top, scale, twice, PROBS, SAMPLE and NORMALISE)
        # A NaN or an infinity shows in its group's sum or maximum; replacing it in every entry would be slower.
        if tl.max(tl.where((mass < float("inf")) & (top == top), 0, 1), 0) > 0:
            value = d.load_values(values_ptr, row[:, None], column, row_stride, in_row)
            top = tl.max(value, 1)
            mass, plain = _masses(value, top, scale, twice, PROBS, SAMPLE and NORMALISE)
        tl.store(stats_ptr + plane + place, mass, mask=live)
        if SAMPLE and NORMALISE:
            tl.store(stats_ptr + 2 * plane + place, plain, mask=live)
    else:
        top = tl.max(d.usable(value), 1)
    tl.store(stats_ptr + place, top, mask=live)


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
def _gather(
    values_ptr, ids_ptr, row, in_row, group_max, group, row_stride,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Values [R, SLOTS * WIDTH] of the groups of the largest maxima in the order of their ids, and the key from which
    on they are all of the row's values. The ids of the groups go to `ids_ptr` [R, SLOTS]."""
    member = tl.arange(0, SLOTS * WIDTH)[None, :]
    if GROUPS <= SLOTS:
        column = member + tl.zeros_like(row)[:, None]
        value = d.load_values(values_ptr, row[:, None], column, row_stride, in_row[:, None] & (column < VOCAB))
        key = d.sort_key(value, SHIFT)
        complete = tl.min(tl.where(value > float("-inf"), key, 0x7FFFFFFF), 1).to(tl.int64)
    else:
        key_max = d.sort_key(group_max, SHIFT)
        low = tl.min(tl.where(group < GROUPS, key_max, 0x7FFFFFFF), 1).to(tl.int64) - 1
        high = tl.max(key_max, 1).to(tl.int64) + 1
        complete = d.kth_key(key_max, SLOTS + 1, low, high) + 1
        chosen = in_row[:, None] & (key_max >= complete.to(tl.int32)[:, None]) & (group < GROUPS)
        slot = tl.cumsum(chosen.to(tl.int32), 1) - 1
        ids_row = row.to(tl.int64)[:, None] * SLOTS
        tl.store(ids_ptr + ids_row + slot, group + tl.zeros_like(slot), mask=chosen)
        tl.debug_barrier()
        used = tl.max(slot, 1) + 1
        filled = member // WIDTH < used[:, None]
        held = tl.load(ids_ptr + ids_row + member // WIDTH, mask=filled & in_row[:, None], other=GROUPS)
        column = held * WIDTH + member % WIDTH
        value = d.load_values(values_ptr, row[:, None], column, row_stride, in_row[:, None] & (column < VOCAB))
        key = d.sort_key(value, SHIFT)
    return value, key, complete


@triton.jit
def _floor_in_slots(
    value, key, complete, wanted, share, lowest, everything, top, scale,
    WHOLE: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Threshold from the gathered values, whether it is the row's, the kept weight of each slot, and the weight at or
    above `complete`."""
    weight = tl.where(key >= complete.to(tl.int32)[:, None], d.weigh(value, top[:, None], scale[:, None], PROBS), 0.0)
    key_top = d.sort_key(top, SHIFT).to(tl.int64)
    by_count, by_mass = wanted > 0, share < 1
    held = tl.sum((key >= complete.to(tl.int32)[:, None]).to(tl.int32), 1)
    known = (by_count == 0) | (held >= wanted) | WHOLE
    lowest_key = d.kth_key(key, wanted, complete, tl.where(by_count & known, key_top + 1, complete + 1))
    in_reach = tl.sum(tl.where(key >= lowest_key.to(tl.int32)[:, None], weight, 0.0), 1)
    goal = share * tl.where(by_count | WHOLE, in_reach, everything)
    known &= (by_mass == 0) | (in_reach >= goal)
    lowest_key = d.mass_key(key, weight, goal, lowest_key - 1, tl.where(by_mass & known, key_top, lowest_key))
    cut = tl.where(by_count | by_mass, d.key_value(lowest_key.to(tl.int32), SHIFT), float("-inf"))
    floor = tl.maximum(cut, lowest)
    known &= (floor >= d.key_value(complete.to(tl.int32), SHIFT)) | WHOLE
    kept = tl.where(value >= floor[:, None], weight, 0.0)
    slot_mass = tl.sum(tl.reshape(kept, (kept.shape[0], SLOTS, WIDTH)), 2)
    return floor, known, slot_mass, tl.sum(weight, 1)


@triton.jit
def _defer(
    values_ptr, state_ptr, pivots_ptr, row, in_row, deferred, rows, row_stride, complete, reached, wanted, share,
    lowest, everything, top, scale,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr,
):  # fmt: skip
    """Tell `kernel_nucleus` what to do for each row, and where the thresholds of the deferred rows should lie."""
    searched = deferred & (wanted == 0) & (share < 1)
    mode = tl.where(searched, nucleus.SEARCH, tl.where(wanted > 0, nucleus.COUNT, nucleus.FIXED))
    mode = tl.where(deferred, mode, nucleus.DONE)
    ceiling = tl.where(reached < share * everything, d.key_value(complete.to(tl.int32), SHIFT), top)
    goal = share * everything
    nucleus.store_state(state_ptr, row, in_row, rows, mode, goal, ceiling, lowest, everything, top, reached)
    if tl.max(searched.to(tl.int32), 0) > 0:
        nucleus.store_pivots(
            values_ptr, pivots_ptr, row, searched, rows, row_stride, complete, reached, goal, everything, top, scale,
            VOCAB, GROUPS, SLOTS, WIDTH, SHIFT, PROBS,
        )  # fmt: skip


@triton.jit
def _filter(
    values_ptr, top_k_ptr, top_p_ptr, min_p_ptr, ids_ptr, state_ptr, pivots_ptr, row, request, in_row, drawn, group_max,
    group, rows, row_stride, top, scale, total,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr,
):  # fmt: skip
    """Threshold, kept total and kept mass of each slot, and the rows of which the slots tell all; filtered rows of
    which they do not are deferred, and count as unfiltered here."""
    wanted, share = d.count_and_share(top_k_ptr, top_p_ptr, request, in_row, VOCAB)
    lowest = _lowest(min_p_ptr, request, in_row, top, scale, PROBS)
    filtered = drawn & ((wanted > 0) | (share < 1) | (lowest > float("-inf")))
    value, key, complete = _gather(
        values_ptr, ids_ptr, row, in_row, group_max, group, row_stride, VOCAB, GROUPS, SLOTS, WIDTH, SHIFT
    )
    floor, known, slot_mass, reached = _floor_in_slots(
        value, key, complete, wanted, share, lowest, total, top, scale, GROUPS <= SLOTS, SLOTS, WIDTH, SHIFT, PROBS
    )
    near = filtered & known
    if GROUPS <= SLOTS:
        total = tl.sum(slot_mass, 1)
    else:
        _defer(
            values_ptr, state_ptr, pivots_ptr, row, in_row, filtered & (known == 0), rows, row_stride, complete,
            reached, wanted, share, lowest, total, top, scale, VOCAB, GROUPS, SLOTS, WIDTH, SHIFT, PROBS,
        )  # fmt: skip
        total = tl.where(near, tl.sum(slot_mass, 1), total)
        floor = tl.where(near, floor, float("-inf"))
    return floor, total, slot_mass, near


@triton.jit
def _draw(
    values_ptr, ids_ptr, row, in_row, mass, slot_mass, near, uniform, top, scale, floor, row_stride,
    FILTER: tl.constexpr, VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    PROBS: tl.constexpr,
):  # fmt: skip
    """Token at which the running weight passes the uniform's share of the total; -1 for none."""
    if FILTER and GROUPS <= SLOTS:
        chosen, within = d.find(slot_mass, uniform)
    else:
        chosen, within = d.find(mass, uniform)
        if FILTER:
            slot, in_slot = d.find(slot_mass, uniform)
            held = tl.load(ids_ptr + row.to(tl.int64) * SLOTS + slot, mask=near & (slot >= 0), other=0)
            chosen, within = tl.where(near, held, chosen), tl.where(near, in_slot, within)
    return d.draw_in_group(values_ptr, row, in_row, chosen, within, top, scale, floor, row_stride, VOCAB, WIDTH, PROBS)


@triton.jit
def _store_logprobs(
    values_ptr, plain_ptr, normaliser_ptr, logprobs_ptr, row, in_row, in_groups, token, valid, group_max, top,
    row_stride, PROBS: tl.constexpr,
):  # fmt: skip
    """Store what is asked for of the log sum exp at temperature 1 and of the token's log-probability; return the
    former."""
    plain = tl.load(plain_ptr, mask=in_groups, other=0.0)
    if not PROBS:
        plain = plain * d.weigh(group_max, top[:, None], d.LOG2E, False)
    normaliser = tl.log(tl.sum(plain, 1)) + (0.0 if PROBS else d.finite(top))
    if normaliser_ptr is not None:
        tl.store(normaliser_ptr + row, normaliser, mask=in_row)
    if logprobs_ptr is not None:
        logprob = d.log_value(values_ptr, row, token, row_stride, in_row, PROBS) - normaliser
        tl.store(logprobs_ptr + row, tl.where(valid, logprob, float("-inf")), mask=in_row)
    return normaliser


@triton.jit(do_not_specialize=["rows"])
def _select_kernel(  # 19 run-time arguments: most are optional inputs and outputs, and those that are None cost nothing
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    top_k_ptr,  # [R / PER_REQUEST] int32, or None
    top_p_ptr,  # [R / PER_REQUEST] float32, or None
    min_p_ptr,  # [R / PER_REQUEST] float32, or None
    seeds_ptr,  # [R / PER_REQUEST] int64, or None
    positions_ptr,  # [R] int64, or None
    uniforms_ptr,  # [R] float64, or None
    stats_ptr,  # [2 or 3, R, GROUPS] float32
    ids_ptr,  # [R, SLOTS] int32, or None where the row fits the slots or is not filtered
    state_ptr,  # [8, R] float32, or None where no row can be deferred
    pivots_ptr,  # [8, R] float32, or None
    normaliser_ptr,  # [R] float32, or None
    tokens_ptr,  # [R] int64
    valid_ptr,  # [R] bool
    logprobs_ptr,  # [R] float32, or None
    distribution_ptr,  # [4, R] float32 (see Selected), or None
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    DRAW: tl.constexpr,
    FILTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    STREAM: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // PER_REQUEST
    in_row = row < rows
    group = tl.arange(0, BLOCK_G)[None, :]
    place = row.to(tl.int64)[:, None] * GROUPS + group
    in_groups = in_row[:, None] & (group < GROUPS)
    plane = rows.to(tl.int64) * GROUPS
    group_max = tl.load(stats_ptr + place, mask=in_groups, other=float("-inf"))
    top = tl.max(group_max, 1)
    valid = top > 0 if PROBS else top > float("-inf")
    token = d.first_largest(values_ptr, row, in_row, group_max, group, top, row_stride, VOCAB, GROUPS, WIDTH)

    if SAMPLE:
        temperature = tl.load(temperature_ptr + request, mask=in_row, other=0.0)
        scale = d.exponent_scale(temperature)
        floor = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        mass = tl.load(stats_ptr + plane + place, mask=in_groups, other=0.0)
        if not PROBS:
            mass = mass * d.weigh(group_max, top[:, None], scale[:, None], False)
        total = tl.sum(mass, 1)
        slot_mass, near = mass, in_row
        if FILTER:
            floor, total, slot_mass, near = _filter(
                values_ptr, top_k_ptr, top_p_ptr, min_p_ptr, ids_ptr, state_ptr, pivots_ptr, row, request, in_row,
                in_row & valid & (temperature > 0), group_max, group, rows, row_stride, top, scale, total, VOCAB,
                GROUPS, SLOTS, WIDTH, SHIFT, PROBS,
            )  # fmt: skip
        if DRAW:
            uniform = d.row_uniform(seeds_ptr, positions_ptr, uniforms_ptr, row, request, in_row, STREAM)
            drawn = _draw(
                values_ptr, ids_ptr, row, in_row, mass, slot_mass, near, uniform, top, scale, floor, row_stride, FILTER,
                VOCAB, GROUPS, SLOTS, WIDTH, PROBS,
            )  # fmt: skip
            token = tl.where((temperature > 0) & (drawn >= 0), drawn, token)

    token = tl.where(valid, token, 0)
    tl.store(tokens_ptr + row, token.to(tl.int64), mask=in_row)
    tl.store(valid_ptr + row, valid, mask=in_row)
    if NORMALISE:
        plain_ptr = stats_ptr + (2 * plane if SAMPLE else plane) + place
        normaliser = _store_logprobs(
            values_ptr, plain_ptr, normaliser_ptr, logprobs_ptr, row, in_row, in_groups, token, valid, group_max, top,
            row_stride, PROBS,
        )  # fmt: skip
    if distribution_ptr is not None:
        tl.store(distribution_ptr + row, d.finite(top), mask=in_row)
        tl.store(distribution_ptr + rows + row, floor, mask=in_row)
        tl.store(distribution_ptr + 2 * rows + row, total, mask=in_row)
        if NORMALISE:
            tl.store(distribution_ptr + 3 * rows + row, normaliser, mask=in_row)


def select(
    values: torch.Tensor,
    sampling: SamplingTensors,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    *,
    per_request: int = 1,
    stream: int = TARGET_STREAM,
    probabilities: bool = False,
    draw: bool = True,
    want_logprobs: bool = False,
    want_distribution: bool = False,
    normalise: bool = False,
) -> Selected:
    """Token of every row, and what else is asked for. Row r belongs to request r // per_request.

    `want_distribution` needs a temperature; its last row is written only with `want_logprobs` or `normalise`.
    """
    rows, vocab = values.shape
    config = SELECTION[current_chip(values)]
    width, groups, block_g = d.grouping(vocab, config.width)
    slots = min(config.slots, block_g)
    sample, normalise = sampling.temperature is not None, normalise or want_logprobs
    filtered = sample and sampling.filtered
    may_defer = filtered and groups > slots
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    stats = out(1 + sample + normalise, rows, groups)
    ids = out(rows, slots, dtype=torch.int32) if may_defer else None
    state, pivots = (out(nucleus.STATES, rows), out(nucleus.NUM_PIVOTS, rows)) if may_defer else (None, None)
    normaliser = out(rows) if may_defer and want_logprobs else None
    found = Selected(
        out(rows, dtype=torch.int64), out(rows, dtype=torch.bool), out(rows) if want_logprobs else None,
        out(4, rows) if want_distribution else None,
    )  # fmt: skip
    shared = dict(
        PER_REQUEST=per_request, VOCAB=vocab, GROUPS=groups, SAMPLE=sample, NORMALISE=normalise, PROBS=probabilities,
        WIDTH=width,
    )  # fmt: skip
    block_s = min(config.strips, block_g)
    block_r = min(config.strips // block_s, config.max_rows, triton.next_power_of_2(max(rows, 1)))
    launch(
        _stats_kernel, (triton.cdiv(rows, block_r), triton.cdiv(groups, block_s)), values, sampling.temperature, stats,
        rows, values.stride(0), num_warps=config.stats_warps, BLOCK_R=block_r, BLOCK_S=block_s, **shared,
    )  # fmt: skip
    keyed = sample and draw and uniforms is None
    sources = (sampling.seeds, positions, None) if keyed else (None, None, uniforms if sample and draw else None)
    shift = _KEY_SHIFT[values.dtype]
    block_r = d.rows_per_program(rows, config.max_rows, max(slots * width, block_g) if filtered else block_g)
    launch(
        _select_kernel, (triton.cdiv(rows, block_r),), values, sampling.temperature,
        *(sampling.filters if filtered else (None, None, None)), *sources, stats, ids, state, pivots, normaliser,
        *found, rows, values.stride(0), num_warps=config.select_warps if filtered else config.stats_warps, DRAW=draw,
        FILTER=filtered, STREAM=stream, SHIFT=shift, BLOCK_R=block_r, BLOCK_G=block_g, SLOTS=slots, **shared,
    )  # fmt: skip
    if may_defer:
        nucleus.resolve(
            values, sampling, sources, state, pivots, normaliser, found.tokens, found.logprobs, found.distribution,
            config, draw=draw, per_request=per_request, probabilities=probabilities, stream=stream, shift=shift,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["rows"])
def _probs_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R] float32
    distribution_ptr,  # [4, R] float32, see Selected
    tokens_ptr,  # [R] int64, the argmax
    valid_ptr,  # [R] bool
    probs_ptr,  # [R, VOCAB] float32
    rows,
    row_stride,
    VOCAB: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    in_row = row < rows
    live = in_row[:, None] & (column < VOCAB)
    temperature = tl.load(temperature_ptr + row, mask=in_row, other=0.0)
    top = tl.load(distribution_ptr + row, mask=in_row, other=0.0)
    floor = tl.load(distribution_ptr + rows + row, mask=in_row, other=0.0)
    total = tl.load(distribution_ptr + 2 * rows + row, mask=in_row, other=1.0)
    token = tl.load(tokens_ptr + row, mask=in_row, other=0)
    valid = tl.load(valid_ptr + row, mask=in_row, other=0) != 0
    value = d.load_values(values_ptr, row[:, None], column, row_stride, live)
    weight = d.weigh(value, top[:, None], d.exponent_scale(temperature)[:, None], PROBS)
    prob = tl.where(value >= floor[:, None], weight / total[:, None], 0.0)
    if not PROBS:
        prob = tl.where((temperature > 0)[:, None], prob, (column == token[:, None]).to(tl.float32))
    prob = tl.where(valid[:, None], prob, 0.0)
    tl.store(probs_ptr + row.to(tl.int64)[:, None] * VOCAB + column, prob, mask=live)


def filtered_probs(logits: torch.Tensor, sampling: SamplingTensors, probabilities: bool = False) -> torch.Tensor:
    """See `specdec_kernels.sampling.filtered_probs`; with `probabilities` the rows hold probabilities, not logits."""
    rows, vocab = logits.shape
    if sampling.temperature is None:
        sampling = sampling._replace(temperature=torch.full((rows,), float(probabilities), device=logits.device))
    found = select(logits, sampling, None, None, probabilities=probabilities, draw=False, want_distribution=True)
    probs = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    block_v = min(max(triton.next_power_of_2(vocab), 2), 4096)
    block_r = 1 if current_chip(logits) != "interpreter" else triton.next_power_of_2(max(rows, 1))
    launch(
        _probs_kernel, (triton.cdiv(rows, block_r), triton.cdiv(vocab, block_v)), logits, sampling.temperature,
        found.distribution, found.tokens, found.valid, probs, rows, logits.stride(0), num_warps=4, VOCAB=vocab,
        PROBS=probabilities, BLOCK_R=block_r, BLOCK_V=block_v,
    )  # fmt: skip
    return probs


def pick_tokens(
    logits: torch.Tensor,
    sampling: SamplingTensors,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    *,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
) -> Picked:
    """See `specdec_kernels.sampling.pick_tokens`."""
    found = select(logits, sampling, positions, uniforms, stream=stream, want_logprobs=return_logprobs)
    return Picked(found.tokens, found.valid, found.logprobs)
