"""Ragged rows on the device: one program sums, every other program finds its rows by bisection.

Stores are by output place, so they are dense, every place is written, and no row waits for another. The one
program of a scan keeps its running sum in a register from block to block, so that sums and compaction take
time linear in their entries.
"""

# mypy: ignore-errors
# Device code: parameters are pointers and constexprs that Python's types do not describe.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.kv_index.configs import config_of, lanes
from specdec_kernels.kv_index.ragged_reference import INT32_MAX
from specdec_kernels.kv_index.types import Compacted, RaggedValues
from specdec_kernels.launch import launch


@triton.jit
def owning_row(offsets_ptr, place, batch, live, scale, shift):
    """Row of each place: the first with scale * offsets[row + 1] + shift * (row + 1) > place, else `batch`."""
    # Invariant: rows below `low` end at or before the place, rows from `high` on end behind it.
    low = (place * 0).to(tl.int32)
    high = low + batch
    span = batch
    while span > 0:
        middle = (low + high) // 2
        open_ = live & (low < high)
        end = tl.load(offsets_ptr + middle + 1, mask=open_, other=0).to(tl.int64)
        past = open_ & (end * scale + (middle + 1).to(tl.int64) * shift <= place)
        high = tl.where(past | (low >= high), high, middle)
        low = tl.where(past, middle + 1, low)
        span = span // 2
    return low


@triton.jit
def table_entry(table_ptr, row, column, live, num_rows, width, OUTSIDE: tl.constexpr):
    """table[row, column] as int64, OUTSIDE where there is no such entry."""
    inside = live & (row >= 0) & (row < num_rows) & (column >= 0) & (column < width)
    place = tl.where(inside, row.to(tl.int64) * width + column, 0)
    return tl.load(table_ptr + place, mask=inside, other=OUTSIDE).to(tl.int64)


@triton.jit
def places_to_visit(capacity, used, least, FILL: tl.constexpr):
    """End of the places that have to be written: all of them to fill, else those in use; `least` at least."""
    end = tl.minimum(used, capacity)
    if FILL:
        end = tl.maximum(end, capacity)
    return tl.maximum(end, least).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "other_batch", "capacity", "other_capacity", "limit"])
