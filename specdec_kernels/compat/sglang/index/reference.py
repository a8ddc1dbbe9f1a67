"""Definition of the index functions in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.compat.sglang.index.types import ExportedMask
from specdec_kernels.tree.types import UNUSED_PARENT, WORD_BITS

_BYTE_BITS = 8


def parents_from_candidates(selected: torch.Tensor, parent_list: torch.Tensor, topk: int) -> torch.Tensor:
    """See `specdec_kernels.compat.sglang.index.parents_from_candidates`."""
    batch, drafts = selected.shape
    rows = parent_list.shape[1]
    row = selected.div(topk, rounding_mode="floor")
    readable = (selected >= 0) & (row > 0) & (row < rows)
    padded = torch.cat([parent_list, parent_list.new_full((batch, 1), -1)], 1)
    wanted = padded.gather(1, torch.where(readable, row, rows))
    entry = torch.arange(drafts, device=selected.device)
    found = (wanted[:, :, None] == selected[:, None, :]) & (wanted[:, :, None] >= 0) & (entry < entry[:, None])
    parent = torch.where(found.any(-1), found.int().argmax(-1) + 1, UNUSED_PARENT) if drafts else selected
    parent = torch.where((selected >= 0) & (row == 0), 0, parent)
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
    inside = (request < batch)[:, None]
    request = request.clamp(max=batch - 1)
    cell = (element - offsets[request])[:, None] * unit + torch.arange(unit, device=sees.device)
    node, column = cell // width[request, None], cell % width[request, None]
    drafted = column - (width[request, None] - num_nodes)
    seen = sees[request[:, None], node.clamp(max=num_nodes - 1), drafted.clamp(min=0)]
    return inside & (node < num_nodes) & ((drafted < 0) | seen)


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
