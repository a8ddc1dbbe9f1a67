"""`kernel_scaled` for chips with warp-group products (sm90) where x is rounded to codes, in Gluon: the same sums.

A program has two tiles of 64 rows of the weight, gate and up of the same columns where they are gated. It requests
groups of both, of x and of all scales as many ahead as it has buffers. The first groups of weights are requested before
the predecessor has ended, so that the memory is busy while that kernel ends and while x is rounded. In a step it waits
for products alone: nothing is loaded from memory to registers.
"""

# mypy: ignore-errors
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec_kernels.activation.kernel import gated
from specdec_kernels.gluon_copies import request_copy
from specdec_kernels.launch import launch
from specdec_kernels.projection.configs import LinearConfig
from specdec_kernels.projection.device import arrived, sum_of_splits, work_of
from specdec_kernels.projection.kernel_hopper import STEP, TILE, WARPS, place_of_split, places, write
from specdec_kernels.projection.rounding import rounded_rows
from specdec_kernels.projection.types import GROUP, Product, ScaledWeight

_COLUMNS = 2 * TILE.value  # of a program
_OF_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [WARPS.value, 1], [1, 0]))
"""Of a group of codes: sixteen bytes a thread."""


class Operands(NamedTuple):
    """Where a program reads."""

    x: Any  # [rows, K] codes
    x_scale: Any  # [groups, rows]
    first: Any  # the first row of the first tile of weights
    second: Any
    first_scale: Any  # of the groups of the first tile
    second_scale: Any
    rows: Any
    K: Any
    k_first: Any
    k_end: Any


class Ring(NamedTuple):
    """Buffers in shared memory, each of which holds a group."""

    weights: Any  # [2 * BUFFERS, 64, 128]: both tiles
    scales: Any  # [2 * BUFFERS, 1]: theirs
    x: Any  # [BUFFERS, ROWS, 128]
    x_scales: Any  # [BUFFERS, ROWS]


@gluon.jit
def _ring(ROWS: gl.constexpr, BUFFERS: gl.constexpr):
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Ring(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * BUFFERS, TILE, STEP], CODES),
        gl.allocate_shared_memory(gl.float32, [2 * BUFFERS, 1], SCALES),
        gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, ROWS, STEP], CODES),
        gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS], SCALES),
    )


