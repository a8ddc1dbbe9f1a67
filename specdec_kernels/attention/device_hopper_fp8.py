"""Warp groups over a float8 pool, for `kernel_hopper`: the producer converts codes, one or two groups of 64 rows
multiply.

    buffer s of an item      keys of tile s, values of tile s - 1
    rows                     scores of tile s = q . k        weights of tile s - 1 . v        softmax of tile s

The two products of a buffer are in flight together, and the softmax waits for the first alone. An item has one buffer
more than tiles. With 64 rows, two programs run on a processor; queries are then in shared memory, as registers are few.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from specdec_kernels.attention import device as d
from specdec_kernels.attention.device_hopper import (
    GROUP_ROWS,
    WARPS,
    arrive,
    arrive_written,
    load_rows,
    masked,
    next_buffer,
    nodes_of_group,
    num_tiles,
    rows_of_group,
    store_operand,
    weights_of_tile,
    work_count,
    work_item,
    write_rows,
)

_CODES = gl.constexpr(4)  # in a number of 32 bits


@gluon.jit
def _load_codes(ptr, places, stored, quads, STEP: gl.constexpr):
    """Four codes as one number: single codes would each hold a register until they arrive."""
    return gl.load(ptr + places[:, None] * STEP + quads[None, :], mask=stored[:, None], other=0)


@gluon.jit
def _store_converted(codes, buffer):
    """Numbers in float16 of the codes [N, D / 4], stored as [N, D]."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 front, back; mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 front, low; "
        "cvt.rn.f16x2.e4m3x2 back, high; mov.b32 {$0, $1}, front; mov.b32 {$2, $3}, back; }",
        "=h,=h,=h,=h,r",
        [codes],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    numbers = gl.join(gl.join(first, third), gl.join(second, fourth))
    buffer.store(gl.reshape(numbers, [codes.shape[0], _CODES * codes.shape[1]]))


@gluon.jit
def convert_tiles(call, ring, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """The producer. Codes of the next buffer are loaded while the codes of this one are converted."""
    H_KV: gl.constexpr = STATIC.H_KV
    PAGE: gl.constexpr = STATIC.PAGE
    BLOCK_N: gl.constexpr = STATIC.BLOCK_N
    QUADS: gl.constexpr = STATIC.D // _CODES
    STEP: gl.constexpr = H_KV * QUADS
    # Eight threads that store at once have half a row of two rows each, which the buffer's pattern lays in all banks.
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOAD))
    quads = gl.arange(0, QUADS, gl.SliceLayout(0, LOAD))
    buffer, phase = 0, 0
    count = work_count(call, STATIC)
    for turn in range(gl.cdiv(count, gl.num_programs(0))):
        item = work_item(turn, count, call, STATIC)
        stop = item.stop
        key_ptr = call.kv + item.kv_head * QUADS
        value_ptr = key_ptr + call.num_pages.to(gl.int64) * (PAGE * STEP)
        table_row = call.of.table + item.request * call.table_stride
        positions = item.begin + columns
        places = d.page_ids(table_row, positions, stop, PAGE).to(gl.int64) * PAGE + positions % PAGE
        pages = d.page_ids(table_row, positions + BLOCK_N, stop, PAGE)
        key_codes = _load_codes(key_ptr, places, positions < stop, quads, STEP)
        value_codes = _load_codes(value_ptr, places, positions < 0, quads, STEP)  # the first buffer has none
        for _index in range(gl.where(item.exists, num_tiles(item.begin, stop, BLOCK_N) + 1, 0)):
            mbarrier.wait(ring.empty.index(buffer), 1 - phase)
            before = places
            before_stored = positions < stop
            positions += BLOCK_N
            places = pages.to(gl.int64) * PAGE + positions % PAGE
            pages = d.page_ids(table_row, positions + BLOCK_N, stop, PAGE)
            _store_converted(key_codes, ring.k_tiles.index(buffer))
            key_codes = _load_codes(key_ptr, places, positions < stop, quads, STEP)
            _store_converted(value_codes, ring.v_tiles.index(buffer))
            value_codes = _load_codes(value_ptr, before, before_stored, quads, STEP)
            arrive_written(ring.full.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)


