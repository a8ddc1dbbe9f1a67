"""Latent attention on chips with warp-group products (sm90), in Gluon: latents of 512 and rotated keys of 64 columns.

    program     (request, split of the keys, 64 query rows), rows fastest
    producer    a warp group that copies pairs of tiles of 64 keys, in pieces of 128 columns
    computing   two warp groups; group g computes scores and weights of tile g of a pair, and columns 256 g to
                256 g + 255 of the output from both tiles

    group 0     scores 0 | weights 0 | products of tile 0 |            | products of tile 1
    group 1     scores 1             | products of tile 0, weights 1   | products of tile 1

The groups give each other the weights of their tiles and the maxima that they are relative to. Shared memory holds the
queries and one pair: a piece is copied anew once the group of its columns has multiplied by it, while the others are
still in use. The weights of a tile take the place of its rotated keys, which only its scores need.

Sources: FlashMLA (two groups that share one output and two tiles), FlashAttention-3 (arXiv 2407.08608).
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
from specdec_kernels.attention.device_hopper import WARPS, arrive, arrive_written, wait_written
from specdec_kernels.attention.launch_arguments import pdl_options
from specdec_kernels.attention.types import WorkShape
from specdec_kernels.gluon_copies import request_copy
from specdec_kernels.launch import launch
from specdec_kernels.mla.types import MlaCall

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
_KEYS = gl.constexpr(64)  # of a tile
_ROWS = gl.constexpr(64)
_PIECE = gl.constexpr(128)  # columns
# Registers of a thread: before they are shared out, and in a computing group. The producer has what is left.
_SETTINGS = dict(maxnreg=168, COMPUTING=224)


class Call(NamedTuple):
    """The arguments of a program, and its keys."""

    q_latent: Any
    q_rope: Any
    cache: Any
    table_row: Any
    mask_row: Any  # or None
    out: Any
    lse: Any  # or None
    factor: Any
    first_row: Any  # of the request
    tile: Any
    split: Any
    num_splits: Any
    num_nodes: Any
    begin: Any  # first key
    stop: Any  # past the last key
    free_end: Any  # position past the keys that every row sees
    pairs: Any  # of tiles, 0 for a split without keys
    length: Any
    used: Any  # nodes in use


class Shared(NamedTuple):
    """Shared memory of a program and its barriers."""

    queries: Any  # [4, 64, 128]
    q_rope: Any  # [1, 64, 64]
    pieces: Any  # [8, 64, 128]: four of either tile
    ropes: Any  # [2, 64, 64]: rotated keys of a tile, then its weights
    tops: Any  # [2, 64]: maxima of the rows up to a tile
    full: Any  # [8] pieces are there
    empty: Any  # [8] pieces may be copied anew
    loaded: Any  # [1] queries are there
    weights: Any  # [2] a tile's weights and maxima are there
    done: Any  # [4] of the groups, twice, after the last pair


@gluon.jit
def _copy_piece(call, shared, places, stored, dims, phase, PIECE: gl.constexpr):
    mbarrier.wait(shared.empty.index(PIECE), phase)
    pointers = call.cache + PIECE % 4 * _PIECE + places[:, None] + dims[None, :]
    request_copy(shared.pieces.index(PIECE), pointers, mask=stored[:, None])
    if PIECE % 4 == 3:  # the last that is copied of this tile
        columns = LATENT + gl.arange(0, ROPE, gl.SliceLayout(0, pointers.type.layout))
        pointers = call.cache + places[:, None] + columns[None, :]
        request_copy(shared.ropes.index(PIECE // 4), pointers, mask=stored[:, None])
    async_copy.mbarrier_arrive(shared.full.index(PIECE), increment_count=False)  # once the piece is there


@gluon.jit
def _copy_tiles(call, shared, PAGE: gl.constexpr):
    """The producer, in the order in which the groups are done with the pieces. Rotated keys come last of a tile: by
    then the other group has multiplied by the weights in their place."""
    ORDER: gl.constexpr = (0, 2, 1, 3, 4, 6, 5, 7)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    columns = gl.arange(0, _KEYS, gl.SliceLayout(1, LOAD))
    dims = gl.arange(0, _PIECE, gl.SliceLayout(0, LOAD))
    for pair in range(call.pairs):
        first = call.begin + pair * (2 * _KEYS) + columns
        second = first + _KEYS
        pages = page_ids(call.table_row, first, call.stop, PAGE)
        more_pages = page_ids(call.table_row, second, call.stop, PAGE)
        first_places = (pages.to(gl.int64) * PAGE + first % PAGE) * (LATENT + ROPE)
        second_places = (more_pages.to(gl.int64) * PAGE + second % PAGE) * (LATENT + ROPE)
        for index in gl.static_range(8):
            if ORDER[index] < 4:
                _copy_piece(call, shared, first_places, first < call.stop, dims, 1 - pair % 2, ORDER[index])
            else:
                _copy_piece(call, shared, second_places, second < call.stop, dims, 1 - pair % 2, ORDER[index])


@gluon.jit
def _load_queries(call, shared, HEADS: gl.constexpr, G: gl.constexpr):
    """Half of the queries by either group."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows = call.tile * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LOAD))
    live = (rows // HEADS < call.used)[:, None]
    places = (call.first_row + rows)[:, None]
    dims = gl.arange(0, _PIECE, gl.SliceLayout(0, LOAD))[None, :]
    for index in gl.static_range(2):
        piece = gl.load(call.q_latent + places * LATENT + (2 * G + index) * _PIECE + dims, mask=live, other=0.0)
        shared.queries.index(2 * G + index).store(piece)
    if G == 0:
        half = gl.arange(0, ROPE, gl.SliceLayout(0, LOAD))[None, :]
        shared.q_rope.index(0).store(gl.load(call.q_rope + places * ROPE + half, mask=live, other=0.0))
    arrive_written(shared.loaded.index(0))
    mbarrier.wait(shared.loaded.index(0), 0)


@gluon.jit
def _scores(shared, zeros, phase, first, G: gl.constexpr):
    """Of the group's own tile, in the order in which its pieces are copied."""
    ORDER: gl.constexpr = (0, 2, 1, 3)
    scores = zeros
    for index in gl.static_range(4):
        wait_written(shared.full.index(4 * G + ORDER[index]), phase)
        piece = shared.pieces.index(first + 4 * G + ORDER[index]).permute((1, 0))
        queries = shared.queries.index(first + ORDER[index])
        if index == 0:
            scores = warpgroup_mma(queries, piece, zeros, use_acc=False, is_async=True)
        else:
            scores = warpgroup_mma(queries, piece, scores, is_async=True)
    rope = shared.ropes.index(first + G).permute((1, 0))
    scores = warpgroup_mma(shared.q_rope.index(first), rope, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _seen(scores, pair, columns, nodes, call, MODE: gl.constexpr, WORDS: gl.constexpr, G: gl.constexpr):
    """-inf for the keys that a row does not see."""
    start = call.begin + (2 * pair + G) * _KEYS
    if start + _KEYS > call.free_end:
        seen = visible(call.mask_row, start + columns, call.stop, call.length, nodes, call.used, MODE, WORDS)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _give_weights(shared, scores, factor, top, dtype: gl.constexpr, G: gl.constexpr):
    """Weights of the group's tile and the maxima `top` that they are relative to, for the other group: (weights as an
    operand, their sums)."""
    shared.tops.index(G).store(top)
    weights = gl.exp2(scores * factor - finite_or_zero(top)[:, None])
    narrow = weights.to(dtype)
    shared.ropes.index(G).store(narrow)
    arrive_written(shared.weights.index(G))
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _PIECE, 16])
    return gl.convert_layout(narrow, gl.DotOperandLayout(0, SUMS, 2)), gl.sum(weights, 1)


