"""The attention kernel for chips with warp-group products (sm90) and many query rows, in Gluon.

It computes what `kernel` computes. There, all warps copy, multiply and take the softmax in step, so the matrix unit
waits during each softmax. Here, as in FlashAttention-3 (arXiv 2407.08608), a program has groups of four warps:

    copies   keys and values of the tiles, as many ahead as there are buffers
    rows     one or two groups of 64 rows, which share every tile and wait for each other only where a buffer is free

Within a group two products are in flight while a softmax runs:

    scores of tile i = q . k        weights of tile i - 1 . v        softmax of tile i waits for the first alone

Over a pool of two-byte numbers a program has two groups of rows. Over a float8 pool it may have one, and the group that
copies converts (see `device_hopper_fp8`).
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
from specdec_kernels.attention.device import MODE_CODES, RUN_TIME_SIZES, finite_or_zero, page_ids, visible
from specdec_kernels.attention.device_hopper import (
    GROUP_ROWS,
    WARPS,
    item_of,
    load_rows,
    next_buffer,
    num_tiles,
    tell,
    tell_written,
    works,
    write_rows,
)
from specdec_kernels.attention.device_hopper_fp8 import attend_codes, convert_tiles
from specdec_kernels.attention.kernel_merge import overlapped
from specdec_kernels.attention.types import AttentionMetadata, WorkList, WorkShape
from specdec_kernels.launch import launch

# Triton 3.9 renamed it.
_ask = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_KEYS = 64  # of a tile
_LAG = gl.constexpr(1)  # tiles that the copying group has asked for beyond the one that it tells of
# (bytes of a stored number, rows of a program): buffers, and registers of a thread: before they are shared out, in a
# second group of rows, and in the group that copies. The first group's are what is left.
_SETTINGS = {
    (2, 128): dict(NUM_BUFFERS=4, maxnreg=168, COMPUTING=224, COPYING=56),
    (1, 64): dict(NUM_BUFFERS=2, maxnreg=128, COMPUTING=0, COPYING=88),
    (1, 128): dict(NUM_BUFFERS=3, maxnreg=168, COMPUTING=208, COPYING=88),
}
GROUPED_ROWS = tuple(_SETTINGS)
"""Bytes of a stored number, and query rows that a program over such a pool may have."""


@gluon.jit
def _copy_tiles(
    kv_ptr,
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
    """The copying group. A tile is told to be there _LAG tiles after it was asked for."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    PAGE: gl.constexpr = SHAPE[3]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    keys, values, _queries, full, empty = ring
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOAD))
    dims = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    asked, behind, buffer, phase = 0, 0, 0, 0
    first, last, step = works(num_items_ptr, H_KV)
    for work in range(first, last, step):
        item = item_of(work, tensors, cut, num_splits, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N)
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
            _ask(keys.index(buffer), key_ptr + offsets, mask=stored)
            _ask(values.index(buffer), value_ptr + offsets, mask=stored)
            async_copy.commit_group()
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            asked += 1
            if asked > _LAG:
                async_copy.wait_group(_LAG)
                tell_written(full.index(behind))
                behind = gl.where(behind == NUM_BUFFERS - 1, 0, behind + 1)
    async_copy.wait_group(0)
    for _left in range(gl.minimum(asked, _LAG)):
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
def _attend_numbers(
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
    """A group of 64 rows of each item, over a pool of two-byte numbers."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    Q: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    keys, values, _queries, full, empty = ring
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    zeros = gl.full([GROUP_ROWS, BLOCK_N], 0.0, gl.float32, SCORES)
    factor = gl.full([GROUP_ROWS], 0.0, gl.float32, LINES) + score_scale
    buffer, phase = 0, 0
    first, last, step = works(num_items_ptr, H_KV)
    for work in range(first, last, step):
        there, request, tile, part, begin, stop, free_end, length, used = item_of(
            work, tensors, cut, num_splits, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N
        )
        if there:
            num_nodes, first_row = cut[0], tile * ROWS + group * GROUP_ROWS
            own = request * num_nodes * (H_KV * GROUP) + work % H_KV * GROUP
            # In registers: products that read queries beside keys would ask too much of shared memory.
            q = gl.convert_layout(load_rows(q_ptr, own, first_row, used, SHAPE), Q)
            nodes = (first_row + gl.arange(0, GROUP_ROWS, LINES)) // GROUP
            mask_row = mask_ptr
            if mask_ptr is not None:
                mask_row = mask_ptr + request * num_nodes * WORDS
            top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, LINES)
            total = gl.full([GROUP_ROWS], 0.0, gl.float32, LINES)
            acc = gl.full([GROUP_ROWS, D], 0.0, gl.float32, SUMS)

            mbarrier.wait(full.index(buffer), phase)
            scores = warpgroup_mma(q, keys.index(buffer).permute((1, 0)), zeros, use_acc=False)
            weights, top, total, decay = _weights(
                scores, begin, factor, top, total, mask_row, free_end, stop, length, nodes, used, columns, MODE, WORDS
            )
            narrow = gl.convert_layout(weights.to(q.dtype), P)
            for start in range(begin + BLOCK_N, stop, BLOCK_N):
                before = buffer
                buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
                mbarrier.wait(full.index(buffer), phase)
                coming = warpgroup_mma(q, keys.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
                summed = warpgroup_mma(narrow, values.index(before), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[coming])
                weights, top, total, decay = _weights(
                    scores, start, factor, top, total, mask_row, free_end, stop, length, nodes, used, columns, MODE,
                    WORDS,
                )  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[summed])
                tell(empty.index(before))
                narrow = gl.convert_layout(weights.to(q.dtype), P)
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(narrow, values.index(buffer), acc)
            tell(empty.index(buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            write_rows(
                out_ptr, lse_ptr, per_head[0], acc, top, total, own, part - request, first_row, used, num_nodes,
                work % H_KV, value_scale, SUMS, SHAPE, SPLIT,
            )  # fmt: skip


@gluon.jit
def _barriers(ROWS: gl.constexpr, NUM_BUFFERS: gl.constexpr):
    """(`full`, `empty`) of the buffers."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], LAYOUT)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], LAYOUT)
    for buffer in gl.static_range(NUM_BUFFERS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=ROWS // GROUP_ROWS)
    fence_async_shared()
    tl.debug_barrier()
    return full, empty


# More than 16 run-time arguments, those of `_attention_kernel`, and 100 lines: each kind of groups has its list.
@gluon.jit(do_not_specialize=RUN_TIME_SIZES)
def _hopper_kernel(
    q_ptr,  # [B, N, H, D]
    kv_ptr,  # [2, pages, PAGE, H_KV, D], with FP8 four codes a number
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, ceil(num_slots / 64)] int64 or None
    sinks_ptr,  # [H] float32 or None
    k_scale_ptr,  # [H_KV] float32 or None, with FP8
    v_scale_ptr,  # [H_KV] float32 or None, with FP8
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
    FP8: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr,
    COMPUTING: gl.constexpr,
    COPYING: gl.constexpr,
):
    # Launched while the kernel before still runs; the merge may be launched while this one does.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    GROUPS: gl.constexpr = ROWS // GROUP_ROWS
    dtype: gl.constexpr = gl.float16 if FP8 else q_ptr.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, BLOCK_N, D], SHARED)
    values = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, BLOCK_N, D], SHARED)
    full, empty = _barriers(ROWS, NUM_BUFFERS)
    if GROUPS == 1:
        queries = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_ROWS, D], SHARED)
        ring = (keys, values, queries, full, empty)
    else:
        ring = (keys, values, None, full, empty)
    tensors = (lengths_ptr, q_lens_ptr, items_ptr, offsets_ptr)
    per_head = (sinks_ptr, k_scale_ptr, v_scale_ptr)
    cut = (num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length)
    SHAPE: gl.constexpr = (D, H_KV, GROUP, PAGE)
    if not FP8:
        gl.warp_specialize(
            [
                (_attend_numbers, (0, q_ptr, tensors, num_items_ptr, mask_ptr, per_head, out_ptr, lse_ptr, ring, cut,
                                 num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, ROWS,
                                 BLOCK_N, NUM_BUFFERS)),
                (_attend_numbers, (1, q_ptr, tensors, num_items_ptr, mask_ptr, per_head, out_ptr, lse_ptr, ring, cut,
                                 num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, ROWS,
                                 BLOCK_N, NUM_BUFFERS)),
                (_copy_tiles, (kv_ptr, table_ptr, tensors, num_items_ptr, ring, cut, num_splits, num_pages,
                             table_stride, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N, NUM_BUFFERS)),
            ],
            [WARPS, WARPS],
            [COMPUTING, COPYING],
        )  # fmt: skip
    elif GROUPS == 1:
        gl.warp_specialize(
            [
                (attend_codes, (0, q_ptr, tensors, num_items_ptr, mask_ptr, per_head, out_ptr, lse_ptr, ring, cut,
                              num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, ROWS,
                              BLOCK_N, NUM_BUFFERS)),
                (convert_tiles, (kv_ptr, table_ptr, tensors, num_items_ptr, ring, cut, num_splits, num_pages,
                               table_stride, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N, NUM_BUFFERS)),
            ],
            [WARPS],
            [COPYING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_codes, (0, q_ptr, tensors, num_items_ptr, mask_ptr, per_head, out_ptr, lse_ptr, ring, cut,
                              num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, ROWS,
                              BLOCK_N, NUM_BUFFERS)),
                (attend_codes, (1, q_ptr, tensors, num_items_ptr, mask_ptr, per_head, out_ptr, lse_ptr, ring, cut,
                              num_splits, score_scale, value_scale, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, ROWS,
                              BLOCK_N, NUM_BUFFERS)),
                (convert_tiles, (kv_ptr, table_ptr, tensors, num_items_ptr, ring, cut, num_splits, num_pages,
                               table_stride, SHAPE, MODE, ALL_SLOTS, SPLIT, ROWS, BLOCK_N, NUM_BUFFERS)),
            ],
            [WARPS, WARPS],
            [COMPUTING, COPYING],
        )  # fmt: skip


