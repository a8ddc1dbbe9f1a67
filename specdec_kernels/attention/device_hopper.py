"""Shared by the warp groups of `kernel_hopper`: the work items of a program, barriers, and the rows of a group.

A warp group is four warps. Each computing group has 64 query rows; the producer brings keys and values into a ring of
buffers in shared memory. The producer arrives at the barrier `full` of a buffer, the computing groups at `empty`; their
phases follow from the number of buffers that the program has used.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from specdec_kernels.attention import device as d

_LOG2_E = gl.constexpr(d.LOG2_E)
WARPS = gl.constexpr(4)  # of a warp group
GROUP_ROWS = gl.constexpr(64)  # of a computing group
COPY_KEYS = gl.constexpr(16)  # of a page, which one copy brings


class Ring(NamedTuple):
    """Buffers in shared memory and their barriers."""

    k_tiles: Any  # [buffers, keys, D]
    v_tiles: Any  # [buffers, keys, D]
    queries: Any  # [groups, 64, D], or None where queries are in registers
    full: Any
    empty: Any


class WorkItem(NamedTuple):
    """A unit of work: a tile of rows of a request over a split of the keys."""

    exists: Any  # a request may have fewer splits than the grid, and the last round fewer items than programs
    request: Any
    kv_head: Any
    tile: Any
    part: Any  # place of its partial result
    begin: Any  # first key
    stop: Any  # past the last key
    free_begin: Any  # first key that is in the windows of all rows
    free_end: Any  # position past the keys that every row sees
    length: Any
    used: Any  # rows in use


class Rows(NamedTuple):
    """The rows of a computing group."""

    kv_head: Any
    first_row: Any  # of the group, among the packed rows of its request
    own: Any  # first row of the request and KV head in memory


@gluon.jit
def work_count(call, STATIC: gl.constexpr):
    """Work items of the call, each KV head's counted."""
    if call.of.items is None:
        return call.num_items
    else:
        return gl.load(call.num_items) * STATIC.H_KV


@gluon.jit
def work_item(turn, count, call, STATIC: gl.constexpr):
    """The `WorkItem` of the program in a round over `count` of them. Every other round runs backwards: items that get
    shorter from first to last, as a prompt's do, are then shared evenly."""
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    inside = turn * programs + place < count
    work = gl.minimum(turn * programs + place, count - 1)
    ROWS: gl.constexpr = STATIC.BLOCK_M
    GROUP: gl.constexpr = STATIC.GROUP
    splits = call.splits
    request, tile, split, part = d.item_of(work, call, STATIC)
    begin, split_end, live = d.split_range(
        call.of.lengths, call.of.q_lens, request, split, splits, STATIC.SPLIT, STATIC.ALL_SLOTS, STATIC.FIXED
    )
    length = gl.load(call.of.lengths + request).to(gl.int32)
    used = d.used_rows(call.of.q_lens, request, splits.num_nodes)
    end = d.key_end(length, used, splits.num_slots, splits.max_length, STATIC.ALL_SLOTS)
    first_node = tile * ROWS // GROUP
    last_node = (tile * ROWS + ROWS - 1) // GROUP
    stop, free_end = d.tile_key_range(length, used, end, first_node, last_node, STATIC.MODE, STATIC.BLOCK_N)
    if STATIC.SPLIT:
        stop = gl.minimum(stop, split_end)
        free_end = gl.minimum(free_end, stop)
    free_begin = begin
    if splits.window is not None:
        lowest = length + gl.minimum(first_node, used - 1) - splits.window + 1
        free_begin = length + gl.minimum(last_node, used - 1) - splits.window + 1
        # Whole copies after `begin`, see `device_hopper_tma`.
        begin += gl.maximum(lowest - begin, 0) // COPY_KEYS * COPY_KEYS
    exists = inside & (split < live)
    return WorkItem(exists, request, work % STATIC.H_KV, tile, part, begin, stop, free_begin, free_end, length, used)


@gluon.jit
def rows_of_group(group, item, call, STATIC: gl.constexpr):
    """The `Rows` of computing group `group` in a work item."""
    GROUP: gl.constexpr = STATIC.GROUP
    first_row = item.tile * STATIC.BLOCK_M + group * GROUP_ROWS
    own = item.request * call.splits.num_nodes * (STATIC.H_KV * GROUP) + item.kv_head * GROUP
    return Rows(item.kv_head, first_row, own)


@gluon.jit
def nodes_of_group(rows, LINES: gl.constexpr, STATIC: gl.constexpr):
    """The node of each row of a group."""
    return (rows.first_row + gl.arange(0, GROUP_ROWS, LINES)) // STATIC.GROUP


