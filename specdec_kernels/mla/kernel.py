"""Triton kernel of absorbed latent attention, with split keys.

    program   (request, split of the keys, tile of query rows), tile fastest: programs that run together read the same
              keys, which are then in L2
    row       node * H + head: all heads share the one cached head, so a tile is dense whatever N is
    maths     t = scale * log2(e) * (q_latent . latent + q_rope . rope);  m' = max(m, t);  a = 2^(m - m')
              p = 2^(t - m');  l = a l + sum p;  acc = a acc + p latent
    split     each split of `split_tokens` keys leaves (out, lse) in float32; a second kernel merges
              out = sum_s 2^(lse_s - lse) out_s with 2^lse = sum_s 2^lse_s; a single split writes its own output

A tile of latents is loaded once and used twice, as keys and as values. A latent size that is no power of two is cut
into its largest power of two and a padded rest, each with its own accumulator.

Sources: MLA in absorbed form (arXiv 2405.04434), FlashMLA's split scheduling, Flash-Decoding; bit masks limited to
the draft block as in `specdec_kernels.attention`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.mla.configs import blocks, merge_config, mla_config

_LOG2_E = math.log2(math.e)
_LN_2 = tl.constexpr(math.log(2.0))
_CHAIN = tl.constexpr(0)
_BLOCK = tl.constexpr(1)
_MODE_CODES = {"chain": 0, "block": 1, "tree": 2}


@triton.jit
def _used_rows(q_lens_ptr, request, num_nodes, valid=True):
    """Query rows in use of `request`, a scalar or a tensor."""
    if q_lens_ptr is None:
        return num_nodes
    else:
        return tl.minimum(tl.maximum(tl.load(q_lens_ptr + request, mask=valid, other=0), 0), num_nodes)


@triton.jit
def _last_key(length, used, tree_width, max_length):
    """End of a request's keys; without a tree width the draft is as long as the rows in use."""
    drafted = tl.where(tree_width > 0, tree_width, used)
    return tl.minimum(length + drafted, max_length)


@triton.jit
def _key_range(length, used, end, first_node, last_node, MODE: tl.constexpr):
    """(end of the keys that any row of the tile sees, end of those that every row of it sees)."""
    if MODE == _CHAIN:
        tile_end = tl.minimum(end, length + last_node + 1)
        free_end = length + first_node + 1
    elif MODE == _BLOCK:
        tile_end = end
        free_end = end
    else:
        tile_end = end
        free_end = length
    tile_end = tl.where(first_node < used, tile_end, 0)
    return tile_end, tl.minimum(free_end, tile_end)


