"""Merging the partial results of one row's splits.

    out = sum_s 2^(lse_s - lse) out_s        2^lse = 2^sink + sum_s 2^lse_s

A kernel of its own, because no program of the attention kernel knows which split of a row ends last.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.configs import merge_config
from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    Splits,
    fold_part,
    fold_parts,
    fold_sink,
    inverse_or_zero,
    key_end,
    log2_sum,
    split_layout,
    used_rows,
)
from specdec_kernels.attention.types import AttentionMetadata, WorkShape
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor

_LOG2_E = tl.constexpr(LOG2_E)


# More than 16 run-time arguments: those that say how the keys of a request are split.
@triton.jit(do_not_specialize=[*Splits._fields, "num_splits"])
def _merge_kernel(
    part_ptr,  # [partial results, N, H, D] in the type of out
    part_lse_ptr,  # [partial results, N, H] float32, base 2
    offsets_ptr,  # [B + 1] int32 of a tile schedule; None: `num_splits` per request
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
    PDL: tl.constexpr,
):
    all_rows = num_nodes * HEADS
    tiles = (all_rows + ROWS - 1) // ROWS
    request = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    # Loaded before the wait: lengths and offsets. The predecessor is the attention kernel, which does not write them
    # and waits before it launches its dependents, so their producers have ended.
    used = used_rows(q_lens_ptr, request, num_nodes)
    length = tl.load(lengths_ptr + request).to(tl.int32)
    end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    splits = Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    _, _, _, live = split_layout(length, end, splits, FIXED)
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
    launch_dependents(PDL)
    wait_for_predecessor(PDL)
    for first in tl.range(0, live, UNROLL):
        # A tile per split instead of one tile of all: sums over splits stay inside a thread. All tiles are loaded
        # before any weight is computed, because weights change their layout through barriers that loads do not pass.
        parts = ()
        lses = ()
        for step in tl.static_range(UNROLL):
            here = (part_rows + step * all_rows)[:, None] * D + dims[None, :]
            parts += (tl.load(part_ptr + here, mask=stored & (first + step < live), other=0.0),)
            present = row_used & (first + step < live)
            lses += (tl.load(part_lse_ptr + part_rows + step * all_rows, mask=present, other=float("-inf")),)
        if FIXED:  # the bits of `kernel_tree` and of one part after the other
            for step in tl.static_range(UNROLL):
                acc, top, total = fold_part(acc, top, total, parts[step].to(tl.float32), lses[step])
        else:
            acc, top, total = fold_parts(acc, top, total, parts, lses)
        part_rows += UNROLL * all_rows

    valid = rows < all_rows
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + rows % HEADS, mask=row_used, other=float("-inf")) * _LOG2_E
        acc, top, total = fold_sink(acc, top, total, sink)
    narrow = (acc * inverse_or_zero(total)[:, None]).to(out_ptr.dtype.element_ty)
    out_rows = request * all_rows + rows
    tl.store(out_ptr + out_rows[:, None] * D + dims[None, :], narrow, mask=valid[:, None] & (dims < D)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + out_rows, log2_sum(top, total) * LN_2, mask=valid)


def merge_parts(
    metadata: AttentionMetadata,
    work: WorkShape,
    part: Tensor,
    part_lse: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    offsets: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write `out` [B, N, H, D] and `lse` [B, N, H] from the partial results of `work.num_splits` splits; a part's place
    is by request and split where no `offsets` of a tile schedule say it."""
    batch, num_nodes, heads, head_dim = out.shape
    config = merge_config(current_chip(out), num_nodes * heads, work.num_splits, head_dim)
    launch(
        _merge_kernel,
        (batch * -(-num_nodes * heads // config.rows),),
        *(part, part_lse, offsets, metadata.lengths, metadata.q_lens, sinks, out, lse, num_nodes, work.num_splits),
        *work.sizes,
        num_warps=config.num_warps,
        num_stages=2,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=heads,
        ALL_SLOTS=work.all_slots,
        FIXED=work.fixed_splits,
        ROWS=config.rows,
        UNROLL=config.unroll,
    )