@gluon.jit
def masked(scores, start, columns, view, stop, MODE: gl.constexpr, WORDS: gl.constexpr):
    """-inf for the keys of the tile at `start` that a row does not see."""
    return gl.where(d.visible_in_window(view, start + columns, stop, MODE, WORDS), scores, float("-inf"))


@gluon.jit
def weights_of_tile(scores, factor, top):
    """As `device.softmax_step`: (weights, top, decay of the output, sums [64, 4] of the weights that each thread of a
    row has). Threads add their sums at the end, because each exchange among them delays the next tile."""
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    decay = gl.exp2(top - d.finite_or_zero(new_top))
    weights = gl.exp2(gl.fma(scores, factor[:, None], -d.finite_or_zero(new_top)[:, None]))
    by_thread = gl.reshape(weights, [GROUP_ROWS, weights.shape[1] // 8, 4, 2])
    return weights, new_top, decay, gl.sum(gl.sum(by_thread, 3), 1)


@gluon.jit
def num_tiles(begin, stop, BLOCK_N: gl.constexpr):
    """Tiles of keys of an item; one that holds nothing where there are no keys."""
    return (gl.maximum(stop - begin, 1) + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def next_buffer(buffer, phase, NUM_BUFFERS: gl.constexpr):
    """The buffer after `buffer`, and the phase of its barriers."""
    last = buffer == NUM_BUFFERS - 1
    return gl.where(last, 0, buffer + 1), gl.where(last, 1 - phase, phase)


@gluon.jit
def arrive(barrier):
    """Arrive at the barrier once all warps of the group are here."""
    tl.debug_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def arrive_written(barrier):
    """`arrive`, with what the group wrote to shared memory visible to the matrix unit."""
    fence_async_shared()
    arrive(barrier)


@gluon.jit
def load_rows(q_ptr, rows, used, STATIC: gl.constexpr):
    """[64, D] queries of a group, 0 where a row is not in use."""
    D: gl.constexpr = STATIC.D
    GROUP: gl.constexpr = STATIC.GROUP
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    row = rows.first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LOAD))
    dims = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    places = rows.own + row // GROUP * (STATIC.H_KV * GROUP) + row % GROUP
    return gl.load(q_ptr + places[:, None] * D + dims[None, :], mask=(row // GROUP < used)[:, None], other=0.0)


@gluon.jit
def store_operand(buffer, rows):
    """Rows for all warps of the group, as an operand of products."""
    tl.debug_barrier()  # the products before have read their operand
    buffer.store(rows)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def write_rows(call, item, rows, acc, top, total, value_scale, SUMS: gl.constexpr, STATIC: gl.constexpr):
    """Store a group's rows as `kernel` does: a partial result, or the final one with the sink."""
    D: gl.constexpr = STATIC.D
    GROUP: gl.constexpr = STATIC.GROUP
    ROW_HEADS: gl.constexpr = STATIC.H_KV * GROUP
    LINES: gl.constexpr = gl.SliceLayout(1, SUMS)
    num_nodes = call.splits.num_nodes
    part = item.part - item.request  # rows of the requests before are counted in `rows.own`
    top = gl.convert_layout(top, LINES)
    total = gl.convert_layout(total, LINES)
    row = rows.first_row + gl.arange(0, GROUP_ROWS, LINES)
    nodes = row // GROUP
    total = gl.where(nodes < item.used, total, 0.0)
    out = acc * (value_scale * d.inverse_or_zero(total))[:, None]
    lse = d.log2_sum(top, total)
    places = rows.own + nodes * ROW_HEADS + row % GROUP
    if STATIC.SPLIT:
        places += part * num_nodes * ROW_HEADS
        written = nodes < item.used
    else:
        written = nodes < num_nodes
        if call.of.sinks is not None:
            sink = gl.load(call.of.sinks + rows.kv_head * GROUP + row % GROUP) * _LOG2_E
            sink = gl.where(nodes < item.used, sink, float("-inf"))
            out, top, total = d.fold_sink(out, lse, gl.where(total > 0.0, 1.0, 0.0), sink)
            out = out * d.inverse_or_zero(total)[:, None]
            lse = d.log2_sum(top, total)
        lse *= d.LN_2
    dims = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    narrow = out.to(call.of.out.dtype.element_ty)
    gl.store(call.of.out + places[:, None] * D + dims[None, :], narrow, mask=written[:, None])
    if call.of.lse is not None:
        gl.store(call.of.lse + places, lse, mask=written)
