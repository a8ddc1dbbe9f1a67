"""Definition of the index functions in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.compat.sglang.index.types import (
    Compacted,
    DraftSlots,
    ExportedMask,
    RaggedValues,
    SequenceIndices,
)
from specdec_kernels.kv_index import reference as kv_index
from specdec_kernels.tree.types import UNUSED_PARENT, WORD_BITS

INT32_MAX = 2**31 - 1
_BYTE_BITS = 8


def row_offsets(counts: torch.Tensor, capacity: int | None = None) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.row_offsets`."""
    ends = counts.long().clamp(min=0).cumsum(0).clamp(max=INT32_MAX if capacity is None else capacity)
    return torch.cat([ends.new_zeros(1), ends]).int()


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
    row, column, owned = _owners(offsets, capacity)
    owned = owned & (column < _picked(counts, row))
    values = _picked(start, row).long() + column
    if table is not None and rows is not None:
        values = _table_entries(table, _picked(rows, row), values, fill)
    return RaggedValues(offsets, _filled(values, owned, fill, torch.int64, out))


def write_table(
    table: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, values: torch.Tensor
) -> None:
    """See `specdec_kernels.compat.sglang.index.write_table`."""
    num_rows, width = table.shape
    if table.numel() == 0 or values.numel() == 0:
        return
    row, column, owned = _owners(row_offsets(counts, values.shape[0]), values.shape[0])
    pool_row, position = _picked(rows, row).long(), _picked(start, row).long() + column
    owned = owned & (pool_row >= 0) & (pool_row < num_rows) & (position >= 0) & (position < width)
    place = torch.where(owned, pool_row * width + position, num_rows * width)
    # One place more than the table takes what is not to be written.
    longer = torch.cat([table.view(-1), table.new_zeros(1)])
    table.view(-1).copy_(longer.scatter(0, place, values.int())[:-1])


def compact(index: torch.Tensor, source: torch.Tensor | None, fill: int, out: torch.Tensor | None) -> Compacted:
    """See `specdec_kernels.compat.sglang.index.compact`."""
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
    return Compacted(_filled(front, owned, fill, torch.int64, out), num_kept)


def draft_slots(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, topk: int, num_steps: int, page_size: int
) -> DraftSlots:
    """See `specdec_kernels.compat.sglang.index.draft_slots`."""
    batch = rows.shape[0]
    step = torch.arange(num_steps, device=table.device)
    branch = torch.arange(topk, device=table.device)
    first = _branch_start(lengths.long()[:, None], branch, num_steps, page_size)
    position = first[:, :, None] + step
    slots = _table_entries(table, rows[:, None, None], position, -1)

    tail = (lengths.long() % page_size)[:, None, None]
    offset = torch.arange(page_size - 1, device=table.device)
    copied = (offset < tail).expand(batch, topk - 1, page_size - 1)
    original = (lengths.long()[:, None, None] - tail + offset).expand(batch, topk - 1, page_size - 1)
    copy = first[:, 1:, None] - tail + offset
    source, target = (_table_entries(table, rows[:, None, None], p, -1) for p in (original, copy))
    return DraftSlots(
        slots.permute(2, 0, 1).reshape(num_steps, batch * topk),
        torch.where(copied, source, -1),
        torch.where(copied, target, -1),
    )


def draft_kv_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
    capacity: int,
    window: int | None,
    sink: int,
    out: SequenceIndices | None,
) -> SequenceIndices:
    """See `specdec_kernels.compat.sglang.index.draft_kv_indices`."""
    length = lengths.long().clamp(min=0).repeat_interleave(topk)
    kept = length if window is None else length.clamp(max=sink + window)
    branch = torch.arange(topk, device=table.device).repeat(rows.shape[0])
    first_draft = _branch_start(length, branch, num_steps, page_size)
    pool_row = rows.repeat_interleave(topk)
    steps = []
    for step in range(num_steps):
        offsets = row_offsets(kept + step + 1, capacity)
        owner, column, owned = _owners(offsets, capacity)
        prefix = _picked(kept, owner)
        early = torch.where(column < sink, column, column + _picked(length, owner) - prefix)
        position = torch.where(column < prefix, early, _picked(first_draft, owner) + column - prefix)
        values = _table_entries(table, _picked(pool_row, owner), position, 0)
        steps.append(_sequences(offsets, values, owned, out and SequenceIndices(out.indptr[step], out.indices[step])))
    return out or SequenceIndices(*(torch.stack(parts) for parts in zip(*steps, strict=True)))


