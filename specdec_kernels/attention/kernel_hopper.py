"""The attention kernel for chips with warp-group products (sm90) and many query rows, in Gluon.

It computes what `kernel` computes, 128 rows at a time, over pools of two-byte numbers. There, all warps copy, multiply
and take the softmax in step, so the matrix unit waits during each softmax. Here, as in FlashAttention-3 (arXiv
2407.08608), a program has three groups of four warps:

    copies   keys and values of the tiles, NUM_BUFFERS of them ahead
    rows     two groups of 64 rows, which share every tile and wait for each other only where a buffer is free again

Within a group two products are in flight while a softmax runs:

    scores of tile i = q . k        weights of tile i - 1 . v        softmax of tile i waits for the first alone

A buffer has two barriers: `full` counts the copying group, `empty` the groups of rows. Their phases follow from the
number of tiles that the program has had, over all items that it walks.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specdec_kernels.attention.configs import AttentionConfig
from specdec_kernels.attention.device import RUN_TIME_SIZES, finite_or_zero, page_ids, visible
from specdec_kernels.attention.device_hopper import (
    GROUP_ROWS,
    WARPS,
    item_of,
    launch_groups,
    next_buffer,
    num_tiles,
    tell,
    tell_written,
    works,
    write_rows,
)
from specdec_kernels.attention.types import AttentionMetadata, WorkList, WorkShape

# Triton 3.9 renamed it.
_ask = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_GROUPS = gl.constexpr(2)  # of rows
_ROWS = gl.constexpr(128)
# Registers of a thread that computes, and of one that copies. Together with the first group's they fill the processor.
_COMPUTING_REGISTERS = gl.constexpr(224)
_COPYING_REGISTERS = gl.constexpr(56)
_REGISTERS = 168  # of a thread of any group before they are shared out
_KEYS, _NUM_BUFFERS, _LAG = 64, 4, 1
GROUPED_ROWS = _ROWS.value
"""Query rows of a program."""


@gluon.jit
def _copy_tiles(
    kv_ptr,
    table_ptr,
    tensors,
    num_items_ptr,
    buffers,
    cut,
    num_splits,
    num_pages,
    table_stride,
    SHAPE: gl.constexpr,
    MODE: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    LAG: gl.constexpr,
):
    """The copying group. A tile is told to be there LAG tiles after it was asked for."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    PAGE: gl.constexpr = SHAPE[3]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    k_bufs, v_bufs, full, empty = buffers
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOAD))
    dims = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    asked, behind, buffer, phase = 0, 0, 0, 0
    first, last, step = works(num_items_ptr, H_KV)
    for work in range(first, last, step):
        item = item_of(work, tensors, cut, num_splits, SHAPE, MODE, ALL_SLOTS, SPLIT, _ROWS, BLOCK_N)
        there, request, begin, stop = item[0], item[1], item[4], item[5]
        tiles = gl.where(there, num_tiles(begin, stop, BLOCK_N), 0)
        key_ptr = kv_ptr + work % H_KV * D
        value_ptr = key_ptr + num_pages.to(gl.int64) * (PAGE * H_KV * D)
        table_row = table_ptr + request * table_stride
        pages = page_ids(table_row, begin + columns, stop, PAGE)
        for tile in range(tiles):
            positions = begin + tile * BLOCK_N + columns
            places = pages.to(gl.int64) * PAGE + positions % PAGE
            pages = page_ids(table_row, positions + BLOCK_N, stop, PAGE)
            offsets = places[:, None] * (H_KV * D) + dims[None, :]
            stored = (positions < stop)[:, None]
            mbarrier.wait(empty.index(buffer), 1 - phase)
            _ask(k_bufs.index(buffer), key_ptr + offsets, mask=stored)
            _ask(v_bufs.index(buffer), value_ptr + offsets, mask=stored)
            async_copy.commit_group()
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            asked += 1
            if asked > LAG:
                async_copy.wait_group(LAG)
                tell_written(full.index(behind))
                behind = gl.where(behind == NUM_BUFFERS - 1, 0, behind + 1)
    async_copy.wait_group(0)
    for _left in range(gl.minimum(asked, LAG)):
        tell_written(full.index(behind))
        behind = gl.where(behind == NUM_BUFFERS - 1, 0, behind + 1)


@gluon.jit
def _weights(
    scores,
    start,
    factor,
    top,
    total,
    mask_row,
    free_end,
    stop,
    length,
    nodes,
    used,
    columns,
    MODE: gl.constexpr,
    WORDS: gl.constexpr,
):
    """As `device.softmax_step`: (weights, top, total, decay of the output)."""
    if start + scores.shape[1] > free_end:
        seen = visible(mask_row, start + columns, stop, length, nodes, used, MODE, WORDS)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    decay = gl.exp2(top - finite_or_zero(new_top))
    weights = gl.exp2(gl.fma(scores, factor[:, None], -finite_or_zero(new_top)[:, None]))
    return weights, new_top, gl.fma(total, decay, gl.sum(weights, 1)), decay


