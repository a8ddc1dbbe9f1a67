"""One Triton kernel for decode, chain, block and tree verification, and prefill over a paged KV cache.

Why one: reading the prefix dominates all of them, so they differ only in the few tiles that overlap the
draft.

    program   (request, split of the keys, tile of packed query rows, KV head), KV head fastest: programs that
              run together read the interleaved heads of the same pages
    row       node * G + g: the G query heads of a KV head share a tile, so K and V are read once for all
    maths     t = scale * log2(e) * q . k;  m' = max(m, t);  a = 2^(m - m');  p = 2^(t - m')
              l = a l + sum p;  acc = a acc + p v;  at the end out = acc / l, lse = m + log2(l)
    split     each split of `split_tokens` keys leaves (out, lse) in float32, and a second kernel merges
              out = sum_s 2^(lse_s - lse) out_s with 2^lse = sum_s 2^lse_s; a single split writes its own
              output

Page numbers are loaded one tile ahead and carried through the loop: a page-table load inside it would cost
the software pipeline half of its KV buffers. Tiles that every row of the program sees entirely skip the mask
by a uniform branch; the causal structure ends the loop at the last key that the program's last row sees.

Sources: online softmax of FlashAttention (arXiv 2205.14135), split keys of Flash-Decoding, packed rows of
FlashAttention-3 (arXiv 2407.08608); bit masks limited to the draft block as in XQA and TensorRT-LLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec_kernels.attention.configs import AttentionConfig, attention_config, merge_config
from specdec_kernels.launch import current_chip, launch

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
def _page_ids(table_ptr, positions, end, PAGE: tl.constexpr):
    """Page number of each position, 0 from `end` on."""
    return tl.load(table_ptr + positions // PAGE, mask=positions < end, other=0)


@triton.jit
def _visible(
    mask_ptr,  # [N, ceil(N / 64)] int64 words of this request, tree only
    positions,  # [BLOCK_N]
    end,
    length,
    nodes,  # [BLOCK_M] node of each row
    used,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """[BLOCK_M or 1, BLOCK_N]: which positions below `end` each row sees; rows past `used` may see
    anything."""
    if MODE == _CHAIN:
        return positions[None, :] <= tl.minimum(length + nodes, end - 1)[:, None]
    elif MODE == _BLOCK:
        return (positions < end)[None, :]
    else:
        slot = positions - length
        row_words = mask_ptr + nodes.to(tl.int64) * WORDS
        seen = ((slot < 0) & (positions < end))[None, :]
        # One word of a row at a time: a gather per element would hold a 64-bit register for each.
        for word in tl.static_range(WORDS):
            bits = tl.load(row_words + word, mask=nodes < used, other=0)[:, None]
            here = (slot >= word * 64) & (slot < (word + 1) * 64) & (positions < end)
            shift = tl.where(here, slot - word * 64, 0).to(tl.int64)
            seen = seen | (here[None, :] & (((bits >> shift[None, :]) & 1) != 0))
        return seen


@triton.jit
def _softmax_step(scores, top, total):
    """Fold base-2 scores [M, N] into running maximum and sum [M]; rows that saw nothing yet keep top =
    -inf."""
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
def _key_range(length, used, max_length, first_node, last_node, MODE: tl.constexpr):
    """(last position + 1 any row of the tile sees, last position + 1 every row of the tile sees all
    before)."""
    end = tl.minimum(length + used, max_length)
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


@triton.jit(do_not_specialize=["num_nodes", "num_pages", "num_splits", "split_tokens", "max_length", "table_stride"])
def _attention_kernel(
    q_ptr,  # [B, N, H, D]
    kv_ptr,  # [2, pages, PAGE, H_KV, D]
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, ceil(N / 64)] int64 or None
    out_ptr,  # [B, N, H, D], with SPLIT [B, N, H, num_splits, D] float32
    lse_ptr,  # [B, N, H] float32 natural or None, with SPLIT [B, N, H, num_splits] base 2
    num_nodes,
    num_pages,
    num_splits,
    split_tokens,
    max_length,
    table_stride,
    scale_log2,
    D: tl.constexpr,
    H_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_tiles = (num_nodes * GROUP + BLOCK_M - 1) // BLOCK_M
    item = tl.program_id(0) // H_KV
    kv_head = tl.program_id(0) % H_KV
    # The last tile of a causal prefill has the most keys, so it starts first.
    tile = num_tiles - 1 - item % num_tiles
    split = item // num_tiles % num_splits
    request = (item // num_tiles // num_splits).to(tl.int64)

    length = tl.load(lengths_ptr + request).to(tl.int32)
    used = _used_rows(q_lens_ptr, request, num_nodes)
    split_start = split * split_tokens
    if SPLIT:
        # The merge reads only splits that begin before the request's last key.
        if split_start >= tl.minimum(length + used, max_length):
            return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    nodes = rows // GROUP
    tile_end, free_end = _key_range(
        length, used, max_length, tile * BLOCK_M // GROUP, (tile * BLOCK_M + BLOCK_M - 1) // GROUP, MODE
    )
    end = tl.minimum(tile_end, split_start + split_tokens)

    dims = tl.arange(0, D)
    out_rows = (request * num_nodes + nodes) * (H_KV * GROUP) + kv_head * GROUP + rows % GROUP
    q = tl.load(q_ptr + out_rows[:, None] * D + dims[None, :], mask=(nodes < used)[:, None], other=0.0)

    table_row = table_ptr + request * table_stride
    mask_base = mask_ptr
    if mask_ptr is not None:
        mask_base = mask_ptr + request * num_nodes * WORDS
    key_ptr = kv_ptr + kv_head * D
    value_ptr = key_ptr + num_pages.to(tl.int64) * (PAGE * H_KV * D)
    columns = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, D], 0.0, tl.float32)
    pages = _page_ids(table_row, split_start + columns, end, PAGE)
    for start in tl.range(split_start, end, BLOCK_N):
        positions = start + columns
        stored = (positions < end)[:, None]
        offsets = (pages.to(tl.int64) * PAGE + positions % PAGE)[:, None] * (H_KV * D) + dims[None, :]
        pages = _page_ids(table_row, positions + BLOCK_N, end, PAGE)
        keys = tl.load(key_ptr + offsets, mask=stored, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale_log2
        if start + BLOCK_N > free_end:
            seen = _visible(mask_base, positions, end, length, nodes, used, MODE, WORDS)
            scores = tl.where(seen, scores, float("-inf"))
        weights, decay, top, total = _softmax_step(scores, top, total)
        values = tl.load(value_ptr + offsets, mask=stored, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")

    total = tl.where(nodes < used, total, 0.0)
    out = tl.where((total > 0.0)[:, None], acc / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
    lse = _log2_sum(top, total)
    if SPLIT:
        part_rows = out_rows * num_splits + split
        tl.store(out_ptr + part_rows[:, None] * D + dims[None, :], out, mask=(nodes < used)[:, None])
        tl.store(lse_ptr + part_rows, lse, mask=nodes < used)
    else:
        written = nodes < num_nodes
        narrow = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] * D + dims[None, :], narrow, mask=written[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + out_rows, lse * _LN_2, mask=written)


@triton.jit(do_not_specialize=["num_rows", "num_nodes", "num_splits", "split_tokens", "max_length"])
def _merge_kernel(
    part_ptr,  # [num_rows, num_splits, D] float32
    part_lse_ptr,  # [num_rows, num_splits] float32, base 2
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    out_ptr,  # [num_rows, D], rows (request, node, head)
    lse_ptr,  # [num_rows] float32 natural or None
    num_rows,
    num_nodes,
    num_splits,
    split_tokens,
    max_length,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = rows < num_rows
    request = rows // HEADS // num_nodes
    used = _used_rows(q_lens_ptr, request, num_nodes, valid)
    length = tl.load(lengths_ptr + request, mask=valid, other=0).to(tl.int32)
    live = (tl.minimum(length + used, max_length) + split_tokens - 1) // split_tokens
    live = tl.where(valid & (rows // HEADS % num_nodes < used), live, 0)

    splits = tl.arange(0, ALL_SPLITS)
    part_lse = tl.load(
        part_lse_ptr + rows[:, None] * num_splits + splits[None, :],
        mask=splits[None, :] < live[:, None],
        other=float("-inf"),
    )
    top = tl.max(part_lse, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    lse = _log2_sum(anchor, tl.sum(tl.exp2(part_lse - anchor[:, None]), 1))

    dims = tl.arange(0, D)
    reference_lse = tl.where(lse == float("-inf"), 0.0, lse)
    acc = tl.full([ROWS, D], 0.0, tl.float32)
    for first in tl.range(0, tl.max(live, 0), BLOCK_S):
        chunk = first + tl.arange(0, BLOCK_S)
        present = chunk[None, :] < live[:, None]
        parts = rows[:, None] * num_splits + chunk[None, :]
        weight = tl.exp2(tl.load(part_lse_ptr + parts, mask=present, other=float("-inf")) - reference_lse[:, None])
        part = tl.load(part_ptr + parts[:, :, None] * D + dims[None, None, :], mask=present[:, :, None], other=0.0)
        acc += tl.sum(part * weight[:, :, None], 1)
    narrow = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * D + dims[None, :], narrow, mask=valid[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, lse * _LN_2, mask=valid)


@dataclass(frozen=True)
class _Plan:
    """How the keys are cut: `split_tokens` keys a program, `num_splits` programs a query tile."""

    config: AttentionConfig
    split_tokens: int
    num_splits: int


def _plan(chip: str, head_dim: int, rows: int, max_length: int, split_tokens: int | None) -> _Plan:
    config = attention_config(chip, head_dim, rows, max_length, split_tokens)
    tiles = -(-config.split_tokens // config.block_n)
    keys = tiles * config.block_n
    return _Plan(config, keys, max(1, -(-max_length // keys)))


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None,
    q_lens: torch.Tensor | None,
    scale: float,
    max_length: int,
    split_tokens: int | None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.attention.paged_attention`, which has checked the arguments."""
    if q.dtype == torch.float64:
        raise ValueError("q: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    batch, num_nodes, heads, head_dim = q.shape
    _, num_pages, page_size, kv_heads, _ = kv.shape
    group = heads // kv_heads
    plan = _plan(current_chip(q), head_dim, num_nodes * group, max_length, split_tokens)
    config, splits = plan.config, plan.num_splits
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    partial = splits > 1
    part = q.new_empty((*q.shape[:3], splits, head_dim), dtype=torch.float32) if partial else out
    part_lse = q.new_empty((*q.shape[:3], splits), dtype=torch.float32) if partial else lse
    tiles = -(-num_nodes * group // config.block_m)
    launch(
        _attention_kernel,
        (batch * splits * tiles * kv_heads,),
        *(q, kv, page_table, lengths, q_lens, mask, part, part_lse),
        *(num_nodes, num_pages, splits, plan.split_tokens, max_length, page_table.stride(0), scale * _LOG2_E),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        D=head_dim,
        H_KV=kv_heads,
        GROUP=group,
        PAGE=page_size,
        MODE=_MODE_CODES[mode],
        WORDS=0 if mask is None else mask.shape[2],
        SPLIT=partial,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
    )
    if partial:
        _merge(part, part_lse, lengths, q_lens, out, lse, plan, max_length)
    return (out, lse) if lse is not None else out


def _merge(
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    lengths: torch.Tensor,
    q_lens: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    plan: _Plan,
    max_length: int,
) -> None:
    batch, num_nodes, heads, head_dim = out.shape
    num_rows = batch * num_nodes * heads
    config = merge_config(current_chip(out), plan.num_splits)
    launch(
        _merge_kernel,
        (-(-num_rows // config.rows),),
        *(part, part_lse, lengths, q_lens, out, lse),
        *(num_rows, num_nodes, plan.num_splits, plan.split_tokens, max_length),
        num_warps=config.num_warps,
        num_stages=2,
        D=head_dim,
        HEADS=heads,
        ROWS=config.rows,
        ALL_SPLITS=config.all_splits,
        BLOCK_S=config.block_s,
    )
