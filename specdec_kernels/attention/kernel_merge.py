"""Merging the partial results of one row's splits.

    out = sum_s 2^(lse_s - lse) out_s        2^lse = 2^sink + sum_s 2^lse_s

This is a kernel of its own, because no program of the attention kernel knows which split of a row ends last. Chips with
programmatic launches start it while the attention kernel still runs, and it waits on the device. What it reads before
it waits was stored before the attention kernel began.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec_kernels.attention.configs import merge_config
from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    fold_parts,
    fold_sink,
    inverse_or_zero,
    key_end,
    log2_sum,
    split_layout,
    used_rows,
)
from specdec_kernels.attention.types import AttentionMetadata, WorkList, WorkShape
from specdec_kernels.launch import current_chip, launch

_LOG2_E = tl.constexpr(LOG2_E)


# More than 16 run-time arguments: those that say how the keys of a request are split.
@triton.jit(
    do_not_specialize=[
        "num_nodes",
        "num_splits",
        "num_slots",
        "split_tokens",
        "first_splits",
        "longest_split",
        "max_splits",
        "max_length",
        "window",
    ]
)
def _merge_kernel(
    part_ptr,  # [partial results, N, H, D] in the type of out
    part_lse_ptr,  # [partial results, N, H] float32, base 2
    offsets_ptr,  # [B + 1] int32 of a work list; None: `num_splits` per request
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    sinks_ptr,  # [H] float32 or None
    out_ptr,  # [B, N, H, D]
    lse_ptr,  # [B, N, H] float32 natural or None
    num_nodes,
    num_splits,
    num_slots,
    split_tokens,
    first_splits,
    longest_split,
    max_splits,
    max_length,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    FIXED: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    all_rows = num_nodes * HEADS
    tiles = (all_rows + ROWS - 1) // ROWS
    request = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    used = used_rows(q_lens_ptr, request, num_nodes)
    length = tl.load(lengths_ptr + request).to(tl.int32)
    end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    _, _, _, live = split_layout(length, end, split_tokens, first_splits, longest_split, max_splits, window, FIXED)
    row_used = rows < used * HEADS
    if offsets_ptr is None:
        first_part = request * num_splits
    else:
        first_part = tl.load(offsets_ptr + request).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    stored = row_used[:, None] & (dims < D)[None, :]
    part_rows = first_part * all_rows + rows
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc, top, total = fold_parts(
        acc, top, total, part_ptr, part_lse_ptr, part_rows, all_rows, live, row_used, stored, dims, D, UNROLL
    )

    valid = rows < all_rows
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + rows % HEADS, mask=row_used, other=float("-inf")) * _LOG2_E
        acc, top, total = fold_sink(acc, top, total, sink)
    narrow = (acc * inverse_or_zero(total)[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = request * all_rows + rows
    tl.store(out_ptr + out_rows[:, None] * D + dims[None, :], narrow, mask=valid[:, None] & (dims < D)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + out_rows, log2_sum(top, total) * LN_2, mask=valid)


def overlapped(overlap: bool) -> dict[str, Any]:
    """The launch option that lets a kernel begin before the one ahead of it has ended. The compilers of some chips do
    not know it, so it is absent where it is off."""
    return dict(launch_pdl=True) if overlap else {}


def merge(
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    metadata: AttentionMetadata,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    work: WorkShape,
    work_list: WorkList | None,
) -> None:
    """Write `out` [B, N, H, D] and `lse` [B, N, H] from the partial results of `work.num_splits` splits."""
    batch, num_nodes, heads, head_dim = out.shape
    config = merge_config(current_chip(out), num_nodes * heads, work.num_splits)
    launch(
        _merge_kernel,
        (batch * -(-num_nodes * heads // config.rows),),
        *(part, part_lse, None if work_list is None else work_list.offsets, metadata.lengths, metadata.q_lens),
        *(sinks, out, lse, num_nodes, work.num_splits, *work.cut),
        num_warps=config.num_warps,
        num_stages=2,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=heads,
        ALL_SLOTS=work.all_slots,
        FIXED=work.fixed_cut,
        ROWS=config.rows,
        UNROLL=config.unroll,
        OVERLAP=config.overlap,
        **overlapped(config.overlap),
    )
