"""One Triton kernel for decode, chain, block and tree verification, and prefill over a paged KV cache.

Reading the prefix takes most of the time of all of them, and they differ only in the few tiles that overlap the draft.
So one kernel serves all.

    item      (request, split of the keys, tile of packed query rows), and a KV head of it for each program.
              KV head fastest: programs that run together read the interleaved heads of the same pages
    row       node * G + g: the G query heads of a KV head share a tile, so K and V are read once for them
    maths     t = scale * log2(e) * q . k;  m' = max(m, t);  a = 2^(m - m');  p = 2^(t - m')
              l = a l + sum p;  acc = a acc + p v;  at the end out = acc / l, lse = m + log2(l)
    tree      with a fixed cut only the whole tiles of the prefix are computed here, see `kernel_tree`
    split     each split stores out in the type of q and lse in float32, and a second kernel merges them; where
              a request can only have one split, the program writes the output itself, by the same arithmetic

Page numbers are loaded one tile ahead and carried through the loop, because a page-table load inside the loop would
take half of the KV buffers from the software pipeline. A uniform branch skips the mask for tiles that every row of the
program sees entirely. The loop starts at the first tile that a row's sliding window reaches and ends at the last key
that the program's last row sees.

Without a work list the grid has a program for every item that `max_length` allows. With one, a fixed grid walks the
items that there are.

Sources: online softmax of FlashAttention (arXiv 2205.14135), split keys of Flash-Decoding, packed rows of
FlashAttention-3 (arXiv 2407.08608), polynomial exponential and lazy rescaling of FlashAttention-4 (arXiv
2603.05451); bit masks limited to the draft block as in XQA and TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec_kernels.attention.configs import AttentionConfig
from specdec_kernels.attention.device import (
    FP8_BITS_SCALE,
    LN_2,
    LOG2_E,
    MODE_CODES,
    PATHS,
    RUN_TIME_SIZES,
    fixed_split_begin,
    fold_part,
    fold_scores,
    fold_sink,
    half_queries,
    inverse_or_zero,
    key_end,
    log2_sum,
    page_ids,
    row_positions,
    rows_and_dims,
    split_layout,
    split_range,
    tile_key_range,
    tile_scores,
    used_rows,
    visible_in_window,
    window_begin,
)
from specdec_kernels.attention.device_fp8 import walk_keys_first
from specdec_kernels.attention.kernel_hopper import GROUPED_ROWS, launch_in_groups
from specdec_kernels.attention.kernel_merge import merge, overlapped
from specdec_kernels.attention.kernel_tree import TreeState, launch_tree
from specdec_kernels.attention.types import AttentionMetadata, LayerScales, WorkList, WorkShape
from specdec_kernels.launch import current_chip, launch

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _write_rows(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    out,
    top,
    total,
    rows,
    nodes,
    dims,
    out_rows,
    part_rows,
    used,
    num_nodes,
    first_head,
    SHAPE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store the tile's rows: with SPLIT the partial result `out` with its log-sum-exp `top`, else the final result of
    the sums `out` and `total`, the sink included."""
    D: tl.constexpr = SHAPE[0]
    BLOCK_D: tl.constexpr = SHAPE[1]
    GROUP: tl.constexpr = SHAPE[3]
    if SPLIT:
        out_rows += part_rows
        written = nodes < used
        lse = top
    else:
        written = nodes < num_nodes
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + first_head + rows % GROUP) * _LOG2_E
            sink = tl.where(nodes < used, sink, float("-inf"))
            out, top, total = fold_sink(out, top, total, sink)
        out = out * inverse_or_zero(total)[:, None]
        lse = log2_sum(top, total) * LN_2
    out_written = rows_and_dims(written, dims, D, BLOCK_D)
    narrow = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] * D + dims[None, :], narrow, mask=out_written)
    if lse_ptr is not None:
        tl.store(lse_ptr + out_rows, lse, mask=written)


