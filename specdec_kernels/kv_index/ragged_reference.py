"""Definition of the ragged rows in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.kv_index.types import Compacted, RaggedValues

INT32_MAX = 2**31 - 1


def row_offsets(counts: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
    """See `specdec_kernels.kv_index.row_offsets`."""
    ends = counts.long().clamp(min=0).cumsum(0).clamp(max=INT32_MAX if capacity is None else capacity)
    return torch.cat([ends.new_zeros(1), ends]).int()


def accepted_positions(
    start: torch.Tensor, counts: torch.Tensor, capacity: int, *, out: torch.Tensor | None = None
) -> RaggedValues:
    """See `specdec_kernels.kv_index.accepted_positions`."""
    offsets = row_offsets(counts, capacity)
    row, column, owned = owners(offsets, capacity)
    return RaggedValues(offsets, filled(_picked(start, row).long() + column, owned, -1, torch.int64, out))


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
    row, column, owned = owners(given, capacity)
    owned = owned & (column < _picked(counts, row))
    values = table_entries(table, _picked(rows, row), _picked(start, row) + column, fill)
    return RaggedValues(given, filled(values, owned, fill, dtype, out))


def write_table(
    table: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, values: torch.Tensor
) -> None:
    """See `specdec_kernels.kv_index.write_table`."""
    num_rows, width = table.shape
    if table.numel() == 0 or values.numel() == 0:
        return
    row, column, owned = owners(row_offsets(counts, values.shape[0]), values.shape[0])
    pool_row, position = _picked(rows, row).long(), _picked(start, row).long() + column
    owned = owned & (pool_row >= 0) & (pool_row < num_rows) & (position >= 0) & (position < width)
    place = torch.where(owned, pool_row * width + position, num_rows * width)
    # One place more than the table takes what is not to be written.
    longer = torch.cat([table.view(-1), table.new_zeros(1)])
    table.view(-1).copy_(longer.scatter(0, place, values.int())[:-1])


def compact(
    index: torch.Tensor,
    source: torch.Tensor | None = None,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
) -> Compacted:
    """See `specdec_kernels.kv_index.compact`."""
    size = index.shape[0]
    kept = index >= 0
    values = index.long()
    if source is not None:
        inside = kept & (index < source.shape[0])
        values = torch.where(inside, _picked(source, torch.where(inside, index.long(), 0)).long(), fill)
    capacity = size if out is None else out.shape[0]
    place = torch.where(kept, kept.long().cumsum(0) - 1, capacity).clamp(max=capacity)
    # One place more than the result takes what is dropped.
    front = values.new_full((capacity + 1,), fill).scatter(0, place, values)[:-1]
    num_kept = kept.sum(dtype=torch.int32).reshape(1)
    owned = torch.arange(capacity, device=index.device) < num_kept
    return Compacted(filled(front, owned, fill, torch.int64, out), num_kept)


def filter_rows(
    values: torch.Tensor,
    counts: torch.Tensor,
    kept: torch.Tensor,
    *,
    fill: int = 0,
    out: torch.Tensor | None = None,
) -> RaggedValues:
    """See `specdec_kernels.kv_index.filter_rows`."""
    capacity = values.shape[0] if out is None else out.shape[0]
    offsets = row_offsets(kept, capacity)
    row, column, owned = owners(offsets, capacity)
    place = _picked(row_offsets(counts), row).long() + column
    owned = owned & (place < values.shape[0])
    moved = _picked(values, place.clamp(max=max(values.shape[0] - 1, 0))).long()
    return RaggedValues(offsets, filled(moved, owned, fill, torch.int64, out))


def owners(offsets: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every place: the row that owns it (0 for none), its column there, and whether a row owns it."""
    place = torch.arange(capacity, device=offsets.device)
    row = torch.searchsorted(offsets[1:].contiguous(), place.int(), right=True)
    owned = row < offsets.shape[0] - 1
    row = torch.where(owned, row, 0)
    return row, place - offsets[row], owned


def table_entries(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, outside: int) -> torch.Tensor:
    """table[rows, columns] as int64, `outside` where there is no such entry."""
    num_rows, width = table.shape
    if table.numel() == 0:
        return torch.full_like(columns, outside, dtype=torch.int64)
    inside = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < width)
    entry = table[rows.long().clamp(0, num_rows - 1), columns.long().clamp(0, width - 1)].long()
    return torch.where(inside, entry, outside)


def filled(
    values: torch.Tensor, owned: torch.Tensor, fill: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """The owned values with `fill` elsewhere; or `out` with the owned values written into it."""
    if out is None:
        return torch.where(owned, values, fill).to(dtype)
    return out.copy_(torch.where(owned, values, out))


def _picked(per_row: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return per_row[row] if per_row.shape[0] else torch.zeros_like(row)
