"""Groups of warps over a float8 pool, for `kernel_hopper`.

The matrix unit takes keys and values of two bytes from shared memory, so codes are converted on their way there. In
`kernel` the warps that multiply do this, and each of them waits for the others. Here the group that copies converts,
beside one or two groups of 64 rows that multiply:

    buffer s of an item      keys of tile s, values of tile s - 1
    rows                     scores of tile s = q . k        weights of tile s - 1 . v        softmax of tile s

The two products of a buffer are in flight together, and the softmax waits for the first alone. An item has one buffer
more than tiles. With 64 rows, two programs run on a processor; queries then lie in shared memory, as registers are few.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from specdec_kernels.attention.device import FP8_NATIVE, finite_or_zero, half_queries, page_ids, visible
from specdec_kernels.attention.device_hopper import (
    GROUP_ROWS,
    WARPS,
    item_of,
    load_rows,
    next_buffer,
    num_tiles,
    store_operand,
    tell,
    tell_written,
    works,
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
def convert_tiles(
    kv_ptr,  # four codes a number
    table_ptr,
    tensors,
    num_items_ptr,
    ring,
    cut,
    num_splits,
    num_pages,
    table_stride,
    SHAPE: gl.constexpr,
    MODE: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
):
    """The converting group. Codes of the next buffer are loaded while those of this one are converted."""
    H_KV: gl.constexpr = SHAPE[1]
    PAGE: gl.constexpr = SHAPE[3]
    QUADS: gl.constexpr = SHAPE[0] // _CODES
    STEP: gl.constexpr = H_KV * QUADS
    # Eight threads that store at once have half a row of two rows each, which the buffer's pattern lays in all banks.
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    keys, values, _queries, full, empty = ring
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOAD))
    quads = gl.arange(0, QUADS, gl.SliceLayout(0, LOAD))
    buffer, phase = 0, 0
    first, last, step = works(num_items_ptr, H_KV)
    for work in range(first, last, step):
        item = item_of(work, tensors, cut, num_splits, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N)
        there, request, begin, stop = item[0], item[1], item[4], item[5]
        key_ptr = kv_ptr + work % H_KV * QUADS
        value_ptr = key_ptr + num_pages.to(gl.int64) * (PAGE * STEP)
        table_row = table_ptr + request * table_stride
        positions = begin + columns
        places = page_ids(table_row, positions, stop, PAGE).to(gl.int64) * PAGE + positions % PAGE
        pages = page_ids(table_row, positions + BLOCK_N, stop, PAGE)
        key_codes = _load_codes(key_ptr, places, positions < stop, quads, STEP)
        value_codes = _load_codes(value_ptr, places, positions < 0, quads, STEP)
        for _index in range(gl.where(there, num_tiles(begin, stop, BLOCK_N) + 1, 0)):
            mbarrier.wait(empty.index(buffer), 1 - phase)
            before, before_stored = places, positions < stop
            positions += BLOCK_N
            places = pages.to(gl.int64) * PAGE + positions % PAGE
            pages = page_ids(table_row, positions + BLOCK_N, stop, PAGE)
            _store_converted(key_codes, keys.index(buffer))
            key_codes = _load_codes(key_ptr, places, positions < stop, quads, STEP)
            _store_converted(value_codes, values.index(buffer))
            value_codes = _load_codes(value_ptr, before, before_stored, quads, STEP)
            tell_written(full.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)


@gluon.jit
def _masked(scores, start, view, MODE: gl.constexpr, WORDS: gl.constexpr):
    """-inf for the keys that a row does not see."""
    mask_row, stop, length, nodes, used, columns = view
    seen = visible(mask_row, start + columns, stop, length, nodes, used, MODE, WORDS)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _weights(scores, factor, top):
    """As `device.softmax_step`: (weights, top, decay of the output, sums [64, 4] of the weights that each thread of a
    row has). Threads add their sums at the end, because each exchange among them delays the next tile."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    decay = gl.exp2(top - finite_or_zero(new_top))
    weights = gl.exp2(gl.fma(scores, factor[:, None], -finite_or_zero(new_top)[:, None]))
    by_thread = gl.reshape(weights, [GROUP_ROWS, weights.shape[1] // 8, 4, 2])
    return weights, new_top, decay, gl.sum(gl.sum(by_thread, 3), 1)


@gluon.jit
def _fold_tile(
    start,
    q,
    factor,
    zeros,
    sums,
    ring,
    buffer,
    phase,
    view,
    free_end,
    MODE: gl.constexpr,
    WORDS: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
):
    """Multiply with the keys of the tile at `start` and with the values of the tile before, which lie in one buffer:
    (sums, next buffer, its phase). The sums are weights of a tile whose values come with the next buffer, and what they
    are to be added to."""
    keys, values, _queries, full, empty = ring
    narrow, top, total, decay, acc = sums
    coming = warpgroup_mma(q, keys.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    summed = warpgroup_mma(narrow, values.index(buffer), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[coming])
    if start + scores.shape[1] > free_end:
        # With a barrier, because a compiler would compute the masks of all tiles rather than branch.
        tl.debug_barrier()
        scores = _masked(scores, start, view, MODE, WORDS)
    weights, top, decay, added = _weights(scores, factor, top)
    total = gl.fma(total, gl.convert_layout(decay, gl.SliceLayout(1, added.type.layout))[:, None], added)
    narrow = gl.convert_layout(weights.to(narrow.dtype), narrow.type.layout)
    before = buffer
    buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
    # Between softmax and wait, because the assembler moves a wait as far ahead as no branch hinders it.
    mbarrier.wait(full.index(buffer), phase)
    acc = warpgroup_mma_wait(0, deps=[summed])
    tell(empty.index(before))
    return (narrow, top, total, decay, acc), buffer, phase


@gluon.jit
def _load_queries(
    q_ptr,
    own,
    first_row,
    used,
    queries,
    group,
    SCORES: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """(queries of a group's rows as the first operand of scores, factor of their scores), see `device.half_queries`."""
    q = load_rows(q_ptr, own, first_row, used, SHAPE)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    if q.dtype == gl.bfloat16:
        q, factor = half_queries(q, FP8_NATIVE)
        factor = gl.convert_layout(factor, LINES)
    else:
        factor = gl.full([GROUP_ROWS], 1.0, gl.float32, LINES)
    if queries is None:
        # In registers: products that read queries beside keys would ask too much of shared memory.
        return gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2)), factor
    else:
        store_operand(queries.index(group), q)
        return queries.index(group), factor


@gluon.jit
def attend_codes(
    group,
    q_ptr,
    tensors,
    num_items_ptr,
    mask_ptr,
    per_head,
    out_ptr,
    lse_ptr,
    ring,
    cut,
    num_splits,
    score_scale,
    value_scale,
    SHAPE: gl.constexpr,
    MODE: gl.constexpr,
    WORDS: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
):
    """A group of 64 rows of each item."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    keys, values, queries, full, empty = ring
    sinks_ptr, k_scale_ptr, v_scale_ptr = per_head
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    zeros = gl.full([GROUP_ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    buffer, phase = 0, 0
    first, last, step = works(num_items_ptr, H_KV)
    for work in range(first, last, step):
        there, request, tile, part, begin, stop, free_end, length, used = item_of(
            work, tensors, cut, num_splits, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N
        )
        if there:
            num_nodes, kv_head, first_row = cut[0], work % H_KV, tile * ROWS + group * GROUP_ROWS
            own = request * num_nodes * (H_KV * GROUP) + kv_head * GROUP
            q, factor = _load_queries(q_ptr, own, first_row, used, queries, group, SCORES, SHAPE)
            factor, value_factor = factor * score_scale, value_scale
            if k_scale_ptr is not None:
                factor *= gl.load(k_scale_ptr + kv_head)
            if v_scale_ptr is not None:
                value_factor *= gl.load(v_scale_ptr + kv_head)
            nodes = (first_row + gl.arange(0, GROUP_ROWS, LINES)) // GROUP
            if mask_ptr is None:
                view = (None, stop, length, nodes, used, columns)
            else:
                view = (mask_ptr + request * num_nodes * WORDS, stop, length, nodes, used, columns)
            top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, LINES)
            acc = gl.full([GROUP_ROWS, D], 0.0, gl.float32, SUMS)

            mbarrier.wait(full.index(buffer), phase)
            scores = warpgroup_mma(q, keys.index(buffer).permute((1, 0)), zeros, use_acc=False)
            tell(empty.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            if begin + BLOCK_N > free_end:
                scores = _masked(scores, begin, view, MODE, WORDS)
            weights, top, decay, total = _weights(scores, factor, top)
            sums = (gl.convert_layout(weights.to(gl.float16), P), top, total, decay, acc)
            mbarrier.wait(full.index(buffer), phase)
            for start in range(begin + BLOCK_N, stop, BLOCK_N):
                sums, buffer, phase = _fold_tile(
                    start, q, factor, zeros, sums, ring, buffer, phase, view, free_end, MODE, WORDS, NUM_BUFFERS
                )
            narrow, top, total, decay, acc = sums
            total = gl.convert_layout(gl.sum(total, 1), LINES)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(narrow, values.index(buffer), acc)
            tell(empty.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            write_rows(
                out_ptr, lse_ptr, sinks_ptr, acc, top, total, own, part - request, first_row, used, num_nodes, kv_head,
                value_factor, SUMS, SHAPE, SPLIT,
            )  # fmt: skip
