"""Device functions of paged attention: which keys a program reads, which rows see them, and the running softmax."""

# ruff: noqa: SIM108, SIM109
from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

CHAIN = tl.constexpr(0)
BLOCK = tl.constexpr(1)
TREE = tl.constexpr(2)
PATHS = tl.constexpr(3)
MODE_CODES = {"chain": 0, "block": 1, "tree": 2, "paths": 3}
FP8_NONE = tl.constexpr(0)
FP8_NATIVE = tl.constexpr(1)
FP8_BITS = tl.constexpr(2)
# Keys and values that FP8_BITS reads are too small by this factor.
FP8_BITS_SCALE = 256.0
LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))
_LOG2_E = tl.constexpr(LOG2_E)


class Splits(NamedTuple):
    """Run-time sizes of a call that say how the keys of a request are split, see `types.WorkShape`."""

    num_nodes: Any
    num_slots: Any
    split_tokens: Any
    first_splits: Any
    longest_split: Any
    max_splits: Any
    max_length: Any
    window: Any  # or None


class Static(NamedTuple):
    """Compile-time description of a kernel: shapes, variant and tile."""

    D: Any  # of a head
    BLOCK_D: Any  # D, padded to a power of two
    H_KV: Any
    GROUP: Any  # query heads of a KV head
    PAGE: Any  # tokens
    MODE: Any  # one of MODE_CODES
    WORDS: Any  # of a row of the mask
    ALL_SLOTS: Any  # every request has all slots of the tree
    SPLIT: Any  # partial results are merged by another kernel
    FIXED: Any  # splits lie at fixed positions
    FP8: Any  # one of FP8_NONE, FP8_NATIVE, FP8_BITS
    BLOCK_M: Any  # query rows
    BLOCK_N: Any  # keys


class Pool(NamedTuple):
    """Addresses of the keys and values of a request and KV head."""

    key_ptr: Any
    value_ptr: Any  # not `values`, which is an attribute of every tuple in Triton
    table_row: Any  # of the page table


class Tensors(NamedTuple):
    """What an attention kernel reads and writes, besides the pool and the number of work items."""

    q: Any  # [B, N, H, D]
    table: Any  # [B, table_stride] int32
    lengths: Any  # [B] int64
    q_lens: Any  # [B] int32 or None
    mask: Any  # [B, N, ceil(num_slots / 64)] int64, tree only
    depths: Any  # [B, num_slots] int32, tree with a window only
    row_depths: Any  # [B, N] int32, tree with a window only
    sinks: Any  # [H] float32 or None
    k_scale: Any  # [H_KV] float32 or None
    v_scale: Any  # [H_KV] float32 or None
    items: Any  # [capacity, 3] int32 of a tile schedule or None
    offsets: Any  # [B + 1] int32 of a tile schedule or None: `num_splits` partial results per request
    out: Any  # [B, N, H, D], with SPLIT [partial results, N, H, D]
    lse: Any  # [B, N, H] float32 natural or None, with SPLIT [partial results, N, H] base 2
    state: Any  # [B, N, H, D] float32 with PATHS, see `kernel_tree`
    sums: Any  # [B, N, H, 2] float32 with PATHS


class Call(NamedTuple):
    """The run-time arguments of an attention kernel, see `kernel._attention_kernel`."""

    of: Any  # Tensors
    kv: Any
    num_items: Any
    splits: Any  # Splits
    num_pages: Any
    num_splits: Any
    table_stride: Any
    score_scale: Any
    value_scale: Any
    soft_cap: Any


class View(NamedTuple):
    """Which keys the rows of a tile see."""

    mask_row: Any  # words of the request, tree only
    depths_row: Any  # depths of the slots of the request, tree with a window only
    row_position: Any  # [BLOCK_M], for the window
    nodes: Any  # [BLOCK_M] node of each row
    length: Any
    used: Any  # rows in use
    window: Any


RUN_TIME_SIZES = [*Splits._fields, "num_pages", "num_splits", "table_stride"]
"""Run-time arguments of the kernels that vary from call to call: no kernel is specialised on them."""


