"""Definition of the index functions in plain torch."""

import torch
from torch import Tensor

from specdec_kernels.kv_index.types import (
    CHUNK_UNIT,
    FlashAttentionIndices,
    FlashInferChunks,
    FlashInferIndices,
    LevelSlots,
)


def token_slots(page_table: Tensor, start: Tensor, counts: Tensor, width: int, page_size: int) -> Tensor:
    column = torch.arange(width, device=page_table.device)
    return torch.where(column < counts[:, None], _position_slots(page_table, start[:, None] + column, page_size), -1)


def level_slots(
    page_table: Tensor, lengths: Tensor, active: Tensor, levels: int, width: int, page_size: int, first: int
) -> LevelSlots:
    starts = [lengths + first + level * width for level in range(levels)]
    counts = active * width
    slots = [token_slots(page_table, start, counts, width, page_size) for start in starts]
    level = torch.arange(levels, device=lengths.device)[:, None, None]
    positions = (lengths + first)[None, :, None] + level.expand(-1, -1, width)
    return LevelSlots(torch.stack(slots) if slots else positions.clone(), positions.contiguous(), counts)


def flashinfer_indices(
    page_table: Tensor, lengths: Tensor, page_size: int, columns: int, out: FlashInferIndices
) -> None:
    batch, row_pages = page_table.shape
    held = lengths.clamp(0, columns * page_size)
    indptr = offsets_of((held + page_size - 1) // page_size, batch * columns)
    row, column, owned = owners(indptr, batch * columns)
    pages = torch.nn.functional.pad(page_table, (0, columns - row_pages)).clamp(min=0)
    out.indptr.copy_(indptr)
    out.indices.copy_(torch.where(owned, pages[row, column.clamp(max=columns - 1)], 0))
    out.last_page_len.copy_(torch.where(held > 0, (held - 1) % page_size + 1, 0))


def flashinfer_chunks(keys: Tensor, most: int, out: FlashInferChunks, limit: int) -> None:
    seen = keys.clamp(max=limit)
    unit = most * CHUNK_UNIT
    size = (seen.max() + unit - 1) // unit * CHUNK_UNIT
    chunks = (seen + size - 1) // size
    rows = (len(out.ends) - 1) // len(keys)
    out.size.fill_(size)
    out.begins.copy_(torch.nn.functional.pad((rows * chunks).cumsum(0), (1, 0)))
    out.ends.copy_(torch.nn.functional.pad(chunks[:, None].expand(-1, rows).reshape(-1).cumsum(0), (1, 0)))
    out.runs.copy_((out.request >= 0) & (out.chunk < chunks[out.request.clamp(min=0)]))


def flashinfer_mask(
    mask: Tensor,
    lengths: Tensor,
    keys: Tensor,
    window: int | None,
    depths: Tensor | None,
    row_depths: Tensor | None,
    out: Tensor,
) -> None:
    batch, nodes, words = mask.shape
    place = torch.arange(8 * out.shape[1], device=mask.device)
    row, slot = place // keys[:, None], place % keys[:, None] - lengths[:, None]
    inside = row.clamp(max=nodes - 1)
    word = mask.flatten(1).gather(1, inside * words + slot.clamp(0, 64 * words - 1) // 64)
    seen = (row < nodes) & ((slot < 0) | (slot < 64 * words) & (word >> slot % 64 & 1 != 0))
    if window is not None:
        at, key = inside, slot
        if depths is not None and row_depths is not None:
            at = row_depths.gather(1, inside)
            key = torch.where(slot < 0, slot, depths.gather(1, slot.clamp(0, depths.shape[1] - 1)))
        seen = seen & (at - key < window)
    bit = torch.arange(8, device=mask.device)
    out.copy_((seen.view(batch, -1, 8) << bit).sum(-1))


def flash_attention_table(page_table: Tensor, lengths: Tensor, page_size: int) -> FlashAttentionIndices:
    row_pages = page_table.shape[1]
    held = lengths.clamp(0, row_pages * page_size)
    column = torch.arange(row_pages, device=page_table.device)
    return FlashAttentionIndices(torch.where(column * page_size < held[:, None], page_table, 0), held.int())


def move_accepted(kv: Tensor, page_table: Tensor, lengths: Tensor, nodes: Tensor) -> None:
    layers, sides, pages, page_size, heads, dim = kv.shape
    if kv.numel() == 0 or nodes.numel() == 0:
        return
    column = torch.arange(nodes.shape[1], device=nodes.device)
    source = _position_slots(page_table, lengths[:, None] + nodes.clamp(min=0), page_size).flatten()
    target = _position_slots(page_table, lengths[:, None] + column, page_size).flatten()
    moves = (nodes >= 0).flatten() & (source >= 0) & (target >= 0) & (source != target)
    # Fixed shapes: an entry that moves nothing writes into slot 0 what slot 0 holds in the end anyway.
    into_zero = moves & (target == 0)
    source = torch.where(moves, source, torch.where(into_zero, source, 0).sum())
    slots = kv.view(layers, sides, pages * page_size, heads, dim)
    slots[:, :, torch.where(moves, target, 0)] = slots[:, :, source]


def offsets_of(counts: Tensor, capacity: int) -> Tensor:
    """[B + 1] int32 exclusive sums, none above `capacity`."""
    ends = counts.long().clamp(min=0).cumsum(0).clamp(max=capacity)
    return torch.cat([ends.new_zeros(1), ends]).int()


def owners(offsets: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Owning span of every place (0 for none), column in it, and whether there is one."""
    place = torch.arange(capacity, device=offsets.device)
    span = torch.searchsorted(offsets[1:].contiguous(), place.to(offsets.dtype), right=True)
    owned = span < offsets.shape[0] - 1
    span = torch.where(owned, span, 0)
    return span, place - offsets[span], owned


def _position_slots(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, K] positions -> [B, K] int64 slots, -1 outside the table or on a page that is not there."""
    batch, row_pages = page_table.shape
    if row_pages == 0:
        return torch.full_like(positions, -1)
    column = torch.div(positions, page_size, rounding_mode="floor")
    page = page_table.gather(1, column.clamp(0, row_pages - 1)).long()
    inside = (column >= 0) & (column < row_pages) & (page >= 0)
    return torch.where(inside, page * page_size + positions % page_size, -1)