def verify_decode_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    factor: int,
    capacity: int,
    out: SequenceIndices | None,
) -> SequenceIndices:
    """See `specdec_kernels.compat.sglang.index.verify_decode_indices`."""
    query = torch.arange(factor, device=table.device)
    offsets = row_offsets((lengths.long().clamp(min=0)[:, None] + query + 1).flatten(), capacity)
    owner, column, owned = _owners(offsets, capacity)
    return _sequences(offsets, _table_entries(table, _picked(rows, owner // factor), column, 0), owned, out)


def _sequences(
    offsets: torch.Tensor, values: torch.Tensor, owned: torch.Tensor, out: SequenceIndices | None
) -> SequenceIndices:
    """New tensors, or `out` with the offsets and the owned values written into it."""
    indices = _filled(values, owned, 0, torch.int32, None if out is None else out.indices)
    if out is None:
        return SequenceIndices(offsets, indices)
    out.indptr[: offsets.shape[0]] = offsets
    return out


def align_eviction(evict: torch.Tensor, lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.align_eviction`."""
    wanted = (~evict).sum(1)
    first = (lengths + wanted - 1).div(page_size, rounding_mode="floor") * page_size - lengths
    column = torch.arange(evict.shape[1], device=evict.device)
    on_page = (column >= first[:, None]) & (column < first[:, None] + page_size)
    return evict & ~on_page


def move_slots(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `specdec_kernels.compat.sglang.index.move_slots`."""
    kv_index.move_slots(kv, source, target)


def parents_from_candidates(selected: torch.Tensor, parent_list: torch.Tensor, topk: int) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.parents_from_candidates`."""
    batch, drafts = selected.shape
    rows = parent_list.shape[1]
    row = selected.div(topk, rounding_mode="floor")
    readable = (row > 0) & (row < rows)
    padded = torch.cat([parent_list, parent_list.new_full((batch, 1), -1)], 1)
    wanted = padded.gather(1, torch.where(readable, row, rows))
    found = (wanted[:, :, None] == selected[:, None, :]) & readable[:, :, None]
    parent = torch.where(found.any(-1), found.int().argmax(-1) + 1, UNUSED_PARENT) if drafts else selected
    parent = torch.where(row <= 0, 0, parent)
    return torch.cat([parent.new_full((batch, 1), -1), parent], 1).int()


def export_mask(mask: torch.Tensor, lengths: torch.Tensor, form: str, capacity: int | None) -> ExportedMask:
    """See `specdec_kernels.compat.sglang.index.export_mask`."""
    batch, num_nodes = mask.shape[:2]
    if form == "query":
        return ExportedMask(mask_cells(mask), None)
    if form == "packed":
        kept = mask & low_bits(num_nodes)
        return ExportedMask(kept.view(packed_dtype(num_nodes))[:, :, 0].clone(), None)
    assert capacity is not None
    unit = _BYTE_BITS if form == "flashinfer" else 1
    width = lengths.clamp(min=0) + num_nodes
    offsets = torch.nn.functional.pad(((width * num_nodes + unit - 1) // unit).cumsum(0), (1, 0))
    if batch == 0:
        cells = torch.zeros(capacity, unit, dtype=torch.bool, device=mask.device)
    else:
        cells = _flat_cells(mask_cells(mask), width, offsets, capacity, unit)
    return ExportedMask(_pack_bytes(cells) if unit > 1 else cells[:, 0], offsets)


def _flat_cells(
    sees: torch.Tensor, width: torch.Tensor, offsets: torch.Tensor, capacity: int, unit: int
) -> torch.Tensor:
    """[capacity, unit] bool: the cells of each element of a flat layout, false past a request's last one."""
    batch, num_nodes = sees.shape[:2]
    element = torch.arange(capacity, device=sees.device)
    request = torch.searchsorted(offsets[1:], element, right=True)
    request = request.clamp(max=batch - 1)
    cell = (element - offsets[request])[:, None] * unit + torch.arange(unit, device=sees.device)
    node, column = cell // width[request, None], cell % width[request, None]
    drafted = column - (width[request, None] - num_nodes)
    seen = sees[request[:, None], node.clamp(max=num_nodes - 1), drafted.clamp(min=0)]
    return (node < num_nodes) & ((drafted < 0) | seen)  # what stands behind the last request is no node of it


def packed_dtype(num_nodes: int) -> torch.dtype:
    """Smallest unsigned type that holds a bit a node."""
    sizes = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}
    return next(dtype for bits, dtype in sizes.items() if num_nodes <= bits)


def low_bits(num_nodes: int) -> int:
    """The word whose lowest `num_nodes` (at most 64) bits are set, as a signed integer."""
    return (1 << num_nodes) - 1 if num_nodes < WORD_BITS else -1


def _pack_bytes(bits: torch.Tensor) -> torch.Tensor:
    """[n, 8] bool -> [n] uint8, the first bit lowest."""
    return (bits.int() << torch.arange(_BYTE_BITS, device=bits.device)).sum(-1).to(torch.uint8)


def mask_cells(words: torch.Tensor) -> torch.Tensor:
    """[B, N, W] int64 mask words -> [B, N, N] bool."""
    node = torch.arange(words.shape[1], device=words.device)
    return (words[:, :, node // WORD_BITS] >> (node % WORD_BITS) & 1).bool()


def _owners(offsets: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every place: the row that owns it (0 for none), its column there, and whether a row owns it."""
    place = torch.arange(capacity, device=offsets.device)
    row = torch.searchsorted(offsets[1:].contiguous(), place.int(), right=True)
    owned = row < offsets.shape[0] - 1
    row = torch.where(owned, row, 0)
    return row, place - offsets[row], owned


def _table_entries(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, outside: int) -> torch.Tensor:
    """table[rows, columns] as int64, `outside` where there is no such entry."""
    num_rows, width = table.shape
    if table.numel() == 0:
        return torch.full_like(columns, outside, dtype=torch.int64)
    inside = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < width)
    entry = table[rows.long().clamp(0, num_rows - 1), columns.long().clamp(0, width - 1)].long()
    return torch.where(inside, entry, outside)


def _filled(
    values: torch.Tensor, owned: torch.Tensor, fill: int, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """The owned values with `fill` elsewhere; or `out` with the owned values written into it."""
    if out is None:
        return torch.where(owned, values, fill).to(dtype)
    return out.copy_(torch.where(owned, values, out))


def _picked(per_row: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return per_row[row] if per_row.shape[0] else torch.zeros_like(row)


def _branch_start(lengths: torch.Tensor, branch: torch.Tensor, num_steps: int, page_size: int) -> torch.Tensor:
    """Position of the first draft of a branch. Each branch but the first begins with a copy of the prefix's last,
    partly filled page."""
    pages = (lengths % page_size + num_steps + page_size - 1) // page_size
    return lengths + branch * pages * page_size
