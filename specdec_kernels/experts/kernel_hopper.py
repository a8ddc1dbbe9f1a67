"""The products of `kernel` for chips with warp-group products (sm90) and weights in half precision, in Gluon.

The sums are those of `kernel`, bit for bit. Its programs are as many as the chip holds at once, and each takes every
P-th tile of columns of the items, so that items that there are not cost nothing. A program requests weights and rows of
x as many steps ahead as it has buffers, across the end of a tile, so that the memory is busy while results are written.
The second product requests its first weights while the first one ends.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specdec_kernels.activation.kernel import gated
from specdec_kernels.experts.configs import RingConfig
from specdec_kernels.experts.types import ExpertSchedule, Matrices
from specdec_kernels.gluon_copies import request_copy
from specdec_kernels.launch import current_chip, launch, num_processors

_TILE = gl.constexpr(64)  # the M side of a product
_WARPS = gl.constexpr(4)


@gluon.jit
def _lanes(LENGTH: gl.constexpr, DIM: gl.constexpr):
    """Places in a dimension of a tile that is copied in pieces of 16 bytes."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    return gl.arange(0, LENGTH, gl.SliceLayout(1 - DIM, LOAD))


@gluon.jit
def _tile_of(
    weight_ptr, schedule, number, count, topk, OUTER, K, ROWS: gl.constexpr, TILES: gl.constexpr, GATED: gl.constexpr
):
    """Of tile `number`: where its weights begin, and the rows of x [ROWS], -1 for none."""
    there = number < count
    item = schedule.items + number // TILES * 3
    expert = gl.load(item, mask=there, other=0).to(gl.int64)
    place = gl.load(item + 1, mask=there, other=0) + _lanes(ROWS, 0)
    here = place < gl.load(item + 2, mask=there, other=0)
    row = place
    if GATED:
        row = gl.load(schedule.order + place, mask=here, other=0) // topk
    first = number % TILES * (_TILE // 2 if GATED else _TILE)
    return weight_ptr + (expert * OUTER + first) * K, gl.where(here, row, -1)


@gluon.jit
def _ask_weights(weights, slot, first, OUTER, K, STEP: gl.constexpr, GATED: gl.constexpr):
    """Request a step of the tile that begins at `first`: rows of the gate in its first half, the same of up after."""
    row, HALF = _lanes(_TILE, 0), _TILE // 2
    if GATED:
        row = gl.where(row < HALF, row, row - HALF + OUTER // 2)
    offsets = row[:, None] * K + _lanes(STEP, 1)[None, :]
    request_copy(weights.index(slot), first + offsets)


@gluon.jit
def _x_at(x_ptr, row, k, K, STEP: gl.constexpr):
    return x_ptr + row.to(gl.int64)[:, None] * K + (k + _lanes(STEP, 1))[None, :]


@gluon.jit
def _fetch_x(x_ptr, ring, row, K, STEP: gl.constexpr, COUNT: gl.constexpr):
    """The first steps of x, whose weights have been requested: through registers, because a wait for a request waits
    for all before it."""
    loaded = ()
    for step in gl.static_range(COUNT):
        loaded += (gl.load(_x_at(x_ptr, row, step * STEP, K, STEP), mask=(row >= 0)[:, None], other=0.0),)
    for step in gl.static_range(COUNT):
        ring.index(step).store(loaded[step])


@gluon.jit
def _write_hidden(out_ptr, exchange, acc, first, end, tile, WIDTH, ROWS: gl.constexpr):
    """The activation of a tile whose first half are gates, at the places of the schedule."""
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, _WARPS], [0, 1])
    HALF: gl.constexpr = _TILE // 2
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    exchange.store(acc.to(dtype).to(gl.float32))
    tl.debug_barrier()
    gate, up = exchange.slice(0, HALF).load(OUT), exchange.slice(HALF, HALF).load(OUT)
    column = tile * HALF + gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    place = first + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    at = out_ptr + place.to(gl.int64)[None, :] * WIDTH + column[:, None]
    gl.store(at, gated(gate, up, dtype), mask=(place < end)[None, :] & (column < WIDTH)[:, None])


@gluon.jit
def _write_parts(out_ptr, order_ptr, acc, first, end, tile, OUTER, ROWS: gl.constexpr):
    """Sums of a tile, at their assignments."""
    column = tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(1, acc.type.layout))
    place = first + gl.arange(0, ROWS, gl.SliceLayout(0, acc.type.layout))
    assignment = gl.load(order_ptr + place, mask=place < end, other=0)
    at = out_ptr + assignment.to(gl.int64)[None, :] * OUTER + column[:, None]
    gl.store(at, acc, mask=(place < end)[None, :] & (column < OUTER)[:, None])


