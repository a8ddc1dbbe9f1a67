"""The attention kernel for chips with warp-group products (sm90) and many query rows, in Gluon.

It computes what `kernel` computes, with specialised warps, as in FlashAttention-3 (arXiv 2407.08608):

    producer     a warp that has keys and values copied into buffers of their own, see `device_hopper_tma`
    computing    two groups of 64 rows, which share every tile and wait for each other only for a free buffer

Within a computing group two products are in flight while a softmax runs:

    scores of tile i = q . k        weights of tile i - 1 . v        softmax of tile i waits for the first alone

Over a float8 pool the producer converts, and there may be one group, see `device_hopper_fp8`.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specdec_kernels.attention import device as d
from specdec_kernels.attention.device_hopper import (
    GROUP_ROWS,
    WARPS,
    Ring,
    arrive,
    load_rows,
    masked,
    next_buffer,
    nodes_of_group,
    rows_of_group,
    store_operand,
    weights_of_tile,
    work_count,
    work_item,
    write_rows,
)
from specdec_kernels.attention.device_hopper_fp8 import attend_fp8, convert_tiles
from specdec_kernels.attention.device_hopper_tma import clear_values, copy_tiles, pool_descriptor
from specdec_kernels.attention.launch_arguments import score_factors, static_of, tensors_of
from specdec_kernels.attention.types import AttentionCall
from specdec_kernels.launch import launch, num_processors

# Registers of a thread before they are shared out, in a second computing group, and in the producer; the first group
# has the rest. With 224 a group's softmax copies registers.
_HALVES = dict(maxnreg=168, COMPUTING=232, COPYING=40)
# (bytes of a stored number, rows of a program, head dimension): keys of a tile, buffers, registers.
_SETTINGS = {
    (2, 128, 64): dict(keys=128, NUM_BUFFERS=4, **_HALVES),
    (2, 128, 128): dict(keys=128, NUM_BUFFERS=3, **_HALVES),
    (2, 128, 256): dict(keys=64, NUM_BUFFERS=2, **_HALVES),
    (1, 64, 128): dict(keys=64, NUM_BUFFERS=2, maxnreg=128, COMPUTING=0, COPYING=88),
    (1, 128, 128): dict(keys=64, NUM_BUFFERS=3, maxnreg=168, COMPUTING=208, COPYING=88),
}
_AT_ONCE = {64: 2, 128: 1}  # rows of a program: programs that a processor runs
WARP_SPECIALIZED_TILES = tuple(_SETTINGS)
"""Bytes of a stored number, query rows that a program over such a pool may have, and head dimension."""


@gluon.jit
def _attend_halves(group, call, ring, NUM_BUFFERS: gl.constexpr, STATIC: gl.constexpr):
    """A computing group over a pool of two-byte numbers: 64 rows of each work item."""
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
    factor = gl.full([GROUP_ROWS], 0.0, gl.float32, LINES) + call.score_scale
    buffer, phase = 0, 0
    count = work_count(call, STATIC)
    for turn in range(gl.cdiv(count, gl.num_programs(0))):
        item = work_item(turn, count, call, STATIC)
        if item.exists:
            rows = rows_of_group(group, item, call, STATIC)
            q = ring.queries.index(group)
            store_operand(q, load_rows(call.of.q, rows, item.used, STATIC))
            # Made here: Triton 3.6 returns no structure from a function that holds None.
            mask_row = call.of.mask
            if call.of.mask is not None:
                mask_row = call.of.mask + item.request * call.splits.num_nodes * STATIC.WORDS
            nodes = nodes_of_group(rows, LINES, STATIC)
            positions = d.row_positions(None, item.length, nodes, item.used, d.CHAIN)
            view = d.View(mask_row, None, positions, nodes, item.length, item.used, call.splits.window)
            top = gl.full([GROUP_ROWS], float("-inf"), gl.float32, LINES)
            acc = gl.full([GROUP_ROWS, D], 0.0, gl.float32, SUMS)

            mbarrier.wait(ring.full.index(buffer), phase)
            scores = warpgroup_mma(q, ring.k_tiles.index(buffer).permute((1, 0)), zeros, use_acc=False)
            arrive(ring.empty.index(buffer))
            if (item.begin + BLOCK_N > item.free_end) | (item.begin < item.free_begin):
                scores = masked(scores, item.begin, columns, view, item.stop, MODE, WORDS)
            weights, top, decay, total = weights_of_tile(scores, factor, top)
            narrow = gl.convert_layout(weights.to(q.dtype), P)
            for start in range(item.begin + BLOCK_N, item.stop, BLOCK_N):
                before, before_phase = buffer, phase
                buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
                mbarrier.wait(ring.full.index(buffer), phase)
                k_tile = ring.k_tiles.index(buffer).permute((1, 0))
                coming = warpgroup_mma(q, k_tile, zeros, use_acc=False, is_async=True)
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
                mbarrier.wait(ring.full.index(NUM_BUFFERS + before), before_phase)
                summed = warpgroup_mma(narrow, ring.v_tiles.index(before), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[coming])
                arrive(ring.empty.index(buffer))
                if (start + BLOCK_N > item.free_end) | (start < item.free_begin):
                    scores = masked(scores, start, columns, view, item.stop, MODE, WORDS)
                weights, top, decay, added = weights_of_tile(scores, factor, top)
                total = gl.fma(total, gl.convert_layout(decay, gl.SliceLayout(1, added.type.layout))[:, None], added)
                narrow = gl.convert_layout(weights.to(q.dtype), P)
                # Holds at once: a branch between softmax and wait, which the assembler else moves ahead of the softmax.
                mbarrier.wait(ring.full.index(NUM_BUFFERS + before), before_phase)
                acc = warpgroup_mma_wait(0, deps=[summed])
                arrive(ring.empty.index(NUM_BUFFERS + before))
            total = gl.convert_layout(gl.sum(total, 1), LINES)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
            mbarrier.wait(ring.full.index(NUM_BUFFERS + buffer), phase)
            clear_values(ring, buffer, item, NUM_BUFFERS, STATIC)
            acc = warpgroup_mma(narrow, ring.v_tiles.index(buffer), acc)
            arrive(ring.empty.index(NUM_BUFFERS + buffer))
            buffer, phase = next_buffer(buffer, phase, NUM_BUFFERS)
            write_rows(call, item, rows, acc, top, total, call.value_scale, SUMS, STATIC)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that open after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(COUNT):
        mbarrier.init(barriers.index(each), count=ARRIVALS)
    fence_async_shared()
    tl.debug_barrier()
    return barriers


@gluon.jit(do_not_specialize=[*d.RUN_TIME_SIZES, "num_items"])
def _hopper_kernel(
    tensors,  # `device.Tensors`; scales of heads with FP8 alone
    kv,  # [2, pages, PAGE, H_KV, D]: with FP8 a pointer to four codes a number, else a descriptor of `pool_descriptor`
    num_items,  # [1] int32 of a tile schedule, else the number of work items, each KV head's counted
    num_nodes,
    num_pages,
    num_splits,
    num_slots,
    split_tokens,
    first_splits,
    longest_split,
    max_splits,
    max_length,
    window,  # or None; not of a tree
    table_stride,
    score_scale,  # of q . k, to base 2
    value_scale,
    STATIC: gl.constexpr,  # `device.Static`
    NUM_BUFFERS: gl.constexpr,
    COMPUTING: gl.constexpr,
    COPYING: gl.constexpr,
):
    # The predecessor may have written every input, the lengths included, so nothing is loaded before the wait.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    D: gl.constexpr = STATIC.D
    GROUPS: gl.constexpr = STATIC.BLOCK_M // GROUP_ROWS
    dtype: gl.constexpr = gl.float16 if STATIC.FP8 else tensors.q.dtype.element_ty
    k_tiles = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, STATIC.BLOCK_N, D], SHARED)
    v_tiles = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, STATIC.BLOCK_N, D], SHARED)
    BARRIERS: gl.constexpr = NUM_BUFFERS if STATIC.FP8 else 2 * NUM_BUFFERS
    full, empty = _barriers(BARRIERS, 1), _barriers(BARRIERS, GROUPS)
    if GROUPS == 1 or not STATIC.FP8:
        queries = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_ROWS, D], SHARED)
        ring = Ring(k_tiles, v_tiles, queries, full, empty)
    else:
        ring = Ring(k_tiles, v_tiles, None, full, empty)
    splits = d.Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    call = d.Call(
        tensors, kv, num_items, splits, num_pages, num_splits, table_stride, score_scale, value_scale, soft_cap=None
    )
    if not STATIC.FP8:
        gl.warp_specialize(
            [
                (_attend_halves, (0, call, ring, NUM_BUFFERS, STATIC)),
                (_attend_halves, (1, call, ring, NUM_BUFFERS, STATIC)),
                (copy_tiles, (call, ring, NUM_BUFFERS, STATIC)),
            ],
            [WARPS, 1],
            [COMPUTING, COPYING],
        )
    elif GROUPS == 1:
        gl.warp_specialize(
            [(attend_fp8, (0, call, ring, NUM_BUFFERS, STATIC)), (convert_tiles, (call, ring, NUM_BUFFERS, STATIC))],
            [WARPS],
            [COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (attend_fp8, (0, call, ring, NUM_BUFFERS, STATIC)),
                (attend_fp8, (1, call, ring, NUM_BUFFERS, STATIC)),
                (convert_tiles, (call, ring, NUM_BUFFERS, STATIC)),
            ],
            [WARPS, WARPS],
            [COMPUTING, COPYING],
        )


def launch_warp_specialized(call: AttentionCall, out: Tensor, lse: Tensor | None) -> None:
    """Write `out` and `lse`: the partial results or, without splits, the results."""
    q, kv, work = call.q, call.kv, call.work
    _, num_pages, _, kv_heads, _ = kv.shape
    fp8 = kv.dtype == torch.float8_e4m3fn
    settings = dict(_SETTINGS[kv.dtype.itemsize, work.block_m, q.shape[3]])
    keys = settings.pop("keys")
    count = work.programs(kv_heads, False, 0)
    resident = min(call.config.resident_programs, _AT_ONCE[work.block_m] * num_processors(q))
    launch(
        _hopper_kernel,
        (min(count, resident),),
        *(tensors_of(call, out, lse), kv.view(torch.int32) if fp8 else pool_descriptor(kv)),
        count if call.tile_schedule is None else call.tile_schedule.num_items,
        *(work.num_nodes, num_pages, work.num_splits, *work.sizes, call.metadata.page_table.stride(0)),
        *score_factors(call)[:2],
        num_warps=WARPS.value,
        STATIC=static_of(call)._replace(FP8=fp8, BLOCK_N=keys),
        launch_pdl=True,
        **settings,
    )