@triton.jit
def _visible(
    mask_ptr,  # [N, WORDS] int64 words of this request, tree only
    positions,  # [BLOCK_N]
    end,
    length,
    nodes,  # [BLOCK_M] node of each row
    used,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """[BLOCK_M or 1, BLOCK_N]: which positions below `end` each row sees; rows past `used` may see anything."""
    if MODE == _CHAIN:
        return positions[None, :] <= tl.minimum(length + nodes, end - 1)[:, None]
    elif MODE == _BLOCK:
        return (positions < end)[None, :]
    else:
        slot = positions - length
        row_words = mask_ptr + nodes.to(tl.int64) * WORDS
        seen = ((slot < 0) & (positions < end))[None, :]
        for word in tl.static_range(WORDS):
            bits = tl.load(row_words + word, mask=nodes < used, other=0)[:, None]
            here = (slot >= word * 64) & (slot < (word + 1) * 64) & (positions < end)
            shift = tl.where(here, slot - word * 64, 0).to(tl.int64)
            seen = seen | (here[None, :] & (((bits >> shift[None, :]) & 1) != 0))
        return seen


@triton.jit
def _softmax_step(scores, top, total):
    """Fold base-2 scores [M, N] into running maximum and sum [M]; rows that saw nothing yet keep top = -inf."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - anchor[:, None])
    decay = tl.exp2(top - anchor)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def _log2_sum(top, total):
    """log2(2^top * total), -inf for an empty sum."""
    return tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


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


@triton.jit(do_not_specialize=["num_nodes", "num_splits", "split_tokens", "max_length", "tree_width", "table_stride"])
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
    max_length,
    tree_width,
    table_stride,
    scale_log2,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
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
    used = _used_rows(q_lens_ptr, request, num_nodes)
    last_key = _last_key(length, used, tree_width, max_length)
    split_start = split * split_tokens
    if SPLIT:
        # The merge reads only splits that begin before the request's last key.
        if split_start >= last_key:
            return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    nodes = rows // HEADS
    tile_end, free_end = _key_range(
        length, used, last_key, tile * BLOCK_M // HEADS, (tile * BLOCK_M + BLOCK_M - 1) // HEADS, MODE
    )
    end = tl.minimum(tile_end, split_start + split_tokens)
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
    # Page numbers are loaded one tile ahead: inside the loop they would cost the pipeline half of its buffers.
    pages = tl.load(table_row + (split_start + columns) // PAGE, mask=split_start + columns < end, other=0)
    for start in tl.range(split_start, end, BLOCK_N):
        positions = start + columns
        stored = positions < end
        slots = pages.to(tl.int64) * PAGE + positions % PAGE
        ahead = positions + BLOCK_N
        pages = tl.load(table_row + ahead // PAGE, mask=ahead < end, other=0)
        latent_a = _columns(cache_ptr, slots, LATENT + ROPE, 0, BLOCK_A, BLOCK_A, stored)
        rope = _columns(cache_ptr, slots, LATENT + ROPE, LATENT, ROPE, BLOCK_R, stored)
        scores = tl.dot(q_r, tl.trans(rope), input_precision="ieee")
        scores += tl.dot(q_a, tl.trans(latent_a), input_precision="ieee")
        if BLOCK_B > 0:
            latent_b = _columns(cache_ptr, slots, LATENT + ROPE, BLOCK_A, LATENT - BLOCK_A, BLOCK_B, stored)
            scores += tl.dot(q_b, tl.trans(latent_b), input_precision="ieee")
        scores = scores * scale_log2
        if start + BLOCK_N > free_end:
            seen = _visible(mask_base, positions, end, length, nodes, used, MODE, WORDS)
            scores = tl.where(seen, scores, float("-inf"))
        weights, decay, top, total = _softmax_step(scores, top, total)
        weights = weights.to(latent_a.dtype)
        acc_a = tl.dot(weights, latent_a, acc_a * decay[:, None], input_precision="ieee")
        if BLOCK_B > 0:
            acc_b = tl.dot(weights, latent_b, acc_b * decay[:, None], input_precision="ieee")

    total = tl.where(live, total, 0.0)
    inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)[:, None]
    lse = _log2_sum(top, total)
    if SPLIT:
        written = live
        to_rows = rows.to(tl.int64) * num_splits + split
        first_row *= num_splits
        tl.store(lse_ptr + first_row + to_rows, lse, mask=written)
    else:
        written = nodes < num_nodes
        to_rows = rows
        if lse_ptr is not None:
            tl.store(lse_ptr + first_row + to_rows, lse * _LN_2, mask=written)
    out_ptr += first_row * LATENT
    _store_columns(out_ptr, to_rows, LATENT, 0, BLOCK_A, BLOCK_A, acc_a * inverse, written)
    if BLOCK_B > 0:
        _store_columns(out_ptr, to_rows, LATENT, BLOCK_A, LATENT - BLOCK_A, BLOCK_B, acc_b * inverse, written)


@triton.jit(do_not_specialize=["num_rows", "num_nodes", "num_splits", "split_tokens", "max_length", "tree_width"])
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
    max_length,
    tree_width,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = rows < num_rows
    request = rows // HEADS // num_nodes
    used = _used_rows(q_lens_ptr, request, num_nodes, valid)
    length = tl.load(lengths_ptr + request, mask=valid, other=0).to(tl.int32)
    live = (_last_key(length, used, tree_width, max_length) + split_tokens - 1) // split_tokens
    live = tl.where(valid & (rows // HEADS % num_nodes < used), live, 0)

    splits = tl.arange(0, ALL_SPLITS)
    present = splits[None, :] < live[:, None]
    part_lse = tl.load(part_lse_ptr + rows[:, None] * num_splits + splits[None, :], mask=present, other=float("-inf"))
    top = tl.max(part_lse, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    lse = _log2_sum(anchor, tl.sum(tl.exp2(part_lse - anchor[:, None]), 1))

    dims = tl.arange(0, BLOCK_D)
    reference_lse = tl.where(lse == float("-inf"), 0.0, lse)
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
        tl.store(lse_ptr + rows, lse * _LN_2, mask=valid)


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    scale: float,
    mask: torch.Tensor | None,
    q_lens: torch.Tensor | None,
    max_length: int,
    split_tokens: int | None,
    tree_width: int | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.mla.mla_attention`, which has checked the arguments."""
    if q_latent.dtype == torch.float64:
        raise ValueError("q_latent: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    batch, num_nodes, heads, latent = q_latent.shape
    rows, itemsize = num_nodes * heads, cache.element_size()
    config = mla_config(current_chip(q_latent), latent, rows, max_length, split_tokens, itemsize)
    splits = max(1, -(-max_length // config.split_tokens))
    out = torch.empty_like(q_latent)
    lse = q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32) if return_lse else None
    partial = splits > 1
    part = q_latent.new_empty((*q_latent.shape[:3], splits, latent), dtype=torch.float32) if partial else out
    part_lse = q_latent.new_empty((*q_latent.shape[:3], splits), dtype=torch.float32) if partial else lse
    cut = (splits, config.split_tokens, max_length, tree_width or 0)
    block_a, block_b = blocks(latent)
    launch(
        _mla_kernel,
        (batch * splits * -(-rows // config.block_m),),
        *(q_latent, q_rope, cache, page_table, lengths, q_lens, mask, part, part_lse),
        *(num_nodes, *cut, page_table.stride(0), scale * _LOG2_E),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HEADS=heads,
        LATENT=latent,
        ROPE=q_rope.shape[3],
        PAGE=cache.shape[1],
        MODE=_MODE_CODES[mode],
        WORDS=0 if mask is None else mask.shape[2],
        SPLIT=partial,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        BLOCK_R=triton.next_power_of_2(q_rope.shape[3]),
    )
    if partial:
        _merge(part, part_lse, lengths, q_lens, out, lse, cut)
    return (out, lse) if lse is not None else out


def _merge(
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    lengths: torch.Tensor,
    q_lens: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    cut: tuple[int, int, int, int],
) -> None:
    batch, num_nodes, heads, latent = out.shape
    num_rows = batch * num_nodes * heads
    config = merge_config(current_chip(out), cut[0])
    launch(
        _mla_merge_kernel,
        (-(-num_rows // config.rows),),
        *(part, part_lse, lengths, q_lens, out, lse),
        *(num_rows, num_nodes, *cut),
        num_warps=config.num_warps,
        num_stages=2,
        HEADS=heads,
        LATENT=latent,
        ROWS=config.rows,
        ALL_SPLITS=config.all_splits,
        BLOCK_S=config.block_s,
        BLOCK_D=triton.next_power_of_2(latent),
    )