@triton.jit
def _walk(
    q,
    pool,
    mask_row,
    depths_row,
    row_position,
    score_scale,
    soft_cap,
    begin,
    stop,
    free_end,
    window,
    length,
    used,
    nodes,
    SHAPE: tl.constexpr,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
    FP8: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    LAZY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sums of `softmax_step` over the keys from `begin` to `stop`: (top, total, acc) of the tile's rows.

    pool: pointers to keys and values of the head, and to the request's row of the page table.
    """
    D: tl.constexpr = SHAPE[0]
    BLOCK_D: tl.constexpr = SHAPE[1]
    H_KV: tl.constexpr = SHAPE[2]
    PAGE: tl.constexpr = SHAPE[4]
    key_ptr, value_ptr, table_row = pool
    if window is not None:
        begin, free_begin = window_begin(row_position, begin, window, BLOCK_N)

    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    pages = page_ids(table_row, begin + columns, stop, PAGE)
    for start in tl.range(begin, stop, BLOCK_N):
        positions = start + columns
        stored = rows_and_dims(positions < stop, dims, D, BLOCK_D)
        offsets = (pages.to(tl.int64) * PAGE + positions % PAGE)[:, None] * (H_KV * D) + dims[None, :]
        pages = page_ids(table_row, positions + BLOCK_N, stop, PAGE)
        scores, factor = tile_scores(q, key_ptr, offsets, stored, score_scale, soft_cap, FP8)
        masked = start + BLOCK_N > free_end
        if window is not None:
            masked = masked | (start < free_begin)
        if masked:
            seen = visible_in_window(
                mask_row, depths_row, row_position, positions, stop, length, nodes, used, window, MODE, WORDS
            )
            scores = tl.where(seen, scores, float("-inf"))
        top, total, acc = fold_scores(
            q, scores, factor, value_ptr, offsets, stored, top, total, acc, FP8, POLYNOMIAL, LAZY
        )
    return top, total, acc


@triton.jit
def _attend(
    tensors,
    item,
    sizes,
    scales,
    cut,
    SHAPE: tl.constexpr,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    IN_ORDER: tl.constexpr,
    FP8: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    LAZY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of one item and KV head. The tuples are those of `_attention_kernel`."""
    D: tl.constexpr = SHAPE[0]
    BLOCK_D: tl.constexpr = SHAPE[1]
    H_KV: tl.constexpr = SHAPE[2]
    GROUP: tl.constexpr = SHAPE[3]
    PAGE: tl.constexpr = SHAPE[4]
    q_ptr, kv_ptr, table_ptr, lengths_ptr, q_lens_ptr, mask_ptr, depths_ptr, row_depths_ptr = tensors[:8]
    sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, state_ptr, sums_ptr = tensors[8:]
    request, tile, split_begin, split_end, part, kv_head = item
    num_nodes, num_pages, num_slots, max_length, window, table_stride = sizes
    score_scale, value_scale, soft_cap = scales
    length = tl.load(lengths_ptr + request).to(tl.int32)
    used = used_rows(q_lens_ptr, request, num_nodes)
    end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    nodes = rows // GROUP
    first_node = tile * BLOCK_M // GROUP
    last_node = (tile * BLOCK_M + BLOCK_M - 1) // GROUP
    stop, free_end = tile_key_range(length, used, end, first_node, last_node, MODE, BLOCK_N)
    mask_row = mask_ptr
    if mask_ptr is not None:
        mask_row = mask_ptr + request * num_nodes * WORDS
    depths_row = depths_ptr
    row_position = nodes
    if window is not None:
        row_depths_row = row_depths_ptr
        if depths_ptr is not None:
            depths_row = depths_ptr + request * num_slots
        if row_depths_ptr is not None:
            row_depths_row = row_depths_ptr + request * num_nodes
        row_position = row_positions(row_depths_row, length, nodes, used, MODE)

    dims = tl.arange(0, BLOCK_D)
    out_rows = (request * num_nodes + nodes) * (H_KV * GROUP) + kv_head * GROUP + rows % GROUP
    q_loaded = rows_and_dims(nodes < used, dims, D, BLOCK_D)
    q = tl.load(q_ptr + out_rows[:, None] * D + dims[None, :], mask=q_loaded, other=0.0)
    if k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr + kv_head)
    if v_scale_ptr is not None:
        value_scale *= tl.load(v_scale_ptr + kv_head)

    q, row_factor = half_queries(q, FP8)
    score_scale = row_factor * score_scale
    key_ptr = kv_ptr + kv_head * D
    pool = (key_ptr, key_ptr + num_pages.to(tl.int64) * (PAGE * H_KV * D), table_ptr + request * table_stride)
    if IN_ORDER:
        _, _, split_tokens, first_splits, longest_split, max_splits, _, _ = cut
        _, _, first, live = split_layout(
            length, stop, split_tokens, first_splits, longest_split, max_splits, window, True
        )
        out = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        for split in tl.range(first, first + live):
            begin = fixed_split_begin(split, split_tokens, first_splits)
            split_stop = tl.minimum(stop, fixed_split_begin(split + 1, split_tokens, first_splits))
            part_top, part_total, acc = _walk(
                q, pool, mask_row, depths_row, row_position, score_scale, soft_cap, begin, split_stop, free_end, window,
                length, used, nodes, SHAPE, MODE, WORDS, FP8, POLYNOMIAL, LAZY, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            acc = acc * (value_scale * inverse_or_zero(part_total))[:, None]
            # Rounded as the partial result of another program is.
            acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
            out, top, total = fold_part(out, top, total, acc, log2_sum(part_top, part_total))
        total = tl.where(nodes < used, total, 0.0)
    else:
        begin = 0
        if SPLIT:
            begin = split_begin
            stop = tl.minimum(stop, split_end)
            free_end = tl.minimum(free_end, stop)
        if KEYS_FIRST:
            top, total, acc = walk_keys_first(
                q, pool, mask_row, depths_row, row_position, score_scale, soft_cap, begin, stop, free_end, window,
                length, used, nodes, SHAPE, MODE, WORDS, FP8, POLYNOMIAL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            top, total, acc = _walk(
                q, pool, mask_row, depths_row, row_position, score_scale, soft_cap, begin, stop, free_end, window,
                length, used, nodes, SHAPE, MODE, WORDS, FP8, POLYNOMIAL, LAZY, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if MODE == PATHS:
            if (begin <= stop) & (split_end > stop):
                # The split goes on with the text of each node, see `kernel_tree`.
                tl.store(state_ptr + out_rows[:, None] * D + dims[None, :], acc, mask=q_loaded)
                tl.store(sums_ptr + out_rows * 2, top, mask=nodes < used)
                tl.store(sums_ptr + out_rows * 2 + 1, total, mask=nodes < used)
        total = tl.where(nodes < used, total, 0.0)
        out = acc * (value_scale * inverse_or_zero(total))[:, None]
        # One part of the whole: what the merge has after it, to the bit.
        top = log2_sum(top, total)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    part_rows = (part - request) * num_nodes * (H_KV * GROUP)
    _write_rows(
        out_ptr, lse_ptr, sinks_ptr, out, top, total, rows, nodes, dims, out_rows, part_rows, used, num_nodes,
        kv_head * GROUP, SHAPE, SPLIT,
    )  # fmt: skip


# More than 16 run-time arguments: a tuple in their place would be specialised anew for every batch and length.
@triton.jit(do_not_specialize=RUN_TIME_SIZES)
def _attention_kernel(
    q_ptr,  # [B, N, H, D]
    kv_ptr,  # [2, pages, PAGE, H_KV, D], bytes with FP8
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, ceil(num_slots / 64)] int64 or None
    depths_ptr,  # [B, num_slots] int32, tree with a window only
    row_depths_ptr,  # [B, N] int32, tree with a window only
    sinks_ptr,  # [H] float32 or None
    k_scale_ptr,  # [H_KV] float32 or None
    v_scale_ptr,  # [H_KV] float32 or None
    items_ptr,  # [capacity, 3] int32 of a work list or None
    offsets_ptr,  # [B + 1] int32 of a work list or None
    num_items_ptr,  # [1] int32 of a work list or None
    out_ptr,  # [B, N, H, D], with SPLIT [partial results, N, H, D]
    lse_ptr,  # [B, N, H] float32 natural or None, with SPLIT [partial results, N, H] base 2
    state_ptr,  # [B, N, H, D] float32 with PATHS
    sums_ptr,  # [B, N, H, 2] float32 with PATHS
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    H_KV: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    FIXED: tl.constexpr,
    IN_ORDER: tl.constexpr,
    FP8: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
    LAZY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        # Launched while the kernel before still runs; the merge may be launched while this one does.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tensors = (q_ptr, kv_ptr, table_ptr, lengths_ptr, q_lens_ptr, mask_ptr, depths_ptr, row_depths_ptr, sinks_ptr,
               k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, state_ptr, sums_ptr)  # fmt: skip
    cut = (num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    sizes = (num_nodes, num_pages, num_slots, max_length, window, table_stride)
    scales = (score_scale, value_scale, soft_cap)
    SHAPE: tl.constexpr = (D, BLOCK_D, H_KV, GROUP, PAGE)
    if items_ptr is None:
        num_tiles = (num_nodes * GROUP + BLOCK_M - 1) // BLOCK_M
        index = tl.program_id(0) // H_KV
        # The last tile of a causal prefill has the most keys, so it starts first.
        tile = num_tiles - 1 - index % num_tiles
        split = index // num_tiles % num_splits
        request = (index // num_tiles // num_splits).to(tl.int64)
        begin, end, live = split_range(lengths_ptr, q_lens_ptr, request, split, cut, SPLIT, ALL_SLOTS, FIXED)
        if SPLIT:
            # The merge reads only the splits that a request has.
            if split >= live:
                return
        item = (request, tile, begin, end, request * num_splits + split, tl.program_id(0) % H_KV)
        _attend(tensors, item, sizes, scales, cut, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, IN_ORDER, FP8,
                KEYS_FIRST, POLYNOMIAL, LAZY, BLOCK_M, BLOCK_N)  # fmt: skip
    else:
        work_end = tl.load(num_items_ptr) * H_KV
        for work in tl.range(tl.program_id(0), work_end, tl.num_programs(0)):
            entry = items_ptr + work // H_KV * 3
            request = tl.load(entry).to(tl.int64)
            tile = tl.load(entry + 1)
            split = tl.load(entry + 2)
            part = (tl.load(offsets_ptr + request) + split).to(tl.int64)
            begin, end, _ = split_range(lengths_ptr, q_lens_ptr, request, split, cut, SPLIT, ALL_SLOTS, FIXED)
            item = (request, tile, begin, end, part, work % H_KV)
            _attend(tensors, item, sizes, scales, cut, SHAPE, MODE, WORDS, ALL_SLOTS, SPLIT, IN_ORDER, FP8,
                    KEYS_FIRST, POLYNOMIAL, LAZY, BLOCK_M, BLOCK_N)  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work: WorkShape,
    config: AttentionConfig,
    work_list: WorkList | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `specdec_kernels.attention.paged_attention`, which has checked the arguments."""
    return _attention(q, kv, metadata, scales, work, config, work_list, None, out)


def paged_attention_with_lse(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work: WorkShape,
    config: AttentionConfig,
    work_list: WorkList | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.attention.paged_attention_with_lse`, which has checked the arguments."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return _attention(q, kv, metadata, scales, work, config, work_list, lse), lse


def _attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work: WorkShape,
    config: AttentionConfig,
    work_list: WorkList | None,
    lse: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel and, where keys are split, the merge; writes `lse` and `out` if they are given."""
    if q.dtype == torch.float64:
        raise ValueError("q: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    head_dim, page_size = q.shape[3], kv.shape[2]
    out = torch.empty_like(q) if out is None else out
    along_paths = work.fixed_cut and metadata.mode == "tree"
    split = work.num_splits > 1 or along_paths
    parts = (work.batch * work.num_splits, *q.shape[1:3])
    # Rounded as the result itself is: float32 would double the bytes that partial results write and read.
    part = q.new_empty((*parts, head_dim)) if split else out
    part_lse = q.new_empty(parts, dtype=torch.float32) if split else lse
    state = TreeState.empty(q) if along_paths else None
    factors = _factors(metadata, scales, config.fp8_code(kv.dtype))
    per_head = (scales.sinks, _per_head(scales.k_scale), _per_head(scales.v_scale))
    if _in_groups(q, kv, metadata, per_head, work, config):
        launch_in_groups(q, kv, metadata, per_head, part, part_lse, work, work_list, factors, config)
    else:
        _launch(q, kv, metadata, per_head, part, part_lse, state, work, work_list, factors, config)
    if state is not None:
        launch_tree(
            *(q, _as_argument(kv), metadata, part, part_lse, state, out, lse, work, work_list, config),
            per_head,
            factors,
            _tile_of(config, head_dim, page_size, kv.dtype),
        )
    elif split:
        merge(part, part_lse, metadata, scales.sinks, out, lse, work, work_list)
    return out


def _in_groups(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    per_head: tuple[torch.Tensor | None, ...],
    work: WorkShape,
    config: AttentionConfig,
) -> bool:
    """Whether `kernel_hopper` computes the call."""
    absent = (metadata.window, metadata.soft_cap)
    if kv.dtype != torch.float8_e4m3fn:
        absent += per_head[1:]
    of_types = q.dtype.itemsize == 2 and kv.dtype in (q.dtype, torch.float8_e4m3fn)
    plain = of_types and all(each is None for each in absent)
    return config.groups and plain and not work.fixed_cut and (kv.dtype.itemsize, work.block_m) in GROUPED_ROWS


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    per_head: tuple[torch.Tensor | None, ...],
    part: torch.Tensor,
    part_lse: torch.Tensor | None,
    state: TreeState | None,
    work: WorkShape,
    work_list: WorkList | None,
    factors: tuple[float, float, float | None],
    config: AttentionConfig,
) -> None:
    """Write `part` and `part_lse`, the partial results or, without splits, the results."""
    heads, head_dim = q.shape[2:]
    _, num_pages, page_size, kv_heads, _ = kv.shape
    along_paths, windowed = state is not None, metadata.window is not None
    launch(
        _attention_kernel,
        (work.programs(kv_heads, work_list is not None, config.resident_programs),),
        *(q, _as_argument(kv), metadata.page_table, metadata.lengths, metadata.q_lens),
        *((None, None) if along_paths else (metadata.mask, metadata.depths if windowed else None)),
        metadata.row_depths if windowed else None,
        *per_head,
        *((None, None, None) if work_list is None else work_list[:3]),
        *(part, part_lse, *(state or (None, None))),
        *(work.num_nodes, num_pages, work.num_splits, *work.cut, metadata.page_table.stride(0)),
        *factors,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        H_KV=kv_heads,
        GROUP=heads // kv_heads,
        MODE=MODE_CODES["paths" if along_paths else metadata.mode],
        WORDS=0 if metadata.mask is None or along_paths else metadata.mask.shape[2],
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1 or along_paths,
        FIXED=work.fixed_cut,
        IN_ORDER=work.in_order,
        # Products in another order would not have the bits of the nodes' own text, see `kernel_tree`.
        KEYS_FIRST=config.keys_first and config.fp8_code(kv.dtype) != 0 and not work.fixed_cut,
        BLOCK_M=config.block_m,
        OVERLAP=config.overlap,
        **_tile_of(config, head_dim, page_size, kv.dtype),
        **overlapped(config.overlap),
    )


def _tile_of(config: AttentionConfig, head_dim: int, page_size: int, kv_dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments of both kernels that read keys."""
    return dict(
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        PAGE=page_size,
        FP8=config.fp8_code(kv_dtype),
        POLYNOMIAL=config.polynomial_exp2,
        LAZY=config.lazy_rescale,
        BLOCK_N=config.block_n,
    )


def _factors(metadata: AttentionMetadata, scales: LayerScales, fp8: int) -> tuple[float, float, float | None]:
    """score_scale, value_scale and soft_cap of the kernel."""
    assert metadata.scale is not None
    stored = FP8_BITS_SCALE if fp8 == 2 else 1.0
    score_scale = metadata.scale * stored * (scales.k_scale if isinstance(scales.k_scale, float) else 1.0)
    value_scale = stored * (scales.v_scale if isinstance(scales.v_scale, float) else 1.0)
    if metadata.soft_cap is None:
        return score_scale * LOG2_E, value_scale, None
    return score_scale / metadata.soft_cap, value_scale, metadata.soft_cap * LOG2_E


def _as_argument(kv: torch.Tensor) -> torch.Tensor:
    """An e4m3 pool goes to a chip as bytes, which all of them load; the interpreter reads its type as bytes."""
    if kv.dtype != torch.float8_e4m3fn or current_chip(kv) == "interpreter":
        return kv
    return kv.view(torch.uint8)


def _per_head(scale: float | torch.Tensor) -> torch.Tensor | None:
    return None if isinstance(scale, float) else scale
