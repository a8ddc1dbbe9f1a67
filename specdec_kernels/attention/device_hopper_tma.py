"""Copies of keys and values by the tensor memory accelerator, for `kernel_hopper`.

    copy     16 keys x 64 columns: consecutive rows of a page, as wide as the pattern of a buffer
    tile     panels of 64 columns; a panel holds the copies of all keys, one after the other

A copy is whole. Rows of a copy past the last key belong to no one: their scores are masked, their values are zeroed.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec_kernels.attention.device_hopper import COPY_KEYS, WARPS, next_buffer, num_tiles, work_count, work_item
from specdec_kernels.gluon_copies import request_tensor_copy

_PANEL = gl.constexpr(64)  # columns
_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)
_NO_ROW = gl.constexpr(-(1 << 30))  # outside of every pool, for keys and values


def pool_descriptor(kv: Tensor) -> TensorDescriptor:
    """The pool [2, pages, PAGE, H_kv, D] of two-byte numbers as [rows, columns]."""
    rows = kv.view(-1, kv.shape[3] * kv.shape[4])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [COPY_KEYS.value, _PANEL.value], _LAYOUT)


@gluon.jit
def _pieces(tiles, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """[buffers x panels x copies, 16, 64] of the tiles [buffers, keys, D]."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    COUNT: gl.constexpr = NUM_BUFFERS * (STATIC.D // _PANEL) * (STATIC.BLOCK_N // COPY_KEYS)
    return tiles._reinterpret(tiles.dtype, [COUNT, COPY_KEYS, _PANEL], SHARED)


@gluon.jit
def _rows_of_copies(table_row, start, stop, STATIC: gl.constexpr):
    """Row of the pool at which each copy of the tile at `start` begins; none of it from `stop` on."""
    COPIES: gl.constexpr = STATIC.BLOCK_N // COPY_KEYS
    rows = ()
    for place in gl.static_range(COPIES):
        position = start + place * COPY_KEYS
        page = gl.load(table_row + position // STATIC.PAGE, mask=position < stop, other=0)
        rows = rows + (gl.where(position < stop, page * STATIC.PAGE + position % STATIC.PAGE, _NO_ROW),)
    return rows


@gluon.jit
def _copy_tile(pool, rows, first_row, column, pieces, buffer, barrier, STATIC: gl.constexpr):
    """Ask for the keys, or the values, in `rows` after `first_row`; rows outside of the pool arrive as zeros."""
    COPIES: gl.constexpr = STATIC.BLOCK_N // COPY_KEYS
    PANELS: gl.constexpr = STATIC.D // _PANEL
    mbarrier.expect(barrier, STATIC.BLOCK_N * STATIC.D * 2)
    for place in gl.static_range(COPIES):
        for panel in gl.static_range(PANELS):
            piece = pieces.index((buffer * PANELS + panel) * COPIES + place)
            request_tensor_copy(pool, [first_row + rows[place], column + panel * _PANEL], barrier, piece)


@gluon.jit
def copy_tiles(call, ring, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """The producer, a warp. It waits for free buffers alone: its copies arrive at a buffer's barrier as they end."""
    BLOCK_N: gl.constexpr = STATIC.BLOCK_N
    k_pieces = _pieces(ring.k_tiles, NUM_BUFFERS, STATIC)
    v_pieces = _pieces(ring.v_tiles, NUM_BUFFERS, STATIC)
    values = call.num_pages * STATIC.PAGE
    buffer, phase = 0, 0
    count = work_count(call, STATIC)
    for turn in range(gl.cdiv(count, gl.num_programs(0))):
        item = work_item(turn, count, call, STATIC)
        column = item.kv_head * STATIC.D
        table_row = call.of.table + item.request * call.table_stride
        tiles = gl.where(item.exists, num_tiles(item.begin, item.stop, BLOCK_N), 0)
        for tile in range(tiles):
            rows = _rows_of_copies(table_row, item.begin + tile * BLOCK_N, item.stop, STATIC)
            mbarrier.wait(ring.empty.index(buffer), 1 - phase)
            _copy_tile(call.kv, rows, 0, column, k_pieces, buffer, ring.full.index(buffer), STATIC)
            mbarrier.wait(ring.empty.index(NUM_BUFFERS + buffer), 1 - phase)
            full = ring.full.index(NUM_BUFFERS + buffer)
            _copy_tile(call.kv, rows, values, column, v_pieces, buffer, full, STATIC)
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)


@gluon.jit
def clear_values(ring, buffer, item, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """Zero what a copy brought from `item.stop` on: a weight of 0 does not hide NaN. Every group writes the same."""
    BLOCK_N: gl.constexpr = STATIC.BLOCK_N
    COPIES: gl.constexpr = BLOCK_N // COPY_KEYS
    PANELS: gl.constexpr = STATIC.D // _PANEL
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    if (item.stop % COPY_KEYS != 0) & (item.stop > item.begin):
        pieces = _pieces(ring.v_tiles, NUM_BUFFERS, STATIC)
        place = (item.stop - item.begin) % BLOCK_N // COPY_KEYS
        kept = gl.arange(0, COPY_KEYS, gl.SliceLayout(1, LOAD)) < item.stop % COPY_KEYS
        for panel in gl.static_range(PANELS):
            piece = pieces.index((buffer * PANELS + panel) * COPIES + place)
            piece.store(gl.where(kept[:, None], piece.load(LOAD), 0.0))
        fence_async_shared()
        tl.debug_barrier()
