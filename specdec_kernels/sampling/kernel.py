"""Token selection over a split vocabulary: statistics of strips of tokens, then one look at what matters.

The first kernel reads all rows once, a strip of up to `strip` groups a program: m = max l and its first token of the
strip, s = sum exp((l - m) / T) of the strip and of each group. The last kernel runs one program per row: M = max m,
and the masses s exp((m - M) / T) of the strips. Their running sum gives the strip that the uniform falls in, the sums
of its groups give the group, and that group alone is read again.

With filters `kernel_filter` stands between the two: it finds each row's threshold, and what it keeps of the groups.
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
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.kernel_filter import Kept, keep, strip_masses
from specdec_kernels.sampling.kernel_nucleus import NEAR, WHOLE
from specdec_kernels.sampling.types import TARGET_STREAM, Picked, SamplingTensors


class Selected(NamedTuple):
    """What `select` found out about each row.

    The rows of `distribution`, [R] each: top; floor; total, with w(v) = exp((v - top) / T) for v >= floor and
    total = sum w; and the log sum exp of the row at temperature 1, unfiltered.
    """

    tokens: torch.Tensor  # [R] int64
    valid: torch.Tensor  # [R] bool
    logprobs: torch.Tensor | None  # [R] float32
    distribution: torch.Tensor | None  # [4, R] float32


# A program of the first kernel takes one row on a GPU, whose numbers are scalars, and many rows in the interpreter.
@triton.jit
def _row_max(of_groups, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):
    """Maximum of the groups [BLOCK_R * BLOCK_S] of each row."""
    return tl.max(of_groups, 0) if BLOCK_R == 1 else tl.max(tl.reshape(of_groups, (BLOCK_R, BLOCK_S)), 1)


@triton.jit
def _row_sum(of_groups, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sum over the groups of each row."""
    return tl.sum(of_groups, 0) if BLOCK_R == 1 else tl.sum(tl.reshape(of_groups, (BLOCK_R, BLOCK_S)), 1)


@triton.jit
def _by_entry(of_rows, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):
    """A number of each row, to be used with the entries of all groups."""
    if BLOCK_R == 1:
        spread = of_rows
    else:
        spread = tl.reshape(tl.broadcast_to(of_rows[:, None], (BLOCK_R, BLOCK_S)), (BLOCK_R * BLOCK_S, 1))
    return spread


@triton.jit
def _any_row(flag, BLOCK_R: tl.constexpr):
    """Whether the flag of any row is set."""
    return flag if BLOCK_R == 1 else tl.max(flag.to(tl.int32), 0) > 0


