"""`kernel_scaled` for chips with warp-group products (sm90) where x is rounded to codes, in Gluon: the same sums.

A program has two tiles of 64 rows of the weight. The memory is kept busy:

    weights     are requested as many groups ahead as there are buffers, the first ones before the predecessor has ended
    x           is requested two groups ahead, and rounded while the tensor core multiplies the group before
    products    of the two tiles run at once
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec_kernels.activation.kernel import gated
from specdec_kernels.launch import launch
from specdec_kernels.projection.configs import LinearConfig
from specdec_kernels.projection.device import arrived, sum_of_splits, work_of
from specdec_kernels.projection.rounding import rounded, rounded_rows
from specdec_kernels.projection.types import GROUP, Product

# Triton 3.9 renamed it.
_ask = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_GROUP = gl.constexpr(GROUP)
_TILE = gl.constexpr(64)  # the M side of a product
_WARPS = gl.constexpr(4)


class Operands(NamedTuple):
    """Where a program reads."""

    x: Any  # [rows, K]
    x_scale: Any  # [groups, rows] if APART
    first: Any  # the first row of the first tile of weights
    second: Any
    first_scale: Any
    second_scale: Any
    rows: Any
    K: Any
    k_first: Any
    k_end: Any


class Buffers(NamedTuple):
    """Shared memory: a ring of groups of weights, two tiles each, and two groups of x with their scales."""

    weights: Any  # [2 * BUFFERS, 64, 128]
    x: Any  # [2, ROWS, 128]
    x_scales: Any  # [2, ROWS]


@gluon.jit
def _ask_weights(of, buffers, step, slot):
    """Request both tiles of a group, if it is in the split."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [_WARPS, 1], [1, 0])
    k = of.k_first + step * _GROUP
    if k < of.k_end:
        row = gl.arange(0, _TILE, gl.SliceLayout(1, LOAD))
        lane = gl.arange(0, _GROUP, gl.SliceLayout(0, LOAD))
        offsets = row.to(gl.int64)[:, None] * of.K + (k + lane)[None, :]
        _ask(buffers.weights.index(2 * slot), of.first + offsets, eviction_policy="evict_first")
        _ask(buffers.weights.index(2 * slot + 1), of.second + offsets, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon.jit
def _load_x(of, step, ROWS: gl.constexpr, APART: gl.constexpr):
    """[ROWS, 128] of x, zeros past the split, and if APART the scales [ROWS]."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [_WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOAD))
    lane = gl.arange(0, _GROUP, gl.SliceLayout(0, LOAD))
    k = of.k_first + step * _GROUP
    here = (row < of.rows) & (k < of.k_end)
    x = gl.load(of.x + row.to(gl.int64)[:, None] * of.K + (k + lane)[None, :], mask=here[:, None], other=0.0)
    if APART:
        return x, gl.load(of.x_scale + k // _GROUP * of.rows + row, mask=here, other=0.0)
    else:
        return x, row


@gluon.jit
def _store_x(buffers, slot, x, scale, APART: gl.constexpr):
    """A group of x as the product takes it, and its scales."""
    if APART:
        codes = x
    else:
        wide, scale = rounded(x, 1)
        codes = wide.to(gl.float8e4nv)
    buffers.x.index(slot).store(codes)
    buffers.x_scales.index(slot).store(scale)


@gluon.jit
def _group_scales(of, step):
    """The scales of both tiles of a group."""
    group = gl.minimum(of.k_first + step * _GROUP, of.K - 1) // _GROUP
    return gl.load(of.first_scale + group), gl.load(of.second_scale + group)


@gluon.jit
def _sums(of, buffers, ROWS: gl.constexpr, BUFFERS: gl.constexpr, APART: gl.constexpr):
    """[64, ROWS] float32 of each of the tiles: the sums over a split, whose first weights have been requested."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, ROWS, 32])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)
    zeros = gl.full([_TILE, ROWS], 0.0, gl.float32, SUMS)
    one, two = zeros, zeros
    x, x_scale = _load_x(of, 0, ROWS, APART)
    _store_x(buffers, 0, x, x_scale, APART)
    x, x_scale = _load_x(of, 1, ROWS, APART)
    scale_one, scale_two = _group_scales(of, 0)
    for step in range((of.k_end - of.k_first) // _GROUP):
        slot = step % BUFFERS
        async_copy.wait_group(BUFFERS - 2)
        fence_async_shared()
        tl.debug_barrier()  # both operands are written, and the products before have read theirs
        codes = buffers.x.index(step % 2).permute((1, 0))
        part_one = warpgroup_mma(buffers.weights.index(2 * slot), codes, zeros, use_acc=False, is_async=True)
        part_two = warpgroup_mma(buffers.weights.index(2 * slot + 1), codes, zeros, use_acc=False, is_async=True)
        _ask_weights(of, buffers, step + BUFFERS - 1, (step + BUFFERS - 1) % BUFFERS)
        factor = buffers.x_scales.index(step % 2).load(COLUMNS)[None, :]
        following_one, following_two = _group_scales(of, step + 1)
        _store_x(buffers, (step + 1) % 2, x, x_scale, APART)
        x, x_scale = _load_x(of, step + 2, ROWS, APART)
        part_one, part_two = warpgroup_mma_wait(0, deps=[part_one, part_two])
        one = gl.fma(part_one * factor, gl.full([_TILE, ROWS], 0.0, gl.float32, SUMS) + scale_one, one)
        two = gl.fma(part_two * factor, gl.full([_TILE, ROWS], 0.0, gl.float32, SUMS) + scale_two, two)
        scale_one, scale_two = following_one, following_two
    return one, two


@gluon.jit
def _write(out_ptr, bias_ptr, sums, first, width, rows):
    """[64, ROWS] to rows of `width` columns from column `first` on."""
    column = first + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    row = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + column).to(gl.float32)[:, None]
    at = out_ptr + row.to(gl.int64)[None, :] * width + column[:, None]
    gl.store(at, sums.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :] & (column < width)[:, None])


