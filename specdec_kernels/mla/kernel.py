"""Triton kernel of absorbed latent attention, with split keys.

    program   (request, split of the keys, tile of query rows), tile fastest: programs that run together read the same
              keys, which are then in L2
    row       node * H + head: all heads share the one cached head, so a tile is full for any N
    maths     t = scale * log2(e) * (q_latent . latent + q_rope . rope);  m' = max(m, t);  a = 2^(m - m')
              p = 2^(t - m');  l = a l + sum p;  acc = a acc + p latent
    split     each split stores (out, lse), which `attention.kernel_merge` merges; a single split writes its own output

A tile of latents is loaded once and used twice, as keys and as values. A latent size that is no power of two is divided
into its largest power of two and a padded rest, each with its own accumulator.

Sources: MLA in absorbed form (arXiv 2405.04434), FlashMLA's split scheduling, Flash-Decoding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.configs import AttentionConfig
from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    MODE_CODES,
    Splits,
    finite_or_zero,
    inverse_or_zero,
    key_end,
    log2_sum,
    page_ids,
    split_range,
    tile_key_range,
    used_rows,
    visible,
)
from specdec_kernels.attention.kernel_merge import merge_parts
from specdec_kernels.attention.types import WorkShape
from specdec_kernels.launch import launch
from specdec_kernels.mla.configs import blocks, divide, requests_at_once
from specdec_kernels.mla.types import MlaCall

RUN_TIME_SIZES = [*Splits._fields, "num_splits", "table_stride"]


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
def _write_lse(
    lse_ptr, lse, first_row, rows, nodes, live, split, num_splits, num_nodes, HEADS: tl.constexpr, SPLIT: tl.constexpr
):
    """Store the tile's log-sum-exps, base 2 for the merge with SPLIT, else natural. Returns (row before the first of
    the request or part, which of its rows are written)."""
    if SPLIT:
        first_row = first_row * num_splits + split * (num_nodes * HEADS)
        tl.store(lse_ptr + first_row + rows, lse, mask=live)
        return first_row, live
    else:
        written = nodes < num_nodes
        if lse_ptr is not None:
            tl.store(lse_ptr + first_row + rows, lse * LN_2, mask=written)
        return first_row, written


@triton.jit
def _place(num_nodes, num_splits, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(tile of query rows, split, request) of this program."""
    num_tiles = (num_nodes * HEADS + BLOCK_M - 1) // BLOCK_M
    rest = tl.program_id(0) // num_tiles
    return tl.program_id(0) % num_tiles, rest % num_splits, (rest // num_splits).to(tl.int64)


@triton.jit
def _key_range(
    length, used, last_key, tile, split_end, MODE: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The end of the keys that the tile's rows see in the split, and of those that all its rows see."""
    first_node = tile * BLOCK_M // HEADS
    last_node = (tile * BLOCK_M + BLOCK_M - 1) // HEADS
    end, free_end = tile_key_range(length, used, last_key, first_node, last_node, MODE, BLOCK_N)
    if SPLIT:
        end = tl.minimum(end, split_end)
        free_end = tl.minimum(free_end, end)
    return end, free_end


# More than 16 run-time arguments: those that say how the keys of a request are split.
@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def _mla_kernel(
    q_latent_ptr,  # [B, N, H, LATENT]
    q_rope_ptr,  # [B, N, H, ROPE]
    cache_ptr,  # [pages, PAGE, LATENT + ROPE]
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, WORDS] int64 or None
    out_ptr,  # [B, N, H, LATENT], with SPLIT [B, num_splits, N, H, LATENT]
    lse_ptr,  # [B, N, H] float32 natural or None, with SPLIT [B, num_splits, N, H] base 2
    num_nodes,
    num_splits,
    num_slots,
    split_tokens,
    first_splits,
    longest_split,
    max_splits,
    max_length,
    window,  # None
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
    FIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,  # first columns of the latent, a power of two
    BLOCK_B: tl.constexpr,  # the others, padded to a power of two; 0 for none
    BLOCK_R: tl.constexpr,
):
    tile, split, request = _place(num_nodes, num_splits, HEADS, BLOCK_M)
    length = tl.load(lengths_ptr + request).to(tl.int32)
    used = used_rows(q_lens_ptr, request, num_nodes)
    last_key = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    splits = Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    begin, split_end, num_live = split_range(lengths_ptr, q_lens_ptr, request, split, splits, SPLIT, ALL_SLOTS, FIXED)
    if split >= num_live:  # the merge does not read such a split
        return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    nodes = rows // HEADS
    end, free_end = _key_range(length, used, last_key, tile, split_end, MODE, HEADS, BLOCK_M, BLOCK_N, SPLIT)
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
    pages = page_ids(table_row, begin + columns, end, PAGE)
    for start in tl.range(begin, end, BLOCK_N):
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
    first_row, written = _write_lse(
        lse_ptr, log2_sum(top, total), first_row, rows, nodes, live, split, num_splits, num_nodes, HEADS, SPLIT
    )
    out_ptr += first_row * LATENT
    _store_columns(out_ptr, rows, LATENT, 0, BLOCK_A, BLOCK_A, acc_a * inverse, written)
    if BLOCK_B > 0:
        _store_columns(out_ptr, rows, LATENT, BLOCK_A, LATENT - BLOCK_A, BLOCK_B, acc_b * inverse, written)


def mla_attention(call: MlaCall) -> Tensor:
    return _attention(call, None)


def mla_attention_with_lse(call: MlaCall) -> tuple[Tensor, Tensor]:
    lse = call.q_latent.new_empty(call.q_latent.shape[:3], dtype=torch.float32)
    return _attention(call, lse), lse


def _attention(call: MlaCall, lse: Tensor | None) -> Tensor:
    """The output; writes `lse` if it is given."""
    if call.q_latent.dtype == torch.float64:
        raise ValueError("q_latent: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    work, config = divide(call)
    out = torch.empty_like(call.q_latent)
    step = requests_at_once(work, out.shape[3], out.element_size())
    for first in range(0, work.batch, step):
        part = slice(first, min(first + step, work.batch))
        turn = work._replace(batch=part.stop - first)
        _attend(call.of_requests(part), turn, config, out[part], None if lse is None else lse[part])
    return out


def _attend(call: MlaCall, work: WorkShape, config: AttentionConfig, out: Tensor, lse: Tensor | None) -> None:
    """Launch the kernel and, where keys are split, the merge."""
    part, part_lse = out, lse
    if work.num_splits > 1:
        part = out.new_empty((len(out), work.num_splits, *out.shape[1:]))
        part_lse = out.new_empty(part.shape[:4], dtype=torch.float32)
    if config.warp_specialized:
        from specdec_kernels.mla.kernel_hopper import launch_warp_specialized

        launch_warp_specialized(call, work, part, part_lse)
    else:
        _launch(call, work, config, part, part_lse)
    if work.num_splits > 1:
        merge_parts(call.metadata, work, part, part_lse, out, lse)


def _launch(call: MlaCall, work: WorkShape, config: AttentionConfig, out: Tensor, lse: Tensor | None) -> None:
    q_latent, q_rope, cache, metadata = call[:4]
    _, num_nodes, heads, latent = q_latent.shape
    assert metadata.scale is not None
    block_a, block_b = blocks(latent)
    launch(
        _mla_kernel,
        (work.programs(1, False, 0),),
        *(q_latent, q_rope, cache, metadata.page_table, metadata.lengths, metadata.q_lens, metadata.mask, out, lse),
        *(num_nodes, work.num_splits, *work.sizes, metadata.page_table.stride(0), metadata.scale * LOG2_E),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HEADS=heads,
        LATENT=latent,
        ROPE=q_rope.shape[3],
        PAGE=cache.shape[1],
        MODE=MODE_CODES[metadata.mode],
        WORDS=0 if metadata.mask is None else metadata.mask.shape[2],
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1,
        FIXED=work.fixed_splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        BLOCK_R=triton.next_power_of_2(q_rope.shape[3]),
    )