@gluon.jit
def _add_product(sums, weights, shared, before, after, PIECE: gl.constexpr):
    """Begin to add the products of two pieces, to the sums scaled from the maxima `before` to those `after`."""
    acc, more = sums
    LINES: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    decay = gl.convert_layout(gl.exp2(before - finite_or_zero(after)), LINES)[:, None]
    acc = warpgroup_mma(weights, shared.pieces.index(PIECE), acc * decay, is_async=True)
    more = warpgroup_mma(weights, shared.pieces.index(PIECE + 1), more * decay, is_async=True)
    return acc, more


@gluon.jit
def _finished(sums, shared, PIECE: gl.constexpr):
    """The sums, once the two pieces may be overwritten."""
    acc, more = sums
    acc, more = warpgroup_mma_wait(1, deps=[acc, more])
    arrive(shared.empty.index(PIECE))
    acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    arrive(shared.empty.index(PIECE + 1))
    return acc, more


@gluon.jit
def _attend(call, shared, HEADS: gl.constexpr, MODE: gl.constexpr, WORDS: gl.constexpr, SPLIT: gl.constexpr,
            G: gl.constexpr):  # fmt: skip
    """Computing group G. Group 0 scales its sums to the maxima up to the first tile of a pair, then up to the second;
    group 1, which knows both, adds the products of the first tile while it computes weights of the second."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _PIECE, 16])
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OWN: gl.constexpr = 6 * G  # pieces of the group's columns in its own tile
    OTHER: gl.constexpr = 4 - 2 * G  # and in the other group's
    dtype: gl.constexpr = call.q_latent.dtype.element_ty
    columns = gl.arange(0, _KEYS, gl.SliceLayout(0, SCORES))
    zeros = gl.full([_ROWS, _KEYS], 0.0, gl.float32, SCORES)
    nodes = (call.tile * _ROWS + gl.arange(0, _ROWS, LINES)) // HEADS
    top = gl.full([_ROWS], float("-inf"), gl.float32, LINES)
    total = gl.full([_ROWS], 0.0, gl.float32, LINES)
    sums = (gl.full([_ROWS, _PIECE], 0.0, gl.float32, SUMS), gl.full([_ROWS, _PIECE], 0.0, gl.float32, SUMS))
    if call.pairs > 0:
        _load_queries(call, shared, HEADS, G)
        for pair in range(call.pairs):
            phase = pair % 2
            scores = _scores(shared, zeros, phase, pair >> 30, G)
            scores = _seen(scores, pair, columns, nodes, call, MODE, WORDS, G)
            highest = gl.max(scores, 1) * call.factor
            if G == 0:
                between = gl.maximum(top, highest)
                weights, added = _give_weights(shared, scores, call.factor, between, dtype, G)
                sums = _add_product(sums, weights, shared, top, between, OWN)
                total = total * gl.exp2(top - finite_or_zero(between)) + added
                sums = _finished(sums, shared, OWN)
                mbarrier.wait(shared.weights.index(1), phase)
                top = shared.tops.index(1).load(LINES)
                sums = _add_product(sums, shared.ropes.index(1), shared, between, top, OTHER)
                total = total * gl.exp2(between - finite_or_zero(top))
                sums = _finished(sums, shared, OTHER)
            else:
                mbarrier.wait(shared.weights.index(0), phase)
                between = shared.tops.index(0).load(LINES)
                sums = _add_product(sums, shared.ropes.index(0), shared, top, between, OTHER)
                total = total * gl.exp2(top - finite_or_zero(between))
                top = gl.maximum(between, highest)
                weights, added = _give_weights(shared, scores, call.factor, top, dtype, G)
                total = total * gl.exp2(between - finite_or_zero(top)) + added
                sums = _finished(sums, shared, OTHER)
                sums = _add_product(sums, weights, shared, between, top, OWN)
                sums = _finished(sums, shared, OWN)
        total += _exchanged(shared, total, G)
        _write(call, shared, sums, top, total, HEADS, SPLIT, G)


@gluon.jit
def _exchanged(shared, values, G: gl.constexpr):
    """The other group's values [64], for which it has no more use of the maxima."""
    arrive(shared.done.index(G))
    mbarrier.wait(shared.done.index(1 - G), 0)
    shared.tops.index(G).store(values)
    arrive(shared.done.index(2 + G))
    mbarrier.wait(shared.done.index(3 - G), 0)
    return shared.tops.index(1 - G).load(values.type.layout)


