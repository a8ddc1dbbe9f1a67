"""Token selection over a split vocabulary: statistics of every group of tokens, then one look at what matters.

First kernel, over all groups of all rows at once: m = max l, s = sum exp((l - m) / T). Second kernel, a program a row:
M = max m and the masses s exp((m - M) / T); their running sum gives the group that the uniform falls in, and that
group alone is read again.

With filters the second kernel first finds the row's threshold. The SLOTS groups of the largest maxima hold every token
above the next maximum C, so if the threshold is not below C these groups are enough: they are read into registers and
the threshold is found there by bisection (top-k up to SLOTS always ends here, and top-p unless the law is flat).
Otherwise the bisection runs over the row in memory, which the first kernel has left in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.types import TARGET_STREAM, Filters, Picked


@dataclass(frozen=True)
class SamplingConfig:
    """Widths depend on the vocabulary alone, so that a row's result does not depend on its batch."""

    width: int  # tokens of a group
    slots: int  # groups that a program holds in registers
    strips: int  # groups of one program of the first kernel
    max_rows: int  # rows of one program of the second kernel
    stats_warps: int
    select_warps: int
    stream: int  # tokens of one step over a row in memory


_GPU = SamplingConfig(width=64, slots=128, strips=128, max_rows=1, stats_warps=8, select_warps=16, stream=8192)
# Sixteen wavefronts of 64 lanes would leave 128 registers a lane, which spills.
_AMD = replace(_GPU, select_warps=8)
# The interpreter pays by the program, not by the lane; few slots, so that its cases reach the path over memory.
_INTERPRETER = SamplingConfig(
    width=64, slots=8, strips=1 << 14, max_rows=1 << 15, stats_warps=1, select_warps=1, stream=2048
)
_CONFIGS = {"sm80": _GPU, "sm90": _GPU, "sm100": _GPU, "gfx942": _AMD, "interpreter": _INTERPRETER}
# A scan shorter than the eight 16-bit logits of one vector load does not compile on Triton 3.6.
_MIN_SCAN = 8
_KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


class Selected(NamedTuple):
    """What `select` found out about each row.

    The law's rows are, [R] each: top; floor; total, with w(v) = exp((v - top) / T) for v >= floor and total = sum w;
    and the log sum exp of the row at temperature 1, unfiltered.
    """

    tokens: torch.Tensor  # [R] int64
    valid: torch.Tensor  # [R] bool
    logprobs: torch.Tensor | None  # [R] float32
    law: torch.Tensor | None  # [4, R] float32


