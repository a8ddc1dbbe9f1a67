# mypy: ignore-errors
"""One read of all rows: what a token is chosen by, for every strip of neighbouring tokens.

Of every strip: the largest value m; in rows that are drawn also s = sum exp((l - m) / T), and where log-probabilities
are asked for sum exp(l - m). Where in a strip its largest value stands is not looked for: of all strips of a row only
one is asked, by the kernel that chooses.

A strip is what one warp reads. Its entries lie as [steps, strips, lanes, neighbours], so that each reduction goes over
what a thread holds first, and then over the threads of a warp; no warp waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.overlap import let_next_kernel_start, wait_for_kernel_ahead
from specdec_kernels.sampling import device as d

LANES = tl.constexpr(32)  # threads that read neighbours
ENTRIES = tl.constexpr(8)  # neighbours that one thread reads
STEP = 256  # tokens that the threads read at once


@triton.jit
def _strip_sum(entries):
    """[S]: the sum of the entries [STEPS, S, LANES, ENTRIES] of each strip."""
    return tl.sum(tl.sum(tl.sum(entries, 3), 0), 1)


@triton.jit
def _any(flag):
    """Whether any flag [S] is set."""
    return tl.max(flag.to(tl.int32), 0) > 0


@triton.jit
def _statistics(
    value, scale, draws, twice, SAMPLE: tl.constexpr, NORMALISE: tl.constexpr, PROBS: tl.constexpr
):  # fmt: skip
    """Of each strip: the largest value; the sum of weights at its temperature if some row `draws`; and that at
    temperature 1, another one if `twice`."""
    top = tl.max(tl.max(tl.max(value, 3), 0), 1)
    mass = tl.zeros_like(top)
    plain = mass
    if SAMPLE or NORMALISE:
        over = top[None, :, None, None]
        if draws:
            mass = _strip_sum(d.weigh(value, over, scale[None, :, None, None], PROBS))
        plain = mass
        if SAMPLE and NORMALISE:
            if twice:
                plain = _strip_sum(d.weigh(value, over, d.LOG2E, PROBS))
    return top, mass, plain


@triton.jit(do_not_specialize=["rows"])
def stats_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    tops_ptr,  # [R, STRIPS] float32: the largest value
    sums_ptr,  # [0 to 2, R, STRIPS] float32: sum at T (with SAMPLE), sum at 1 (with NORMALISE)
    groups_ptr,  # [R, GROUPS] float32: maximum of each 64 tokens, or None
    queue_ptr,  # [1 + R] int32: emptied, that is its first entry set to 0; or None
    rows,
    row_stride,
    PER_REQUEST: tl.constexpr,
    VOCAB: tl.constexpr,
    STRIPS: tl.constexpr,
    SAMPLE: tl.constexpr,
    NORMALISE: tl.constexpr,
    WEIGH_ALL: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Two dimensions first: how a compiler spreads four over the threads depends on its version.
    vector = tl.arange(0, STEPS * BLOCK_S * LANES)[:, None]
    pair = tl.program_id(0) * BLOCK_S + vector // LANES % BLOCK_S
    step = vector // (LANES * BLOCK_S) * LANES + vector % LANES
    column = (pair % STRIPS * (STEPS * LANES) + step) * ENTRIES + tl.arange(0, ENTRIES)[None, :]
    wait_for_kernel_ahead(OVERLAP)
    # Programs that read parts of rows again need room, and would take it from the last of these.
    let_next_kernel_start(OVERLAP and groups_ptr is not None)
    if queue_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(queue_ptr, 0)
    there = (pair < rows * STRIPS) & (column < VOCAB)
    value = d.load_entries(values_ptr, pair // STRIPS, column, row_stride, there)
    value = tl.reshape(value, (STEPS, BLOCK_S, LANES, ENTRIES))
    pair = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row, strip = pair // STRIPS, pair % STRIPS
    live = row < rows
    temperature = tl.zeros((BLOCK_S,), tl.float32)
    draws, twice = True, False
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row // PER_REQUEST, mask=live, other=0.0)
        draws = NORMALISE or WEIGH_ALL or PROBS or _any(temperature > 0)
        twice = _any((temperature > 0) & (temperature != 1))
    scale = d.exponent_scale(temperature)
    top, mass, plain = _statistics(value, scale, draws, twice, SAMPLE, NORMALISE, PROBS)
    # A NaN or an infinity shows in the largest value or in a sum; replacing it in every entry would be slower.
    fine = (top <= d.FLOAT32_MAX) & (mass < float("inf")) & (plain < float("inf"))
    if _any(fine == 0):
        value = d.usable(value)
        top, mass, plain = _statistics(value, scale, draws, twice, SAMPLE, NORMALISE, PROBS)
    tl.store(tops_ptr + pair, top, mask=live)
    plane = rows.to(tl.int64) * STRIPS
    if SAMPLE:
        tl.store(sums_ptr + pair, mass, mask=live)
    if NORMALISE:
        tl.store(sums_ptr + (plane if SAMPLE else 0) + pair, plain, mask=live)
    if groups_ptr is not None:
        _store_group_maxima(groups_ptr, value, row, strip, live, VOCAB, BLOCK_S, STEPS)


@triton.jit
def _store_group_maxima(
    groups_ptr, value, row, strip, live, VOCAB: tl.constexpr, BLOCK_S: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Store the maximum of each 64 tokens."""
    EACH: tl.constexpr = LANES * ENTRIES // 64
    GROUPS: tl.constexpr = (VOCAB + 63) // 64
    of_groups = tl.max(tl.reshape(tl.max(value, 3), (STEPS, BLOCK_S, EACH, LANES // EACH)), 3)
    group = (strip * (STEPS * EACH))[None, :, None] + tl.arange(0, STEPS)[:, None, None] * EACH
    group += tl.arange(0, EACH)[None, None, :]
    at = groups_ptr + row.to(tl.int64)[None, :, None] * GROUPS + group
    tl.store(at, of_groups, mask=live[None, :, None] & (group < GROUPS))