@gluon.jit
def _write(call, shared, sums, top, total, HEADS: gl.constexpr, SPLIT: gl.constexpr, G: gl.constexpr):
    """Store the group's columns, and group 0 the log-sum-exps. The columns go through its own pieces, so that threads
    store 16 bytes each."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    SUM_LINES: gl.constexpr = gl.SliceLayout(1, sums[0].type.layout)
    live = (call.tile * _ROWS + gl.arange(0, _ROWS, top.type.layout)) // HEADS < call.used
    total = gl.where(live, total, 0.0)
    inverse = gl.convert_layout(inverse_or_zero(total), SUM_LINES)[:, None]
    kind: gl.constexpr = call.out.dtype.element_ty
    for index in gl.static_range(2):
        shared.pieces.index(6 * G + index).store((sums[index] * inverse).to(kind))
    tl.debug_barrier()
    STORED: gl.constexpr = gl.SliceLayout(1, LOAD)
    places, written = _places(call, STORED, HEADS, SPLIT)
    dims = gl.arange(0, _PIECE, gl.SliceLayout(0, LOAD))
    for index in gl.static_range(2):
        pointers = call.out + places[:, None] * LATENT + (2 * G + index) * _PIECE + dims[None, :]
        gl.store(pointers, shared.pieces.index(6 * G + index).load(LOAD), mask=written[:, None])
    if G == 0:
        if call.lse is not None:
            LINES: gl.constexpr = top.type.layout
            places, written = _places(call, LINES, HEADS, SPLIT)
            lse = log2_sum(top, total)
            if not SPLIT:
                lse *= LN_2
            gl.store(call.lse + places, lse, mask=written)


@gluon.jit
def _places(call, LINES: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr):
    """(row of the output, whether it is written) of each row."""
    rows = call.tile * _ROWS + gl.arange(0, _ROWS, LINES)
    if SPLIT:
        before = call.first_row * call.num_splits + call.split * (call.num_nodes * HEADS)
        return before + rows, rows // HEADS < call.used
    else:
        return call.first_row + rows, rows // HEADS < call.num_nodes


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def _allocate(dtype: gl.constexpr):
    TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    shared = Shared(
        gl.allocate_shared_memory(dtype, [4, _ROWS, _PIECE], TILES),
        gl.allocate_shared_memory(dtype, [1, _ROWS, ROPE], TILES),
        gl.allocate_shared_memory(dtype, [8, _KEYS, _PIECE], TILES),
        gl.allocate_shared_memory(dtype, [2, _KEYS, ROPE], TILES),
        gl.allocate_shared_memory(gl.float32, [2, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        _barriers(8, 32 * WARPS),
        _barriers(8, 1),
        _barriers(1, 2),
        _barriers(2, 1),
        _barriers(4, 1),
    )
    fence_async_shared()
    tl.debug_barrier()
    return shared


RUN_TIME_SIZES = [*Splits._fields, "num_splits", "table_stride"]


# Many arguments: those of the portable kernel, so that one call describes the work to both.
@gluon.jit(do_not_specialize=RUN_TIME_SIZES)
def _mla_hopper_kernel(
    q_latent_ptr,  # [B, N, H, 512]
    q_rope_ptr,  # [B, N, H, 64]
    cache_ptr,  # [pages, PAGE, 576]
    table_ptr,  # [B, table_stride] int32
    lengths_ptr,  # [B] int64
    q_lens_ptr,  # [B] int32 or None
    mask_ptr,  # [B, N, WORDS] int64 or None
    out_ptr,  # [B, N, H, 512], with SPLIT [B, num_splits, N, H, 512]
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
    score_scale,  # to base 2
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    MODE: gl.constexpr,
    WORDS: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    FIXED: gl.constexpr,
    COMPUTING: gl.constexpr,
):
    shared = _allocate(q_latent_ptr.dtype.element_ty)
    # The predecessor may have written every input, the lengths included, so nothing is loaded before the wait.
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    num_tiles = (num_nodes * HEADS + _ROWS - 1) // _ROWS
    tile = gl.program_id(0) % num_tiles
    split = gl.program_id(0) // num_tiles % num_splits
    request = (gl.program_id(0) // num_tiles // num_splits).to(gl.int64)
    splits = Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    begin, split_end, live = split_range(lengths_ptr, q_lens_ptr, request, split, splits, SPLIT, ALL_SLOTS, FIXED)
    length = gl.load(lengths_ptr + request).to(gl.int32)
    used = used_rows(q_lens_ptr, request, num_nodes)
    end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    stop, free_end = tile_key_range(
        length, used, end, tile * _ROWS // HEADS, (tile * _ROWS + _ROWS - 1) // HEADS, MODE, _KEYS
    )
    if SPLIT:
        stop = gl.minimum(stop, split_end)
        free_end = gl.minimum(free_end, stop)
    mask_row = mask_ptr
    if mask_ptr is not None:
        mask_row = mask_ptr + request * num_nodes * WORDS
    # A split of rows that see none of its keys still writes its empty result.
    pairs = gl.where(split < live, (gl.maximum(stop - begin, 1) + 2 * _KEYS - 1) // (2 * _KEYS), 0)
    call = Call(
        q_latent_ptr, q_rope_ptr, cache_ptr, table_ptr + request * table_stride, mask_row, out_ptr, lse_ptr,
        score_scale, request * num_nodes * HEADS, tile, split, num_splits, num_nodes, begin, stop, free_end, pairs,
        length, used,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_copy_tiles, (call, shared, PAGE)),
            (_attend, (call, shared, HEADS, MODE, WORDS, SPLIT, 0)),
            (_attend, (call, shared, HEADS, MODE, WORDS, SPLIT, 1)),
        ],
        [WARPS, WARPS],
        [COMPUTING, COMPUTING],
    )


def launch_warp_specialized(call: MlaCall, work: WorkShape, out: Tensor, lse: Tensor | None) -> None:
    """Write `out` and `lse`: the partial results or, without splits, the results."""
    q_latent, q_rope, cache, metadata = call[:4]
    launch(
        _mla_hopper_kernel,
        (work.programs(1, False, 0),),
        *(q_latent, q_rope, cache, metadata.page_table, metadata.lengths, metadata.q_lens, metadata.mask, out, lse),
        *(work.num_nodes, work.num_splits, *work.sizes, metadata.page_table.stride(0), metadata.scale * LOG2_E),
        num_warps=WARPS.value,
        HEADS=work.group,
        PAGE=cache.shape[1],
        MODE=MODE_CODES[metadata.mode],
        WORDS=0 if metadata.mask is None else metadata.mask.shape[2],
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1,
        FIXED=work.fixed_splits,
        **_SETTINGS,
        **pdl_options(True),
    )