@gluon.jit
def _ask_weights(of, ring, step, slot):
    """Request both tiles of a group, and their scales."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    k = of.k_first + step * STEP
    if k < of.k_end:
        first, _ = places(of.first, of.K, k, TILE, _OF_CODES)
        second, _ = places(of.second, of.K, k, TILE, _OF_CODES)
        request_copy(ring.weights.index(2 * slot), first, eviction_policy="evict_first")
        request_copy(ring.weights.index(2 * slot + 1), second, eviction_policy="evict_first")
        group = k // STEP + gl.arange(0, 1, ONE)
        request_copy(ring.scales.index(2 * slot), of.first_scale + group)
        request_copy(ring.scales.index(2 * slot + 1), of.second_scale + group)


@gluon.jit
def _x_of(of, step, ROWS: gl.constexpr):
    """Places of a group of x and of its scales, and the rows that are in use."""
    k = of.k_first + step * STEP
    x, row = places(of.x, of.K, k, ROWS, _OF_CODES)
    return x, of.x_scale + k // STEP * of.rows + row, (row < of.rows) & (k < of.k_end)


@gluon.jit
def _ask_x(of, ring, step, slot, ROWS: gl.constexpr):
    """Request a group of x, and its scales."""
    x, scales, here = _x_of(of, step, ROWS)
    request_copy(ring.x.index(slot), x, mask=here[:, None])
    request_copy(ring.x_scales.index(slot), scales, mask=here)


@gluon.jit
def _fetch_x(of, ring, ROWS: gl.constexpr, COUNT: gl.constexpr):
    """The first groups of x, whose weights have been requested: through registers, because a wait for a request waits
    for all before it."""
    loaded = ()
    for step in gl.static_range(COUNT):
        x, scales, here = _x_of(of, step, ROWS)
        loaded += (gl.load(x, mask=here[:, None], other=0.0), gl.load(scales, mask=here, other=0.0))
    for step in gl.static_range(COUNT):
        ring.x.index(step).store(loaded[2 * step])
        ring.x_scales.index(step).store(loaded[2 * step + 1])


@gluon.jit
def _sums(of, ring, ROWS: gl.constexpr, BUFFERS: gl.constexpr):
    """[64, ROWS] float32 of each of the tiles: the sums over a split."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, SUMS)
    one, two = zeros, zeros
    for step in range((of.k_end - of.k_first) // STEP):
        slot = step % BUFFERS
        async_copy.wait_group(BUFFERS - 2)
        fence_async_shared()
        tl.debug_barrier()  # the group is written, and the products before have read theirs
        codes = ring.x.index(slot).permute((1, 0))
        part_one = warpgroup_mma(ring.weights.index(2 * slot), codes, zeros, use_acc=False, is_async=True)
        part_two = warpgroup_mma(ring.weights.index(2 * slot + 1), codes, zeros, use_acc=False, is_async=True)
        x_scale = ring.x_scales.index(slot).load(COLUMNS)[None, :]
        scale_one = ring.scales.index(2 * slot).load(COLUMNS)[None, :]
        scale_two = ring.scales.index(2 * slot + 1).load(COLUMNS)[None, :]
        ahead = step + BUFFERS - 1
        _ask_weights(of, ring, ahead, ahead % BUFFERS)
        _ask_x(of, ring, ahead, ahead % BUFFERS, ROWS)
        async_copy.commit_group()
        part_one, part_two = warpgroup_mma_wait(0, deps=[part_one, part_two])
        one = gl.fma(part_one * x_scale, zeros + scale_one, one)
        two = gl.fma(part_two * x_scale, zeros + scale_two, two)
    return one, two


@gluon.jit
def _write_tiles(out_ptr, bias_ptr, one, two, tile, OUTER, rows, GATED: gl.constexpr):
    """Both tiles, or the activation of gate and up."""
    if GATED:
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        product = gated(one.to(dtype).to(gl.float32), two.to(dtype).to(gl.float32), dtype)
        write(out_ptr, None, product, tile * TILE, OUTER // 2, rows)
    else:
        write(out_ptr, bias_ptr, one, 2 * tile * TILE, OUTER, rows)
        write(out_ptr, bias_ptr, two, (2 * tile + 1) * TILE, OUTER, rows)


@gluon.jit(do_not_specialize=["rows", "splits"])
def _scaled_hopper_kernel(
    x_ptr,  # [rows, K] float8
    x_scale_ptr,  # [groups, rows] float32
    weight_ptr,  # [OUTER, K] float8
    scale_ptr,  # [ceil(OUTER / GROUP_ROWS), groups] float32
    results,  # Results, written
    rows,
    OUTER,
    K,
    groups,
    splits,
    split_length,
    GROUP_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    BUFFERS: gl.constexpr,
    GATED: gl.constexpr,
):
    tile = gl.program_id(1)
    split = gl.program_id(2)
    first = tile * TILE if GATED else 2 * tile * TILE
    second = first + (OUTER // 2 if GATED else TILE)
    k_first = split * split_length
    of = Operands(
        x_ptr,
        x_scale_ptr,
        weight_ptr + first.to(gl.int64) * K,
        weight_ptr + second.to(gl.int64) * K,
        scale_ptr + first // GROUP_ROWS * groups,
        scale_ptr + second // GROUP_ROWS * groups,
        rows,
        K,
        k_first,
        gl.minimum(K, k_first + split_length),
    )
    ring = _ring(ROWS, BUFFERS)
    # Before the wait: weights are constants, which no kernel writes.
    for step in gl.static_range(BUFFERS - 1):
        _ask_weights(of, ring, step, step)
        async_copy.commit_group()
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    _fetch_x(of, ring, ROWS, BUFFERS - 1)
    one, two = _sums(of, ring, ROWS, BUFFERS)
    if results.ticket is None:
        out_ptr = results.out + split.to(gl.int64) * rows * OUTER
        _write_tiles(out_ptr, results.bias, one, two, tile, OUTER, rows, GATED)
    else:
        SIZE: gl.constexpr = TILE * ROWS
        place = place_of_split(results.part, tile, splits, one, 2 * SIZE)
        gl.store(place + split * (2 * SIZE), one)
        gl.store(place + split * (2 * SIZE) + SIZE, two)
        if arrived(results.ticket + tile, splits):
            one = sum_of_splits(place, splits, 2 * SIZE)
            two = sum_of_splits(place + SIZE, splits, 2 * SIZE)
            gl.store(results.ticket + tile, 0)
            _write_tiles(results.out, results.bias, one, two, tile, OUTER, rows, GATED)


def takes(product: Product, config: LinearConfig) -> bool:
    """Whether the product has whole tiles of the kernel, and scales of blocks."""
    weight = product.weight
    assert isinstance(weight, ScaledWeight)
    outer, inner = weight.shape
    if not weight.float8_x or config.in_order or product.rows > config.rows:
        return False
    in_blocks = weight.group_inner == GROUP and weight.group_rows % TILE.value == 0
    return in_blocks and inner % GROUP == 0 and outer % _COLUMNS == 0


def launch_hopper(product: Product, bias: Tensor | None, out: Tensor, is_gated: bool, config: LinearConfig) -> None:
    """`kernel.launch_linear` for a product that this kernel takes."""
    weight = product.weight
    assert isinstance(weight, ScaledWeight)
    outer, inner = weight.shape
    grid, results = work_of(product, bias, out, is_gated, replace(config, columns=_COLUMNS))
    launch(
        _scaled_hopper_kernel,
        grid,
        *(*rounded_rows(product.x), weight.codes.view(torch.float8_e4m3fn), weight.scales, results),
        *(product.rows, outer, inner, weight.scales.shape[1], config.splits, config.split_length(inner)),
        num_warps=WARPS.value,
        GROUP_ROWS=weight.group_rows,
        ROWS=config.rows,
        BUFFERS=config.ring,
        GATED=is_gated,
        launch_pdl=True,
    )
