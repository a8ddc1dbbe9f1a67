# mypy: ignore-errors
"""One read of all rows: statistics of every strip of neighbouring tokens.

These are the largest value m; in sampled rows also s = sum exp((l - m) / T), and for log-probabilities sum exp(l - m).
A strip is what one warp reads; no warp waits for another.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor
from specdec_kernels.sampling import device as d
from specdec_kernels.sampling.configs import SELECTION
from specdec_kernels.sampling.types import SamplingTensors

LANES = tl.constexpr(32)  # threads that read neighbours
ENTRIES = tl.constexpr(8)  # neighbours that one thread reads
STEP = 256  # tokens that the threads read at once
GROUP_SIZE = 64  # tokens of a group, of which the largest is kept
_MOST_WARPS = 8


class Rows(NamedTuple):
    """The rows of one call; row r belongs to request r // per_request."""

    values: Tensor  # [R, V]
    sampling: SamplingTensors  # by request
    per_request: int
    probabilities: bool  # whether the values are probabilities

    @property
    def filtered(self) -> bool:
        return self.sampling.temperature is not None and self.sampling.filtered


class Strips(NamedTuple):
    """Statistics of all rows."""

    tops: Tensor  # [R, STRIPS] float32: the largest value
    sums: Tensor  # [0 to 2, R, STRIPS] float32: at the temperature (sampled rows), at 1 (log-probabilities)
    groups: Tensor | None  # [R, groups of 64 tokens] float32, where there are filters
    queue: Tensor | None  # [1 + R] int32: for the rows that filters defer; emptied, its first entry is set to 0


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
    value, scale, samples, twice, SAMPLE: tl.constexpr, NORMALISE: tl.constexpr, PROBS: tl.constexpr
):  # fmt: skip
    """The largest value of each strip; the sum of weights at its temperature if some row `samples`; and the sum at
    temperature 1, another one if `twice`."""
    top = tl.max(tl.max(tl.max(value, 3), 0), 1)
    mass = tl.zeros_like(top)
    plain = mass
    if SAMPLE or NORMALISE:
        over = top[None, :, None, None]
        if samples:
            mass = _strip_sum(d.weigh(value, over, scale[None, :, None, None], PROBS))
        plain = mass
        if SAMPLE and NORMALISE:
            if twice:
                plain = _strip_sum(d.weigh(value, over, d.LOG2E, PROBS))
    return top, mass, plain


@triton.jit(do_not_specialize=["rows"])
def _stats_kernel(
    values_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / PER_REQUEST] float32, or None without SAMPLE
    strips,  # Strips, written
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
    PDL: tl.constexpr,
):
    # Two dimensions first: how a compiler spreads four over the threads depends on its version.
    vector = tl.arange(0, STEPS * BLOCK_S * LANES)[:, None]
    pair = tl.program_id(0) * BLOCK_S + vector // LANES % BLOCK_S
    step = vector // (LANES * BLOCK_S) * LANES + vector % LANES
    column = (pair % STRIPS * (STEPS * LANES) + step) * ENTRIES + tl.arange(0, ENTRIES)[None, :]
    wait_for_predecessor(PDL)
    # Programs of `_select_kernel` need registers at once, and would take them from the last programs of this one.
    launch_dependents(PDL and strips.groups is not None)
    if strips.queue is not None:
        if tl.program_id(0) == 0:
            tl.store(strips.queue, 0)
    there = (pair < rows * STRIPS) & (column < VOCAB)
    value = d.load_entries(values_ptr, pair // STRIPS, column, row_stride, there)
    value = tl.reshape(value, (STEPS, BLOCK_S, LANES, ENTRIES))
    pair = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = pair // STRIPS
    strip = pair % STRIPS
    live = row < rows
    temperature = tl.zeros((BLOCK_S,), tl.float32)
    samples = True
    twice = False
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row // PER_REQUEST, mask=live, other=0.0)
        samples = NORMALISE or WEIGH_ALL or PROBS or _any(temperature > 0)
        twice = _any((temperature > 0) & (temperature != 1))
    scale = d.exponent_scale(temperature)
    top, mass, plain = _statistics(value, scale, samples, twice, SAMPLE, NORMALISE, PROBS)
    # A NaN or an infinity shows in the largest value or in a sum; replacing it in every entry would be slower.
    fine = (top <= d.FLOAT32_MAX) & (mass < float("inf")) & (plain < float("inf"))
    if _any(fine == 0):
        value = d.usable(value)
        top, mass, plain = _statistics(value, scale, samples, twice, SAMPLE, NORMALISE, PROBS)
    tl.store(strips.tops + pair, top, mask=live)
    plane = rows.to(tl.int64) * STRIPS
    if SAMPLE:
        tl.store(strips.sums + pair, mass, mask=live)
    if NORMALISE:
        tl.store(strips.sums + (plane if SAMPLE else 0) + pair, plain, mask=live)
    if strips.groups is not None:
        _store_group_maxima(strips.groups, value, row, strip, live, VOCAB, BLOCK_S, STEPS)


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


def strip_length(chip: str, vocab: int) -> int:
    """Tokens of a strip."""
    return STEP * min(SELECTION[chip].steps, triton.next_power_of_2(triton.cdiv(vocab, STEP)))


def measure(rows: Rows, normalise: bool, weigh_all: bool) -> Strips:
    """Statistics of the strips of every row; with `weigh_all` greedy rows have sums too, at temperature 1."""
    (count, vocab), temperature, chip = rows.values.shape, rows.sampling.temperature, current_chip(rows.values)
    config, sample, filtered = SELECTION[chip], temperature is not None, rows.filtered
    length = strip_length(chip, vocab)
    strips = triton.cdiv(vocab, length)
    out = partial(torch.empty, device=rows.values.device)
    found = Strips(
        out(count, strips), out(sample + normalise, count, strips),
        out(count, triton.cdiv(vocab, GROUP_SIZE)) if filtered else None,
        out(count + 1, dtype=torch.int32) if filtered else None,
    )  # fmt: skip
    block_s = min(config.sampled_strips if sample else config.strips, triton.next_power_of_2(max(count * strips, 1)))
    launch(
        _stats_kernel, (triton.cdiv(count * strips, block_s),), rows.values, temperature, found, count,
        rows.values.stride(0), num_warps=min(block_s, _MOST_WARPS), PER_REQUEST=rows.per_request, VOCAB=vocab,
        STRIPS=strips, SAMPLE=sample, NORMALISE=normalise, WEIGH_ALL=weigh_all, PROBS=rows.probabilities,
        BLOCK_S=block_s, STEPS=length // STEP,
    )  # fmt: skip
    return found
