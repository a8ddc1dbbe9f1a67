"""Latent attention on chips with warp-group products (sm90), in Gluon: latents of 512 and rotated keys of 64 columns.

    program     (request, split of the keys, 64 query rows), rows fastest
    producer    a warp that asks the tensor memory accelerator for tiles of 64 keys, announced in pieces of 128 columns
    computing   two warp groups; group g computes scores and weights of tile g of a pair, and columns 256 g to
                256 g + 255 of the output from both tiles

    group 0     scores 0 | weights 0 | products of tile 0 |            | products of tile 1
    group 1     scores 1             | products of tile 0, weights 1   | products of tile 1

The groups give each other the weights of their tiles and the maxima that they are relative to. Shared memory holds the
queries and one pair: half a tile is copied anew once the group of its columns has multiplied by it, while the others
are still in use. The weights of a tile take the place of its rotated keys, which only its scores need.

Sources: FlashMLA (two groups that share one output and two tiles), FlashAttention-3 (arXiv 2407.08608).
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    MODE_CODES,
    Splits,
    finite_or_zero,
    inverse_or_zero,
    key_end,
    log2_sum,
    split_range,
    tile_key_range,
    used_rows,
    visible,
)
from specdec_kernels.attention.device_hopper import WARPS, arrive, arrive_written
from specdec_kernels.attention.types import WorkShape
from specdec_kernels.gluon_copies import request_tensor_copy
from specdec_kernels.launch import launch
from specdec_kernels.mla.types import MlaCall

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
_KEYS = gl.constexpr(64)  # of a tile
_ROWS = gl.constexpr(64)
_PIECE = gl.constexpr(128)  # columns
_HALF = gl.constexpr(256)  # columns of a computing group
_PANEL = gl.constexpr(64)  # columns of a copy
_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_SHORT_COPY = 16  # keys, where pages do not hold whole tiles
# Registers of a thread: before they are shared out, in the second computing group, and in the producer. The first
# computing group has what is left.
_SETTINGS = dict(maxnreg=168, COMPUTING=216, COPYING=56)


class Call(NamedTuple):
    """The arguments of a program, and its keys."""

    cache: Any  # descriptor
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
    tiles: Any  # 0 for a split that the request does not have
    length: Any
    used: Any  # nodes in use


class Shared(NamedTuple):
    """Shared memory of a program and its barriers. Latents and rotated keys are panels of 64 columns, each the copies
    of a tile one after the other."""

    queries: Any  # [8 panels, 64, 64]
    q_rope: Any  # [1, 64, 64]
    latents: Any  # [2 tiles x 8 panels x copies, COPY, 64]
    ropes: Any  # [2 tiles x copies, COPY, 64]: rotated keys of a tile, then its weights
    tops: Any  # [2, 64]: maxima of the rows up to a tile
    totals: Any  # [2, 64]: sums of the weights of a group
    full: Any  # [8] pieces are there
    empty: Any  # [4] halves of the tiles may be copied anew
    loaded: Any  # [1] queries are there
    weights: Any  # [2] a tile's weights and maxima are there
    done: Any  # [2] a group's totals are there


@gluon.jit
def _view(panels, COUNT: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr):
    """Panels as `COUNT` parts of `LINES` lines and `COLUMNS` columns."""
    return panels._reinterpret(panels.dtype, [COUNT, LINES, COLUMNS], _LAYOUT)


@gluon.jit
def _copy_queries(q_latent, q_rope, shared, first_row):
    """Ask for 64 rows, of which the last may be another request's."""
    mbarrier.expect(shared.loaded.index(0), _ROWS * (LATENT + ROPE) * 2)
    for panel in gl.static_range(8):
        place = shared.queries.index(panel)
        request_tensor_copy(q_latent, [first_row, panel * _PANEL], shared.loaded.index(0), place)
    request_tensor_copy(q_rope, [first_row, 0], shared.loaded.index(0), shared.q_rope.index(0))


