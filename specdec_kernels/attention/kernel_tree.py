"""The end of a batch-invariant tree: the keys of each node after the whole tiles of the prefix, and the merge.

The keys of a node are the prefix, its ancestors and itself: the sequence that decoding its path would have. `kernel`
computes what the nodes share. Here a program takes one node and KV head, goes on with the node's own path in the tiles
that a sequence without a tree has, closes the split and adds all splits in order: the bits of decoding the path.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention import device as d
from specdec_kernels.attention.configs import node_config
from specdec_kernels.attention.launch_arguments import pool_argument, score_factors, static_of, tensors_of
from specdec_kernels.attention.types import AttentionCall
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor

_LOG2_E = tl.constexpr(d.LOG2_E)


class TreeState(NamedTuple):
    """Sums of `device.softmax_step` over the whole tiles of the prefix in the split that it ends in, float32: acc [B,
    N, H, D], and top and total [B, N, H, 2]."""

    acc: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, q: Tensor) -> TreeState:
        """Not yet written, for queries [B, N, H, D]."""
        return cls(torch.empty_like(q, dtype=torch.float32), q.new_empty((*q.shape[:3], 2), dtype=torch.float32))


@triton.jit
def _place_of_keys(paths, table_row, positions, length, num_slots, max_length, PAGE: tl.constexpr):
    """Place in the pool, in tokens, of the key at each position of a node's path, -1 after its end."""
    depth = positions - length
    there = (depth < num_slots) & (positions < max_length)
    slot = tl.load(paths + depth, mask=there & (depth >= 0), other=-1)
    there = there & ((depth < 0) | (slot >= 0))
    held = tl.where(depth < 0, positions, length + slot)
    page = tl.load(table_row + held // PAGE, mask=there, other=0)
    return tl.where(there, page.to(tl.int64) * PAGE + held % PAGE, -1)


class Halves(NamedTuple):
    """Sums of `device.softmax_step`, whose columns are in two halves: a warp has room for one at a time."""

    first: Any
    last: Any
    top: Any
    total: Any


@triton.jit
def _no_sums(BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    return Halves(
        tl.full([BLOCK_M, HALF], 0.0, tl.float32),
        tl.full([BLOCK_M, HALF], 0.0, tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.full([BLOCK_M], 0.0, tl.float32),
    )


@triton.jit
def _load_half(ptr, rows, mask, dims, D: tl.constexpr):
    """Columns `dims` of rows [M] at `ptr`."""
    return tl.load(ptr + rows[:, None] * D + dims[None, :], mask=mask[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def _load_state(state_ptr, sums_ptr, rows, row_used, dims, HALF: tl.constexpr, D: tl.constexpr):
    """The `TreeState` of rows [M]."""
    return Halves(
        _load_half(state_ptr, rows, row_used, dims, D),
        _load_half(state_ptr, rows, row_used, HALF + dims, D),
        tl.load(sums_ptr + rows * 2, mask=row_used, other=float("-inf")),
        tl.load(sums_ptr + rows * 2 + 1, mask=row_used, other=0.0),
    )


@triton.jit
def _fold_both(sums, part_first, part_last, lse):
    """`fold_part` of both halves of the columns."""
    last, _, _ = d.fold_part(sums.last, sums.top, sums.total, part_last, lse)
    first, top, total = d.fold_part(sums.first, sums.top, sums.total, part_first, lse)
    return Halves(first, last, top, total)


@triton.jit
def _fold_tile(sums, q_first, q_last, pool, places, seen, score_scale, soft_cap, dims, STATIC: tl.constexpr):
    """`softmax_step` over the keys at `places` [N] that are `seen` [N]; -1 for a key that is not there."""
    D: tl.constexpr = STATIC.D
    FP8: tl.constexpr = STATIC.FP8
    more_dims = dims.shape[0] + dims
    stored = places >= 0
    tokens = places * STATIC.H_KV
    # One half after the other: a warp has no room for both.
    keys = d.widen(_load_half(pool.key_ptr, tokens, stored, dims, D), q_first, FP8)
    scores = tl.dot(q_first, tl.trans(keys), input_precision="ieee")
    keys = d.widen(_load_half(pool.key_ptr, tokens, stored, more_dims, D), q_first, FP8)
    scores = tl.dot(q_last, tl.trans(keys), scores, input_precision="ieee")
    scores, factor = d.capped(scores, score_scale, soft_cap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    weights, top, total, first = d.softmax_step(scores, factor, sums.top, sums.total, sums.first)
    last = sums.last * tl.exp2(sums.top - d.finite_or_zero(top))[:, None]
    weights = weights.to(q_first.dtype)
    values = d.widen(_load_half(pool.value_ptr, tokens, stored, dims, D), q_first, FP8)
    first = tl.dot(weights, values, first, input_precision="ieee")
    values = d.widen(_load_half(pool.value_ptr, tokens, stored, more_dims, D), q_first, FP8)
    last = tl.dot(weights, values, last, input_precision="ieee")
    return Halves(first, last, top, total)


@triton.jit
def _fold_splits(part_ptr, part_lse_ptr, part_rows, row_step, first, stop, row_used, dims, BLOCK_M: tl.constexpr,
                 HALF: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The sums of `fold_part` over the partial results of the splits from `first` to `stop`."""
    sums = _no_sums(BLOCK_M, HALF)
    for _ in tl.range(first, stop):
        part = _load_half(part_ptr, part_rows, row_used, dims, D).to(tl.float32)
        part_last = _load_half(part_ptr, part_rows, row_used, HALF + dims, D).to(tl.float32)
        lse = tl.load(part_lse_ptr + part_rows, mask=row_used, other=float("-inf"))
        sums = _fold_both(sums, part, part_last, lse)
        part_rows += row_step
    return sums


@triton.jit
def _fold_closed(out, sums, value_scale, DTYPE: tl.constexpr):
    """`out` with the split whose sums are `sums`, rounded as the partial result of another program is."""
    unit = (value_scale * d.inverse_or_zero(sums.total))[:, None]
    part = (sums.first * unit).to(DTYPE).to(tl.float32)
    part_last = (sums.last * unit).to(DTYPE).to(tl.float32)
    return _fold_both(out, part, part_last, d.log2_sum(sums.top, sums.total))


@triton.jit
def _write_rows_of_node(
    out_ptr, lse_ptr, sinks_ptr, sums, rows, heads, valid, row_used, dims, HALF: tl.constexpr, D: tl.constexpr
):
    """Store the results of the rows, the sink included; zeros where a row is not in use."""
    first, last, top, total = sums
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=row_used, other=float("-inf")) * _LOG2_E
        last, _, _ = d.fold_sink(last, top, total, sink)
        first, top, total = d.fold_sink(first, top, total, sink)
    total = tl.where(row_used, total, 0.0)
    unit = d.inverse_or_zero(total)[:, None]
    at = out_ptr + rows[:, None] * D + dims[None, :]
    tl.store(at, (first * unit).to(out_ptr.dtype.element_ty), mask=valid[:, None])  # D is at least HALF
    in_row = valid[:, None] & (HALF + dims < D)[None, :]
    tl.store(at + HALF, (last * unit).to(out_ptr.dtype.element_ty), mask=in_row)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, d.log2_sum(top, total) * d.LN_2, mask=valid)


# More than 16 run-time arguments: it continues the attention kernel and does the merge.
@triton.jit(do_not_specialize=d.RUN_TIME_SIZES)
def _tree_attention_kernel(
    tensors,  # `device.Tensors`, the results not split
    kv_ptr,  # [2, pages, PAGE, H_KV, D], bytes with FP8
    paths_ptr,  # [B, N, num_slots] int32
    part_ptr,  # [partial results, N, H, D]
    part_lse_ptr,  # [partial results, N, H] float32, base 2
    num_nodes,
    num_pages,
    num_splits,
    num_slots,
    split_tokens,
    first_splits,
    max_length,
    window,
    table_stride,
    score_scale,
    value_scale,
    soft_cap,
    PDL: tl.constexpr,
    STATIC: tl.constexpr,  # `device.Static`
):
    D: tl.constexpr = STATIC.D
    H_KV: tl.constexpr = STATIC.H_KV
    GROUP: tl.constexpr = STATIC.GROUP
    BLOCK_M: tl.constexpr = STATIC.BLOCK_M
    BLOCK_N: tl.constexpr = STATIC.BLOCK_N
    kv_head = tl.program_id(0) % H_KV
    index = tl.program_id(0) // H_KV
    node = index % num_nodes
    request = (index // num_nodes).to(tl.int64)
    # Loaded before the wait: lengths, queries, paths, depths and scales. The predecessor is the attention kernel, which
    # writes none of them and waits before it lets this kernel start, so their producers have ended.
    length = tl.load(tensors.lengths + request).to(tl.int32)
    in_use = node < d.used_rows(tensors.q_lens, request, num_nodes)
    end = tl.where(in_use, tl.minimum(length + num_slots, max_length), 0)
    border = tl.minimum(length // BLOCK_N * BLOCK_N, end)
    head = tl.arange(0, BLOCK_M)
    valid = head < GROUP
    row_used = valid & in_use
    rows = (request * num_nodes + node) * (H_KV * GROUP) + kv_head * GROUP + head
    HALF: tl.constexpr = max(STATIC.BLOCK_D // 2, 16)  # a matrix product takes 16 at least
    dims = tl.arange(0, HALF)
    q_first = _load_half(tensors.q, rows, row_used, dims, D)
    q_last = _load_half(tensors.q, rows, row_used, HALF + dims, D)
    if tensors.k_scale is not None:
        score_scale *= tl.load(tensors.k_scale + kv_head)
    if tensors.v_scale is not None:
        value_scale *= tl.load(tensors.v_scale + kv_head)
    paths = paths_ptr + (request * num_nodes + node) * num_slots
    q_first, q_last, row_factor = d.half_queries_in_halves(q_first, q_last, STATIC.FP8)
    score_scale = row_factor * score_scale
    pool = d.pool_of(kv_ptr, tensors.table + request * table_stride, kv_head, num_pages, STATIC.PAGE, H_KV, D)
    begin = 0
    lowest = 0
    if window is not None:
        begin = d.fixed_split_of(tl.maximum(length - window + 1, 0), split_tokens, first_splits)
        lowest = length + tl.load(tensors.row_depths + request * num_nodes + node) - window + 1
    wait_for_predecessor(PDL)
    launch_dependents(PDL)

    if tensors.offsets is None:
        first_part = request * num_splits
    else:
        first_part = tl.load(tensors.offsets + request).to(tl.int64)
    row_step = num_nodes * (H_KV * GROUP)
    part_rows = (first_part - request) * num_nodes * (H_KV * GROUP) + rows
    split = tl.maximum(d.fixed_split_of(border, split_tokens, first_splits), begin)
    out = _fold_splits(part_ptr, part_lse_ptr, part_rows, row_step, begin, split, row_used, dims, BLOCK_M, HALF, D)
    sums = _load_state(tensors.state, tensors.sums, rows, row_used, dims, HALF, D)
    split_end = d.fixed_split_begin(split + 1, split_tokens, first_splits)
    for start in tl.range(border, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        places = _place_of_keys(paths, pool.table_row, positions, length, num_slots, max_length, STATIC.PAGE)
        seen = (places >= 0) & (positions >= lowest)
        sums = _fold_tile(sums, q_first, q_last, pool, places, seen, score_scale, soft_cap, dims, STATIC)
        if (start + BLOCK_N == split_end) | (start + BLOCK_N >= end):
            out = _fold_closed(out, sums, value_scale, tensors.out.dtype.element_ty)
            sums = _no_sums(BLOCK_M, HALF)
    heads = kv_head * GROUP + head
    _write_rows_of_node(tensors.out, tensors.lse, tensors.sinks, out, rows, heads, valid, row_used, dims, HALF, D)


def launch_tree(
    call: AttentionCall, part: Tensor, part_lse: Tensor | None, state: TreeState, out: Tensor, lse: Tensor | None
) -> None:
    """Write `out` [B, N, H, D] and `lse` [B, N, H] from the partial results and the sums of the prefix's last split."""
    q, kv, work = call.q, call.kv, call.work
    kv_heads = kv.shape[3]
    config = node_config(current_chip(q), call.config, work.group, q.dtype.itemsize)
    launch(
        _tree_attention_kernel,
        (work.batch * work.num_nodes * kv_heads,),
        *(tensors_of(call, out, lse, state), pool_argument(kv), call.metadata.paths, part, part_lse),
        *(work.num_nodes, kv.shape[1], work.num_splits, work.num_slots, work.split_tokens, work.first_splits),
        *(work.max_length, work.window, call.metadata.page_table.stride(0), *score_factors(call)),
        num_warps=config.num_warps,
        num_stages=1,
        STATIC=static_of(call)._replace(BLOCK_M=config.block_m),
    )