@gluon.jit(do_not_specialize=["capacity", "topk"])
def _ring_kernel(
    x_ptr,  # [T, K] if GATED, else [T * topk, K] in the order of the schedule
    weight_ptr,  # [E, OUTER, K]
    out_ptr,  # as of `_product_kernel`
    schedule,  # ExpertSchedule without its row tile
    capacity,  # items that there may be
    topk,
    OUTER,
    K,
    ROWS: gl.constexpr,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,  # K / STEP
    TILES: gl.constexpr,  # of an item
    BUFFERS: gl.constexpr,
    GATED: gl.constexpr,
):
    DTYPE: gl.constexpr = weight_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, ROWS, 16])
    AHEAD: gl.constexpr = BUFFERS - 1
    weights = gl.allocate_shared_memory(DTYPE, [BUFFERS, _TILE, STEP], SHARED)
    xs = gl.allocate_shared_memory(DTYPE, [BUFFERS, ROWS, STEP], SHARED)
    exchange = gl.allocate_shared_memory(gl.float32, [_TILE, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    pid, programs = gl.program_id(0), gl.num_programs(0)
    if GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # Before the wait of the second product: weights are constants, and the first one has waited for the schedule.
    count = gl.load(schedule.num_items) * TILES
    first, row = _tile_of(weight_ptr, schedule, pid, capacity * TILES, topk, OUTER, K, ROWS, TILES, GATED)
    if pid < count:
        for step in gl.static_range(AHEAD):
            _ask_weights(weights, step, first + step * STEP, OUTER, K, STEP, GATED)
            async_copy.commit_group()
    if not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if pid < count:
        _fetch_x(x_ptr, xs, row, K, STEP, AHEAD)
    slot = 0
    for number in range(pid, count, programs):
        next_first, next_row = _tile_of(
            weight_ptr, schedule, number + programs, count, topk, OUTER, K, ROWS, TILES, GATED
        )  # fmt: skip
        acc = gl.full([_TILE, ROWS], 0.0, gl.float32, SUMS)
        for step in range(STEPS):
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
            tl.debug_barrier()  # the step is written, and the products before have read theirs
            acc = warpgroup_mma(weights.index(slot), xs.index(slot).permute((1, 0)), acc, is_async=True)
            free = slot + AHEAD
            free = gl.where(free >= BUFFERS, free - BUFFERS, free)
            is_own = step + AHEAD < STEPS
            k = gl.where(is_own, step + AHEAD, step + AHEAD - STEPS) * STEP
            if is_own | (number + programs < count):
                row_ahead = gl.where(is_own, row, next_row)
                _ask_weights(weights, free, gl.where(is_own, first, next_first) + k, OUTER, K, STEP, GATED)
                x_at = _x_at(x_ptr, row_ahead, k, K, STEP)
                request_copy(xs.index(free), x_at, mask=(row_ahead >= 0)[:, None])
            async_copy.commit_group()
            acc = warpgroup_mma_wait(0, deps=[acc])
            slot = gl.where(slot + 1 == BUFFERS, 0, slot + 1)
        item = schedule.items + number // TILES * 3
        place, end = gl.load(item + 1), gl.load(item + 2)
        if GATED:
            _write_hidden(out_ptr, exchange, acc, place, end, number % TILES, OUTER // 2, ROWS)
        else:
            _write_parts(out_ptr, schedule.order, acc, place, end, number % TILES, OUTER, ROWS)
        first, row = next_first, next_row


def takes(x: Tensor, weight: Matrices, config: RingConfig) -> bool:
    """Whether the product has whole tiles and steps of the kernel, and as many steps as it has buffers."""
    if current_chip(x) != "sm90" or not isinstance(weight, Tensor):
        return False
    outer, inner = weight.shape[1:]
    whole = outer % _TILE.value == 0 and inner % config.step == 0
    return x.element_size() == 2 and whole and inner // config.step >= config.buffers


def launch_ring(
    x: Tensor, weight: Tensor, out: Tensor, schedule: ExpertSchedule, topk: int, config: RingConfig, is_gated: bool
) -> None:
    """One product of the chosen experts, see `kernel`."""
    _, outer, inner = weight.shape
    capacity, tiles = schedule.items.shape[0], outer // _TILE.value
    launch(
        _ring_kernel,
        (min(capacity * tiles, config.programs * num_processors(x)),),
        *(x, weight, out, schedule._replace(row_tile=None), capacity, topk, outer, inner),
        num_warps=_WARPS.value,
        ROWS=schedule.row_tile,
        STEP=config.step,
        STEPS=inner // config.step,
        TILES=tiles,
        BUFFERS=config.buffers,
        GATED=is_gated,
        launch_pdl=True,
    )
