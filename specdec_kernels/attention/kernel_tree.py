"""The end of a batch-invariant tree: what each node sees behind the whole tiles of the prefix, and the merge.

The keys of a node are those of a text: the prefix, then its ancestors and itself. `kernel` computes what the nodes
share, and leaves the sums of the split that the prefix ends in. Here a program takes one node and KV head: it goes on
with the node's own text in the tiles that a text without a tree has, closes the split, and adds all splits in order. So
a node has the bits that decoding its text gives. A program has few rows, so it is one warp where that has the same
bits, and computes the columns of a head in halves, for which a warp has room.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from specdec_kernels.attention.configs import AttentionConfig, node_config
from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    capped,
    finite_or_zero,
    fixed_split_begin,
    fixed_split_of,
    fold_part,
    fold_sink,
    half_queries_in_halves,
    inverse_or_zero,
    log2_sum,
    softmax_step,
    used_rows,
    widen,
)
from specdec_kernels.attention.kernel_merge import overlapped
from specdec_kernels.attention.types import AttentionMetadata, WorkList, WorkShape
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.overlap import let_next_kernel_start, wait_for_kernel_ahead

_LOG2_E = tl.constexpr(LOG2_E)


class TreeState(NamedTuple):
    """Sums of `device.softmax_step` over the whole tiles of the prefix in the split that it ends in: acc [B, N, H, D],
    and top and total [B, N, H, 2]. float32."""

    acc: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor) -> TreeState:
        """Not yet written, for queries [B, N, H, D]."""
        return cls(torch.empty_like(q, dtype=torch.float32), q.new_empty((*q.shape[:3], 2), dtype=torch.float32))


@triton.jit
def _place_of_keys(paths, table_row, positions, length, num_slots, max_length, PAGE: tl.constexpr):
    """Place in the pool, in tokens, of the key at each position of a node's text, -1 behind its end."""
    depth = positions - length
    there = (depth < num_slots) & (positions < max_length)
    slot = tl.load(paths + depth, mask=there & (depth >= 0), other=-1)
    there = there & ((depth < 0) | (slot >= 0))
    held = tl.where(depth < 0, positions, length + slot)
    page = tl.load(table_row + held // PAGE, mask=there, other=0)
    return tl.where(there, page.to(tl.int64) * PAGE + held % PAGE, -1)


@triton.jit
def _load_half(ptr, rows, mask, dims, D: tl.constexpr):
    """Columns `dims` of rows [M, D] at `ptr`; `rows` and `mask` [M, 1]."""
    return tl.load(ptr + rows * D + dims[None, :], mask=mask & (dims < D)[None, :], other=0.0)


@triton.jit
def _store_halves(ptr, rows, mask, first, last, dims, H: tl.constexpr, D: tl.constexpr):
    at = ptr + rows * D + dims[None, :]
    tl.store(at, first.to(ptr.dtype.element_ty), mask=mask)  # D is at least H
    tl.store(at + H, last.to(ptr.dtype.element_ty), mask=mask & (H + dims < D)[None, :])


@triton.jit
def _fold_both(first, last, top, total, part_first, part_last, lse):
    """`fold_part` of both halves of the columns."""
    last, _, _ = fold_part(last, top, total, part_last, lse)
    first, top, total = fold_part(first, top, total, part_first, lse)
    return first, last, top, total


@triton.jit
def _fold_tile(
    q_first, q_last, key_ptr, value_ptr, places, seen, score_scale, soft_cap, top, total, first, last, dims,
    D: tl.constexpr, H_KV: tl.constexpr, FP8: tl.constexpr, POLYNOMIAL: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """`softmax_step` over the keys at `places` [N] that are `seen` [N]; -1 for a key that is not there."""
    more_dims = dims.shape[0] + dims
    there, tokens = (places >= 0)[:, None], places[:, None] * H_KV
    # One half after the other: a warp has no room for both.
    keys = widen(_load_half(key_ptr, tokens, there, dims, D), q_first, FP8)
    scores = tl.dot(q_first, tl.trans(keys), input_precision="ieee")
    keys = widen(_load_half(key_ptr, tokens, there, more_dims, D), q_first, FP8)
    scores = tl.dot(q_last, tl.trans(keys), scores, input_precision="ieee")
    scores, factor = capped(scores, score_scale, soft_cap)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    before = top
    weights, top, total, first = softmax_step(scores, factor, top, total, first, POLYNOMIAL, LAZY)
    last = last * tl.exp2(before - finite_or_zero(top))[:, None]
    weights = weights.to(q_first.dtype)
    values = widen(_load_half(value_ptr, tokens, there, dims, D), q_first, FP8)
    first = tl.dot(weights, values, first, input_precision="ieee")
    values = widen(_load_half(value_ptr, tokens, there, more_dims, D), q_first, FP8)
    last = tl.dot(weights, values, last, input_precision="ieee")
    return top, total, first, last


# More than 16 run-time arguments: those of the attention kernel and of the merge, whose work this does.
@triton.jit(
    do_not_specialize=[
        "num_nodes", "num_pages", "num_splits", "num_slots", "split_tokens", "first_splits", "max_length", "window",
        "table_stride",
    ]
)  # fmt: skip
def _tree_attention_kernel(
    q_ptr,  # [B, N, H, D]
    kv_ptr,  # [2, pages, PAGE, H_KV, D], bytes with FP8
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    paths_ptr,  # [B, N, num_slots] int32
    row_depths_ptr,  # [B, N] int32 with a window, or None
    sinks_ptr,  # [H] float32 or None
    k_scale_ptr,  # [H_KV] float32 or None
    v_scale_ptr,  # [H_KV] float32 or None
    offsets_ptr,  # [B + 1] int32 of a work list, or None: `num_splits` per request
    part_ptr,  # [partial results, N, H, D]
    part_lse_ptr,  # [partial results, N, H] float32, base 2
    state_ptr,  # [B, N, H, D] float32
    sums_ptr,  # [B, N, H, 2] float32
    out_ptr,  # [B, N, H, D]
    lse_ptr,  # [B, N, H] float32 natural or None
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
    H_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    LAZY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head, index = tl.program_id(0) % H_KV, tl.program_id(0) // H_KV
    node, request = index % num_nodes, (index // num_nodes).to(tl.int64)
    length = tl.load(lengths_ptr + request).to(tl.int32)
    in_use = node < used_rows(q_lens_ptr, request, num_nodes)
    end = tl.where(in_use, tl.minimum(length + num_slots, max_length), 0)
    border = tl.minimum(length // BLOCK_N * BLOCK_N, end)
    head = tl.arange(0, BLOCK_M)
    valid = head < GROUP
    row_used = valid & in_use
    rows = (request * num_nodes + node) * (H_KV * GROUP) + kv_head * GROUP + head
    H: tl.constexpr = max(BLOCK_D // 2, 16)  # a matrix product takes 16 at least
    dims, used = tl.arange(0, H), row_used[:, None]
    q_first = _load_half(q_ptr, rows[:, None], used, dims, D)
    q_last = _load_half(q_ptr, rows[:, None], used, H + dims, D)
    if k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr + kv_head)
    if v_scale_ptr is not None:
        value_scale *= tl.load(v_scale_ptr + kv_head)
    paths = paths_ptr + (request * num_nodes + node) * num_slots
    table_row = table_ptr + request * table_stride
    q_first, q_last, row_factor = half_queries_in_halves(q_first, q_last, FP8)
    score_scale = row_factor * score_scale
    key_ptr = kv_ptr + kv_head * D
    value_ptr = key_ptr + num_pages.to(tl.int64) * (PAGE * H_KV * D)
    begin, lowest = 0, 0
    if window is not None:
        begin = fixed_split_of(tl.maximum(length - window + 1, 0), split_tokens, first_splits)
        lowest = length + tl.load(row_depths_ptr + request * num_nodes + node) - window + 1
    wait_for_kernel_ahead(OVERLAP)
    let_next_kernel_start(OVERLAP)

    out = tl.full([BLOCK_M, H], 0.0, tl.float32)
    out_last = tl.full([BLOCK_M, H], 0.0, tl.float32)
    out_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    out_total = tl.full([BLOCK_M], 0.0, tl.float32)
    if offsets_ptr is None:
        first_part = request * num_splits
    else:
        first_part = tl.load(offsets_ptr + request).to(tl.int64)
    part_rows = (first_part - request) * num_nodes * (H_KV * GROUP) + rows
    split = tl.maximum(fixed_split_of(border, split_tokens, first_splits), begin)
    for _ in tl.range(begin, split):
        part = _load_half(part_ptr, part_rows[:, None], used, dims, D).to(tl.float32)
        part_last = _load_half(part_ptr, part_rows[:, None], used, H + dims, D).to(tl.float32)
        lse = tl.load(part_lse_ptr + part_rows, mask=row_used, other=float("-inf"))
        out, out_last, out_top, out_total = _fold_both(out, out_last, out_top, out_total, part, part_last, lse)
        part_rows += num_nodes * (H_KV * GROUP)
    acc = _load_half(state_ptr, rows[:, None], used, dims, D)
    acc_last = _load_half(state_ptr, rows[:, None], used, H + dims, D)
    top = tl.load(sums_ptr + rows * 2, mask=row_used, other=float("-inf"))
    total = tl.load(sums_ptr + rows * 2 + 1, mask=row_used, other=0.0)
    split_end = fixed_split_begin(split + 1, split_tokens, first_splits)
    for start in tl.range(border, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        places = _place_of_keys(paths, table_row, positions, length, num_slots, max_length, PAGE)
        seen = (places >= 0) & (positions >= lowest)
        top, total, acc, acc_last = _fold_tile(
            q_first, q_last, key_ptr, value_ptr, places, seen, score_scale, soft_cap, top, total, acc, acc_last, dims,
            D, H_KV, FP8, POLYNOMIAL, LAZY,
        )  # fmt: skip
        if (start + BLOCK_N == split_end) | (start + BLOCK_N >= end):
            unit = (value_scale * inverse_or_zero(total))[:, None]
            # Rounded as the partial result of another program is.
            part = (acc * unit).to(out_ptr.dtype.element_ty).to(tl.float32)
            part_last = (acc_last * unit).to(out_ptr.dtype.element_ty).to(tl.float32)
            lse = log2_sum(top, total)
            out, out_last, out_top, out_total = _fold_both(out, out_last, out_top, out_total, part, part_last, lse)
            acc = acc * 0.0
            acc_last = acc_last * 0.0
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = total * 0.0

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + kv_head * GROUP + head, mask=row_used, other=float("-inf")) * _LOG2_E
        out_last, _, _ = fold_sink(out_last, out_top, out_total, sink)
        out, out_top, out_total = fold_sink(out, out_top, out_total, sink)
    out_total = tl.where(row_used, out_total, 0.0)
    unit = inverse_or_zero(out_total)[:, None]
    _store_halves(out_ptr, rows[:, None], valid[:, None], out * unit, out_last * unit, dims, H, D)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, log2_sum(out_top, out_total) * LN_2, mask=valid)


def launch_tree(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    state: TreeState,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    work: WorkShape,
    work_list: WorkList | None,
    config: AttentionConfig,
    per_head: tuple[torch.Tensor | None, ...],
    factors: tuple[float, float, float | None],
    tile: dict[str, Any],
) -> None:
    """Write `out` [B, N, H, D] and `lse` [B, N, H]. per_head: sinks and the scales of keys and values that are tensors.
    factors, tile: as the attention kernel has them."""
    batch, num_nodes, heads, _ = q.shape
    kv_heads = kv.shape[3]
    config = node_config(current_chip(q), config, heads // kv_heads, q.dtype.itemsize)
    launch(
        _tree_attention_kernel,
        (batch * num_nodes * kv_heads,),
        *(q, kv, metadata.page_table, metadata.lengths, metadata.q_lens, metadata.paths),
        None if metadata.window is None else metadata.row_depths,
        *(*per_head, None if work_list is None else work_list.offsets, part, part_lse, *state, out, lse),
        *(num_nodes, kv.shape[1], work.num_splits, work.num_slots, work.split_tokens, work.first_splits),
        *(work.max_length, work.window, metadata.page_table.stride(0), *factors),
        num_warps=config.num_warps,
        num_stages=1,
        H_KV=kv_heads,
        GROUP=heads // kv_heads,
        BLOCK_M=config.block_m,
        OVERLAP=config.overlap,
        **tile,
        **overlapped(config.overlap),
    )