@triton.jit
def _masses(
    value, top, scale, twice, SAMPLE: tl.constexpr, NORMALISE: tl.constexpr, PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sums of the weights of each group and of each row's strip at its temperature, and of the strip at temperature 1,
    where they are asked for; the last is another one than the second where `twice`."""
    over = _by_entry(top, BLOCK_R, BLOCK_S)
    mass = tl.sum(d.weigh(value, over, _by_entry(scale, BLOCK_R, BLOCK_S), PROBS), 1)
    strip = _row_sum(mass, BLOCK_R, BLOCK_S)
    plain = strip
    if SAMPLE and NORMALISE:
        if twice:
            plain = _row_sum(tl.sum(d.weigh(value, over, d.LOG2E, PROBS), 1), BLOCK_R, BLOCK_S)
    return mass, strip, plain


@triton.jit(do_not_specialize=["rows"])
def _stats_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    groups_ptr,  # [0 to 2, R, GROUPS] float32: maximum (with FILTER), sum at T over the strip's maximum (with SAMPLE)
    strips_ptr,  # [1 to 3, R, STRIPS] float32: maximum, sum at T (with SAMPLE), sum at 1 (with NORMALISE)
    first_ptr,  # [R, STRIPS] int32: first token that has the maximum, of rows that are not drawn
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    STRIPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    FILTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    pair = tl.arange(0, BLOCK_R * BLOCK_S)
    row = tl.program_id(0) * BLOCK_R + (pair * 0 if BLOCK_R == 1 else pair // BLOCK_S)
    group = tl.program_id(1) * BLOCK_S + pair % BLOCK_S
    live = (row < rows) & (group < GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    in_row = live[:, None] & (column < VOCAB)
    own = tl.program_id(0) if BLOCK_R == 1 else tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    value = d.load_entries(values_ptr, row[:, None], column, row_stride, in_row)
    temperature = own.to(tl.float32) * 0.0
    if SAMPLE:
        temperature = tl.load(temperature_ptr + own // PER_REQUEST, mask=own < rows, other=1.0)
    scale = d.exponent_scale(temperature)
    twice = _any_row((temperature > 0) & (temperature != 1), BLOCK_R)
    group_max = tl.max(value, 1)
    top = _row_max(group_max, BLOCK_R, BLOCK_S)
    fine = (top == top) & (top < float("inf"))
    mass, strip, plain = group_max, top, top
    if SAMPLE or NORMALISE:
        mass, strip, plain = _masses(value, top, scale, twice, SAMPLE, NORMALISE, PROBS, BLOCK_R, BLOCK_S)
        fine &= strip < float("inf")
    # A NaN or an infinity shows in the strip's sum or maximum; replacing it in every entry would be slower.
    if _any_row(fine == 0, BLOCK_R):
        value = d.usable(value)
        group_max = tl.max(value, 1)
        top = _row_max(group_max, BLOCK_R, BLOCK_S)
        if SAMPLE or NORMALISE:
            mass, strip, plain = _masses(value, top, scale, twice, SAMPLE, NORMALISE, PROBS, BLOCK_R, BLOCK_S)

    place, plane = row.to(tl.int64) * GROUPS + group, rows.to(tl.int64) * GROUPS
    if FILTER:
        tl.store(groups_ptr + place, group_max, mask=live)
    if SAMPLE:
        tl.store(groups_ptr + (plane if FILTER else 0) + place, mass, mask=live)
    place, plane = own.to(tl.int64) * STRIPS + tl.program_id(1), rows.to(tl.int64) * STRIPS
    tl.store(strips_ptr + place, top, mask=own < rows)
    if SAMPLE:
        tl.store(strips_ptr + plane + place, strip, mask=own < rows)
    if NORMALISE:
        tl.store(strips_ptr + (2 * plane if SAMPLE else plane) + place, plain, mask=own < rows)
    first = own * 0
    if PROBS or _any_row((temperature > 0) == 0, BLOCK_R):
        among = tl.where(value == _by_entry(top, BLOCK_R, BLOCK_S), -column, -VOCAB)
        first = -_row_max(tl.max(among, 1), BLOCK_R, BLOCK_S)
    tl.store(first_ptr + place, first, mask=own < rows)


@triton.jit
def _store_logprobs(
    values_ptr, logprobs_ptr, row, in_row, plain, token, valid, strip_max, top, row_stride, PROBS: tl.constexpr
):
    """The log sum exp at temperature 1, from the sums `plain` of the strips; the token's log-probability is stored
    where it is asked for."""
    if not PROBS:
        plain = plain * d.weigh(strip_max, top[:, None], d.LOG2E, False)
    normaliser = tl.log(tl.sum(plain, 1)) + (0.0 if PROBS else d.finite(top))
    if logprobs_ptr is not None:
        logprob = d.log_value(values_ptr, row, token, row_stride, in_row, PROBS) - normaliser
        tl.store(logprobs_ptr + row, tl.where(valid, logprob, float("-inf")), mask=in_row)
    return normaliser


@triton.jit
def _find_group(masses_ptr, row, in_row, mass, uniform, GROUPS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Group (-1 for none) at which the running weight passes the uniform's share, and how far into it that is: the
    strip by `mass` [R, strips], then the group by the sums of the strip's groups."""
    strip, within = d.find(mass, uniform)
    group = tl.maximum(strip, 0)[:, None] * BLOCK_S + tl.arange(0, BLOCK_S)[None, :]
    live = in_row[:, None] & (group < GROUPS)
    of_group = tl.load(masses_ptr + row.to(tl.int64)[:, None] * GROUPS + group, mask=live, other=0.0)
    place, within = d.find(of_group, within)
    return tl.where((strip >= 0) & (place >= 0), strip * BLOCK_S + place, -1), within


@triton.jit
def _kept_in_chunk(
    values_ptr, row, far, chunk, top, scale, floor, row_stride,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Weights [R, LANES] that the threshold leaves of the groups of a chunk, which is read again, for the rows that are
    `far`."""
    column = chunk[:, None] * CHUNK + tl.arange(0, LANES * WIDTH)[None, :]
    live = far[:, None] & (column < VOCAB) & (column < (chunk[:, None] + 1) * CHUNK)
    value = d.load_values(values_ptr, row[:, None], column, row_stride, live)
    weight = d.weigh(value, top[:, None], scale[:, None], PROBS)
    kept = tl.where(live & (value >= floor[:, None]), weight, 0.0)
    return tl.sum(tl.reshape(kept, (kept.shape[0], LANES, WIDTH)), 2)


@triton.jit
def _find_kept_group(
    values_ptr, masses_ptr, ids_ptr, slots_ptr, chunks_ptr, state_ptr, row, in_row, mass, uniform, top, scale, floor,
    row_stride,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PROBS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """`_find_group` among the weights that filters leave: by the slots of rows of which these tell all, by the chunks
    of rows that were deferred, and by strips where no filter cuts."""
    LANES: tl.constexpr = CHUNK // WIDTH if CHUNK // WIDTH > BLOCK_S else BLOCK_S
    CHUNKS: tl.constexpr = (VOCAB + CHUNK - 1) // CHUNK
    task = tl.load(state_ptr + row, mask=in_row, other=0.0)
    near, far = task == NEAR, task > WHOLE
    base, lane = row.to(tl.int64)[:, None], tl.arange(0, BLOCK_N)[None, :]
    of_slots = tl.load(slots_ptr + base * SLOTS + lane, mask=near[:, None] & (lane < SLOTS), other=0.0)
    of_chunks = tl.load(chunks_ptr + base * CHUNKS + lane, mask=far[:, None] & (lane < CHUNKS), other=0.0)
    mass = tl.where(near[:, None], of_slots, tl.where(far[:, None], of_chunks, mass))
    first, within = d.find(mass, uniform)
    held = tl.load(ids_ptr + row.to(tl.int64) * SLOTS + first, mask=near & (first >= 0), other=0)

    start, inner = tl.maximum(first, 0), tl.arange(0, LANES)[None, :]
    group = start[:, None] * BLOCK_S + inner
    live = (in_row & (task == WHOLE))[:, None] & (inner < BLOCK_S) & (group < GROUPS)
    of_group = tl.load(masses_ptr + base * GROUPS + group, mask=live, other=0.0)
    if tl.max(far.to(tl.int32), 0) > 0:
        of_group += _kept_in_chunk(
            values_ptr, row, far, start, top, scale, floor, row_stride, VOCAB, WIDTH, CHUNK, LANES, PROBS
        )
    place, share = d.find(of_group, within)
    place = tl.where(place >= 0, start * tl.where(far, CHUNK // WIDTH, BLOCK_S) + place, -1)
    group = tl.where(first >= 0, tl.where(near, held, place), -1)
    return group, tl.where(near, within, share)


@triton.jit(do_not_specialize=["rows"])
def _select_kernel(  # 18 run-time arguments: most are optional inputs and outputs, and those that are None cost nothing
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    seeds_ptr,  # [R / PER_REQUEST] int64, or None
    positions_ptr,  # [R] int64, or None
    uniforms_ptr,  # [R] float64, or None
    groups_ptr,  # [0 to 2, R, GROUPS] float32, see `_stats_kernel`
    strips_ptr,  # [1 to 3, R, STRIPS] float32
    first_ptr,  # [R, STRIPS] int32
    ids_ptr,  # [R, SLOTS] int32, or None, see `kernel_filter`
    slots_ptr,  # [R, SLOTS] float32, or None
    state_ptr,  # [8, R] float32, or None
    chunks_ptr,  # [R, chunks] float32, or None, see `kernel_nucleus`
    tokens_ptr,  # [R] int64
    valid_ptr,  # [R] bool
    logprobs_ptr,  # [R] float32, or None
    distribution_ptr,  # [4, R] float32 (see Selected), or None; with FILTER the second and third are given
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    STRIPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    DRAW: tl.constexpr,
    FILTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // PER_REQUEST
    in_row = row < rows
    strip = tl.arange(0, BLOCK_N)[None, :]
    place = row.to(tl.int64)[:, None] * STRIPS + strip
    in_strips = in_row[:, None] & (strip < STRIPS)
    plane, masses_ptr = rows.to(tl.int64) * STRIPS, groups_ptr + (rows.to(tl.int64) * GROUPS if FILTER else 0)
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)
    strip_max = tl.load(strips_ptr + place, mask=in_strips, other=float("-inf"))
    top = tl.max(strip_max, 1)
    valid = top > 0 if PROBS else top > float("-inf")
    winner = tl.min(tl.where(strip_max == top[:, None], strip, STRIPS), 1)
    token = tl.load(first_ptr + row.to(tl.int64) * STRIPS + winner, mask=in_row & valid, other=0)

    if SAMPLE:
        temperature = tl.load(temperature_ptr + request, mask=in_row, other=0.0)
        scale = d.exponent_scale(temperature)
        floor = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        mass = strip_masses(strips_ptr, place, in_strips, plane, strip_max, top, scale, PROBS)
        total = tl.sum(mass, 1)
        if FILTER:
            floor = tl.load(distribution_ptr + rows + row, mask=in_row, other=float("-inf"))
        if DRAW:
            uniform = d.row_uniform(seeds_ptr, positions_ptr, uniforms_ptr, row, request, in_row, STREAM)
            if FILTER and state_ptr is None:
                slot = row.to(tl.int64)[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
                group, within = d.find(tl.load(slots_ptr + slot, mask=in_row[:, None], other=0.0), uniform)
            elif FILTER:
                group, within = _find_kept_group(
                    values_ptr, masses_ptr, ids_ptr, slots_ptr, chunks_ptr, state_ptr, row, in_row, mass, uniform, top,
                    scale, floor, row_stride, VOCAB, GROUPS, SLOTS, WIDTH, CHUNK, PROBS, BLOCK_N, BLOCK_S,
                )  # fmt: skip
            else:
                group, within = _find_group(masses_ptr, row, in_row, mass, uniform, GROUPS, BLOCK_S)
            drawn = d.draw_in_group(
                values_ptr, row, in_row, group, within, top, scale, floor, row_stride, VOCAB, WIDTH, PROBS
            )
            token = tl.where((temperature > 0) & (drawn >= 0), drawn, token)

    token = tl.where(valid, token, 0)
    tl.store(tokens_ptr + row, token.to(tl.int64), mask=in_row)
    tl.store(valid_ptr + row, valid, mask=in_row)
    if NORMALISE:
        plain = tl.load(strips_ptr + (2 * plane if SAMPLE else plane) + place, mask=in_strips, other=0.0)
        normaliser = _store_logprobs(
            values_ptr, logprobs_ptr, row, in_row, plain, token, valid, strip_max, top, row_stride, PROBS
        )
    if distribution_ptr is not None:
        tl.store(distribution_ptr + row, d.finite(top), mask=in_row)
        if FILTER == 0:
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
    chip = current_chip(values)
    config = SELECTION[chip]
    width, groups, block_g = d.grouping(vocab, config.width)
    block_s = min(config.strip, block_g)
    strips = triton.cdiv(groups, block_s)
    sample, normalise = sampling.temperature is not None, normalise or want_logprobs
    filtered = sample and sampling.filtered
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    stats = out(filtered + sample, rows, groups), out(1 + sample + normalise, rows, strips)
    first = out(rows, strips, dtype=torch.int32)
    found = Selected(
        out(rows, dtype=torch.int64), out(rows, dtype=torch.bool), out(rows) if want_logprobs else None,
        out(4, rows) if want_distribution or filtered else None,
    )  # fmt: skip
    shared = dict(
        PER_REQUEST=per_request, VOCAB=vocab, GROUPS=groups, STRIPS=strips, PROBS=probabilities, WIDTH=width,
        **overlapped(chip),
    )  # fmt: skip
    kinds = dict(SAMPLE=sample, FILTER=filtered, NORMALISE=normalise, BLOCK_S=block_s)
    block_r = min(config.max_groups // block_s, config.max_rows, triton.next_power_of_2(max(rows, 1)))
    launch(
        _stats_kernel, (triton.cdiv(rows, block_r), strips), values, sampling.temperature, *stats, first, rows,
        values.stride(0), num_warps=config.stats_warps, BLOCK_R=block_r, **kinds, **shared,
    )  # fmt: skip
    kept, slots, block_n, lanes = Kept(None, None, None, None), 0, max(triton.next_power_of_2(strips), d.MIN_SCAN), 0
    if filtered:
        kept = keep(values, sampling, *stats, found.distribution, per_request=per_request, probabilities=probabilities)
        slots = kept.slots.shape[1]
    if kept.chunks is not None:
        block_n = max(block_n, slots, triton.next_power_of_2(kept.chunks.shape[1]))
        lanes = config.chunk
    keyed = sample and draw and uniforms is None
    sources = (sampling.seeds, positions, None) if keyed else (None, None, uniforms if sample and draw else None)
    block_r = d.rows_per_program(rows, config.max_rows, max(block_g, slots, lanes))
    launch(
        _select_kernel, (triton.cdiv(rows, block_r),), values, sampling.temperature, *sources, *stats, first, *kept,
        *found, rows, values.stride(0), num_warps=config.draw_warps if lanes else config.pick_warps, DRAW=draw,
        STREAM=stream, BLOCK_R=block_r, BLOCK_N=block_n, SLOTS=slots, CHUNK=lanes, **kinds, **shared,
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