@gluon.jit
def _attend_rows(
    group,
    q_ptr,
    tensors,
    num_items_ptr,
    mask_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    buffers,
    cut,
    num_splits,
    score_scale,
    value_scale,
    SHAPE: gl.constexpr,
    MODE: gl.constexpr,
    WORDS: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
):
    """A group of 64 rows of each item."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    k_bufs, v_bufs, full, empty = buffers
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    zeros = gl.full([GROUP_ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    factor = gl.full([GROUP_ROWS], 0.0, gl.float32, ROWS) + score_scale
    buffer, phase = 0, 0
    first, last, step = works(num_items_ptr, H_KV)
    for work in range(first, last, step):
        there, request, tile, part, begin, stop, free_end, length, used = item_of(
            work, tensors, cut, num_splits, SHAPE, MODE, ALL_SLOTS, SPLIT, _ROWS, BLOCK_N
        )
        if there:
            num_nodes, first_row = cut[0], tile * _ROWS + group * GROUP_ROWS
            own = request * num_nodes * (H_KV * GROUP) + work % H_KV * GROUP
            rows = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LOAD))
            dims = gl.arange(0, D, gl.SliceLayout(0, LOAD))
            places = own + rows // GROUP * (H_KV * GROUP) + rows % GROUP
            loaded = (rows // GROUP < used)[:, None]
            # In registers: products that read queries beside keys would ask too much of shared memory.
            q = gl.convert_layout(gl.load(q_ptr + places[:, None] * D + dims[None, :], mask=loaded, other=0.0), Q)
            nodes = (first_row + gl.arange(0, GROUP_ROWS, ROWS)) // GROUP
            mask_row = mask_ptr
            if mask_ptr is not None:
                mask_row = mask_ptr + request * num_nodes * WORDS
            top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROWS)
            total = gl.full([GROUP_ROWS], 0.0, gl.float32, ROWS)
            acc = gl.full([GROUP_ROWS, D], 0.0, gl.float32, SUMS)

            mbarrier.wait(full.index(buffer), phase)
            scores = warpgroup_mma(q, k_bufs.index(buffer).permute((1, 0)), zeros, use_acc=False)
            weights, top, total, decay = _weights(
                scores, begin, factor, top, total, mask_row, free_end, stop, length, nodes, used, columns, MODE, WORDS
            )
            narrow = gl.convert_layout(weights.to(q.dtype), P)
            for start in range(begin + BLOCK_N, stop, BLOCK_N):
                before = buffer
                buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
                mbarrier.wait(full.index(buffer), phase)
                coming = warpgroup_mma(q, k_bufs.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
                summed = warpgroup_mma(narrow, v_bufs.index(before), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[coming])
                weights, top, total, decay = _weights(
                    scores, start, factor, top, total, mask_row, free_end, stop, length, nodes, used, columns, MODE,
                    WORDS,
                )  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[summed])
                tell(empty.index(before))
                narrow = gl.convert_layout(weights.to(q.dtype), P)
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(narrow, v_bufs.index(buffer), acc)
            tell(empty.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            write_rows(
                out_ptr, lse_ptr, sinks_ptr, acc, top, total, own, part - request, first_row, used, num_nodes,
                work % H_KV, value_scale, SUMS, SHAPE, SPLIT,
            )  # fmt: skip


# More than 16 run-time arguments, those of `_attention_kernel`.
@gluon.jit(do_not_specialize=RUN_TIME_SIZES)
def _hopper_kernel(
    q_ptr,  # [B, N, H, D]
    kv_ptr,  # [2, pages, PAGE, H_KV, D]
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, ceil(num_slots / 64)] int64 or None
    sinks_ptr,  # [H] float32 or None
    items_ptr,  # [capacity, 3] int32 of a work list or None
    offsets_ptr,  # [B + 1] int32 of a work list or None
    num_items_ptr,  # [1] int32 of a work list or None
    out_ptr,  # [B, N, H, D], with SPLIT [partial results, N, H, D]
    lse_ptr,  # [B, N, H] float32 natural or None, with SPLIT [partial results, N, H] base 2
    num_nodes,
    num_pages,
    num_splits,
    num_slots,
    split_tokens,
    first_splits,
    longest_split,
    max_splits,
    max_length,
    table_stride,
    score_scale,  # of q . k, to base 2
    value_scale,
    D: gl.constexpr,
    H_KV: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE: gl.constexpr,
    MODE: gl.constexpr,
    WORDS: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    LAG: gl.constexpr,
):
    # Launched while the kernel before still runs; the merge may be launched while this one does.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    k_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, BLOCK_N, D], SHARED)
    v_bufs = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, BLOCK_N, D], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    for buffer in gl.static_range(NUM_BUFFERS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=_GROUPS)
    fence_async_shared()
    tl.debug_barrier()
    tensors = (lengths_ptr, q_lens_ptr, items_ptr, offsets_ptr)
    cut = (num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length)
    SHAPE: gl.constexpr = (D, H_KV, GROUP, PAGE)
    buffers = (k_bufs, v_bufs, full, empty)
    gl.warp_specialize(
        [
            (_attend_rows, (0, q_ptr, tensors, num_items_ptr, mask_ptr, sinks_ptr, out_ptr, lse_ptr, buffers, cut,
                            num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, BLOCK_N,
                            NUM_BUFFERS)),
            (_attend_rows, (1, q_ptr, tensors, num_items_ptr, mask_ptr, sinks_ptr, out_ptr, lse_ptr, buffers, cut,
                            num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, BLOCK_N,
                            NUM_BUFFERS)),
            (_copy_tiles, (kv_ptr, table_ptr, tensors, num_items_ptr, buffers, cut, num_splits, num_pages,
                           table_stride, SHAPE, MODE, ALL_SLOTS, SPLIT, BLOCK_N, NUM_BUFFERS, LAG)),
        ],
        [WARPS, WARPS],
        [_COMPUTING_REGISTERS, _COPYING_REGISTERS],
    )  # fmt: skip


def launch_in_groups(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    work: WorkShape,
    work_list: WorkList | None,
    factors: tuple[float, float, float | None],
    config: AttentionConfig,
) -> None:
    """Write `out` and `lse`: the partial results or, without splits, the results."""
    launch_groups(
        *(_hopper_kernel, q, kv, metadata, (sinks,), out, lse, work, work_list, factors, config),
        registers=_REGISTERS,
        BLOCK_N=_KEYS,
        NUM_BUFFERS=_NUM_BUFFERS,
        LAG=_LAG,
    )