@gluon.jit
def _fold_tile(start, q, factor, zeros, sums, columns, ring, buffer, phase, view, item, NUM_BUFFERS: gl.constexpr,
               MODE: gl.constexpr, WORDS: gl.constexpr):  # fmt: skip
    """Multiply with the keys of the tile at `start` and with the values of the tile before, which are in one buffer:
    (sums, next buffer, its phase). The sums are weights of a tile whose values come with the next buffer, and what they
    are to be added to."""
    narrow, top, total, decay, acc = sums
    k_tile = ring.k_tiles.index(buffer).permute((1, 0))
    coming = warpgroup_mma(q, k_tile, zeros, use_acc=False, is_async=True)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    summed = warpgroup_mma(narrow, ring.v_tiles.index(buffer), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[coming])
    if start + scores.shape[1] > item.free_end:
        # With a barrier, because a compiler would compute the masks of all tiles rather than branch.
        tl.debug_barrier()
        scores = masked(scores, start, columns, view, item.stop, MODE, WORDS)
    weights, top, decay, added = weights_of_tile(scores, factor, top)
    total = gl.fma(total, gl.convert_layout(decay, gl.SliceLayout(1, added.type.layout))[:, None], added)
    narrow = gl.convert_layout(weights.to(narrow.dtype), narrow.type.layout)
    before = buffer
    buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
    # Between softmax and wait, because the assembler moves a wait as far ahead as no branch hinders it.
    mbarrier.wait(ring.full.index(buffer), phase)
    acc = warpgroup_mma_wait(0, deps=[summed])
    arrive(ring.empty.index(before))
    return (narrow, top, total, decay, acc), buffer, phase


@gluon.jit
def _load_queries(call, rows, used, queries, group, SCORES: gl.constexpr, STATIC: gl.constexpr):
    """(queries of a group's rows as the first operand of scores, factor of their scores), see `device.half_queries`."""
    q = load_rows(call.of.q, rows, used, STATIC)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    if q.dtype == gl.bfloat16:
        q, factor = d.half_queries(q, d.FP8_NATIVE)
        factor = gl.convert_layout(factor, LINES)
    else:
        factor = gl.full([GROUP_ROWS], 1.0, gl.float32, LINES)
    if queries is None:
        # In registers: products that read queries and keys would exceed the bandwidth of shared memory.
        return gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2)), factor
    else:
        store_operand(queries.index(group), q)
        return queries.index(group), factor


@gluon.jit
def attend_fp8(group, call, ring, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """A computing group: 64 rows of each work item."""
    D: gl.constexpr = STATIC.D
    BLOCK_N: gl.constexpr = STATIC.BLOCK_N
    MODE: gl.constexpr = STATIC.MODE
    WORDS: gl.constexpr = STATIC.WORDS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    zeros = gl.full([GROUP_ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    buffer, phase = 0, 0
    count = work_count(call, STATIC)
    for turn in range(gl.cdiv(count, gl.num_programs(0))):
        item = work_item(turn, count, call, STATIC)
        if item.exists:
            rows = rows_of_group(group, item, call, STATIC)
            q, factor = _load_queries(call, rows, item.used, ring.queries, group, SCORES, STATIC)
            factor = factor * call.score_scale
            value_factor = call.value_scale
            if call.of.k_scale is not None:
                factor *= gl.load(call.of.k_scale + rows.kv_head)
            if call.of.v_scale is not None:
                value_factor *= gl.load(call.of.v_scale + rows.kv_head)
            # Made here: Triton 3.6 returns no structure from a function that holds None.
            mask_row = call.of.mask
            if call.of.mask is not None:
                mask_row = call.of.mask + item.request * call.splits.num_nodes * STATIC.WORDS
            nodes = nodes_of_group(rows, LINES, STATIC)
            view = d.View(mask_row, None, None, nodes, item.length, item.used, None)
            top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, LINES)
            acc = gl.full([GROUP_ROWS, D], 0.0, gl.float32, SUMS)

            mbarrier.wait(ring.full.index(buffer), phase)
            scores = warpgroup_mma(q, ring.k_tiles.index(buffer).permute((1, 0)), zeros, use_acc=False)
            arrive(ring.empty.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            if item.begin + BLOCK_N > item.free_end:
                scores = masked(scores, item.begin, columns, view, item.stop, MODE, WORDS)
            weights, top, decay, total = weights_of_tile(scores, factor, top)
            sums = (gl.convert_layout(weights.to(gl.float16), P), top, total, decay, acc)
            mbarrier.wait(ring.full.index(buffer), phase)
            for start in range(item.begin + BLOCK_N, item.stop, BLOCK_N):
                sums, buffer, phase = _fold_tile(
                    start, q, factor, zeros, sums, columns, ring, buffer, phase, view, item, NUM_BUFFERS, MODE, WORDS
                )
            narrow, top, total, decay, acc = sums
            total = gl.convert_layout(gl.sum(total, 1), LINES)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(narrow, ring.v_tiles.index(buffer), acc)
            arrive(ring.empty.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            write_rows(call, item, rows, acc, top, total, value_factor, SUMS, STATIC)