@gluon.jit
def _rows_of_copies(call, start, PAGE: gl.constexpr, COPY: gl.constexpr):
    """Row of the pool at which each copy of the tile at `start` begins; 0 from the last key on."""
    rows = ()
    for key in gl.static_range(0, _KEYS, COPY):
        position = start + key
        page = gl.load(call.table_row + position // PAGE, mask=position < call.stop, other=0)
        rows += (page * PAGE + position % PAGE,)
    return rows


@gluon.jit
def _copy_panel(call, rows, column, panels, panel, barrier):
    """Ask for 64 columns of a tile."""
    for place in gl.static_range(len(rows)):
        request_tensor_copy(call.cache, [rows[place], column], barrier, panels.index(panel * len(rows) + place))


@gluon.jit
def _copy_tiles(call, shared, PAGE: gl.constexpr, COPY: gl.constexpr):
    """The producer. Copies arrive at the barrier of their piece as they end. Rotated keys come last of a tile: by then
    the other group has multiplied by the weights in their place."""
    rows = _rows_of_copies(call, call.begin, PAGE, COPY)
    for tile in range(call.tiles):
        buffer, phase = tile % 2, 1 - tile // 2 % 2
        for piece in gl.static_range(4):
            if piece % 2 == 0:
                mbarrier.wait(shared.empty.index(2 * buffer + piece // 2), phase)
            barrier = shared.full.index(4 * buffer + piece)
            mbarrier.expect(barrier, (_PIECE + (ROPE if piece == 3 else 0)) * _KEYS * 2)
            for panel in gl.static_range(2 * piece, 2 * piece + 2):
                _copy_panel(call, rows, panel * _PANEL, shared.latents, 8 * buffer + panel, barrier)
            if piece == 3:
                _copy_panel(call, rows, LATENT, shared.ropes, buffer, barrier)
        rows = _rows_of_copies(call, call.begin + (tile + 1) * _KEYS, PAGE, COPY)


@gluon.jit
def _clear(shared, count, G: gl.constexpr):
    """Zero the latents of the group's tile from key `count` on: a weight of 0 does not hide NaN."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    halves = _view(shared.latents, 4, _KEYS, _HALF)
    keys = gl.arange(0, 16, gl.SliceLayout(1, LOAD))
    for first in gl.static_range(0, _KEYS, 16):
        if first + 16 > count:
            kept = (first + keys < count)[:, None]
            for half in gl.static_range(2):
                part = halves.index(2 * G + half).slice(first, 16)
                part.store(gl.where(kept, part.load(LOAD), 0.0))


@gluon.jit
def _scores(call, shared, zeros, pair, nodes, MODE: gl.constexpr, WORDS: gl.constexpr, G: gl.constexpr):
    """Of the group's own tile of a pair, -inf for keys that a row does not see; and the maxima of the rows."""
    first = pair >> 30  # 0, which the compiler does not know
    scores = zeros
    pieces, queries = _view(shared.latents, 8, _KEYS, _PIECE), _view(shared.queries, 4, _ROWS, _PIECE)
    for piece in gl.static_range(4):
        mbarrier.wait(shared.full.index(4 * G + piece), pair % 2)
        keys = pieces.index(first + 4 * G + piece).permute((1, 0))
        scores = warpgroup_mma(queries.index(first + piece), keys, scores, use_acc=piece > 0, is_async=True)
    rope = _view(shared.ropes, 2, _KEYS, ROPE).index(first + G).permute((1, 0))
    scores = warpgroup_mma(shared.q_rope.index(first), rope, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    start = call.begin + (2 * pair + G) * _KEYS
    if start + _KEYS > call.free_end:
        columns = start + gl.arange(0, _KEYS, gl.SliceLayout(0, scores.type.layout))
        seen = visible(call.mask_row, columns, call.stop, call.length, nodes, call.used, MODE, WORDS)
        scores = gl.where(seen, scores, float("-inf"))
        if start + _KEYS > call.stop:
            _clear(shared, call.stop - start, G)
    return scores, gl.max(scores, 1)


@gluon.jit
def _give_weights(call, shared, scores, highest, top, total, G: gl.constexpr):
    """Weights of the group's tile and the maxima that they are relative to, for the other group: (weights as an
    operand, maxima, totals)."""
    after = gl.maximum(top, highest * call.factor)
    shared.tops.index(G).store(after)
    weights = gl.exp2(scores * call.factor - finite_or_zero(after)[:, None])
    narrow = weights.to(shared.ropes.dtype)
    _view(shared.ropes, 2, _ROWS, _KEYS).index(G).store(narrow)
    arrive_written(shared.weights.index(G))
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _HALF, 16])
    total = total * gl.exp2(top - finite_or_zero(after)) + gl.sum(weights, 1)
    return gl.convert_layout(narrow, gl.DotOperandLayout(0, SUMS, 2)), after, total


@gluon.jit
def _add_product(shared, sums, weights, before, after, HALF: gl.constexpr):
    """Begin to add the product of a half, to the sums scaled from the maxima `before` to those `after`."""
    LINES: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    decay = gl.convert_layout(gl.exp2(before - finite_or_zero(after)), LINES)[:, None]
    return warpgroup_mma(weights, _view(shared.latents, 4, _KEYS, _HALF).index(HALF), sums * decay, is_async=True)


@gluon.jit
def _finished(shared, sums, HALF: gl.constexpr):
    """The sums, once the half may be overwritten."""
    sums = warpgroup_mma_wait(0, deps=[sums])
    arrive(shared.empty.index(HALF))
    return sums


@gluon.jit
def _add_other(shared, sums, top, total, pair, G: gl.constexpr):
    """Begin to add the other group's tile of a pair, whose maxima follow those `top`: (sums, maxima, totals)."""
    mbarrier.wait(shared.weights.index(1 - G), pair % 2)
    after = shared.tops.index(1 - G).load(top.type.layout)
    sums = _add_product(shared, sums, _view(shared.ropes, 2, _ROWS, _KEYS).index(1 - G), top, after, 2 - G)
    return sums, after, total * gl.exp2(top - finite_or_zero(after))


@gluon.jit
def _attend(call, shared, HEADS: gl.constexpr, MODE: gl.constexpr, WORDS: gl.constexpr, SPLIT: gl.constexpr,
            G: gl.constexpr):  # fmt: skip
    """Computing group G. Group 0 scales its sums to the maxima up to the first tile of a pair, then up to the second;
    group 1, which knows both, adds the products of the first tile while it computes weights of the second."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _HALF, 16])
    LINES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OWN: gl.constexpr = 3 * G  # half of the group's columns in its own tile
    OTHER: gl.constexpr = 2 - G  # and in the other group's
    zeros = gl.full([_ROWS, _KEYS], 0.0, gl.float32, SCORES)
    nodes = (call.tile * _ROWS + gl.arange(0, _ROWS, LINES)) // HEADS
    top = gl.full([_ROWS], float("-inf"), gl.float32, LINES)
    total = gl.full([_ROWS], 0.0, gl.float32, LINES)
    sums = gl.full([_ROWS, _HALF], 0.0, gl.float32, SUMS)
    mbarrier.wait(shared.loaded.index(0), 0)  # even if there is nothing to do: no copy may outlive the program
    if call.tiles > 0:
        for pair in range(call.tiles // 2):
            scores, highest = _scores(call, shared, zeros, pair, nodes, MODE, WORDS, G)
            if G == 0:
                weights, after, total = _give_weights(call, shared, scores, highest, top, total, G)
                sums = _add_product(shared, sums, weights, top, after, OWN)
                sums = _finished(shared, sums, OWN)
                sums, top, total = _add_other(shared, sums, after, total, pair, G)
                sums = _finished(shared, sums, OTHER)
            else:
                sums, after, total = _add_other(shared, sums, top, total, pair, G)
                weights, top, total = _give_weights(call, shared, scores, highest, after, total, G)
                sums = _finished(shared, sums, OTHER)
                sums = _add_product(shared, sums, weights, after, top, OWN)
                sums = _finished(shared, sums, OWN)
        if call.tiles % 2 == 1:
            pair = call.tiles // 2
            if G == 0:
                scores, highest = _scores(call, shared, zeros, pair, nodes, MODE, WORDS, G)
                weights, after, total = _give_weights(call, shared, scores, highest, top, total, G)
                sums = _add_product(shared, sums, weights, top, after, OWN)
                sums = _finished(shared, sums, OWN)
            else:
                sums, after, total = _add_other(shared, sums, top, total, pair, G)
                sums = _finished(shared, sums, OTHER)
            top = after
        tl.extra.cuda.gdc_launch_dependents()
        total += _exchanged(shared, total, G)
        _write(call, shared, sums, top, total, HEADS, SPLIT, G)


@gluon.jit
def _exchanged(shared, values, G: gl.constexpr):
    """The other group's values [64]."""
    shared.totals.index(G).store(values)
    arrive(shared.done.index(G))
    mbarrier.wait(shared.done.index(1 - G), 0)
    return shared.totals.index(1 - G).load(values.type.layout)


@gluon.jit
def _write(call, shared, sums, top, total, HEADS: gl.constexpr, SPLIT: gl.constexpr, G: gl.constexpr):
    """Store the group's columns, and group 0 the log-sum-exps. The columns go through its own half, so that threads
    store 16 bytes each."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    live = (call.tile * _ROWS + gl.arange(0, _ROWS, top.type.layout)) // HEADS < call.used
    total = gl.where(live, total, 0.0)
    inverse = gl.convert_layout(inverse_or_zero(total), gl.SliceLayout(1, sums.type.layout))[:, None]
    half = _view(shared.latents, 4, _ROWS, _HALF).index(3 * G)
    half.store(gl.where(inverse > 0.0, sums * inverse, 0.0).to(call.out.dtype.element_ty))
    tl.debug_barrier()
    places, written = _places(call, gl.SliceLayout(1, LOAD), HEADS, SPLIT)
    columns = _HALF * G + gl.arange(0, _HALF, gl.SliceLayout(0, LOAD))
    # Partial results are read soon and overwritten by the next call: they need not leave the L2 cache.
    KEPT: gl.constexpr = "evict_last" if SPLIT else ""
    pointers = call.out + places[:, None] * LATENT + columns[None, :]
    gl.store(pointers, half.load(LOAD), mask=written[:, None], eviction_policy=KEPT)
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
def _barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=1)
    return barriers


@gluon.jit
def _allocate(dtype: gl.constexpr, COPY: gl.constexpr):
    COPIES: gl.constexpr = _KEYS // COPY
    shared = Shared(
        gl.allocate_shared_memory(dtype, [8, _ROWS, _PANEL], _LAYOUT),
        gl.allocate_shared_memory(dtype, [1, _ROWS, ROPE], _LAYOUT),
        gl.allocate_shared_memory(dtype, [16 * COPIES, COPY, _PANEL], _LAYOUT),
        gl.allocate_shared_memory(dtype, [2 * COPIES, COPY, _PANEL], _LAYOUT),
        gl.allocate_shared_memory(gl.float32, [2, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        gl.allocate_shared_memory(gl.float32, [2, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0])),
        _barriers(8),
        _barriers(4),
        _barriers(1),
        _barriers(2),
        _barriers(2),
    )
    fence_async_shared()
    tl.debug_barrier()
    return shared


RUN_TIME_SIZES = [*Splits._fields, "num_splits", "table_stride"]


# Many arguments: those of the portable kernel, so that one call describes the work to both.
@gluon.jit(do_not_specialize=RUN_TIME_SIZES)
def _mla_hopper_kernel(
    q_latent,  # descriptor of [B * N * H, 512]
    q_rope,  # descriptor of [B * N * H, 64]
    cache,  # descriptor of [pages * PAGE, 576]
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
    COPY: gl.constexpr,  # keys
    COMPUTING: gl.constexpr,
    COPYING: gl.constexpr,
):
    shared = _allocate(cache.dtype, COPY)
    # The predecessor may have written every input, the lengths included, so nothing is loaded before the wait.
    tl.extra.cuda.gdc_wait()
    tile, split, request = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    first_row = request * num_nodes * HEADS
    # The queries are asked for while the length is on its way.
    length = gl.load(lengths_ptr + request).to(gl.int32)
    _copy_queries(q_latent, q_rope, shared, (first_row + tile * _ROWS).to(gl.int32))
    splits = Splits(num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, window)
    begin, split_end, _ = split_range(lengths_ptr, q_lens_ptr, request, split, splits, SPLIT, ALL_SLOTS, FIXED)
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
    tiles = (gl.maximum(stop - begin, 1) + _KEYS - 1) // _KEYS
    if SPLIT:
        tiles = gl.where(begin < split_end, tiles, 0)
    call = Call(
        cache, table_ptr + request * table_stride, mask_row, out_ptr, lse_ptr, score_scale, first_row, tile, split,
        num_splits, num_nodes, begin, stop, free_end, tiles, length, used,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (call, shared, HEADS, MODE, WORDS, SPLIT, 0)),
            (_attend, (call, shared, HEADS, MODE, WORDS, SPLIT, 1)),
            (_copy_tiles, (call, shared, PAGE, COPY)),
        ],
        [WARPS, 1],
        [COMPUTING, COPYING],
    )


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """All but the last dimension as rows, in copies of `rows` rows and 64 columns."""
    flat = tensor.view(-1, tensor.shape[-1])
    return TensorDescriptor.from_tensor(flat, [rows, _PANEL.value], _LAYOUT.value)


def launch_warp_specialized(call: MlaCall, work: WorkShape, out: Tensor, lse: Tensor | None) -> None:
    """Write `out` and `lse`: the partial results or, without splits, the results."""
    q_latent, q_rope, cache, metadata = call[:4]
    copy = _KEYS.value if cache.shape[1] % _KEYS.value == 0 else _SHORT_COPY
    launch(
        _mla_hopper_kernel,
        (work.row_tiles, work.num_splits, work.batch),
        *(_descriptor(q_latent, _ROWS.value), _descriptor(q_rope, _ROWS.value), _descriptor(cache, copy)),
        *(metadata.page_table, metadata.lengths, metadata.q_lens),
        *(metadata.mask, out, lse),
        *(work.num_nodes, work.num_splits, *work.sizes, metadata.page_table.stride(0), metadata.scale * LOG2_E),
        num_warps=WARPS.value,
        HEADS=work.group,
        PAGE=cache.shape[1],
        COPY=copy,
        MODE=MODE_CODES[metadata.mode],
        WORDS=0 if metadata.mask is None else metadata.mask.shape[2],
        ALL_SLOTS=work.all_slots,
        SPLIT=work.num_splits > 1,
        FIXED=work.fixed_splits,
        **_SETTINGS,
        launch_pdl=True,
    )