@gluon.jit
def _write_tiles(out_ptr, bias_ptr, one, two, tile, OUTER, rows, GATED: gl.constexpr):
    """Both tiles, or the activation of gate and up."""
    if GATED:
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        product = gated(one.to(dtype).to(gl.float32), two.to(dtype).to(gl.float32), dtype)
        _write(out_ptr, None, product, tile * _TILE, OUTER // 2, rows)
    else:
        _write(out_ptr, bias_ptr, one, 2 * tile * _TILE, OUTER, rows)
        _write(out_ptr, bias_ptr, two, (2 * tile + 1) * _TILE, OUTER, rows)


@gluon.jit(do_not_specialize=["rows", "splits"])
def _scaled_hopper_kernel(
    x_ptr,  # [rows, K], codes if APART
    x_scale_ptr,  # [groups, rows] float32 if APART, else anything
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
    APART: gl.constexpr,
    EARLY: gl.constexpr,
):
    tile = gl.program_id(1)
    split = gl.program_id(2)
    first = tile * _TILE if GATED else 2 * tile * _TILE
    second = first + (OUTER // 2 if GATED else _TILE)
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
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = Buffers(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * BUFFERS, _TILE, _GROUP], SHARED),
        gl.allocate_shared_memory(gl.float8e4nv, [2, ROWS, _GROUP], SHARED),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], SCALES),
    )
    # Before the wait: weights are constants, which no kernel writes.
    for step in gl.static_range(BUFFERS - 1):
        _ask_weights(of, buffers, step, step)
    tl.extra.cuda.gdc_wait()
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    one, two = _sums(of, buffers, ROWS, BUFFERS, APART)
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if ticket_ptr is None:
        out_ptr += split.to(gl.int64) * rows * OUTER
        _write_tiles(out_ptr, bias_ptr, one, two, tile, OUTER, rows, GATED)
    else:
        SIZE: gl.constexpr = _TILE * ROWS
        row = gl.arange(0, _TILE, gl.SliceLayout(1, one.type.layout))
        lane = row[:, None] * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, one.type.layout))[None, :]
        place = part_ptr + tile.to(gl.int64) * splits * (2 * SIZE) + lane
        gl.store(place + split * (2 * SIZE), one)
        gl.store(place + split * (2 * SIZE) + SIZE, two)
        if arrived(ticket_ptr + tile, splits):
            one = sum_of_splits(place, splits, 2 * SIZE)
            two = sum_of_splits(place + SIZE, splits, 2 * SIZE)
            gl.store(ticket_ptr + tile, 0)
            _write_tiles(out_ptr, bias_ptr, one, two, tile, OUTER, rows, GATED)


def takes(product: Product, is_gated: bool, config: LinearConfig) -> bool:
    """Whether the kernel has the tiles of this product: of 64 rows of a weight whose scales are of blocks."""
    weight = product.weight
    outer, inner = weight.shape
    if config.in_order or product.rows > config.rows or product.x.element_size() != 2:
        return False
    in_blocks = weight.group_inner == GROUP and weight.group_rows % _TILE.value == 0
    return weight.float8_x and in_blocks and inner % GROUP == 0 and outer % (2 * _TILE.value) == 0


def launch_hopper(
    product: Product, bias: Tensor | None, out: Tensor, is_gated: bool, config: LinearConfig, apart: bool, early=False
) -> None:
    """`kernel.launch_linear` for a product that this kernel takes."""
    x, weight, _ = product
    outer, inner = weight.shape
    work = work_of(product, out, is_gated, config)
    numbers, x_scales = rounded_rows(x) if apart else (x, weight.scales)
    launch(
        _scaled_hopper_kernel,
        work.grid,
        *(numbers, x_scales, weight.codes.view(torch.float8_e4m3fn), weight.scales, bias, out, work.part, work.ticket),
        *(product.rows, outer, inner, weight.scales.shape[1], config.splits, config.split_length(inner)),
        num_warps=_WARPS.value,
        GROUP_ROWS=weight.group_rows,
        ROWS=config.rows,
        BUFFERS=config.num_stages,
        GATED=is_gated,
        APART=apart,
        EARLY=early,
        launch_pdl=True,
    )
