"""Merging the partial results of one row's splits.

    out = sum_s 2^(lse_s - lse) out_s        2^lse = 2^sink + sum_s 2^lse_s

A separate kernel, because a row's last split is not known to any program of the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.attention.configs import merge_config
from specdec_kernels.attention.tiles import (
    LN_2,
    LOG2_E,
    finite_or_zero,
    key_end,
    log2_sum,
    split_layout,
    used_rows,
    with_sink,
)
from specdec_kernels.attention.types import AttentionPlan, PlanShape
from specdec_kernels.launch import current_chip, launch

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_nodes",
        "num_splits",
        "num_slots",
        "split_tokens",
        "max_splits",
        "max_length",
        "window",
    ]
)
def _merge_kernel(
    part_ptr,  # [partial results, N, H, D] float32
    part_lse_ptr,  # [partial results, N, H] float32, base 2
    offsets_ptr,  # [B + 1] int32 of a plan or None: `num_splits` a request
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    sinks_ptr,  # [H] float32 or None
    out_ptr,  # [num_rows, D], rows (request, node, head)
    lse_ptr,  # [num_rows] float32 natural or None
    num_rows,
    num_nodes,
    num_splits,
    num_slots,
    split_tokens,
    max_splits,
    max_length,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = rows < num_rows
    request = rows // HEADS // num_nodes
    row_in_part = rows - request * num_nodes * HEADS
    used = used_rows(q_lens_ptr, request, num_nodes, valid)
    length = tl.load(lengths_ptr + request, mask=valid, other=0).to(tl.int32)
    end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    _, _, live = split_layout(length, end, split_tokens, max_splits, window)
    row_used = valid & (row_in_part // HEADS < used)
    live = tl.where(row_used, live, 0)
    if offsets_ptr is None:
        first_part = request * num_splits
    else:
        first_part = tl.load(offsets_ptr + request, mask=valid, other=0).to(tl.int64)
    stride = num_nodes * HEADS

    splits = tl.arange(0, ALL_SPLITS)
    part_lse = tl.load(
        part_lse_ptr + (first_part[:, None] + splits[None, :]) * stride + row_in_part[:, None],
        mask=splits[None, :] < live[:, None],
        other=float("-inf"),
    )
    top = finite_or_zero(tl.max(part_lse, 1))
    lse = log2_sum(top, tl.sum(tl.exp2(part_lse - top[:, None]), 1))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row_in_part % HEADS, mask=valid, other=0.0) * _LOG2_E
        lse = tl.where(row_used, with_sink(lse, sink), lse)

    dims = tl.arange(0, BLOCK_D)
    anchor = finite_or_zero(lse)
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    for first in tl.range(0, tl.max(live, 0), BLOCK_S):
        chunk = first + tl.arange(0, BLOCK_S)
        present = chunk[None, :] < live[:, None]
        parts = (first_part[:, None] + chunk[None, :]) * stride + row_in_part[:, None]
        weight = tl.exp2(tl.load(part_lse_ptr + parts, mask=present, other=float("-inf")) - anchor[:, None])
        stored = present[:, :, None] & (dims < D)[None, None, :]
        part = tl.load(part_ptr + parts[:, :, None] * D + dims[None, None, :], mask=stored, other=0.0)
        acc += tl.sum(part * weight[:, :, None], 1)
    narrow = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], narrow, mask=valid[:, None] & (dims < D)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, lse * LN_2, mask=valid)


def merge(
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    lengths: torch.Tensor,
    q_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    shape: PlanShape,
    plan: AttentionPlan | None,
) -> None:
    """Write `out` [B, N, H, D] and `lse` [B, N, H] from the partial results of `shape.num_splits` splits."""
    batch, num_nodes, heads, head_dim = out.shape
    num_rows = batch * num_nodes * heads
    config = merge_config(current_chip(out), head_dim, shape.num_splits)
    launch(
        _merge_kernel,
        (-(-num_rows // config.rows),),
        *(part, part_lse, plan.offsets if plan is not None else None, lengths, q_lens, sinks, out, lse),
        *(num_rows, num_nodes, shape.num_splits, shape.num_slots, shape.split_tokens, shape.max_splits),
        *(shape.max_length, shape.window),
        num_warps=config.num_warps,
        num_stages=2,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=heads,
        ALL_SLOTS=shape.all_slots,
        ROWS=config.rows,
        ALL_SPLITS=config.all_splits,
        BLOCK_S=config.block_s,
    )
