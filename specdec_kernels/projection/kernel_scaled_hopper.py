"""`kernel_scaled` for chips with warp-group products (sm90) where x is rounded to codes, in Gluon: the same sums.

A program has two tiles of 64 rows of the weight, gate and up of the same columns where they are gated. It requests
groups of both, of x and of the scales as many ahead as it has buffers. The first groups of weights are requested before
the predecessor has ended, so that the memory is busy while that kernel ends. While the products of a step run, it
rounds the group of x of the next.
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
from specdec_kernels.projection.kernel_hopper import (
    OF_X,
    STEP,
    TILE,
    WARPS,
    fetch_x,
    place_of_split,
    places,
    write,
    x_of,
)
from specdec_kernels.projection.rounding import rounded
from specdec_kernels.projection.types import GROUP, Product, ScaledWeight

_COLUMNS = 2 * TILE.value  # of a program


class Operands(NamedTuple):
    """Where a program reads."""

    x: Any  # [rows, K]
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
    x: Any  # [BUFFERS, ROWS, 128], not rounded
    codes: Any  # [2, ROWS, 128]: of this step and the next
    x_scales: Any  # [2, ROWS]


@gluon.jit
def _ring(X: gl.constexpr, ROWS: gl.constexpr, BUFFERS: gl.constexpr):
    CODES: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Ring(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * BUFFERS, TILE, STEP], CODES),
        gl.allocate_shared_memory(gl.float32, [2 * BUFFERS, 1], SCALES),
        gl.allocate_shared_memory(X, [BUFFERS, ROWS, STEP], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        gl.allocate_shared_memory(gl.float8e4nv, [2, ROWS, STEP], CODES),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], SCALES),
    )


@gluon.jit
def _ask_weights(of, ring, step, slot):
    """Request both tiles of a group, and their scales."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    k = of.k_first + step * STEP
    if k < of.k_end:
        first, _ = places(of.first, of.K, k, TILE, LOAD)
        second, _ = places(of.second, of.K, k, TILE, LOAD)
        request_copy(ring.weights.index(2 * slot), first, eviction_policy="evict_first")
        request_copy(ring.weights.index(2 * slot + 1), second, eviction_policy="evict_first")
        group = k // STEP + gl.arange(0, 1, ONE)
        request_copy(ring.scales.index(2 * slot), of.first_scale + group)
        request_copy(ring.scales.index(2 * slot + 1), of.second_scale + group)


@gluon.jit
def _round_x(ring, step, slot):
    """The codes of a group of x, and their scales."""
    wide, scale = rounded(ring.x.index(slot).load(OF_X), 1)
    ring.codes.index(step % 2).store(wide.to(gl.float8e4nv))
    ring.x_scales.index(step % 2).store(scale)


@gluon.jit
def _sums(of, ring, ROWS: gl.constexpr, BUFFERS: gl.constexpr):
    """[64, ROWS] float32 of each of the tiles: the sums over a split."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 32])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    zeros = gl.full([TILE, ROWS], 0.0, gl.float32, SUMS)
    one, two = zeros, zeros
    tl.debug_barrier()  # the first groups of x are written
    _round_x(ring, 0, 0)
    for step in range((of.k_end - of.k_first) // STEP):
        slot = step % BUFFERS
        async_copy.wait_group(BUFFERS - 2)
        fence_async_shared()
        tl.debug_barrier()  # the group and its codes are written, and the products before have read theirs
        codes = ring.codes.index(step % 2).permute((1, 0))
        part_one = warpgroup_mma(ring.weights.index(2 * slot), codes, zeros, use_acc=False, is_async=True)
        part_two = warpgroup_mma(ring.weights.index(2 * slot + 1), codes, zeros, use_acc=False, is_async=True)
        x_scale = ring.x_scales.index(step % 2).load(COLUMNS)[None, :]
        scale_one = ring.scales.index(2 * slot).load(COLUMNS)[None, :]
        scale_two = ring.scales.index(2 * slot + 1).load(COLUMNS)[None, :]
        ahead = step + BUFFERS - 1
        _ask_weights(of, ring, ahead, ahead % BUFFERS)
        # x is a step further ahead, because it is rounded before it is multiplied.
        x, here = x_of(of, ahead + 1, ROWS)
        request_copy(ring.x.index(slot), x, mask=here)
        async_copy.commit_group()
        _round_x(ring, step + 1, (step + 1) % BUFFERS)
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
    x_ptr,  # [rows, K]
    weight_ptr,  # [OUTER, K] float8
    scale_ptr,  # [ceil(OUTER / GROUP_ROWS), groups] float32
    bias_ptr,  # [OUTER] or None
    out_ptr,  # as of `_linear_kernel`, like the two below
    part_ptr,
    ticket_ptr,
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
        weight_ptr + first.to(gl.int64) * K,
        weight_ptr + second.to(gl.int64) * K,
        scale_ptr + first // GROUP_ROWS * groups,
        scale_ptr + second // GROUP_ROWS * groups,
        rows,
        K,
        k_first,
        gl.minimum(K, k_first + split_length),
    )
    ring = _ring(x_ptr.dtype.element_ty, ROWS, BUFFERS)
    # Before the wait: weights are constants, which no kernel writes.
    for step in gl.static_range(BUFFERS - 1):
        _ask_weights(of, ring, step, step)
        async_copy.commit_group()
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    fetch_x(of, ring, ROWS, BUFFERS)
    one, two = _sums(of, ring, ROWS, BUFFERS)
    if ticket_ptr is None:
        out_ptr += split.to(gl.int64) * rows * OUTER
        _write_tiles(out_ptr, bias_ptr, one, two, tile, OUTER, rows, GATED)
    else:
        SIZE: gl.constexpr = TILE * ROWS
        place = place_of_split(part_ptr, tile, splits, one, 2 * SIZE)
        gl.store(place + split * (2 * SIZE), one)
        gl.store(place + split * (2 * SIZE) + SIZE, two)
        if arrived(ticket_ptr + tile, splits):
            one = sum_of_splits(place, splits, 2 * SIZE)
            two = sum_of_splits(place + SIZE, splits, 2 * SIZE)
            gl.store(ticket_ptr + tile, 0)
            _write_tiles(out_ptr, bias_ptr, one, two, tile, OUTER, rows, GATED)


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
    work = work_of(product, out, is_gated, replace(config, columns=_COLUMNS))
    launch(
        _scaled_hopper_kernel,
        work.grid,
        *(product.x, weight.codes.view(torch.float8_e4m3fn), weight.scales),
        *(bias, out, work.part, work.ticket),
        *(product.rows, outer, inner, weight.scales.shape[1], config.splits, config.split_length(inner)),
        num_warps=WARPS.value,
        GROUP_ROWS=weight.group_rows,
        ROWS=config.rows,
        BUFFERS=config.ring,
        GATED=is_gated,
        launch_pdl=True,
    )
