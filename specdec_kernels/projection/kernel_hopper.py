"""`kernel` for chips with warp-group products (sm90), in Gluon: the same sums of few rows.

A program has a tile of 64 rows of the weight, and requests steps of it and of x as many ahead as it has buffers. The
first steps of the weight are requested before the predecessor has ended, so that the memory is busy while small kernels
run.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec_kernels.gluon_copies import request_copy
from specdec_kernels.launch import launch
from specdec_kernels.projection.configs import LinearConfig
from specdec_kernels.projection.device import arrived, sum_of_splits, work_of
from specdec_kernels.projection.types import Product

STEP = gl.constexpr(128)  # inner elements
TILE = gl.constexpr(64)  # the M side of a product
WARPS = gl.constexpr(4)
_OF_X = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS.value, 1], [1, 0]))
"""Of a step of numbers of two bytes: sixteen bytes a thread."""


class Operands(NamedTuple):
    """Where a program reads."""

    x: Any  # [rows, K]
    weight: Any  # the first row of the tile
    rows: Any
    K: Any
    k_first: Any
    k_end: Any


class Ring(NamedTuple):
    """Buffers in shared memory, each of which holds a step."""

    weights: Any  # [BUFFERS, 64, 128]
    x: Any  # [BUFFERS, ROWS, 128]


@gluon.jit
def places(base, K, k, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, 128] addresses of a step of rows of K, and the row of each, [ROWS]."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))
    return base + row.to(gl.int64)[:, None] * K + (k + lane)[None, :], row


@gluon.jit
def _x_of(of, step, ROWS: gl.constexpr):
    """Places of a step of x, and which of them are in use."""
    k = of.k_first + step * STEP
    at, row = places(of.x, of.K, k, ROWS, _OF_X)
    return at, ((row < of.rows) & (k < of.k_end))[:, None]


@gluon.jit
def _fetch_x(of, ring, ROWS: gl.constexpr, COUNT: gl.constexpr):
    """The first steps of x, whose weights have been requested: through registers, because a wait for a request waits
    for all before it."""
    loaded = ()
    for step in gl.static_range(COUNT):
        at, here = _x_of(of, step, ROWS)
        loaded += (gl.load(at, mask=here, other=0.0),)
    for step in gl.static_range(COUNT):
        ring.x.index(step).store(loaded[step])


@gluon.jit
def _ask_weight(of, ring, step, slot):
    k = of.k_first + step * STEP
    if k < of.k_end:
        at, _ = places(of.weight, of.K, k, TILE, _OF_X)
        request_copy(ring.weights.index(slot), at, eviction_policy="evict_first")


@gluon.jit
def _sum(of, ring, ROWS: gl.constexpr, BUFFERS: gl.constexpr):
    """[64, ROWS] float32: the sum over a split."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    acc = gl.full([TILE, ROWS], 0.0, gl.float32, SUMS)
    for step in range((of.k_end - of.k_first) // STEP):
        slot = step % BUFFERS
        async_copy.wait_group(BUFFERS - 2)
        fence_async_shared()
        tl.debug_barrier()  # the step is written, and the product before has read its own
        acc = warpgroup_mma(ring.weights.index(slot), ring.x.index(slot).permute((1, 0)), acc, is_async=True)
        ahead = step + BUFFERS - 1
        _ask_weight(of, ring, ahead, ahead % BUFFERS)
        at, here = _x_of(of, ahead, ROWS)
        request_copy(ring.x.index(ahead % BUFFERS), at, mask=here)
        async_copy.commit_group()
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc


@gluon.jit
def write(out_ptr, bias_ptr, sums, first, width, rows):
    """[64, ROWS] to rows of `width` columns from column `first` on."""
    column = first + gl.arange(0, TILE, gl.SliceLayout(1, sums.type.layout))
    row = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    if bias_ptr is not None:
        sums += gl.load(bias_ptr + column).to(gl.float32)[:, None]
    at = out_ptr + row.to(gl.int64)[None, :] * width + column[:, None]
    gl.store(at, sums.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :])


@gluon.jit
def place_of_split(part_ptr, tile, splits, sums, SIZE: gl.constexpr):
    """Addresses of the first partial sum, [64, ROWS] as `sums`, of a tile whose splits are SIZE numbers apart."""
    row = gl.arange(0, TILE, gl.SliceLayout(1, sums.type.layout))
    lane = row[:, None] * sums.shape[1] + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))[None, :]
    return part_ptr + tile.to(gl.int64) * splits * SIZE + lane


@gluon.jit(do_not_specialize=["rows", "splits"])
def _linear_hopper_kernel(
    x_ptr,  # [rows, K]
    weight_ptr,  # [OUTER, K]
    results,  # Results, written
    rows,
    OUTER,
    K,
    splits,
    split_length,
    ROWS: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    tile = gl.program_id(1)
    split = gl.program_id(2)
    k_first = split * split_length
    weight_ptr += (tile * TILE).to(gl.int64) * K
    of = Operands(x_ptr, weight_ptr, rows, K, k_first, gl.minimum(K, k_first + split_length))
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ring = Ring(
        gl.allocate_shared_memory(dtype, [BUFFERS, TILE, STEP], SHARED),
        gl.allocate_shared_memory(dtype, [BUFFERS, ROWS, STEP], SHARED),
    )
    # Before the wait: weights are constants, which no kernel writes.
    for step in gl.static_range(BUFFERS - 1):
        _ask_weight(of, ring, step, step)
        async_copy.commit_group()
    tl.extra.cuda.gdc_wait()
    _fetch_x(of, ring, ROWS, BUFFERS - 1)
    acc = _sum(of, ring, ROWS, BUFFERS)
    tl.extra.cuda.gdc_launch_dependents()
    if results.ticket is None:
        write(results.out + split.to(gl.int64) * rows * OUTER, results.bias, acc, tile * TILE, OUTER, rows)
    else:
        SIZE: gl.constexpr = TILE * ROWS
        place = place_of_split(results.part, tile, splits, acc, SIZE)
        gl.store(place + split * SIZE, acc)
        if arrived(results.ticket + tile, splits):
            acc = sum_of_splits(place, splits, SIZE)
            gl.store(results.ticket + tile, 0)
            write(results.out, results.bias, acc, tile * TILE, OUTER, rows)


def takes(product: Product, config: LinearConfig, is_gated: bool) -> bool:
    """Whether the product has whole tiles and steps of the kernel, which are copied by sixteen bytes."""
    outer, inner = product.weight.shape
    fits = product.rows <= config.rows and not config.in_order and not is_gated
    aligned = product.x.data_ptr() % 16 == product.plain.data_ptr() % 16 == 0
    return fits and aligned and inner % STEP.value == 0 and outer % TILE.value == 0


def launch_hopper(product: Product, bias: Tensor | None, out: Tensor, config: LinearConfig) -> None:
    """`kernel.launch_linear` for a product that this kernel takes."""
    outer, inner = product.weight.shape
    grid, results = work_of(product, bias, out, False, config)
    launch(
        _linear_hopper_kernel,
        grid,
        *(product.x, product.weight, results, product.rows, outer, inner, config.splits, config.split_length(inner)),
        num_warps=WARPS.value,
        ROWS=config.rows,
        BUFFERS=config.ring,
        launch_pdl=True,
    )