@triton.jit(do_not_specialize=["strips"])
def _stats_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    stats_ptr,  # [2 or 3, R, GROUPS] float32: maximum, sum at T, sum at 1 (only with SAMPLE and NORMALISE)
    strips,  # R * GROUPS
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
):
    strip = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = strip // GROUPS
    column = (strip - row * GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    in_strips = strip < strips
    value = d.load_values(values_ptr, row[:, None], column, row_stride, in_strips[:, None] & (column < VOCAB))
    top = tl.max(value, 1)
    place = strip.to(tl.int64)
    tl.store(stats_ptr + place, top, mask=in_strips)
    if SAMPLE:
        warmth = tl.load(temperature_ptr + row // PER_REQUEST, mask=in_strips, other=1.0)
        mass = tl.sum(d.weigh(value, top[:, None], d.exponent_scale(warmth)[:, None], PROBS), 1)
        tl.store(stats_ptr + strips + place, mass, mask=in_strips)
        if NORMALISE:
            if tl.max(tl.where((warmth > 0) & (warmth != 1), 1, 0), 0) > 0:
                mass = tl.sum(d.weigh(value, top[:, None], d.LOG2E, PROBS), 1)
            tl.store(stats_ptr + strips.to(tl.int64) * 2 + place, mass, mask=in_strips)
    elif NORMALISE:
        mass = tl.sum(d.weigh(value, top[:, None], d.LOG2E, PROBS), 1)
        tl.store(stats_ptr + strips + place, mass, mask=in_strips)


@triton.jit
def _limits(
    top_k_ptr, top_p_ptr, min_p_ptr, request, in_row, top, scale, VOCAB: tl.constexpr, PROBS: tl.constexpr
):  # fmt: skip
    """The row's k (0 is off), p (1 is off), and the value below which min-p cuts (-inf is off)."""
    wanted = tl.zeros_like(request)
    share = tl.full(request.shape, 1.0, tl.float32)
    lowest = tl.full(request.shape, float("-inf"), tl.float32)
    if top_k_ptr is not None:
        wanted = tl.load(top_k_ptr + request, mask=in_row, other=0)
        wanted = tl.where((wanted > 0) & (wanted < VOCAB), wanted, 0)
    if top_p_ptr is not None:
        share = tl.load(top_p_ptr + request, mask=in_row, other=1.0)
        share = tl.where(share < 1, share, 1.0)
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + request, mask=in_row, other=0.0)
        least = tl.minimum(tl.where(least > 0, least, 0.0), 1.0)
        lowest = top * least if PROBS else d.finite(top) + tl.log2(least) / scale
        lowest = tl.where(least > 0, lowest, float("-inf"))
    return wanted, share, lowest


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
def _sampled_guess(
    values_ptr, row, asks, row_stride, under, key_top, share, top, scale,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr,
):  # fmt: skip
    """Where the threshold of top-p would be in a sample of SLOTS groups spread over the row; only keys above `under`
    count."""
    member = tl.arange(0, SLOTS * WIDTH)[None, :]
    column = member // WIDTH * (GROUPS // SLOTS) * WIDTH + member % WIDTH + tl.zeros_like(row)[:, None]
    value = d.load_values(values_ptr, row[:, None], column, row_stride, asks[:, None] & (column < VOCAB))
    key = d.sort_key(value, SHIFT)
    weight = d.weigh(value, top[:, None], scale[:, None], PROBS)
    weight = tl.where(key > under.to(tl.int32)[:, None], weight, 0.0)
    return d.mass_key(key, weight, share * tl.sum(weight, 1), under, tl.where(asks, key_top, under + 1))


@triton.jit
def _floor_in_memory(
    values_ptr, row, asks, row_stride, complete, reached, wanted, share, lowest, everything, top, scale,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Threshold from the whole row; `reached` is the weight at or above `complete`."""
    key_top = d.sort_key(top, SHIFT).to(tl.int64)
    by_count, by_mass = asks & (wanted > 0), asks & (share < 1)
    # Nothing lies below the key of -inf, and no weight that float32 can hold below this many halvings of the largest.
    bottom = d.sort_key(tl.full(top.shape, float("-inf"), tl.float32), SHIFT).to(tl.int64)
    if not PROBS:
        weightless = d.sort_key(d.finite(top) - 160.0 / scale, SHIFT).to(tl.int64)
        bottom = tl.where(by_count, bottom, tl.maximum(bottom, weightless))
    low = d.streamed_kth_key(
        values_ptr, row, row_stride, wanted, bottom, tl.where(by_count, key_top + 1, bottom + 1), VOCAB, SHIFT, BLOCK_V
    )  # fmt: skip
    if tl.max(by_mass.to(tl.int32), 0) > 0:
        under = (low - 1).to(tl.int32)
        counted = d.streamed_mass(
            values_ptr, row, by_count & by_mass, row_stride, under, top, scale, VOCAB, SHIFT, PROBS, BLOCK_V
        )  # fmt: skip
        goal = share * tl.where(by_count, counted, everything)
        guess = _sampled_guess(
            values_ptr, row, by_mass, row_stride, low - 1, key_top, share, top, scale, VOCAB, GROUPS, SLOTS, WIDTH,
            SHIFT, PROBS,
        )  # fmt: skip
        high = tl.where(reached < goal, tl.minimum(complete - 1, key_top), key_top)
        low = d.streamed_mass_key(
            values_ptr, row, row_stride, goal, low - 1, tl.where(by_mass, high, low), guess, top, scale, VOCAB, SHIFT,
            PROBS, BLOCK_V,
        )  # fmt: skip
    cut = tl.where(by_count | by_mass, d.key_value(low.to(tl.int32), SHIFT), float("-inf"))
    return tl.maximum(cut, lowest)


@triton.jit
def _store_kept_mass(
    values_ptr, mass_ptr, row, asks, row_stride, floor, top, scale,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PROBS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Replace the groups' masses of the rows that ask by the weights that the threshold leaves, relative to `top`."""
    tl.debug_barrier()
    for start in range(0, VOCAB, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)[None, :]
        value = d.load_values(values_ptr, row[:, None], column, row_stride, asks[:, None] & (column < VOCAB))
        weight = d.weigh(value, top[:, None], scale[:, None], PROBS)
        kept = tl.where(value >= floor[:, None], weight, 0.0)
        mass = tl.sum(tl.reshape(kept, (kept.shape[0], BLOCK_V // WIDTH, WIDTH)), 2)
        group = start // WIDTH + tl.arange(0, BLOCK_V // WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * GROUPS + group
        tl.store(mass_ptr + place, mass, mask=asks[:, None] & (group < GROUPS))
    tl.debug_barrier()


@triton.jit
def _uniform(seeds_ptr, positions_ptr, uniforms_ptr, row, request, in_row, STREAM: tl.constexpr):
    """The row's uniform: injected where given, else from the generator."""
    if uniforms_ptr is not None:
        uniform = tl.load(uniforms_ptr + row, mask=in_row, other=0.0)
    else:
        seed = tl.load(seeds_ptr + request, mask=in_row, other=0)
        position = tl.load(positions_ptr + row, mask=in_row, other=0)
        uniform = d.philox_uniform(seed, position, STREAM)
    return uniform


@triton.jit(do_not_specialize=["rows"])
def _select_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    top_k_ptr,  # [R / PER_REQUEST] int32, or None
    top_p_ptr,  # [R / PER_REQUEST] float32, or None
    min_p_ptr,  # [R / PER_REQUEST] float32, or None
    seeds_ptr,  # [R / PER_REQUEST] int64, or None
    positions_ptr,  # [R] int64, or None
    uniforms_ptr,  # [R] float32, or None
    stats_ptr,  # [2 or 3, R, GROUPS] float32; the sums at T of filtered rows may be replaced
    ids_ptr,  # [R, SLOTS] int32, or None where the row fits the slots or is not filtered
    tokens_ptr,  # [R] int64
    valid_ptr,  # [R] bool
    logprobs_ptr,  # [R] float32, or None
    law_ptr,  # [4, R] float32 (see Selected), or None
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
    BLOCK_V: tl.constexpr,
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
        warmth = tl.load(temperature_ptr + request, mask=in_row, other=0.0)
        scale = d.exponent_scale(warmth)
        floor = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        mass = tl.load(stats_ptr + plane + place, mask=in_groups, other=0.0)
        if not PROBS:
            mass = mass * d.weigh(group_max, top[:, None], scale[:, None], False)
        total = tl.sum(mass, 1)
        if FILTER:
            wanted, share, lowest = _limits(top_k_ptr, top_p_ptr, min_p_ptr, request, in_row, top, scale, VOCAB, PROBS)
            filtered = in_row & valid & ((wanted > 0) | (share < 1) | (lowest > float("-inf")))
            value, key, complete = _gather(
                values_ptr, ids_ptr, row, in_row, group_max, group, row_stride, VOCAB, GROUPS, SLOTS, WIDTH, SHIFT
            )
            floor, known, slot_mass, reached = _floor_in_slots(
                value, key, complete, wanted, share, lowest, total, top, scale, GROUPS <= SLOTS, SLOTS, WIDTH, SHIFT,
                PROBS,
            )  # fmt: skip
            if GROUPS <= SLOTS:
                total = tl.sum(slot_mass, 1)
            else:
                total = tl.where(filtered & known, tl.sum(slot_mass, 1), total)
                far = filtered & (known == 0)
                floor = tl.where(filtered, floor, float("-inf"))
                if tl.max(far.to(tl.int32), 0) > 0:
                    streamed = _floor_in_memory(
                        values_ptr, row, far, row_stride, complete, reached, wanted, share, lowest, total, top, scale,
                        VOCAB, GROUPS, SLOTS, WIDTH, SHIFT, PROBS, BLOCK_V,
                    )  # fmt: skip
                    floor = tl.where(far, streamed, floor)
                    _store_kept_mass(
                        values_ptr, stats_ptr + plane, row, far, row_stride, floor, top, scale, VOCAB, GROUPS, WIDTH,
                        PROBS, BLOCK_V,
                    )  # fmt: skip
                    kept = tl.load(stats_ptr + plane + place, mask=in_groups & far[:, None], other=0.0)
                    mass = tl.where(far[:, None], kept, mass)
                    total = tl.where(far, tl.sum(kept, 1), total)
        if DRAW:
            uniform = _uniform(seeds_ptr, positions_ptr, uniforms_ptr, row, request, in_row, STREAM)
            if FILTER and GROUPS <= SLOTS:
                chosen, goal = d.find(slot_mass, uniform, tl.arange(0, SLOTS)[None, :], SLOTS)
            else:
                chosen, goal = d.find(mass, uniform, group, BLOCK_G)
                if FILTER:
                    slot, left = d.find(slot_mass, uniform, tl.arange(0, SLOTS)[None, :], SLOTS)
                    near = filtered & known
                    held = tl.load(ids_ptr + row.to(tl.int64) * SLOTS + slot, mask=near, other=0)
                    chosen, goal = tl.where(near, held, chosen), tl.where(near, left, goal)
            drawn = d.draw_in_group(
                values_ptr, row, in_row, chosen, goal, top, scale, floor, row_stride, VOCAB, WIDTH, PROBS
            )
            token = tl.where((warmth > 0) & (drawn >= 0), drawn, token)

    token = tl.where(valid, token, 0)
    tl.store(tokens_ptr + row, token.to(tl.int64), mask=in_row)
    tl.store(valid_ptr + row, valid, mask=in_row)
    if NORMALISE:
        if SAMPLE:
            plain = tl.load(stats_ptr + 2 * plane + place, mask=in_groups, other=0.0)
        else:
            plain = tl.load(stats_ptr + plane + place, mask=in_groups, other=0.0)
        if not PROBS:
            plain = plain * d.weigh(group_max, top[:, None], d.LOG2E, False)
        normaliser = tl.log(tl.sum(plain, 1)) + (0.0 if PROBS else d.finite(top))
        if logprobs_ptr is not None:
            value_at = d.load_values(values_ptr, row, token, row_stride, in_row)
            value_at = tl.log(tl.maximum(value_at, 0.0)) if PROBS else value_at
            logprob = tl.where(valid, value_at - normaliser, float("-inf"))
            tl.store(logprobs_ptr + row, logprob, mask=in_row)
    if law_ptr is not None:
        tl.store(law_ptr + row, d.finite(top), mask=in_row)
        tl.store(law_ptr + rows + row, floor, mask=in_row)
        tl.store(law_ptr + 2 * rows + row, total, mask=in_row)
        if NORMALISE:
            tl.store(law_ptr + 3 * rows + row, normaliser, mask=in_row)


def select(
    values: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    filters: Filters,
    *,
    per_request: int = 1,
    stream: int = TARGET_STREAM,
    probabilities: bool = False,
    draw: bool = True,
    want_logprobs: bool = False,
    want_law: bool = False,
    normalise: bool = False,
) -> Selected:
    """Token of every row, and what else is asked for. Row r belongs to request r // per_request.

    `want_law` needs a temperature; its last row is written only with `want_logprobs` or `normalise`.
    """
    rows, vocab = values.shape
    config = _CONFIGS[current_chip(values)]
    width = min(max(triton.next_power_of_2(vocab), _MIN_SCAN), config.width)
    groups = triton.cdiv(vocab, width)
    block_g = max(triton.next_power_of_2(groups), _MIN_SCAN)
    slots = min(config.slots, block_g)
    sample, normalise = temperature is not None, normalise or want_logprobs
    filtered = sample and not filters.off

    def out(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=values.device)

    stats = out(1 + sample + normalise, rows, groups)
    ids = out(rows, slots, dtype=torch.int32) if filtered and groups > slots else None
    tokens, valid = out(rows, dtype=torch.int64), out(rows, dtype=torch.bool)
    logprobs = out(rows) if want_logprobs else None
    law = out(4, rows) if want_law else None
    shared = dict(
        PER_REQUEST=per_request, VOCAB=vocab, GROUPS=groups, SAMPLE=sample, NORMALISE=normalise, PROBS=probabilities,
        WIDTH=width,
    )  # fmt: skip
    block_s = min(config.strips, max(triton.next_power_of_2(rows * groups), 2))
    launch(
        _stats_kernel, (triton.cdiv(rows * groups, block_s),), values, temperature, stats, rows * groups,
        values.stride(0), num_warps=config.stats_warps, BLOCK_S=block_s, **shared,
    )  # fmt: skip
    if not sample or uniforms is not None or not draw:
        seeds = positions = None
    fitting = max(1, (1 << 20) // (max(slots * width, block_g) if filtered else block_g))
    block_r = min(triton.next_power_of_2(max(rows, 1)), config.max_rows, fitting)
    launch(
        _select_kernel, (triton.cdiv(rows, block_r),), values, temperature, *(filters if filtered else Filters()),
        seeds, positions, uniforms if sample and draw else None, stats, ids, tokens, valid, logprobs, law, rows,
        values.stride(0), num_warps=config.select_warps if filtered else config.stats_warps, DRAW=draw,
        FILTER=filtered, STREAM=stream, SHIFT=_KEY_SHIFT[values.dtype], BLOCK_R=block_r, BLOCK_G=block_g, SLOTS=slots,
        BLOCK_V=config.stream, **shared,
    )  # fmt: skip
    return Selected(tokens, valid, logprobs, law)


@triton.jit(do_not_specialize=["rows"])
def _law_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R] float32
    law_ptr,  # [4, R] float32, see Selected
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
    warmth = tl.load(temperature_ptr + row, mask=in_row, other=0.0)
    top = tl.load(law_ptr + row, mask=in_row, other=0.0)
    floor = tl.load(law_ptr + rows + row, mask=in_row, other=0.0)
    total = tl.load(law_ptr + 2 * rows + row, mask=in_row, other=1.0)
    token = tl.load(tokens_ptr + row, mask=in_row, other=0)
    valid = tl.load(valid_ptr + row, mask=in_row, other=0) != 0
    value = d.load_values(values_ptr, row[:, None], column, row_stride, live)
    weight = d.weigh(value, top[:, None], d.exponent_scale(warmth)[:, None], PROBS)
    prob = tl.where(value >= floor[:, None], weight / total[:, None], 0.0)
    if not PROBS:
        prob = tl.where((warmth > 0)[:, None], prob, (column == token[:, None]).to(tl.float32))
    prob = tl.where(valid[:, None], prob, 0.0)
    tl.store(probs_ptr + row.to(tl.int64)[:, None] * VOCAB + column, prob, mask=live)


def filtered_probs(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    probabilities: bool = False,
) -> torch.Tensor:
    """See `specdec_kernels.sampling.filtered_probs`."""
    rows, vocab = logits.shape
    if temperature is None:
        temperature = torch.full((rows,), float(probabilities), device=logits.device)
    found = select(
        logits, temperature, None, None, None, Filters(top_k, top_p, min_p),
        probabilities=probabilities, draw=False, want_law=True,
    )  # fmt: skip
    assert found.law is not None
    probs = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    block_v = min(max(triton.next_power_of_2(vocab), 2), 4096)
    block_r = 1 if current_chip(logits) != "interpreter" else triton.next_power_of_2(max(rows, 1))
    launch(
        _law_kernel, (triton.cdiv(rows, block_r), triton.cdiv(vocab, block_v)), logits, temperature, found.law,
        found.tokens, found.valid, probs, rows, logits.stride(0), num_warps=4, VOCAB=vocab, PROBS=probabilities,
        BLOCK_R=block_r, BLOCK_V=block_v,
    )  # fmt: skip
    return probs


def pick_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
) -> Picked:
    """See `specdec_kernels.sampling.pick_tokens`."""
    filters = Filters(top_k, top_p, min_p)
    found = select(
        logits, temperature, seeds, positions, uniforms, filters, stream=stream, want_logprobs=return_logprobs
    )
    return Picked(found.tokens, found.valid, found.logprobs)
