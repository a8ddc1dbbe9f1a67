"""Definition of the locations and moves of accepted paths in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.kv_index.page_reference import position_slots
from specdec_kernels.kv_index.types import PathLocations


def align_eviction(evict: torch.Tensor, lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """See `specdec_kernels.kv_index.align_eviction`."""
    wanted = (~evict).sum(1)
    first = _floor(lengths + wanted - 1, page_size) - lengths
    column = torch.arange(evict.shape[1], device=evict.device)
    on_page = (column >= first[:, None]) & (column < first[:, None] + page_size)
    return evict & ~on_page


def accepted_locations(
    slots: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor, page_size: int
) -> PathLocations:
    """See `specdec_kernels.kv_index.accepted_locations`."""
    batch, num_nodes = slots.shape
    on_path = (nodes >= 0) & (nodes < num_nodes)
    kept = on_path.sum(1)
    if num_nodes == 0:
        empty = torch.full_like(nodes, -1, dtype=torch.int64)
        return PathLocations(empty, empty.clone(), slots.clone(), kept.int())
    step = torch.arange(nodes.shape[1], device=nodes.device)
    source = slots.gather(1, nodes.long().clamp(0, num_nodes - 1))
    target = slots.gather(1, step.clamp(max=num_nodes - 1).expand(batch, -1))
    extended = lengths + num_nodes
    num_freed = extended - torch.minimum(-_floor(-(lengths + kept), page_size), extended)
    column = torch.arange(num_nodes, device=slots.device)
    place = num_nodes - num_freed[:, None] + column
    freed = slots.gather(1, place.long().clamp(0, num_nodes - 1))
    return PathLocations(
        torch.where(on_path, source, -1),
        torch.where(on_path, target, -1),
        torch.where(column < num_freed[:, None], freed, -1),
        num_freed.int(),
    )


def move_accepted(kv: torch.Tensor, page_table: torch.Tensor, lengths: torch.Tensor, nodes: torch.Tensor) -> None:
    """See `specdec_kernels.kv_index.move_accepted`."""
    column = torch.arange(nodes.shape[1], device=nodes.device)
    source = position_slots(page_table, lengths[:, None] + nodes.clamp(min=0), kv.shape[3])
    target = position_slots(page_table, lengths[:, None] + column, kv.shape[3])
    source = torch.where(nodes >= 0, source, -1)
    move_slots(kv, source.reshape(-1), target.reshape(-1))


def move_slots(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `specdec_kernels.kv_index.move_slots`."""
    layers, _, pages, page_size, heads, dim = kv.shape
    num_slots = pages * page_size
    if num_slots == 0 or source.numel() == 0:
        return
    moves = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots) & (source != target)
    # Fixed shapes: an entry that moves nothing rewrites slot 0 with what slot 0 is to hold in the end anyway.
    into_zero = moves & (target == 0)
    source = torch.where(moves, source, torch.where(into_zero, source, 0).sum())
    target = torch.where(moves, target, 0)
    slots = kv.view(layers, 2, num_slots, heads, dim)
    slots[:, :, target] = slots[:, :, source]


def _floor(position: torch.Tensor, page_size: int) -> torch.Tensor:
    return torch.div(position, page_size, rounding_mode="floor") * page_size
