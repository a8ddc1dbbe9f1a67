"""Token selection over a split vocabulary: statistics of strips of tokens, then one look at what matters.

`kernel_stats` reads all rows once. The last kernel runs one program per row: the running sum of the strips' masses
gives the strip that the uniform falls in, and that strip alone is read again. With filters `kernel_filter`,
`kernel_nucleus` and `kernel_settle` find the threshold of each row in between, and the weight that it keeps.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import begin
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.kernel_filter import Kept, keep, strip_masses
from specdec_kernels.sampling.kernel_nucleus import NEAR, WHOLE
from specdec_kernels.sampling.kernel_stats import GROUP_SIZE, Rows, measure, strip_length
from specdec_kernels.sampling.types import TARGET_STREAM, Picked, SamplingTensors

GROUP = tl.constexpr(GROUP_SIZE)


class Selected(NamedTuple):
    """The results of `select` for each row.

    `distribution` holds top; floor; total, with w(v) = exp((v - top) / T) for v >= floor and total = sum w; and the log
    sum exp of the row at temperature 1, unfiltered.
    """

    tokens: Tensor  # [R] int64
    valid: Tensor  # [R] bool
    logprobs: Tensor | None  # [R] float32
    distribution: Tensor | None  # [4, R] float32


@triton.jit
def _store_logprobs(
    values_ptr, logprobs_ptr, row, in_row, plain, token, valid, tops, top, row_stride, PROBS: tl.constexpr
):
    """The log sum exp at temperature 1, from the sums `plain` of the strips; the token's log-probability is stored
    if `logprobs_ptr` is given."""
    if not PROBS:
        plain = plain * d.weigh(tops, top[:, None], d.LOG2E, False)
    normaliser = tl.log(tl.sum(plain, 1)) + (0.0 if PROBS else d.finite(top))
    if logprobs_ptr is not None:
        logprob = d.log_value(values_ptr, row, token, row_stride, in_row, PROBS) - normaliser
        tl.store(logprobs_ptr + row, tl.where(valid, logprob, float("-inf")), mask=in_row)
    return normaliser


@triton.jit
def _largest(values_ptr, row, asks, tops, top, row_stride, VOCAB: tl.constexpr, STRIP: tl.constexpr):
    """The first token that has the row's largest value `top`; `tops` [R, E] are the largest values of its strips."""
    lane = tl.arange(0, tops.shape[1])[None, :]
    inside = tl.arange(0, STRIP)[None, :]
    start = tl.min(tl.where(tops == top[:, None], lane, tops.shape[1]), 1) * STRIP
    column = start[:, None] + inside
    value = d.load_entries(values_ptr, row[:, None], column, row_stride, asks[:, None] & (column < VOCAB))
    return start + tl.min(tl.where(value >= top[:, None], inside, STRIP), 1)


