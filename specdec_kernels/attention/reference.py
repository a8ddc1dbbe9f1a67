"""Definition of paged attention in plain torch.

With s[i, t] = scale * k_scale * q_i . k_t over the keys t that row i sees, capped to c tanh(s / c) where there
is a soft cap c:

    lse_i = log(exp(sink) + sum_t exp(s[i, t]))        out_i = v_scale sum_t exp(s[i, t] - lse_i) v_t

A row that sees no key has out 0, and lse -inf or its sink. Half types are computed in float32. The tile schedule of
`plan_attention` is defined here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.attention.configs import fixed_borders
from specdec_kernels.attention.types import AttentionCall, AttentionMetadata, TileSchedule, WorkShape


def paged_attention(call: AttentionCall, out: Tensor | None = None) -> Tensor:
    result = paged_attention_with_lse(call)[0]
    return result if out is None else out.copy_(result)


def paged_attention_with_lse(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """How the work is divided has no meaning here."""
    q, kv, metadata, scales, work, _, _ = call
    batch, num_nodes, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    assert metadata.scale is not None
    maths = torch.float64 if q.dtype == torch.float64 else torch.float32
    stored = stored_keys(metadata, num_nodes, work.max_length)
    rows = gather_pages(kv.movedim(0, 2), metadata.page_table, work.max_length).to(maths)
    keys, values = rows.permute(2, 0, 3, 1, 4)  # [B, H_kv, S, D]
    keys, values = _scaled(keys, scales.k_scale), _scaled(values, scales.v_scale)
    values = torch.where(stored[:, None, :, None], values, 0.0)

    grouped = q.to(maths).unflatten(2, (kv_heads, -1)).movedim(1, 3)  # [B, H_kv, G, N, D]
    scores = (grouped * metadata.scale).flatten(2, 3) @ keys.mT
    if metadata.soft_cap is not None:
        scores = metadata.soft_cap * torch.tanh(scores / metadata.soft_cap)
    seen = visible_keys(metadata, num_nodes, work.max_length, stored)
    scores = torch.where(seen[:, None, None], scores.unflatten(2, (-1, num_nodes)), float("-inf"))

    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(maths).min)  # finite for a row that sees nothing
    if scales.sinks is not None:
        row_used = torch.arange(num_nodes, device=q.device) < metadata.used_rows(num_nodes)[:, None]
        sinks = scales.sinks.to(maths).view(kv_heads, -1, 1, 1)
        sinks = torch.where(row_used[:, None, None, :, None], sinks, float("-inf"))
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if scales.sinks is not None:
        total = total + torch.exp(sinks - top)
    weights = weights / total.clamp(min=1.0)  # it is less only where nothing is seen
    out = (weights.flatten(2, 3) @ values).view(batch, heads, num_nodes, head_dim)
    lse = (top + torch.log(total)).view(batch, heads, num_nodes)
    return out.movedim(1, 2).to(q.dtype).contiguous(), lse.mT.contiguous()


def _scaled(x: Tensor, scale: float | Tensor) -> Tensor:
    """x [B, H_kv, S, D] times a scale, or one of each head."""
    if isinstance(scale, Tensor):
        return x * scale[:, None, None]
    return x if scale == 1.0 else x * scale


def gather_pages(pool: Tensor, page_table: Tensor, num_keys: int) -> Tensor:
    """pool [pages, page_size, ...] by position: [B, num_keys, ...]."""
    pages, page_size = pool.shape[:2]
    columns = -(-num_keys // page_size)
    table = page_table[:, :columns].to(torch.int64).clamp(0, pages - 1)
    return pool[table].flatten(1, 2)[:, :num_keys]


def stored_keys(metadata: AttentionMetadata, num_nodes: int, num_keys: int) -> Tensor:
    """[B, num_keys] bool: whether a key of the prefix or the draft is at position t."""
    used = metadata.used_rows(num_nodes)
    slots = used if metadata.tree_width is None else metadata.tree_width
    return torch.arange(num_keys, device=used.device) < (metadata.lengths + slots)[:, None]


def visible_keys(metadata: AttentionMetadata, num_nodes: int, num_keys: int, stored: Tensor | None = None) -> Tensor:
    """[B, num_nodes, num_keys] bool: whether query row i sees the key at position t; rows not in use see nothing.
    `stored`: what `stored_keys` gave, where it is known."""
    stored = stored_keys(metadata, num_nodes, num_keys) if stored is None else stored
    lengths, used = metadata.lengths, metadata.used_rows(num_nodes)
    row = torch.arange(num_nodes, device=lengths.device)[:, None]
    slot = torch.arange(num_keys, device=lengths.device) - lengths[:, None, None]
    seen = stored[:, None]
    if metadata.mode == "chain":
        seen = seen & (slot <= row)
    elif metadata.mode == "tree":
        assert metadata.mask is not None
        bit = slot.clamp(0, metadata.mask.shape[2] * 64 - 1).expand(-1, num_nodes, -1)
        among_draft = (metadata.mask.gather(2, bit // 64) >> (bit % 64)) & 1 != 0
        seen = seen & (among_draft | (slot < 0))
    if metadata.window is not None:
        seen = seen & (_distance(metadata, row, slot) < metadata.window)
    return seen & (row < used[:, None, None])


def _distance(metadata: AttentionMetadata, row: Tensor, slot: Tensor) -> Tensor:
    """[B, N, S]: position of the row - position of the key, from row [N, 1] and slot [B, 1, S]; a draft slot is at its
    depth."""
    depths, row_depths = metadata.depths, metadata.row_depths
    row_place, key_place = row[None], slot
    if depths is not None:
        row_place = (depths if row_depths is None else row_depths)[:, :, None]
        by_depth = depths.to(torch.int64)[:, None].gather(2, slot.clamp(0, depths.shape[1] - 1))
        key_place = torch.where(slot >= 0, by_depth, slot)  # no row sees what follows the last slot
    return row_place - key_place


def _plan(metadata: AttentionMetadata, work: WorkShape) -> TileSchedule:
    lengths, used = metadata.lengths, metadata.used_rows(work.num_nodes)
    if work.num_splits > 1:
        splits = _num_splits(lengths, used, work)
        tiles = (used * work.group + work.block_m - 1) // work.block_m
    else:
        splits = torch.ones_like(used)
        tiles = torch.full_like(used, work.row_tiles)
    items = splits * tiles
    starts = items.cumsum(0) - items
    index = torch.arange(work.batch * work.num_splits * work.row_tiles, device=lengths.device)
    live = index < items.sum()
    request = torch.searchsorted((starts + items).contiguous(), index, right=True).clamp(max=max(0, work.batch - 1))
    rows = torch.zeros(len(index), 3, dtype=torch.int64, device=lengths.device)
    if work.batch:
        within = index - starts[request]
        width = tiles[request].clamp(min=1)
        rows = torch.stack([request, width - 1 - within % width, within // width], dim=1)
    offsets = torch.nn.functional.pad(splits.cumsum(0), (1, 0))
    return TileSchedule(torch.where(live[:, None], rows, 0).int(), offsets.int(), items.sum()[None].int(), work)


def plan_levels(
    metadata: AttentionMetadata, works: Sequence[WorkShape], length_step: int, width_step: int
) -> tuple[TileSchedule, ...]:
    return tuple(
        _plan(metadata._replace(lengths=metadata.lengths + level * length_step), work)
        for level, work in enumerate(works)
    )


def _num_splits(lengths: Tensor, used: Tensor, work: WorkShape) -> Tensor:
    """[B] splits of each request, as `device.split_layout` has them."""
    slots = torch.full_like(used, work.num_slots) if work.all_slots else used
    end = torch.where(used > 0, (lengths + slots).clamp(max=work.max_length), 0)
    lowest = torch.zeros_like(end) if work.window is None else (lengths - work.window + 1).clamp(min=0)
    if work.fixed_splits:
        borders = fixed_borders(work.max_length, work.split_tokens, work.first_splits)
        begins = torch.tensor(borders, device=lengths.device)
        last = torch.searchsorted(begins, (end - 1).clamp(min=0), right=True)
        return torch.where(end > 0, last - torch.searchsorted(begins, lowest, right=True) + 1, 0)
    unit = work.split_tokens // 8
    span = (end - lowest // unit * unit).clamp(min=0)
    rounds = (span // work.first_splits + work.longest_split // 2) // work.longest_split
    rounds = rounds.clamp(max=work.max_splits // work.first_splits).clamp(min=1)
    wanted = _ceil_div(span, work.split_tokens).minimum(rounds * work.first_splits).clamp(min=1, max=work.max_splits)
    tokens = _ceil_div(_ceil_div(span, wanted), unit).clamp(min=1) * unit
    return _ceil_div(span, tokens)


def _ceil_div(value: Tensor, by: int | Tensor) -> Tensor:
    return (value + by - 1) // by


def mask_paths(mask: Tensor, most: int) -> Tensor:
    bit = torch.arange(mask.shape[2] * 64, device=mask.device)
    seen = (mask[:, :, bit // 64] >> (bit % 64)) & 1 != 0
    place = torch.where(seen, seen.cumsum(2) - 1, most).clamp(max=most)
    paths = mask.new_full((*mask.shape[:2], most + 1), -1, dtype=torch.int32)
    paths.scatter_(2, place, bit.to(torch.int32).expand(place.shape))
    return paths[:, :, :most].contiguous()
