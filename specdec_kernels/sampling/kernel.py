"""Token selection over a split vocabulary: statistics of every tile, then one look at the tile that matters.

First kernel, a program a (row block, tile): m = max l, a = first argmax, s = sum exp((l - m) / T).
Second kernel, a program a row block: M = max m, mass of tile t = s_t exp((m_t - M) / T), C = their running
sum. The uniform's goal is g = u * C_last; the winning tile is the first whose C exceeds g, and inside it,
read again, the winner is the first token whose running weight exceeds g - C_before. Running sums of a
parallel scan may differ in the last bit from one lane to the next, so a token (or tile) of weight zero is
passed over by name, not by trusting equal sums, and where rounding leaves no winner the last one of positive
weight is taken. Maths is float32 whatever the logits' type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.sampling.reference import MIN_TEMPERATURE
from specdec_kernels.sampling.types import TARGET_STREAM, Picked

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_TARGET_STREAM = tl.constexpr(TARGET_STREAM)
# A scan shorter than the eight 16-bit logits of one vector load does not compile on Triton 3.6.
_MIN_SCAN = 8
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class SamplingConfig:
    """Tile width depends on the vocabulary alone, so that a row's result does not depend on its batch."""

    max_tile: int
    max_rows: int
    tile_budget: int  # rows * tile of one program
    num_warps: int


_GPU = SamplingConfig(max_tile=4096, max_rows=1, tile_budget=4096, num_warps=8)
# The interpreter pays by the program, not by the lane.
_CONFIGS = {
    "sm80": _GPU,
    "sm90": _GPU,
    "sm100": _GPU,
    "gfx942": _GPU,
    "interpreter": SamplingConfig(max_tile=2048, max_rows=1 << 15, tile_budget=1 << 18, num_warps=1),
}


@triton.jit
def _load_logits(logits_ptr, row, column, row_stride, live):
    """Logits as float32 with NaN as -inf and +inf as the largest float32; -inf where not `live`."""
    offset = row.to(tl.int64)[:, None] * row_stride + column
    logit = tl.load(logits_ptr + offset, mask=live, other=float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))
    return tl.minimum(logit, _FLOAT32_MAX)