def _offsets_kernel(
    counts_ptr,  # [batch] int
    offsets_ptr,  # [batch + 1] int32
    other_counts_ptr,  # [other_batch] int or None: summed by the second program
    other_offsets_ptr,  # [other_batch + 1] int32 or None
    batch,
    other_batch,
    capacity,
    other_capacity,
    limit,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        _running_sums(counts_ptr, offsets_ptr, batch, capacity, limit, BLOCK)
    elif other_counts_ptr is not None:
        _running_sums(other_counts_ptr, other_offsets_ptr, other_batch, other_capacity, limit, BLOCK)


@triton.jit
def _running_sums(counts_ptr, offsets_ptr, batch, capacity, limit, BLOCK: tl.constexpr):
    """Exclusive sums of the counts, each count within [0, limit], no sum above `capacity`."""
    lane = tl.arange(0, BLOCK)
    tl.store(offsets_ptr + lane, lane * 0, mask=lane < 1)
    before = (batch * 0).to(tl.int64)
    for first in range(0, batch, BLOCK):
        entry = first + lane
        count = tl.load(counts_ptr + entry, mask=entry < batch, other=0).to(tl.int64)
        count = tl.minimum(tl.maximum(count, 0), limit)
        ends = before + tl.cumsum(count, 0)
        tl.store(offsets_ptr + 1 + entry, tl.minimum(ends, capacity).to(tl.int32), mask=entry < batch)
        before += tl.sum(count, 0)


@triton.jit(do_not_specialize=["batch", "capacity"])
def _positions_kernel(
    offsets_ptr,  # [B + 1] int32
    start_ptr,  # [B] int
    out_ptr,  # [capacity] int
    batch,
    capacity,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < capacity
    row = owning_row(offsets_ptr, place, batch, live, 1, 0)
    owned = live & (row < batch)
    first = tl.load(offsets_ptr + row, mask=owned, other=0)
    value = tl.load(start_ptr + row, mask=owned, other=0).to(tl.int64) + place - first
    value = tl.where(owned, value, -1)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=live if FILL else owned)


@triton.jit(do_not_specialize=["batch", "capacity", "num_rows", "width"])
def _read_table_kernel(
    table_ptr,  # [num_rows, width] int32
    rows_ptr,  # [B] int
    start_ptr,  # [B] int
    counts_ptr,  # [B] int
    offsets_ptr,  # [B + 1] int32
    out_ptr,  # [capacity] int
    batch,
    capacity,
    num_rows,
    width,
    VALUE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    end = places_to_visit(capacity, tl.load(offsets_ptr + batch).to(tl.int64), 0, FILL)
    for first in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        live = place < capacity
        row = owning_row(offsets_ptr, place, batch, live, 1, 0)
        owned = live & (row < batch)
        column = place - tl.load(offsets_ptr + row, mask=owned, other=0)
        # Offsets that came from the caller may leave a row more room than it has values.
        owned = owned & (column < tl.load(counts_ptr + row, mask=owned, other=0))
        pool_row = tl.load(rows_ptr + row, mask=owned, other=0)
        position = tl.load(start_ptr + row, mask=owned, other=0).to(tl.int64) + column
        value = table_entry(table_ptr, pool_row, position, owned, num_rows, width, VALUE)
        tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=live if FILL else owned)


@triton.jit(do_not_specialize=["batch", "capacity", "num_rows", "width"])
def _write_table_kernel(
    table_ptr,  # [num_rows, width] int32, changed
    rows_ptr,  # [B] int
    start_ptr,  # [B] int
    offsets_ptr,  # [B + 1] int32
    values_ptr,  # [capacity] int
    batch,
    capacity,
    num_rows,
    width,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < capacity
    row = owning_row(offsets_ptr, place, batch, live, 1, 0)
    owned = live & (row < batch)
    column = place - tl.load(offsets_ptr + row, mask=owned, other=0)
    pool_row = tl.load(rows_ptr + row, mask=owned, other=-1)
    position = tl.load(start_ptr + row, mask=owned, other=0).to(tl.int64) + column
    owned = owned & (pool_row >= 0) & (pool_row < num_rows) & (position >= 0) & (position < width)
    value = tl.load(values_ptr + place, mask=owned, other=0)
    target = tl.where(owned, pool_row.to(tl.int64) * width + position, 0)
    tl.store(table_ptr + target, value.to(tl.int32), mask=owned)


@triton.jit(do_not_specialize=["size", "source_size", "capacity"])
def _compact_kernel(
    index_ptr,  # [size] int
    source_ptr,  # [source_size] int or None
    out_ptr,  # [capacity] int
    count_ptr,  # [1] int32
    size,
    source_size,
    capacity,
    VALUE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    before = (size * 0).to(tl.int32)
    for first in range(0, size, BLOCK):
        entry = first + lane
        index = tl.load(index_ptr + entry, mask=entry < size, other=-1)
        kept = index >= 0
        value = index.to(tl.int64)
        if source_ptr is not None:
            inside = kept & (index < source_size)
            value = tl.load(source_ptr + tl.where(inside, index, 0), mask=inside, other=VALUE).to(tl.int64)
        place = before + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=kept & (place < capacity))
        before += tl.sum(kept.to(tl.int32), 0)
    tl.store(count_ptr + lane, lane * 0 + before, mask=lane < 1)
    if FILL:
        for first in range(0, capacity - before, BLOCK):
            place = before + first + lane
            tl.store(out_ptr + place, (lane * 0 + VALUE).to(out_ptr.dtype.element_ty), mask=place < capacity)


@triton.jit(do_not_specialize=["batch", "capacity", "size"])
def _filter_rows_kernel(
    values_ptr,  # [size] int
    old_offsets_ptr,  # [B + 1] int32
    offsets_ptr,  # [B + 1] int32
    out_ptr,  # [capacity] int
    batch,
    capacity,
    size,
    VALUE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < capacity
    row = owning_row(offsets_ptr, place, batch, live, 1, 0)
    owned = live & (row < batch)
    shift = tl.load(old_offsets_ptr + row, mask=owned, other=0) - tl.load(offsets_ptr + row, mask=owned, other=0)
    owned = owned & (place + shift < size)
    value = tl.load(values_ptr + place + shift, mask=owned, other=VALUE)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=live if FILL else owned)


def row_offsets(counts: torch.Tensor, capacity: int | None = None, *, limit: int | None = None) -> torch.Tensor:
    """See `specdec_kernels.kv_index.row_offsets`; no count is taken as larger than `limit`."""
    return _offsets(counts, capacity, limit=limit)[0]


def _offsets(
    counts: torch.Tensor,
    capacity: int | None,
    other: torch.Tensor | None = None,
    other_capacity: int | None = None,
    limit: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sums of one or two tensors of counts in one launch."""
    batch, other_batch = counts.shape[0], 0 if other is None else other.shape[0]
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=counts.device)
    other_offsets = None if other is None else torch.empty(other_batch + 1, dtype=torch.int32, device=counts.device)
    config = config_of(counts)
    caps = [INT32_MAX if cap is None else cap for cap in (capacity, other_capacity)]
    launch(
        _offsets_kernel, (1 if other is None else 2,), counts, offsets, other, other_offsets, batch,
        other_batch, *caps, INT32_MAX if limit is None else limit, num_warps=config.num_warps,
        BLOCK=lanes(max(batch, other_batch), config.scan_block),
    )  # fmt: skip
    return offsets, other_offsets


def accepted_positions(
    start: torch.Tensor, counts: torch.Tensor, capacity: int, *, out: torch.Tensor | None = None
) -> RaggedValues:
    """See `specdec_kernels.kv_index.accepted_positions`."""
    offsets = row_offsets(counts, capacity)
    values = torch.empty(capacity, dtype=torch.int64, device=start.device) if out is None else out
    config = config_of(start)
    block = lanes(capacity, config.flat_block)
    launch(
        _positions_kernel, (triton.cdiv(capacity, block),), offsets, start, values, start.shape[0], capacity,
        num_warps=config.num_warps, FILL=out is None, BLOCK=block,
    )  # fmt: skip
    return RaggedValues(offsets, values)


def read_table(
    table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    *,
    fill: int = -1,
    dtype: torch.dtype = torch.int64,
    offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> RaggedValues:
    """See `specdec_kernels.kv_index.read_table`."""
    given = row_offsets(counts, capacity) if offsets is None else offsets
    values = torch.empty(capacity, dtype=dtype, device=table.device) if out is None else out
    config = config_of(table)
    block = lanes(capacity, config.flat_block)
    programs = min(triton.cdiv(capacity, block), config.max_programs)
    launch(
        _read_table_kernel, (programs,), table, rows, start, counts, given, values, rows.shape[0],
        capacity, *table.shape, num_warps=config.num_warps, VALUE=fill, FILL=out is None,
        BLOCK=block,
    )  # fmt: skip
    return RaggedValues(given, values)


def write_table(
    table: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, values: torch.Tensor
) -> None:
    """See `specdec_kernels.kv_index.write_table`."""
    capacity = values.shape[0]
    if capacity == 0 or table.numel() == 0:
        return
    offsets = row_offsets(counts, capacity)
    config = config_of(table)
    block = lanes(capacity, config.flat_block)
    launch(
        _write_table_kernel, (triton.cdiv(capacity, block),), table, rows, start, offsets, values,
        rows.shape[0], capacity, *table.shape, num_warps=config.num_warps, BLOCK=block,
    )  # fmt: skip


def compact(
    index: torch.Tensor,
    source: torch.Tensor | None = None,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
) -> Compacted:
    """See `specdec_kernels.kv_index.compact`."""
    size = index.shape[0]
    values = torch.empty(size, dtype=torch.int64, device=index.device) if out is None else out
    count = torch.empty(1, dtype=torch.int32, device=index.device)
    config = config_of(index)
    launch(
        _compact_kernel, (1,), index, source, values, count, size, 0 if source is None else source.shape[0],
        values.shape[0], num_warps=config.num_warps, VALUE=fill, FILL=out is None, BLOCK=lanes(size, config.scan_block),
    )  # fmt: skip
    return Compacted(values, count)


def filter_rows(
    values: torch.Tensor,
    counts: torch.Tensor,
    kept: torch.Tensor,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
) -> RaggedValues:
    """See `specdec_kernels.kv_index.filter_rows`."""
    size = values.shape[0]
    capacity = size if out is None else out.shape[0]
    offsets, old_offsets = _offsets(kept, capacity, counts)
    moved = torch.empty(size, dtype=torch.int64, device=values.device) if out is None else out
    config = config_of(values)
    block = lanes(capacity, config.flat_block)
    launch(
        _filter_rows_kernel, (triton.cdiv(capacity, block),), values, old_offsets, offsets, moved,
        counts.shape[0], capacity, size, num_warps=config.num_warps, VALUE=fill, FILL=out is None, BLOCK=block,
    )  # fmt: skip
    return RaggedValues(offsets, moved)
