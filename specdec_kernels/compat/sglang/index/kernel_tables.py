"""Ragged rows on the device: reads and writes of token tables by output place, and compaction in one program."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.compat.sglang.index.configs import config_of
from specdec_kernels.compat.sglang.index.reference import INT32_MAX
from specdec_kernels.compat.sglang.index.types import Compacted, RaggedValues
from specdec_kernels.kv_index.kernel import owning_row, running_sums
from specdec_kernels.launch import lanes, launch


@triton.jit
def table_entry(table_ptr, row, column, live, num_rows, width, OUTSIDE: tl.constexpr):
    """table[row, column] as int64, OUTSIDE where there is no such entry."""
    inside = live & (row >= 0) & (row < num_rows) & (column >= 0) & (column < width)
    place = tl.where(inside, row.to(tl.int64) * width + column, 0)
    return tl.load(table_ptr + place, mask=inside, other=OUTSIDE).to(tl.int64)


@triton.jit
def places_to_visit(capacity, used, FILL: tl.constexpr):
    """End of the places that have to be written: all of them to fill, else those in use."""
    end = tl.minimum(used.to(tl.int64), capacity)
    if FILL:
        end = tl.maximum(end, capacity)
    return end.to(tl.int32)


@triton.jit
def _span_position(offsets_ptr, start_ptr, place, batch, live):
    """Of each place: the request that owns it, whether one does, its column there, and the position it stands for."""
    request = owning_row(offsets_ptr, place, batch, live)
    owned = live & (request < batch)
    column = place - tl.load(offsets_ptr + request, mask=owned, other=0)
    return request, owned, column, tl.load(start_ptr + request, mask=owned, other=0).to(tl.int64) + column


@triton.jit(do_not_specialize=["batch", "capacity", "num_rows", "width"])
def _read_table_kernel(
    table_ptr,  # [num_rows, width] int, or None: an entry is its column
    rows_ptr,  # [B] int, or None
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
    end = places_to_visit(capacity, tl.load(offsets_ptr + batch), FILL)
    for first in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        place = (first + tl.arange(0, BLOCK)).to(tl.int64)
        live = place < capacity
        request, owned, column, position = _span_position(offsets_ptr, start_ptr, place, batch, live)
        # Offsets that came from the caller may leave a row more room than it has values.
        owned = owned & (column < tl.load(counts_ptr + request, mask=owned, other=0))
        if table_ptr is None:
            value = tl.where(owned, position, VALUE)
        else:
            row = tl.load(rows_ptr + request, mask=owned, other=0)
            value = table_entry(table_ptr, row, position, owned, num_rows, width, VALUE)
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
    request, owned, _, position = _span_position(offsets_ptr, start_ptr, place, batch, place < capacity)
    row = tl.load(rows_ptr + request, mask=owned, other=-1)
    owned = owned & (row >= 0) & (row < num_rows) & (position >= 0) & (position < width)
    value = tl.load(values_ptr + place, mask=owned, other=0)
    target = tl.where(owned, row.to(tl.int64) * width + position, 0)
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


def row_offsets(counts: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.row_offsets`."""
    offsets = torch.empty(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    return running_sums(counts, offsets, capacity=INT32_MAX if capacity is None else capacity)


def read_table(
    table: torch.Tensor | None,
    rows: torch.Tensor | None,
    start: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    fill: int,
    offsets: torch.Tensor | None,
    out: torch.Tensor | None,
) -> RaggedValues:
    """See `specdec_kernels.compat.sglang.index.read_table`."""
    offsets = row_offsets(counts, capacity) if offsets is None else offsets
    values = torch.empty(capacity, dtype=torch.int64, device=start.device) if out is None else out
    config = config_of(start)
    block = lanes(capacity, config.flat_block)
    programs = min(triton.cdiv(capacity, block), config.max_programs)
    launch(
        _read_table_kernel, (programs,), table, rows, start, counts, offsets, values, start.shape[0], capacity,
        *(table.shape if table is not None else (0, 0)), num_warps=config.num_warps, VALUE=fill, FILL=out is None,
        BLOCK=block,
    )  # fmt: skip
    return RaggedValues(offsets, values)


def write_table(
    table: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, values: torch.Tensor
) -> None:
    """See `specdec_kernels.compat.sglang.index.write_table`."""
    capacity = values.shape[0]
    if capacity == 0 or table.numel() == 0:
        return
    config = config_of(table)
    block = lanes(capacity, config.flat_block)
    launch(
        _write_table_kernel, (triton.cdiv(capacity, block),), table, rows, start, row_offsets(counts, capacity),
        values, rows.shape[0], capacity, *table.shape, num_warps=config.num_warps, BLOCK=block,
    )  # fmt: skip


def compact(index: torch.Tensor, source: torch.Tensor | None, fill: int, out: torch.Tensor | None) -> Compacted:
    """See `specdec_kernels.compat.sglang.index.compact`."""
    size, config = index.shape[0], config_of(index)
    values = torch.empty(size, dtype=torch.int64, device=index.device) if out is None else out
    count = torch.empty(1, dtype=torch.int32, device=index.device)
    launch(
        _compact_kernel, (1,), index, source, values, count, size, 0 if source is None else source.shape[0],
        values.shape[0], num_warps=config.num_warps, VALUE=fill, FILL=out is None,
        BLOCK=lanes(size, config.compact_block),
    )  # fmt: skip
    return Compacted(values, count)