@triton.jit
def _finite(top):
    """A shift for exponents that keeps rows without a usable logit free of inf - inf."""
    return tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def philox_uniform(seed, position, STREAM: tl.constexpr):
    """Uniform in [0, 1) with 24 bits keyed by (seed, position, stream), see `reference.philox_uniform`."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero + STREAM, zero)
    return (word >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["rows"])
def _tile_stats_kernel(
    logits_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / GROUP] float32, or None without SAMPLE
    tile_max_ptr,  # [R, TILES] float32
    tile_arg_ptr,  # [R, TILES] int32
    tile_sum_ptr,  # [R, TILES] float32, or None without SAMPLE
    rows,
    row_stride,
    GROUP: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tile = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    live = (row < rows)[:, None] & (column < VOCAB)
    logit = _load_logits(logits_ptr, row, column, row_stride, live)
    top = tl.max(logit, 1)
    first = tl.min(tl.where(logit == top[:, None], column, VOCAB), 1)
    place = row.to(tl.int64) * TILES + tile
    tl.store(tile_max_ptr + place, top, mask=row < rows)
    tl.store(tile_arg_ptr + place, first, mask=row < rows)
    if SAMPLE:
        warmth = tl.load(temperature_ptr + row // GROUP, mask=row < rows, other=0.0)
        scaled = (logit - _finite(top)[:, None]) / tl.maximum(warmth, _MIN_TEMPERATURE)[:, None]
        tl.store(tile_sum_ptr + place, tl.sum(tl.exp(scaled), 1), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    logits_ptr,  # [R, VOCAB], row stride row_stride
    temperature_ptr,  # [R / GROUP] float32, or None without SAMPLE
    seeds_ptr,  # [R / GROUP] int64, or None
    positions_ptr,  # [R] int64, or None
    uniforms_ptr,  # [R] float32, or None
    tile_max_ptr,  # [R, TILES] float32
    tile_arg_ptr,  # [R, TILES] int32
    tile_sum_ptr,  # [R, TILES] float32, or None without SAMPLE
    tokens_ptr,  # [R] int64
    valid_ptr,  # [R] bool
    rows,
    row_stride,
    GROUP: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tile = tl.arange(0, BLOCK_T)[None, :]
    in_row = row < rows
    in_tiles = in_row[:, None] & (tile < TILES)
    place = row.to(tl.int64)[:, None] * TILES + tile
    tile_max = tl.load(tile_max_ptr + place, mask=in_tiles, other=float("-inf"))
    tile_arg = tl.load(tile_arg_ptr + place, mask=in_tiles, other=VOCAB)
    top = tl.max(tile_max, 1)
    token = tl.min(tl.where(tile_max == top[:, None], tile_arg, VOCAB), 1)

    if SAMPLE:
        warmth = tl.load(temperature_ptr + row // GROUP, mask=in_row, other=0.0)
        divisor = tl.maximum(warmth, _MIN_TEMPERATURE)[:, None]
        shift = _finite(top)[:, None]
        tile_sum = tl.load(tile_sum_ptr + place, mask=in_tiles, other=0.0)
        mass = tile_sum * tl.exp((tile_max - shift) / divisor)
        running = tl.cumsum(mass, 1)
        goal = _uniform(seeds_ptr, positions_ptr, uniforms_ptr, row, in_row, GROUP) * tl.max(running, 1)
        winner = _first_beyond(running, mass, goal, tile, BLOCK_T)
        winner = tl.maximum(winner, 0)
        before = tl.max(tl.where(tile < winner[:, None], running, 0.0), 1)

        column = winner[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        logit = _load_logits(logits_ptr, row, column, row_stride, in_row[:, None] & (column < VOCAB))
        weight = tl.exp((logit - shift) / divisor)
        drawn = _first_beyond(tl.cumsum(weight, 1), weight, goal - before, column, VOCAB)
        token = tl.where((warmth > 0) & (drawn >= 0), drawn, token)

    valid = top > float("-inf")
    tl.store(tokens_ptr + row, tl.where(valid, token, 0).to(tl.int64), mask=in_row)
    tl.store(valid_ptr + row, valid, mask=in_row)


@triton.jit
def _uniform(seeds_ptr, positions_ptr, uniforms_ptr, row, in_row, GROUP: tl.constexpr):
    """The row's uniform: injected where given, else from the generator."""
    if uniforms_ptr is not None:
        uniform = tl.load(uniforms_ptr + row, mask=in_row, other=0.0)
    else:
        seed = tl.load(seeds_ptr + row // GROUP, mask=in_row, other=0)
        position = tl.load(positions_ptr + row, mask=in_row, other=0)
        uniform = philox_uniform(seed, position, _TARGET_STREAM)
    return uniform


@triton.jit
def _first_beyond(running, weight, goal, index, END: tl.constexpr):
    """First index of positive weight whose sum exceeds the goal, else the last such index, else -1."""
    first = tl.min(tl.where((running > goal[:, None]) & (weight > 0), index, END), 1)
    last = tl.max(tl.where(weight > 0, index, -1), 1)
    return tl.where(first < END, first, last)


def pick_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    rows_per_request: int = 1,
) -> Picked:
    """See `specdec_kernels.sampling.pick_tokens`.

    With `rows_per_request` above 1, row r takes the temperature and seed of request r // rows_per_request.
    """
    rows, vocab = logits.shape
    config = _CONFIGS[current_chip(logits)]
    block_v = min(max(triton.next_power_of_2(vocab), 2), config.max_tile)  # a tile of one lane does not compile
    fitting = max(1, config.tile_budget // block_v)
    block_r = min(triton.next_power_of_2(max(rows, 1)), config.max_rows, fitting)
    tiles, sample = triton.cdiv(vocab, block_v), temperature is not None
    row_blocks = triton.cdiv(rows, block_r)

    def stats(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, tiles, dtype=dtype, device=logits.device)

    tile_max, tile_arg = stats(torch.float32), stats(torch.int32)
    tile_sum = stats(torch.float32) if sample else None
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    sizes = dict(GROUP=rows_per_request, VOCAB=vocab, TILES=tiles, SAMPLE=sample, BLOCK_R=block_r, BLOCK_V=block_v)
    stride = logits.stride(0)
    launch(
        _tile_stats_kernel, (row_blocks, tiles), logits, temperature, tile_max, tile_arg, tile_sum, rows,
        stride, num_warps=config.num_warps, **sizes,
    )  # fmt: skip
    if not sample or uniforms is not None:
        seeds = positions = None
    launch(
        _combine_kernel, (row_blocks,), logits, temperature, seeds, positions, uniforms if sample else None,
        tile_max, tile_arg, tile_sum, tokens, valid, rows, stride,
        num_warps=config.num_warps, BLOCK_T=max(triton.next_power_of_2(tiles), _MIN_SCAN), **sizes,
    )  # fmt: skip
    return Picked(tokens, valid)