@triton.jit
def _draw(
    values_ptr, ids_ptr, row, in_row, near, size, mass, uniform, top, scale, floor, row_stride,
    VOCAB: tl.constexpr, SLOTS: tl.constexpr, LENGTH: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Token (-1 for none) at which the running weight passes the uniform's share: first the part of the row by the
    weights `mass` [R, E], then the token in the part, `size` [R] tokens that are read again."""
    part, units, running, goal = d.locate(mass, tl.sum(mass, 1), uniform)
    found = part >= 0
    start = tl.maximum(part, 0)
    if ids_ptr is not None:
        held = tl.load(ids_ptr + row.to(tl.int64) * SLOTS + start, mask=near & found, other=0)
        start = tl.where(near, held, start)
    inside = tl.arange(0, LENGTH)[None, :]
    column = (start * size)[:, None] + inside
    live = (in_row & found)[:, None] & (inside < size[:, None]) & (column < VOCAB)
    value = d.load_values(values_ptr, row[:, None], column, row_stride, live)
    # What follows up to the weights is computed while the part is on its way.
    within = d.share_within(units, running, goal)
    lane = tl.arange(0, mass.shape[1])[None, :]
    of_part = tl.sum(tl.where(lane == part[:, None], mass, 0.0), 1)
    weight = d.weigh(value, top[:, None], scale[:, None], PROBS)
    place, _, _, _ = d.locate(tl.where(live & (value >= floor[:, None]), weight, 0.0), of_part, within)
    return tl.where(found & (place >= 0), start * size + place, -1)


@triton.jit
def _kept_parts(
    kept, row, in_row, mass,
    SLOTS: tl.constexpr, STRIP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Weights [R, BLOCK_N] of the parts by which a filtered row is sampled, tokens of a part, and whether parts are
    slots (the threshold lies within them); else they are chunks (deferred rows) or strips of weight `mass` (no
    filter)."""
    lane = tl.arange(0, BLOCK_N)[None, :]
    base = row.to(tl.int64)[:, None]
    of_slots = tl.load(kept.slots + base * SLOTS + lane, mask=in_row[:, None] & (lane < SLOTS), other=0.0)
    task = tl.load(kept.state + row, mask=in_row, other=0.0)
    near = task == NEAR
    far = task > WHOLE
    size = tl.where(near, GROUP, tl.where(far, CHUNK, STRIP))
    if kept.chunks is not None:
        of_chunks = tl.load(kept.chunks + base * CHUNKS + lane, mask=in_row[:, None] & (lane < CHUNKS), other=0.0)
        mass = tl.where(far[:, None], of_chunks, mass)
    return tl.where(near[:, None], of_slots, mass), size, near


@triton.jit(do_not_specialize=["rows"])
def _select_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    origin,  # Uniforms
    strips,  # Strips
    kept,  # Kept, of None without FILTER
    found,  # Selected, written; with FILTER the second and third of the distribution are given
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIPS: tl.constexpr,
    STRIP: tl.constexpr,
    SAMPLE: tl.constexpr,
    DRAW: tl.constexpr,
    FILTER: tl.constexpr,
    NORMALISE: tl.constexpr,
    PROBS: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    request = row // PER_REQUEST
    in_row = row < rows
    strip = tl.arange(0, BLOCK_N)[None, :]
    place = row.to(tl.int64)[:, None] * STRIPS + strip
    in_strips = in_row[:, None] & (strip < STRIPS)
    plane = rows.to(tl.int64) * STRIPS
    if SAMPLE:
        # Loaded before the wait: the predecessor is a kernel of this family, which waits before it calls
        # `launch_dependents`, so that the producers of temperatures, seeds and positions have ended.
        temperature = tl.load(temperature_ptr + request, mask=in_row, other=0.0)
        if DRAW:
            uniform = d.keyed_uniform(origin, row, request, row, in_row, STREAM)
    begin(PDL)
    # What does not depend on other loads is loaded first.
    tops = tl.load(strips.tops + place, mask=in_strips, other=float("-inf"))
    if SAMPLE:
        sums = tl.load(strips.sums + place, mask=in_strips, other=0.0)
        if FILTER:
            floor = tl.load(found.distribution + rows + row, mask=in_row, other=float("-inf"))
        else:
            floor = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    top = tl.max(tops, 1)
    valid = top > 0 if PROBS else top > float("-inf")
    token = tl.full((BLOCK_R,), -1, tl.int32)

    if SAMPLE:
        scale = d.exponent_scale(temperature)
        mass = strip_masses(sums, tops, top, scale, PROBS)
        total = tl.sum(mass, 1)
        if DRAW:
            sampled = in_row & valid & (temperature > 0)
            size = tl.full((BLOCK_R,), STRIP, tl.int32)
            near = None
            if FILTER:
                mass, size, near = _kept_parts(
                    kept, row, in_row, mass, SLOTS, STRIP, CHUNK, CHUNKS, BLOCK_N
                )  # fmt: skip
            if tl.max(sampled.to(tl.int32), 0) > 0:
                token = _draw(
                    values_ptr, kept.ids, row, sampled, near, size, mass, uniform, top, scale, floor, row_stride, VOCAB,
                    SLOTS, STRIP if STRIP > CHUNK else CHUNK, PROBS,
                )  # fmt: skip
                token = tl.where(sampled, token, -1)
    picked = in_row & valid & (token < 0)
    if tl.max(picked.to(tl.int32), 0) > 0:
        token = tl.where(picked, _largest(values_ptr, row, picked, tops, top, row_stride, VOCAB, STRIP), token)
    token = tl.where(valid, token, 0)
    tl.store(found.tokens + row, token.to(tl.int64), mask=in_row)
    tl.store(found.valid + row, valid, mask=in_row)
    if NORMALISE:
        plain = tl.load(strips.sums + (plane if SAMPLE else 0) + place, mask=in_strips, other=0.0)
        normaliser = _store_logprobs(
            values_ptr, found.logprobs, row, in_row, plain, token, valid, tops, top, row_stride, PROBS
        )
    if found.distribution is not None:
        tl.store(found.distribution + row, d.finite(top), mask=in_row)
        if FILTER == 0:
            tl.store(found.distribution + rows + row, floor, mask=in_row)
            tl.store(found.distribution + 2 * rows + row, total, mask=in_row)
        if NORMALISE:
            tl.store(found.distribution + 3 * rows + row, normaliser, mask=in_row)


def select(
    values: Tensor,
    sampling: SamplingTensors,
    positions: Tensor | None,
    uniforms: Tensor | None,
    *,
    per_request: int = 1,
    stream: int = TARGET_STREAM,
    probabilities: bool = False,
    draw: bool = True,
    want_logprobs: bool = False,
    want_distribution: bool = False,
    normalise: bool = False,
) -> Selected:
    """Token of every row, and the results that the flags name. Row r belongs to request r // per_request.

    `want_distribution` needs a temperature; its last row is written only with `want_logprobs` or `normalise`.
    """
    (rows, vocab), chip = values.shape, current_chip(values)
    config = SELECTION[chip]
    sample, normalise = sampling.temperature is not None, normalise or want_logprobs
    out = partial(torch.empty, dtype=torch.float32, device=values.device)
    found = Selected(
        out(rows, dtype=torch.int64), out(rows, dtype=torch.bool), out(rows) if want_logprobs else None,
        out(4, rows) if want_distribution or sample and sampling.filtered else None,
    )  # fmt: skip
    call = Rows(values, sampling, per_request, probabilities)
    strips = measure(call, normalise, want_distribution)
    kept, slots, chunks = Kept(None, None, None, None), 0, 0
    if call.filtered:
        kept = keep(call, strips, found.distribution)
        slots = kept.slots.shape[1]
    if kept.chunks is not None:
        chunks = kept.chunks.shape[1]
    chunk, length = config.chunk if chunks else 0, strip_length(chip, vocab)
    keyed = sample and draw and uniforms is None
    origin = d.Uniforms(None, None, uniforms if sample and draw else None)
    if keyed:
        origin = d.Uniforms(sampling.seeds, positions, None)
    block_n = max(triton.next_power_of_2(max(strips.tops.shape[1], slots, chunks)), d.MIN_SCAN)
    block_r = d.rows_per_program(rows, config.max_rows, max(block_n, length, chunk))
    launch(
        _select_kernel, (triton.cdiv(rows, block_r),), values, sampling.temperature, origin, strips, kept,
        found, rows, values.stride(0), num_warps=config.sample_warps if sample and draw else config.pick_warps,
        PER_REQUEST=per_request, VOCAB=vocab, STRIPS=strips.tops.shape[1], STRIP=length, SAMPLE=sample,
        DRAW=draw, FILTER=call.filtered, NORMALISE=normalise, PROBS=probabilities, STREAM=stream, BLOCK_R=block_r,
        BLOCK_N=block_n, SLOTS=slots, CHUNK=chunk, CHUNKS=chunks,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["rows"])
def _probs_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R] float32
    found,  # Selected, the argmax of each row
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
    top = tl.load(found.distribution + row, mask=in_row, other=0.0)
    floor = tl.load(found.distribution + rows + row, mask=in_row, other=0.0)
    total = tl.load(found.distribution + 2 * rows + row, mask=in_row, other=1.0)
    token = tl.load(found.tokens + row, mask=in_row, other=0)
    valid = tl.load(found.valid + row, mask=in_row, other=0) != 0
    value = d.load_values(values_ptr, row[:, None], column, row_stride, live)
    weight = d.weigh(value, top[:, None], d.exponent_scale(temperature)[:, None], PROBS)
    prob = tl.where(value >= floor[:, None], weight / tl.where(valid, total, 1.0)[:, None], 0.0)
    if not PROBS:
        prob = tl.where((temperature > 0)[:, None], prob, (column == token[:, None]).to(tl.float32))
    prob = tl.where(valid[:, None], prob, 0.0)
    tl.store(probs_ptr + row.to(tl.int64)[:, None] * VOCAB + column, prob, mask=live)


def filtered_probs(logits: Tensor, sampling: SamplingTensors, probabilities: bool = False) -> Tensor:
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
        found, probs, rows, logits.stride(0), num_warps=4, VOCAB=vocab,
        PROBS=probabilities, BLOCK_R=block_r, BLOCK_V=block_v,
    )  # fmt: skip
    return probs


def pick_tokens(
    logits: Tensor,
    sampling: SamplingTensors,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    *,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
) -> Picked:
    found = select(logits, sampling, positions, uniforms, stream=stream, want_logprobs=return_logprobs)
    return Picked(found.tokens, found.valid, found.logprobs)
