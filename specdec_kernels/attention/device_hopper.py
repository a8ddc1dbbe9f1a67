"""What the groups of warps of `kernel_hopper` share: the items of a program, barriers, and the rows of a group.

A group has four warps. Those that compute have 64 rows each; one more brings keys and values into a ring of buffers in
shared memory. A buffer has two barriers: `full` counts the group that brings, `empty` the groups of rows. Their phases
follow from the number of buffers that the program has had, over all items that it walks.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from specdec_kernels.attention.device import (
    LN_2,
    LOG2_E,
    fold_sink,
    inverse_or_zero,
    key_end,
    log2_sum,
    split_range,
    tile_key_range,
    used_rows,
)

_LOG2_E = gl.constexpr(LOG2_E)
WARPS = gl.constexpr(4)  # of a group
GROUP_ROWS = gl.constexpr(64)


@gluon.jit
def works(num_items_ptr, H_KV: gl.constexpr):
    """First work of the program, past its last, and the step between two."""
    if num_items_ptr is None:
        return gl.program_id(0), gl.program_id(0) + 1, 1
    else:
        return gl.program_id(0), gl.load(num_items_ptr) * H_KV, gl.num_programs(0)


@gluon.jit
def item_of(
    work,
    tensors,
    cut,
    num_splits,
    SHAPE: gl.constexpr,
    MODE: gl.constexpr,
    ALL_SLOTS: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """(whether there is such an item, request, tile of rows, partial result, first key, past the last key, position
    past the keys that every row sees, length, rows in use)."""
    H_KV: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    lengths_ptr, q_lens_ptr, items_ptr, offsets_ptr = tensors
    num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length = cut
    keys = (num_nodes, num_slots, split_tokens, first_splits, longest_split, max_splits, max_length, None)
    if items_ptr is None:
        num_tiles = (num_nodes * GROUP + ROWS - 1) // ROWS
        index = work // H_KV
        # The last tile of a causal prefill has the most keys, so it starts first.
        tile = num_tiles - 1 - index % num_tiles
        split = index // num_tiles % num_splits
        request = (index // num_tiles // num_splits).to(gl.int64)
        part = request * num_splits + split
    else:
        entry = items_ptr + work // H_KV * 3
        request = gl.load(entry).to(gl.int64)
        tile, split = gl.load(entry + 1), gl.load(entry + 2)
        part = (gl.load(offsets_ptr + request) + split).to(gl.int64)
    begin, split_end, live = split_range(lengths_ptr, q_lens_ptr, request, split, keys, SPLIT, ALL_SLOTS, False)
    length = gl.load(lengths_ptr + request).to(gl.int32)
    used = used_rows(q_lens_ptr, request, num_nodes)
    end = key_end(length, used, num_slots, max_length, ALL_SLOTS)
    first_node, last_node = tile * ROWS // GROUP, (tile * ROWS + ROWS - 1) // GROUP
    stop, free_end = tile_key_range(length, used, end, first_node, last_node, MODE, BLOCK_N)
    if SPLIT:
        stop = gl.minimum(stop, split_end)
        free_end = gl.minimum(free_end, stop)
    return split < live, request, tile, part, begin, stop, free_end, length, used


@gluon.jit
def num_tiles(begin, stop, BLOCK_N: gl.constexpr):
    """Tiles of keys of an item; one that holds nothing where there are no keys."""
    return (gl.maximum(stop - begin, 1) + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def next_buffer(buffer, phase, NUM_BUFFERS: gl.constexpr):
    """The buffer behind `buffer`, and the phase of its barriers."""
    last = buffer == NUM_BUFFERS - 1
    return gl.where(last, 0, buffer + 1), gl.where(last, 1 - phase, phase)


@gluon.jit
def tell(barrier):
    """All warps of a group have come this far."""
    tl.debug_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def tell_written(barrier):
    """All warps of a group have come this far, and the matrix unit sees what they wrote."""
    fence_async_shared()
    tell(barrier)


@gluon.jit
def load_rows(q_ptr, own, first_row, used, SHAPE: gl.constexpr):
    """[64, D] queries of a group from row `first_row` of its request on, 0 where a row is not in use. own: first row of
    the request and the KV head in memory."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    rows = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LOAD))
    dims = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    places = own + rows // GROUP * (H_KV * GROUP) + rows % GROUP
    return gl.load(q_ptr + places[:, None] * D + dims[None, :], mask=(rows // GROUP < used)[:, None], other=0.0)


@gluon.jit
def store_operand(buffer, rows):
    """Rows for all warps of the group, as an operand of products."""
    tl.debug_barrier()  # The products before have read theirs.
    buffer.store(rows)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def write_rows(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    acc,
    top,
    total,
    own,
    part,
    first_row,
    used,
    num_nodes,
    kv_head,
    value_scale,
    SUMS: gl.constexpr,
    SHAPE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Store a group's rows as `kernel` does: a partial result, or the final one with the sink."""
    D: gl.constexpr = SHAPE[0]
    H_KV: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    top, total = gl.convert_layout(top, ROWS), gl.convert_layout(total, ROWS)
    rows = first_row + gl.arange(0, GROUP_ROWS, ROWS)
    nodes = rows // GROUP
    total = gl.where(nodes < used, total, 0.0)
    out = acc * (value_scale * inverse_or_zero(total))[:, None]
    lse = log2_sum(top, total)
    places = own + nodes * (H_KV * GROUP) + rows % GROUP
    if SPLIT:
        places += part * num_nodes * (H_KV * GROUP)
        written = nodes < used
    else:
        written = nodes < num_nodes
        if sinks_ptr is not None:
            sink = gl.load(sinks_ptr + kv_head * GROUP + rows % GROUP) * _LOG2_E
            sink = gl.where(nodes < used, sink, float("-inf"))
            out, top, total = fold_sink(out, lse, gl.where(total > 0.0, 1.0, 0.0), sink)
            out = out * inverse_or_zero(total)[:, None]
            lse = log2_sum(top, total)
        lse *= LN_2
    dims = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    gl.store(out_ptr + places[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=written[:, None])
    if lse_ptr is not None:
        gl.store(lse_ptr + places, lse, mask=written)