@triton.jit
def used_rows(q_lens_ptr, request, num_nodes, valid=True):
    """Query rows in use of `request`, a scalar or a tensor."""
    if q_lens_ptr is None:
        return num_nodes
    else:
        return tl.minimum(tl.maximum(tl.load(q_lens_ptr + request, mask=valid, other=0), 0), num_nodes)


@triton.jit
def rows_and_dims(rows_valid, dims, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D or 1] mask of the entries that exist in memory."""
    if D != BLOCK_D:
        return rows_valid[:, None] & (dims < D)[None, :]
    else:
        return rows_valid[:, None]


@triton.jit
def key_end(length, used, num_slots, max_length, ALL_SLOTS: tl.constexpr):
    """Position past the last key of a request, 0 for a request without rows."""
    if ALL_SLOTS:
        end = tl.minimum(length + num_slots, max_length)
    else:
        end = tl.minimum(length + used, max_length)
    return tl.where(used > 0, end, 0)


@triton.jit
def _floor_log2(x):
    """floor(log2) of an integer from 1 to 2^24, read from the exponent of a float32."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def fixed_split_of(position, split_tokens, first_splits):
    """Index of the split that holds `position`, where splits lie at fixed positions: `first_splits` of `split_tokens`
    keys, from there to four times the position splits of twice the length, and so on."""
    reach = split_tokens * first_splits
    step = _floor_log2(tl.maximum(position // reach, 1)) // 2
    before = first_splits + first_splits * 3 // 2 * ((1 << step) - 1)
    long = before + (position - (reach << (2 * step))) // (split_tokens << (step + 1))
    return tl.where(position < reach, position // split_tokens, long)


@triton.jit
def fixed_split_begin(index, split_tokens, first_splits):
    """First position of split `index`, see `fixed_split_of`."""
    behind = index - first_splits
    step = _floor_log2(tl.maximum(behind, 0) // (first_splits * 3 // 2) + 1)
    within = behind - first_splits * 3 // 2 * ((1 << step) - 1)
    long = (split_tokens * first_splits << (2 * step)) + within * (split_tokens << (step + 1))
    return tl.where(behind < 0, index * split_tokens, long)


@triton.jit
def split_layout(length, end, splits, FIXED: tl.constexpr):
    """(keys per split, first key, index of the first split, number of splits) of a request, scalars or tensors.

    The keys that a row may see are divided into equal splits: `first_splits`, or fewer of `split_tokens` keys, or a
    multiple of `first_splits` such that a split has about `longest_split` keys, as far as `max_splits` allows, in
    eighths of `split_tokens`. FIXED splits depend on positions alone, see `fixed_split_of`; their length is given as 0.
    """
    lowest = end * 0
    if splits.window is not None:
        lowest = tl.maximum(length - splits.window + 1, 0)
    if FIXED:
        first = fixed_split_of(lowest, splits.split_tokens, splits.first_splits)
        last = fixed_split_of(tl.maximum(end - 1, 0), splits.split_tokens, splits.first_splits)
        return end * 0, end * 0, first, tl.where(end > 0, last - first + 1, 0)
    unit = splits.split_tokens // 8
    begin = lowest // unit * unit
    span = tl.maximum(end - begin, 0)
    shortest = (span + splits.split_tokens - 1) // splits.split_tokens
    # To the nearest number: lengths just above a power of two, of a prompt and its draft, have the splits of the power.
    rounds = (span // splits.first_splits + splits.longest_split // 2) // splits.longest_split
    rounds = tl.maximum(tl.minimum(rounds, splits.max_splits // splits.first_splits), 1)
    wanted = tl.minimum(tl.minimum(shortest, rounds * splits.first_splits), splits.max_splits)
    tokens = (span + tl.maximum(wanted, 1) - 1) // tl.maximum(wanted, 1)
    tokens = tl.maximum((tokens + unit - 1) // unit, 1) * unit
    return tokens, begin, end * 0, (span + tokens - 1) // tokens


@triton.jit
def item_of(work, call, STATIC: tl.constexpr):
    """(request, tile of query rows, split of the keys, place of the partial result) of a work item: an entry of the
    tile schedule or, without one, a program of the grid."""
    if call.of.items is None:
        num_tiles = (call.splits.num_nodes * STATIC.GROUP + STATIC.BLOCK_M - 1) // STATIC.BLOCK_M
        index = work // STATIC.H_KV
        # The last tile of a causal prefill has the most keys, so it starts first.
        tile = num_tiles - 1 - index % num_tiles
        split = index // num_tiles % call.num_splits
        request = (index // num_tiles // call.num_splits).to(tl.int64)
        part = request * call.num_splits + split
    else:
        entry = call.of.items + work // STATIC.H_KV * 3
        request = tl.load(entry).to(tl.int64)
        tile = tl.load(entry + 1)
        split = tl.load(entry + 2)
        part = (tl.load(call.of.offsets + request) + split).to(tl.int64)
    return request, tile, split, part


@triton.jit
def split_range(
    lengths_ptr, q_lens_ptr, request, split, splits, SPLIT: tl.constexpr, ALL_SLOTS: tl.constexpr, FIXED: tl.constexpr
):
    """(first key, past the last key, number of splits) of a request's split; zeros and one where keys are not split."""
    if SPLIT:
        length = tl.load(lengths_ptr + request).to(tl.int32)
        used = used_rows(q_lens_ptr, request, splits.num_nodes)
        end = key_end(length, used, splits.num_slots, splits.max_length, ALL_SLOTS)
        tokens, begin, first, live = split_layout(length, end, splits, FIXED)
        if FIXED:
            split_begin = fixed_split_begin(first + split, splits.split_tokens, splits.first_splits)
            split_end = fixed_split_begin(first + split + 1, splits.split_tokens, splits.first_splits)
            split_end = tl.minimum(split_end, end)
        else:
            split_begin = begin + split * tokens
            split_end = tl.minimum(split_begin + tokens, end)
        return split_begin, split_end, live
    else:
        return 0, 0, 1


@triton.jit
def tile_key_range(length, used, end, first_node, last_node, MODE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(position past the last key that a row of the tile sees, position past the keys that the mode lets all rows
    see)."""
    if MODE == CHAIN:
        tile_end = tl.minimum(end, length + last_node + 1)
        free_end = length + first_node + 1
    elif MODE == BLOCK:
        tile_end = end
        free_end = end
    elif MODE == PATHS:
        # Whole tiles of the prefix: what follows is another text for every node.
        tile_end = tl.minimum(end, length // BLOCK_N * BLOCK_N)
        free_end = tile_end
    else:
        tile_end = end
        free_end = length
    tile_end = tl.where(first_node < used, tile_end, 0)
    return tile_end, tl.minimum(free_end, tile_end)


@triton.jit
def row_positions(row_depths_ptr, length, nodes, used, MODE: tl.constexpr):
    """[BLOCK_M] position of each query row for the sliding window, by depth in a tree; past `used` that of another
    row."""
    if MODE == TREE or MODE == PATHS:
        depth = tl.load(row_depths_ptr + nodes, mask=nodes < used, other=-1)
        deepest = tl.max(depth, 0)
        return length + tl.where(depth < 0, deepest, depth)
    else:
        return length + tl.minimum(nodes, used - 1)


@triton.jit
def key_positions(depths_ptr, positions, length, end, MODE: tl.constexpr):
    """[BLOCK_N] position of each key for the sliding window: a draft slot of a tree is at its depth."""
    if MODE == TREE:
        drafted = (positions >= length) & (positions < end)
        depth = tl.load(depths_ptr + (positions - length), mask=drafted, other=0)
        return tl.where(drafted, length + depth, positions)
    else:
        return positions


@triton.jit
def visible(
    mask_ptr,  # [N, ceil(M / 64)] int64 words of this request, tree only
    positions,  # [BLOCK_N]
    end,
    length,
    nodes,  # [BLOCK_M] node of each row
    used,
    MODE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """[BLOCK_M or 1, BLOCK_N]: which positions below `end` each row sees by its mode; undefined for rows past
    `used`."""
    if MODE == CHAIN:
        return positions[None, :] <= tl.minimum(length + nodes, end - 1)[:, None]
    elif MODE == BLOCK or MODE == PATHS:
        return (positions < end)[None, :]
    else:
        slot = positions - length
        row_words = mask_ptr + nodes.to(tl.int64) * WORDS
        seen = ((slot < 0) & (positions < end))[None, :]
        # One word of a row at a time, because a gather per element needs a 64-bit register for each.
        for word in tl.static_range(WORDS):
            bits = tl.load(row_words + word, mask=nodes < used, other=0)[:, None]
            here = (slot >= word * 64) & (slot < (word + 1) * 64) & (positions < end)
            shift = tl.where(here, slot - word * 64, 0).to(tl.int64)
            seen = seen | (here[None, :] & (((bits >> shift[None, :]) & 1) != 0))
        return seen


@triton.jit
def window_begin(row_position, begin, free_end, window, BLOCK_N: tl.constexpr):
    """(first key to read, whole tiles after `begin`; first key that is in the windows of all rows)."""
    # Slots of a tree are stored before their positions where slot 0 is below the root, so none of them is left out.
    lowest = tl.minimum(tl.min(row_position, 0) - window + 1, free_end)
    return begin + tl.maximum(lowest - begin, 0) // BLOCK_N * BLOCK_N, tl.max(row_position, 0) - window + 1


@triton.jit
def visible_in_window(view, positions, end, MODE: tl.constexpr, WORDS: tl.constexpr):
    """As `visible`, and in the window of the row if there is one."""
    seen = visible(view.mask_row, positions, end, view.length, view.nodes, view.used, MODE, WORDS)
    if view.window is not None:
        key_position = key_positions(view.depths_row, positions, view.length, end, MODE)
        seen = seen & (view.row_position[:, None] - key_position[None, :] < view.window)
    return seen


@triton.jit
def page_ids(table_ptr, positions, end, PAGE: tl.constexpr):
    """Page number of each position, 0 from `end` on."""
    return tl.load(table_ptr + positions // PAGE, mask=positions < end, other=0)


@triton.jit
def pool_of(kv_ptr, table_row, kv_head, num_pages, PAGE: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr):
    """The `Pool` of a KV head, for the request of `table_row`."""
    key_ptr = kv_ptr + kv_head * D
    return Pool(key_ptr, key_ptr + num_pages.to(tl.int64) * (PAGE * H_KV * D), table_row)


@triton.jit
def widen(stored, like, FP8: tl.constexpr):
    """Keys or values in the type of `like`; FP8 pools come as bytes.

    FP8_NATIVE is for chips that convert two codes to float16 at once; `like` is not bfloat16, see `half_queries`.
    FP8_BITS moves the bits of e4m3 into a float16 of 1 / 256 the value, which is exact for every finite code.
    """
    if FP8 == FP8_NATIVE:
        return stored.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    elif FP8 == FP8_BITS:
        code = stored.to(tl.uint8, bitcast=True).to(tl.uint16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(like.dtype)
    else:
        return stored


@triton.jit
def _half_factors(largest):
    """Powers of two [M] for rows whose largest number is `largest`: to multiply queries by, and to undo it."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    # Exponents as float32 stores them; the bounds keep both powers of two normal numbers.
    exponent = tl.minimum(tl.maximum(exponent, 8), 254)
    shrink, grow = (261 - exponent) << 23, (exponent - 7) << 23
    return shrink.to(tl.float32, bitcast=True), grow.to(tl.float32, bitcast=True)


@triton.jit
def half_queries_in_halves(q, more, FP8: tl.constexpr):
    """`half_queries` of rows whose columns are in `q` and in `more`: (both halves, factor)."""
    if FP8 == FP8_NATIVE and q.dtype == tl.bfloat16:
        wide, more_wide = q.to(tl.float32), more.to(tl.float32)
        shrink, grow = _half_factors(tl.maximum(tl.max(tl.abs(wide), 1), tl.max(tl.abs(more_wide), 1)))
        return (wide * shrink[:, None]).to(tl.float16), (more_wide * shrink[:, None]).to(tl.float16), grow
    else:
        return q, more, tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def half_queries(q, FP8: tl.constexpr):
    """(queries [M, D] for the product with widened keys, factor [M] of their scores).

    FP8_NATIVE multiplies in float16. A bfloat16 row is multiplied by a power of two that brings its largest number to
    [2^7, 2^8), so that a number down to 2^-24 of the largest keeps all bits, and a smaller one loses 2^-32 of it at
    most.
    """
    if FP8 == FP8_NATIVE and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        shrink, grow = _half_factors(tl.max(tl.abs(wide), 1))
        return (wide * shrink[:, None]).to(tl.float16), grow
    else:
        return q, tl.full([q.shape[0]], 1.0, tl.float32)


@triton.jit
def tanh(x):
    """Hyperbolic tangent from exp2, because the interpreter has no libdevice; the series where 1 - 2 / (e^2x + 1)
    cancels."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2_E)) + 1.0))


@triton.jit
def finite_or_zero(top):
    """`top` as a subtrahend: an exponent of -inf - -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def softmax_step(scores, factor, top, total, acc):
    """Fold a tile of scores [M, N], in base 2 once multiplied by `factor` [M] > 0, into the running maximum `top` [M],
    sum `total` [M] and output `acc` [M, D]: (weights, top, total, acc)."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    decay = tl.exp2(top - finite_or_zero(new_top))
    acc = acc * decay[:, None]
    weights = tl.exp2(tl.fma(scores, factor[:, None], -finite_or_zero(new_top)[:, None]))
    total = tl.fma(total, decay, tl.sum(weights, 1))
    return weights, new_top, total, acc


@triton.jit
def capped(scores, score_scale, soft_cap):
    """(scores [M, N] after the soft cap, if there is one; the factor [M] that brings them to base 2)."""
    factor = score_scale
    if soft_cap is not None:
        scores = tanh(scores * score_scale[:, None])
        factor = score_scale * 0.0 + soft_cap
    return scores, factor


@triton.jit
def log2_sum(top, total):
    """log2(2^top * total), -inf for an empty sum."""
    return tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))


@triton.jit
def fold_part(acc, top, total, part, lse):
    """Add a partial result, rows [M, D] with their log-sum-exp `lse` [M], to the sums of `softmax_step`. Products and
    sums are written as they are to be fused, so that no compiler decides it."""
    new_top = tl.maximum(top, lse)
    decay = tl.exp2(top - finite_or_zero(new_top))
    weight = tl.exp2(lse - finite_or_zero(new_top))
    acc = tl.fma(part, weight[:, None], acc * decay[:, None])
    return acc, new_top, tl.fma(total, decay, weight)


@triton.jit
def fold_parts(acc, top, total, parts, lses):
    """As `fold_part`, of several at once and in fewer instructions. The bits depend on which ones are together."""
    new_top = top
    for place in tl.static_range(len(lses)):
        new_top = tl.maximum(new_top, lses[place])
    decay = tl.exp2(top - finite_or_zero(new_top))
    acc, total = acc * decay[:, None], total * decay
    for place in tl.static_range(len(lses)):
        weight = tl.exp2(lses[place] - finite_or_zero(new_top))
        acc = tl.fma(parts[place].to(tl.float32), weight[:, None], acc)
        total += weight
    return acc, new_top, total


@triton.jit
def fold_sink(acc, top, total, sink):
    """Add a key of score `sink` (base 2) without a value to the sums of `softmax_step`."""
    new_top = tl.maximum(top, sink)
    decay = tl.exp2(top - finite_or_zero(new_top))
    return acc * decay[:, None], new_top, total * decay + tl.exp2(sink - finite_or_zero(new_top))


@triton.jit
def inverse_or_zero(total):
    """1 / total, 0 for an empty sum."""
    return tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