def launch_in_groups(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    per_head: tuple[torch.Tensor | None, ...],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    work: WorkShape,
    work_list: WorkList | None,
    factors: tuple[float, float, float | None],
    config: AttentionConfig,
) -> None:
    """Write `out` and `lse`: the partial results or, without splits, the results. per_head: sinks, and factors of keys
    and values, which a pool of two-byte numbers has not."""
    heads, head_dim = q.shape[2:]
    _, num_pages, page_size, kv_heads, _ = kv.shape
    fp8 = kv.dtype == torch.float8_e4m3fn
    launch(
        _hopper_kernel,
        (work.programs(kv_heads, work_list is not None, config.resident_programs),),
        *(q, kv.view(torch.int32) if fp8 else kv, metadata.page_table, metadata.lengths, metadata.q_lens),
        *(metadata.mask, *per_head, *((None, None, None) if work_list is None else work_list[:3])),
        *(out, lse, work.num_nodes, num_pages, work.num_splits, *work.cut[:-1], metadata.page_table.stride(0)),
        *factors[:2],
        num_warps=WARPS.value,
        D=head_dim,
        H_KV=kv_heads,
        GROUP=heads // kv_heads,
        PAGE=page_size,
        MODE=MODE_CODES[metadata.mode],
        WORDS=0 if metadata.mask is None else metadata.mask.shape[2],
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1,
        FP8=fp8,
        ROWS=work.block_m,
        BLOCK_N=_KEYS,
        **_SETTINGS[kv.dtype.itemsize, work.block_m],
        **overlapped(config.overlap),
    )
