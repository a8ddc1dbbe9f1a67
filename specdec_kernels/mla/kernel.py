"""Triton kernel of absorbed latent attention, with split keys.

    program   (request, split of the keys, tile of query rows), tile fastest: programs that run together read the same
              keys, which are then in L2
    row       node * H + head: all heads share the one cached head, so a tile is full for any N
    maths     t = scale * log2(e) * (q_latent . latent + q_rope . rope);  m' = max(m, t);  a = 2^(m - m')
              p = 2^(t - m');  l = a l + sum p;  acc = a acc + p latent
    split     each split stores (out, lse) in float32; a second kernel merges out = sum_s 2^(lse_s - lse) out_s with
              2^lse = sum_s 2^lse_s; a single split writes its own output

A tile of latents is loaded once and used twice, as keys and as values. A latent size that is no power of two is divided
into its largest power of two and a padded rest, each with its own accumulator.

Sources: MLA in absorbed form (arXiv 2405.04434), FlashMLA's split scheduling, Flash-Decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    MODE_CODES,
    finite_or_zero,
    inverse_or_zero,
    key_end,
    log2_sum,
    page_ids,
    tile_key_range,
    used_rows,
    visible,
)
from specdec_kernels.attention.types import AttentionMetadata
from specdec_kernels.launch import current_chip, launch
from specdec_kernels.mla.configs import blocks, max_splits, merge_config, mla_config
from specdec_kernels.mla.types import MlaCall


@triton.jit
def _split_length(last_key, split_tokens, num_splits):
    """Keys per split of a request, scalar or tensor: `split_tokens`, doubled until `num_splits` of them suffice."""
    beyond = tl.maximum(last_key - 1, 0) // (split_tokens * num_splits)
    # The bits of `beyond`, read from the exponent of a float32, which is -127 for zero.
    return split_tokens << tl.maximum((beyond.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def _softmax_step(scores, top, total):
    """Fold base-2 scores [M, N] into running maximum and sum [M]; rows that saw nothing yet keep top = -inf."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - finite_or_zero(new_top)[:, None])
    decay = tl.exp2(top - finite_or_zero(new_top))
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def _columns(base, rows, stride: tl.constexpr, offset: tl.constexpr, size: tl.constexpr, BLOCK: tl.constexpr, valid):
    """`base[rows, offset : offset + size]` as [len(rows), BLOCK], zeros where invalid and in the padding."""
    column = tl.arange(0, BLOCK)
    pointers = base + rows.to(tl.int64)[:, None] * stride + offset + column[None, :]
    if size == BLOCK:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=valid[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def _store_columns(
    base, rows, stride: tl.constexpr, offset: tl.constexpr, size: tl.constexpr, BLOCK: tl.constexpr, values, valid
):
    """The reverse of `_columns`, in the pointer's type."""
    column = tl.arange(0, BLOCK)
    pointers = base + rows.to(tl.int64)[:, None] * stride + offset + column[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=valid[:, None] & (column < size)[None, :])


@triton.jit
def _write_lse(lse_ptr, lse, first_row, rows, nodes, live, split, num_splits, num_nodes, SPLIT: tl.constexpr):
    """Store the tile's log-sum-exps, base 2 for the merge with SPLIT, else natural. Returns where its outputs go:
    (first row of the request, rows after it, which of them are written)."""
    if SPLIT:
        to_rows = rows.to(tl.int64) * num_splits + split
        tl.store(lse_ptr + first_row * num_splits + to_rows, lse, mask=live)
        return first_row * num_splits, to_rows, live
    else:
        written = nodes < num_nodes
        if lse_ptr is not None:
            tl.store(lse_ptr + first_row + rows, lse * LN_2, mask=written)
        return first_row, rows, written


@triton.jit(do_not_specialize=["num_nodes", "num_splits", "split_tokens", "num_slots", "max_length", "table_stride"])
def _mla_kernel(
    q_latent_ptr,  # [B, N, H, LATENT]
    q_rope_ptr,  # [B, N, H, ROPE]
    cache_ptr,  # [pages, PAGE, LATENT + ROPE]
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, WORDS] int64 or None
    out_ptr,  # [B, N, H, LATENT], with SPLIT [B, N, H, num_splits, LATENT] float32
    lse_ptr,  # [B, N, H] float32 natural or None, with SPLIT [B, N, H, num_splits] base 2
    num_nodes,
    num_splits,
    split_tokens,
    num_slots,
    max_length,
    table_stride,
    scale_log2,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,  # first columns of the latent, a power of two
    BLOCK_B: tl.constexpr,  # the others, padded to a power of two; 0 for none
    BLOCK_R: tl.constexpr,
):
    num_tiles = (num_nodes * HEADS + BLOCK_M - 1) // BLOCK_M
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles % num_splits
    request = (tl.program_id(0) // num_tiles // num_splits).to(tl.int64)

    length = tl.load(lengths_ptr + request).to(tl.int32)
    used = used_rows(q_lens_ptr, request, num_nodes)
    last_key = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    split_length = _split_length(last_key, split_tokens, num_splits)
    split_start = split * split_length
    if SPLIT:
        if split_start >= last_key:  # the merge does not read such a split
            return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    nodes = rows // HEADS
    first_node = tile * BLOCK_M // HEADS
    last_node = (tile * BLOCK_M + BLOCK_M - 1) // HEADS
    tile_end, free_end = tile_key_range(length, used, last_key, first_node, last_node, MODE, BLOCK_N)
    end = tl.minimum(tile_end, split_start + split_length)
    first_row = request * num_nodes * HEADS
    live = nodes < used
    q_latent_ptr += first_row * LATENT
    q_a = _columns(q_latent_ptr, rows, LATENT, 0, BLOCK_A, BLOCK_A, live)
    q_r = _columns(q_rope_ptr + first_row * ROPE, rows, ROPE, 0, ROPE, BLOCK_R, live)
    if BLOCK_B > 0:
        q_b = _columns(q_latent_ptr, rows, LATENT, BLOCK_A, LATENT - BLOCK_A, BLOCK_B, live)
        acc_b = tl.full([BLOCK_M, BLOCK_B], 0.0, tl.float32)

    table_row = table_ptr + request * table_stride
    mask_base = mask_ptr
    if mask_ptr is not None:
        mask_base = mask_ptr + request * num_nodes * WORDS
    columns = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc_a = tl.full([BLOCK_M, BLOCK_A], 0.0, tl.float32)
    pages = page_ids(table_row, split_start + columns, end, PAGE)
    for start in tl.range(split_start, end, BLOCK_N):
        positions = start + columns
        stored = positions < end
        slots = pages.to(tl.int64) * PAGE + positions % PAGE
        pages = page_ids(table_row, positions + BLOCK_N, end, PAGE)
        latent_a = _columns(cache_ptr, slots, LATENT + ROPE, 0, BLOCK_A, BLOCK_A, stored)
        rope = _columns(cache_ptr, slots, LATENT + ROPE, LATENT, ROPE, BLOCK_R, stored)
        scores = tl.dot(q_r, tl.trans(rope), input_precision="ieee")
        scores += tl.dot(q_a, tl.trans(latent_a), input_precision="ieee")
        if BLOCK_B > 0:
            latent_b = _columns(cache_ptr, slots, LATENT + ROPE, BLOCK_A, LATENT - BLOCK_A, BLOCK_B, stored)
            scores += tl.dot(q_b, tl.trans(latent_b), input_precision="ieee")
        scores = scores * scale_log2
        if start + BLOCK_N > free_end:
            seen = visible(mask_base, positions, end, length, nodes, used, MODE, WORDS)
            scores = tl.where(seen, scores, float("-inf"))
        weights, decay, top, total = _softmax_step(scores, top, total)
        weights = weights.to(latent_a.dtype)
        acc_a = tl.dot(weights, latent_a, acc_a * decay[:, None], input_precision="ieee")
        if BLOCK_B > 0:
            acc_b = tl.dot(weights, latent_b, acc_b * decay[:, None], input_precision="ieee")

    total = tl.where(live, total, 0.0)
    inverse = inverse_or_zero(total)[:, None]
    first_row, to_rows, written = _write_lse(
        lse_ptr, log2_sum(top, total), first_row, rows, nodes, live, split, num_splits, num_nodes, SPLIT
    )
    out_ptr += first_row * LATENT
    _store_columns(out_ptr, to_rows, LATENT, 0, BLOCK_A, BLOCK_A, acc_a * inverse, written)
    if BLOCK_B > 0:
        _store_columns(out_ptr, to_rows, LATENT, BLOCK_A, LATENT - BLOCK_A, BLOCK_B, acc_b * inverse, written)


@triton.jit(do_not_specialize=["num_rows", "num_nodes", "num_splits", "split_tokens", "num_slots", "max_length"])
def _mla_merge_kernel(
    part_ptr,  # [num_rows, num_splits, LATENT] float32
    part_lse_ptr,  # [num_rows, num_splits] float32, base 2
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    out_ptr,  # [num_rows, LATENT], rows (request, node, head)
    lse_ptr,  # [num_rows] float32 natural or None
    num_rows,
    num_nodes,
    num_splits,
    split_tokens,
    num_slots,
    max_length,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = rows < num_rows
    request = rows // HEADS // num_nodes
    used = used_rows(q_lens_ptr, request, num_nodes, valid)
    length = tl.load(lengths_ptr + request, mask=valid, other=0).to(tl.int32)
    last_key = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    split_length = _split_length(last_key, split_tokens, num_splits)
    live = (last_key + split_length - 1) // split_length
    live = tl.where(valid & (rows // HEADS % num_nodes < used), live, 0)

    splits = tl.arange(0, ALL_SPLITS)
    present = splits[None, :] < live[:, None]
    part_lse = tl.load(part_lse_ptr + rows[:, None] * num_splits + splits[None, :], mask=present, other=float("-inf"))
    top = tl.max(part_lse, 1)
    anchor = finite_or_zero(top)
    lse = log2_sum(anchor, tl.sum(tl.exp2(part_lse - anchor[:, None]), 1))

    dims = tl.arange(0, BLOCK_D)
    reference_lse = finite_or_zero(lse)
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    for first in tl.range(0, tl.max(live, 0), BLOCK_S):
        chunk = first + tl.arange(0, BLOCK_S)
        here = chunk[None, :] < live[:, None]
        parts = rows[:, None] * num_splits + chunk[None, :]
        weight = tl.exp2(tl.load(part_lse_ptr + parts, mask=here, other=float("-inf")) - reference_lse[:, None])
        loaded = here[:, :, None] & (dims < LATENT)[None, None, :]
        part = tl.load(part_ptr + parts[:, :, None] * LATENT + dims[None, None, :], mask=loaded, other=0.0)
        acc += tl.sum(part * weight[:, :, None], 1)
    _store_columns(out_ptr, rows, LATENT, 0, LATENT, BLOCK_D, acc, valid)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, lse * LN_2, mask=valid)


class _Splits(NamedTuple):
    """How keys are split, as both kernels take it."""

    num_splits: int
    split_tokens: int
    num_slots: int
    max_length: int


def mla_attention(call: MlaCall) -> Tensor:
    return _attention(call, None)


def mla_attention_with_lse(call: MlaCall) -> tuple[Tensor, Tensor]:
    lse = call.q_latent.new_empty(call.q_latent.shape[:3], dtype=torch.float32)
    return _attention(call, lse), lse


def _attention(call: MlaCall, lse: Tensor | None) -> Tensor:
    """Launch the kernel and, where keys are split, the merge; writes `lse` if it is given."""
    q_latent, q_rope, cache, metadata, split_tokens = call
    if q_latent.dtype == torch.float64:
        raise ValueError("q_latent: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    batch, num_nodes, heads, latent = q_latent.shape
    max_length = metadata.max_length
    assert max_length is not None and metadata.scale is not None
    rows = num_nodes * heads
    config = mla_config(current_chip(q_latent), latent, rows, max_length, split_tokens, cache.element_size())
    num_splits = max(1, min(max_splits(rows, latent), -(-max_length // config.split_tokens)))
    splits = _Splits(num_splits, config.split_tokens, metadata.tree_width or num_nodes, max_length)
    out = torch.empty_like(q_latent)
    part = out
    part_lse = lse
    if num_splits > 1:
        part = q_latent.new_empty((*q_latent.shape[:3], num_splits, latent), dtype=torch.float32)
        part_lse = q_latent.new_empty(part.shape[:4], dtype=torch.float32)
    block_a, block_b = blocks(latent)
    launch(
        _mla_kernel,
        (batch * num_splits * -(-rows // config.block_m),),
        *(q_latent, q_rope, cache, metadata.page_table, metadata.lengths, metadata.q_lens, metadata.mask),
        *(part, part_lse, num_nodes, *splits, metadata.page_table.stride(0), metadata.scale * LOG2_E),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HEADS=heads,
        LATENT=latent,
        ROPE=q_rope.shape[3],
        PAGE=cache.shape[1],
        MODE=MODE_CODES[metadata.mode],
        WORDS=0 if metadata.mask is None else metadata.mask.shape[2],
        ALL_SLOTS=metadata.tree_width is not None,
        SPLIT=num_splits > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        BLOCK_R=triton.next_power_of_2(q_rope.shape[3]),
    )
    if num_splits > 1:
        _merge(part, part_lse, metadata, splits, out, lse)
    return out


def _merge(
    part: Tensor, part_lse: Tensor | None, metadata: AttentionMetadata, splits: _Splits, out: Tensor, lse: Tensor | None
) -> None:
    batch, num_nodes, heads, latent = out.shape
    num_rows = batch * num_nodes * heads
    config = merge_config(current_chip(out), splits.num_splits)
    launch(
        _mla_merge_kernel,
        (-(-num_rows // config.rows),),
        *(part, part_lse, metadata.lengths, metadata.q_lens, out, lse, num_rows, num_nodes, *splits),
        num_warps=config.num_warps,
        num_stages=2,
        HEADS=heads,
        LATENT=latent,
        ALL_SLOTS=metadata.tree_width is not None,
        ROWS=config.rows,
        ALL_SPLITS=config.all_splits,
        BLOCK_S=config.block_s,
        BLOCK_D=triton.next_power_of_2(latent),
    )
