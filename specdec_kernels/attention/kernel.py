"""One Triton kernel for decode, chain, block and tree verification, and prefill over a paged KV cache.

    item      (request, split of the keys, tile of packed query rows), and a KV head of it for each program.
              KV head fastest: programs that run together read the interleaved heads of the same pages
    row       node * G + g: the G query heads of a KV head share a tile, so K and V are read once for them
    maths     t = scale * log2(e) * q . k;  m' = max(m, t);  a = 2^(m - m');  p = 2^(t - m')
              l = a l + sum p;  acc = a acc + p v;  at the end out = acc / l, lse = m + log2(l)
    tree      with fixed splits only the whole tiles of the prefix are computed here, see `kernel_tree`
    split     each split stores out in the type of q and lse in float32, and `kernel_merge` merges them; where
              a request can only have one split, the program writes the output itself, by the same arithmetic

A uniform branch skips the mask for tiles that every row of the program sees entirely. Without a tile schedule the grid
has a program for every item that `max_length` allows; with one, a fixed grid loops over its work items.

Sources: online softmax of FlashAttention (arXiv 2205.14135), split keys of Flash-Decoding, packed rows of
FlashAttention-3 (arXiv 2407.08608); bit masks limited to the draft block as in XQA and TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention import device as d
from specdec_kernels.attention.device_fp8 import attend_keys_swap_ab
from specdec_kernels.attention.device_hopper import COPY_KEYS
from specdec_kernels.attention.kernel_hopper import WARP_SPECIALIZED_TILES, launch_warp_specialized
from specdec_kernels.attention.kernel_merge import merge_parts
from specdec_kernels.attention.kernel_tree import TreeState, launch_tree
from specdec_kernels.attention.launch_arguments import pool_argument, score_factors, static_of, tensors_of
from specdec_kernels.attention.types import AttentionCall
from specdec_kernels.launch import launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor

_LOG2_E = tl.constexpr(d.LOG2_E)


class Item(NamedTuple):
    """The work of one program: the rows of `tile` over the keys from `begin` to `end`, if keys are split."""

    request: Any
    kv_head: Any
    tile: Any
    begin: Any
    end: Any
    part: Any  # place of its partial result


@triton.jit
def _write_rows(call, item, out, top, total, rows, out_rows, used, STATIC: tl.constexpr):
    """Store the tile's rows: a partial result `out` with its log-sum-exp `top` or, without splits, the final result of
    the sums `out` and `total`, the sink included."""
    D: tl.constexpr = STATIC.D
    num_nodes = call.splits.num_nodes
    nodes = rows // STATIC.GROUP
    if STATIC.SPLIT:
        out_rows += (item.part - item.request) * num_nodes * (STATIC.H_KV * STATIC.GROUP)
        written = nodes < used
        lse = top
    else:
        written = nodes < num_nodes
        if call.of.sinks is not None:
            sink = tl.load(call.of.sinks + item.kv_head * STATIC.GROUP + rows % STATIC.GROUP) * _LOG2_E
            sink = tl.where(nodes < used, sink, float("-inf"))
            out, top, total = d.fold_sink(out, top, total, sink)
        out = out * d.inverse_or_zero(total)[:, None]
        lse = d.log2_sum(top, total) * d.LN_2
    dims = tl.arange(0, STATIC.BLOCK_D)
    out_written = d.rows_and_dims(written, dims, D, STATIC.BLOCK_D)
    narrow = out.to(call.of.out.dtype.element_ty)
    tl.store(call.of.out + out_rows[:, None] * D + dims[None, :], narrow, mask=out_written)
    if call.of.lse is not None:
        tl.store(call.of.lse + out_rows, lse, mask=written)


@triton.jit
def attend_keys(q, pool, view, score_scale, soft_cap, begin, stop, free_end, STATIC: tl.constexpr):
    """The sums of `softmax_step` over the keys from `begin` to `stop`: (top, total, acc) of the tile's rows."""
    D: tl.constexpr = STATIC.D
    BLOCK_N: tl.constexpr = STATIC.BLOCK_N
    PAGE: tl.constexpr = STATIC.PAGE
    if view.window is not None:
        begin, free_begin = d.window_begin(view.row_position, begin, free_end, view.window, BLOCK_N)

    dims = tl.arange(0, STATIC.BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    top = tl.full([STATIC.BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([STATIC.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([STATIC.BLOCK_M, STATIC.BLOCK_D], 0.0, tl.float32)
    pages = d.page_ids(pool.table_row, begin + columns, stop, PAGE)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + columns
        stored = d.rows_and_dims(positions < stop, dims, D, STATIC.BLOCK_D)
        offsets = (pages.to(tl.int64) * PAGE + positions % PAGE)[:, None] * (STATIC.H_KV * D) + dims[None, :]
        # A tile ahead: a load of page numbers between two loads of keys would end the pipelining of the latter.
        pages = d.page_ids(pool.table_row, positions + BLOCK_N, stop, PAGE)
        keys = d.widen(tl.load(pool.key_ptr + offsets, mask=stored, other=0.0), q, STATIC.FP8)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        scores, factor = d.capped(scores, score_scale, soft_cap)
        masked = start + BLOCK_N > free_end
        if view.window is not None:
            masked = masked | (start < free_begin)
        if masked:
            seen = d.visible_in_window(view, positions, stop, STATIC.MODE, STATIC.WORDS)
            scores = tl.where(seen, scores, float("-inf"))
        weights, top, total, acc = d.softmax_step(scores, factor, top, total, acc)
        values = d.widen(tl.load(pool.value_ptr + offsets, mask=stored, other=0.0), q, STATIC.FP8)
        acc = tl.dot(weights.to(q.dtype), values, acc, input_precision="ieee")
    return top, total, acc


@triton.jit
def _attend_in_order(
    q, pool, view, score_scale, value_scale, soft_cap, stop, free_end, splits, DTYPE: tl.constexpr, STATIC: tl.constexpr
):
    """All splits of a request, one after the other, with the bits of partial results and their merge: (out, top,
    total)."""
    _, _, first, live = d.split_layout(view.length, stop, splits, True)
    out = tl.full([STATIC.BLOCK_M, STATIC.BLOCK_D], 0.0, tl.float32)
    top = tl.full([STATIC.BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([STATIC.BLOCK_M], 0.0, tl.float32)
    for split in tl.range(first, first + live):
        begin = d.fixed_split_begin(split, splits.split_tokens, splits.first_splits)
        split_stop = tl.minimum(stop, d.fixed_split_begin(split + 1, splits.split_tokens, splits.first_splits))
        part_top, part_total, acc = attend_keys(
            q, pool, view, score_scale, soft_cap, begin, split_stop, free_end, STATIC
        )
        acc = acc * (value_scale * d.inverse_or_zero(part_total))[:, None]
        # Rounded as the partial result of another program is.
        acc = acc.to(DTYPE).to(tl.float32)
        out, top, total = d.fold_part(out, top, total, acc, d.log2_sum(part_top, part_total))
    return out, top, total


@triton.jit
def _attend(call, item, IN_ORDER: tl.constexpr, SWAP_AB: tl.constexpr, STATIC: tl.constexpr):
    """Attention of one item."""
    D: tl.constexpr = STATIC.D
    BLOCK_M: tl.constexpr = STATIC.BLOCK_M
    ROW_HEADS: tl.constexpr = STATIC.H_KV * STATIC.GROUP
    GROUP: tl.constexpr = STATIC.GROUP
    request = item.request
    splits = call.splits
    num_nodes = splits.num_nodes
    score_scale = call.score_scale
    value_scale = call.value_scale
    soft_cap = call.soft_cap
    length = tl.load(call.of.lengths + request).to(tl.int32)
    used = d.used_rows(call.of.q_lens, request, num_nodes)
    end = d.key_end(length, used, splits.num_slots, splits.max_length, STATIC.ALL_SLOTS)
    rows = item.tile * BLOCK_M + tl.arange(0, BLOCK_M)
    nodes = rows // GROUP
    first_node = item.tile * BLOCK_M // GROUP
    last_node = (item.tile * BLOCK_M + BLOCK_M - 1) // GROUP
    stop, free_end = d.tile_key_range(length, used, end, first_node, last_node, STATIC.MODE, STATIC.BLOCK_N)
    # The view is made here: Triton 3.6 returns no structure from a function that holds None.
    mask_row = call.of.mask
    if call.of.mask is not None:
        mask_row = call.of.mask + request * num_nodes * STATIC.WORDS
    depths_row = call.of.depths
    row_position = nodes
    if splits.window is not None:
        row_depths_row = call.of.row_depths
        if call.of.depths is not None:
            depths_row = call.of.depths + request * splits.num_slots
        if call.of.row_depths is not None:
            row_depths_row = call.of.row_depths + request * num_nodes
        row_position = d.row_positions(row_depths_row, length, nodes, used, STATIC.MODE)
    view = d.View(mask_row, depths_row, row_position, nodes, length, used, splits.window)

    dims = tl.arange(0, STATIC.BLOCK_D)
    out_rows = (request * num_nodes + nodes) * ROW_HEADS + item.kv_head * GROUP + rows % GROUP
    q_loaded = d.rows_and_dims(nodes < used, dims, D, STATIC.BLOCK_D)
    q = tl.load(call.of.q + out_rows[:, None] * D + dims[None, :], mask=q_loaded, other=0.0)
    if call.of.k_scale is not None:
        score_scale *= tl.load(call.of.k_scale + item.kv_head)
    if call.of.v_scale is not None:
        value_scale *= tl.load(call.of.v_scale + item.kv_head)
    q, row_factor = d.half_queries(q, STATIC.FP8)
    score_scale = row_factor * score_scale
    table_row = call.of.table + request * call.table_stride
    pool = d.pool_of(call.kv, table_row, item.kv_head, call.num_pages, STATIC.PAGE, STATIC.H_KV, D)
    if IN_ORDER:
        dtype: tl.constexpr = call.of.out.dtype.element_ty
        out, top, total = _attend_in_order(
            q, pool, view, score_scale, value_scale, soft_cap, stop, free_end, splits, dtype, STATIC
        )
        total = tl.where(nodes < used, total, 0.0)
    else:
        begin = 0
        if STATIC.SPLIT:
            begin = item.begin
            stop = tl.minimum(stop, item.end)
            free_end = tl.minimum(free_end, stop)
        if SWAP_AB:
            top, total, acc = attend_keys_swap_ab(q, pool, view, score_scale, soft_cap, begin, stop, free_end, STATIC)
        else:
            top, total, acc = attend_keys(q, pool, view, score_scale, soft_cap, begin, stop, free_end, STATIC)
        if STATIC.MODE == d.PATHS:
            if (begin <= stop) & (item.end > stop):
                # The prefix ends inside this split, which goes on with the path of each node, see `kernel_tree`.
                tl.store(call.of.state + out_rows[:, None] * D + dims[None, :], acc, mask=q_loaded)
                tl.store(call.of.sums + out_rows * 2, top, mask=nodes < used)
                tl.store(call.of.sums + out_rows * 2 + 1, total, mask=nodes < used)
        total = tl.where(nodes < used, total, 0.0)
        out = acc * (value_scale * d.inverse_or_zero(total))[:, None]
        # One part of the whole: what the merge has after it, to the bit.
        top = d.log2_sum(top, total)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    _write_rows(call, item, out, top, total, rows, out_rows, used, STATIC)


# More than 16 run-time arguments: numbers in a record would be specialised for every batch and length.
@triton.jit(do_not_specialize=d.RUN_TIME_SIZES)
def _attention_kernel(
    tensors,  # `device.Tensors`
    kv_ptr,  # [2, pages, PAGE, H_KV, D], bytes with FP8
    num_items_ptr,  # [1] int32 of a tile schedule or None
    num_nodes,
    num_pages,
    num_splits,
    num_slots,
    split_tokens,
    first_splits,
    longest_split,
    max_splits,
    max_length,
    window,
    table_stride,
    score_scale,  # of q . k: to base 2, or to the argument of tanh with a soft cap
    value_scale,
    soft_cap,  # of the scores, base 2, or None
    IN_ORDER: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PDL: tl.constexpr,
    STATIC: tl.constexpr,  # `device.Static`
):
    # The predecessor may have written every input, the lengths included, so nothing is loaded before the wait.
    wait_for_predecessor(PDL)
    launch_dependents(PDL)
    splits = d.Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    call = d.Call(
        tensors, kv_ptr, num_items_ptr, splits, num_pages, num_splits, table_stride, score_scale, value_scale, soft_cap
    )
    H_KV: tl.constexpr = STATIC.H_KV
    if tensors.items is None:
        request, tile, split, part = d.item_of(tl.program_id(0), call, STATIC)
        begin, end, live = d.split_range(
            tensors.lengths, tensors.q_lens, request, split, splits, STATIC.SPLIT, STATIC.ALL_SLOTS, STATIC.FIXED
        )
        if STATIC.SPLIT:
            # The merge reads only the splits that a request has.
            if split >= live:
                return
        _attend(call, Item(request, tl.program_id(0) % H_KV, tile, begin, end, part), IN_ORDER, SWAP_AB, STATIC)
    else:
        # A persistent loop over the work items of the tile schedule.
        for work in tl.range(tl.program_id(0), tl.load(num_items_ptr) * H_KV, tl.num_programs(0)):
            request, tile, split, part = d.item_of(work, call, STATIC)
            begin, end, _ = d.split_range(
                tensors.lengths, tensors.q_lens, request, split, splits, STATIC.SPLIT, STATIC.ALL_SLOTS, STATIC.FIXED
            )
            _attend(call, Item(request, work % H_KV, tile, begin, end, part), IN_ORDER, SWAP_AB, STATIC)


def paged_attention(call: AttentionCall, out: Tensor | None = None) -> Tensor:
    return _attention(call, None, out)


def paged_attention_with_lse(call: AttentionCall) -> tuple[Tensor, Tensor]:
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    return _attention(call, lse), lse


def _attention(call: AttentionCall, lse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Launch the kernel and, where keys are split, the merge; writes `lse` and `out` if they are given."""
    q, work = call.q, call.work
    out = torch.empty_like(q) if out is None else out
    split = work.num_splits > 1 or call.along_paths
    parts = (work.batch * work.num_splits, *q.shape[1:3])
    # Rounded as the result itself is: float32 would double the bytes that partial results write and read.
    part = q.new_empty((*parts, q.shape[3])) if split else out
    part_lse = q.new_empty(parts, dtype=torch.float32) if split else lse
    state = TreeState.empty(q) if call.along_paths else None
    if _is_warp_specialized(call):
        launch_warp_specialized(call, part, part_lse)
    else:
        _launch(call, part, part_lse, state)
    if state is not None:
        launch_tree(call, part, part_lse, state, out, lse)
    elif split:
        offsets = None if call.tile_schedule is None else call.tile_schedule.offsets
        merge_parts(call.metadata, work, part, part_lse, out, lse, offsets, call.scales.sinks)
    return out


def _is_warp_specialized(call: AttentionCall) -> bool:
    """Whether `kernel_hopper` computes the call."""
    metadata, work, kv_dtype = call.metadata, call.work, call.kv.dtype
    fp8 = kv_dtype == torch.float8_e4m3fn
    of_types = call.q.dtype.itemsize == 2 and (fp8 or kv_dtype == call.q.dtype)
    has_tile = (kv_dtype.itemsize, work.block_m, call.q.shape[3]) in WARP_SPECIALIZED_TILES
    # A copy is of one page, and splits begin with one, see `device.split_layout`.
    whole_copies = call.kv.shape[2] % COPY_KEYS.value == 0 and work.split_tokens % (8 * COPY_KEYS.value) == 0
    whole_copies = whole_copies and call.kv.data_ptr() % 16 == 0
    window_missing = metadata.window is not None and (fp8 or metadata.mode == "tree")
    scaled = not fp8 and any(scale is not None for scale in call.scales.of_heads[1:])
    plain = metadata.soft_cap is None and not (window_missing or scaled or work.fixed_splits)
    return call.config.warp_specialized and of_types and has_tile and (fp8 or whole_copies) and plain


def _launch(call: AttentionCall, part: Tensor, part_lse: Tensor | None, state: TreeState | None) -> None:
    """Write `part` and `part_lse`, the partial results or, without splits, the results."""
    kv, work, config, schedule = call.kv, call.work, call.config, call.tile_schedule
    _, num_pages, _, kv_heads, _ = kv.shape
    tensors = tensors_of(call, part, part_lse, state)
    if call.along_paths:
        tensors = tensors._replace(mask=None, depths=None)
    launch(
        _attention_kernel,
        (work.programs(kv_heads, schedule is not None, config.resident_programs),),
        *(tensors, pool_argument(kv), None if schedule is None else schedule.num_items),
        *(work.num_nodes, num_pages, work.num_splits, *work.sizes, call.metadata.page_table.stride(0)),
        *score_factors(call),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        IN_ORDER=work.in_order,
        # Products in another order would not have the bits of the nodes' own paths, see `kernel_tree`.
        SWAP_AB=config.swap_ab and config.fp8_code(kv.dtype) != 0 and not work.fixed_splits,
        STATIC=static_of(call),
    )
