"""Definition of the index functions in plain torch."""

import torch
from torch import Tensor

from specdec_kernels.kv_index.types import FlashAttentionIndices, FlashInferIndices, LevelSlots


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


def flashinfer_indices(page_table: Tensor, lengths: Tensor, page_size: int) -> FlashInferIndices:
    batch, row_pages = page_table.shape
    held = lengths.clamp(0, row_pages * page_size)
    pages = (held + page_size - 1) // page_size
    ends = pages.cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    place = torch.arange(batch * row_pages, device=page_table.device)
    row = torch.searchsorted(ends, place, right=True)
    if batch == 0 or row_pages == 0:
        indices = torch.zeros_like(place)
    else:
        safe_row = row.clamp(max=batch - 1)
        column = (place - indptr[safe_row]).clamp(0, row_pages - 1)
        indices = torch.where(row < batch, page_table[safe_row, column].long(), 0)
    last_page_len = torch.where(held > 0, (held - 1) % page_size + 1, 0)
    return FlashInferIndices(indptr.int(), indices.int(), last_page_len.int())


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


def _position_slots(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[B, K] positions -> [B, K] int64 slots, -1 outside the table or on a page that is not there."""
    batch, row_pages = page_table.shape
    if row_pages == 0:
        return torch.full_like(positions, -1)
    column = torch.div(positions, page_size, rounding_mode="floor")
    page = page_table.gather(1, column.clamp(0, row_pages - 1)).long()
    inside = (column >= 0) & (column < row_pages) & (page >= 0)
    return torch.where(inside, page * page_size + positions % page_size, -1)
