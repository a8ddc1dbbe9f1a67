"""Definition of the draft locations and of the per-branch KV indices in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.kv_index.ragged_reference import filled, owners, row_offsets, table_entries
from specdec_kernels.kv_index.types import DraftSlots, SequenceIndices, StepIndices


def draft_slots(
    table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, topk: int, num_steps: int, page_size: int
) -> DraftSlots:
    """See `specdec_kernels.kv_index.draft_slots`."""
    batch = rows.shape[0]
    step = torch.arange(num_steps, device=table.device)
    branch = torch.arange(topk, device=table.device)
    first = _branch_start(lengths.long()[:, None], branch, topk, num_steps, page_size)
    position = first[:, :, None] + step
    slots = table_entries(table, rows[:, None, None], position, -1)

    tail = (lengths.long() % page_size)[:, None, None]
    offset = torch.arange(page_size - 1, device=table.device)
    copied = (offset < tail).expand(batch, topk - 1, page_size - 1)
    original = (lengths.long()[:, None, None] - tail + offset).expand(batch, topk - 1, page_size - 1)
    copy = first[:, 1:, None] - tail + offset
    source, target = (table_entries(table, rows[:, None, None], p, -1) for p in (original, copy))
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
    *,
    window: int | None = None,
    sink: int = 0,
    out: StepIndices | None = None,
) -> StepIndices:
    """See `specdec_kernels.kv_index.draft_kv_indices`."""
    batch = rows.shape[0]
    length = lengths.long().clamp(min=0).repeat_interleave(topk)
    kept = length if window is None else length.clamp(max=sink + window)
    branch = torch.arange(topk, device=table.device).repeat(batch)
    first_draft = _branch_start(length, branch, topk, num_steps, page_size)
    pool_row = rows.repeat_interleave(topk)
    indptr, indices = [], []
    for step in range(num_steps):
        offsets = row_offsets(kept + step + 1, capacity)
        owner, column, owned = owners(offsets, capacity)
        indptr.append(offsets)
        if batch == 0:
            indices.append(filled(column, owned, 0, torch.int32, None if out is None else out.indices[step]))
            continue
        skipped = torch.where(column < sink, 0, (length - kept)[owner])
        position = torch.where(column < kept[owner], column + skipped, first_draft[owner] + column - kept[owner])
        values = table_entries(table, pool_row[owner], position, 0)
        indices.append(filled(values, owned, 0, torch.int32, None if out is None else out.indices[step]))
    if out is None:
        return StepIndices(torch.stack(indptr), torch.stack(indices))
    out.indptr[:, : batch * topk + 1] = torch.stack(indptr)
    return out


def verify_decode_indices(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    factor: int,
    capacity: int,
    *,
    out: SequenceIndices | None = None,
) -> SequenceIndices:
    """See `specdec_kernels.kv_index.verify_decode_indices`."""
    query = torch.arange(factor, device=table.device)
    counts = (lengths.long().clamp(min=0)[:, None] + query + 1).reshape(-1)
    offsets = row_offsets(counts, capacity)
    owner, column, owned = owners(offsets, capacity)
    values = column
    if rows.shape[0]:
        values = table_entries(table, rows[owner // factor], column, 0)
    indices = filled(values, owned, 0, torch.int32, None if out is None else out.indices)
    if out is None:
        return SequenceIndices(offsets, indices)
    out.indptr[: offsets.shape[0]] = offsets
    return out


def _branch_start(
    lengths: torch.Tensor, branch: torch.Tensor, topk: int, num_steps: int, page_size: int
) -> torch.Tensor:
    """Position of the first draft of a branch."""
    if page_size == 1 or topk == 1:
        return lengths + branch * num_steps
    pages = (lengths % page_size + num_steps + page_size - 1) // page_size
    return lengths + branch * pages * page_size
