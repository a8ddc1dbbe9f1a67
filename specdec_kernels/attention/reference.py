"""Definition of paged attention in plain torch.

With s[i, t] = scale * k_scale * q_i . k_t over the keys t that row i sees, capped to c tanh(s / c) where there
is a soft cap c:

    lse_i = log(exp(sink) + sum_t exp(s[i, t]))        out_i = v_scale sum_t exp(s[i, t] - lse_i) v_t

A row that sees no key has out 0, and lse -inf or its sink. Half types are computed in float32 and float64 in float64,
so the same code serves as the truth of the parity tests. The work list of `plan_attention` is defined here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels.attention.configs import AttentionConfig, fixed_borders
from specdec_kernels.attention.types import AttentionMetadata, LayerScales, WorkList, WorkShape


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work: WorkShape,
    config: AttentionConfig,
    work_list: WorkList | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `specdec_kernels.attention.paged_attention`, which has checked the arguments."""
    result = paged_attention_with_lse(q, kv, metadata, scales, work, config, work_list)[0]
    return result if out is None else out.copy_(result)


def paged_attention_with_lse(
    q: torch.Tensor,
    kv: torch.Tensor,
    metadata: AttentionMetadata,
    scales: LayerScales,
    work: WorkShape,
    config: AttentionConfig,
    work_list: WorkList | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.attention.paged_attention_with_lse`; how the work is divided has no meaning here."""
    batch, num_nodes, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    assert metadata.scale is not None
    maths = torch.float64 if q.dtype == torch.float64 else torch.float32
    stored = stored_keys(metadata, num_nodes, work.max_length)[:, :, None, None]
    keys, values = (gather_pages(half, metadata.page_table, work.max_length).to(maths) for half in kv)
    keys, values = keys * _by_head(scales.k_scale), (values * _by_head(scales.v_scale)).masked_fill(~stored, 0.0)

    grouped = q.to(maths).reshape(batch, num_nodes, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bnhgd,bthd->bhgnt", grouped * metadata.scale, keys)
    if metadata.soft_cap is not None:
        scores = metadata.soft_cap * torch.tanh(scores / metadata.soft_cap)
    seen = visible_keys(metadata, num_nodes, work.max_length)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    if scales.sinks is not None:
        row_used = torch.arange(num_nodes, device=q.device) < metadata.used_rows(num_nodes)[:, None]
        with_sink = torch.logaddexp(lse, scales.sinks.to(maths).view(kv_heads, -1, 1))
        lse = torch.where(row_used[:, None, None], with_sink, lse)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhgnt,bthd->bnhgd", weights, values).reshape(q.shape).to(q.dtype)
    return out, lse.permute(0, 3, 1, 2).reshape(batch, num_nodes, heads).contiguous()


def _by_head(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A scale that multiplies [B, S, H_kv, D]."""
    return scale if isinstance(scale, float) else scale[:, None]


def gather_pages(pool: torch.Tensor, page_table: torch.Tensor, num_keys: int) -> torch.Tensor:
    """pool [pages, page_size, ...] by position, [B, num_keys, ...]; entries of unused table slots are whatever page
    they name."""
    pages, page_size = pool.shape[:2]
    columns = -(-num_keys // page_size)
    table = page_table[:, :columns].to(torch.int64).clamp(0, pages - 1)
    return pool[table].flatten(1, 2)[:, :num_keys]


def stored_keys(metadata: AttentionMetadata, num_nodes: int, num_keys: int) -> torch.Tensor:
    """[B, num_keys] bool: whether a key of the prefix or the draft stands at position t."""
    used = metadata.used_rows(num_nodes)
    slots = used if metadata.tree_width is None else metadata.tree_width
    return torch.arange(num_keys, device=used.device) < (metadata.lengths + slots)[:, None]


def visible_keys(metadata: AttentionMetadata, num_nodes: int, num_keys: int) -> torch.Tensor:
    """[B, num_nodes, num_keys] bool: whether query row i sees the key at position t. Rows that are not in use see
    nothing. Reads nothing back."""
    lengths, used = metadata.lengths, metadata.used_rows(num_nodes)
    row = torch.arange(num_nodes, device=lengths.device)[:, None]
    slot = torch.arange(num_keys, device=lengths.device) - lengths[:, None, None]
    if metadata.mode == "chain":
        among_draft = slot <= row
    elif metadata.mode == "block":
        among_draft = torch.ones_like(slot, dtype=torch.bool)
    else:
        assert metadata.mask is not None
        bit = slot.clamp(0, metadata.mask.shape[2] * 64 - 1).expand(-1, num_nodes, -1)
        among_draft = (metadata.mask.gather(2, bit // 64) >> (bit % 64)) & 1 != 0
    seen = (slot < 0) | (among_draft & stored_keys(metadata, num_nodes, num_keys)[:, None])
    if metadata.window is not None:
        seen = seen & (_distance(metadata, row, slot) < metadata.window)
    return seen & (row < used[:, None, None])


def _distance(metadata: AttentionMetadata, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """[B, N, S]: position of the row - position of the key, where a draft slot of a tree stands at its depth.
    row [N, 1], slot [B, 1, S]; positions count from L."""
    depths, row_depths = metadata.depths, metadata.row_depths
    row_place, key_place = row[None], slot
    if depths is not None:
        row_place = (depths if row_depths is None else row_depths)[:, :, None]
        by_depth = depths.to(torch.int64)[:, None].gather(2, slot.clamp(0, depths.shape[1] - 1))
        key_place = torch.where(slot >= 0, by_depth, slot)  # no row sees what stands behind the last slot
    return row_place - key_place


def plan_attention(metadata: AttentionMetadata, work: WorkShape) -> WorkList:
    """See `specdec_kernels.attention.plan_attention`, which has checked the arguments."""
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
    return WorkList(
        torch.where(live[:, None], rows, 0).to(torch.int32),
        offsets.to(torch.int32),
        items.sum()[None].to(torch.int32),
        work,
    )


def plan_levels(
    metadata: AttentionMetadata, works: Sequence[WorkShape], length_step: int, width_step: int
) -> tuple[WorkList, ...]:
    """See `specdec_kernels.attention.plan_levels`, which has checked the arguments; `works` hold the widths."""
    return tuple(
        plan_attention(metadata._replace(lengths=metadata.lengths + level * length_step), work)
        for level, work in enumerate(works)
    )


def _num_splits(lengths: torch.Tensor, used: torch.Tensor, work: WorkShape) -> torch.Tensor:
    """[B] splits of each request, as `device.split_layout` has them."""
    slots = torch.full_like(used, work.num_slots) if work.all_slots else used
    if work.fixed_cut:
        return _fixed_splits(lengths, used, slots, work)
    end = torch.where(used > 0, (lengths + slots).clamp(max=work.max_length), 0)
    lowest = torch.zeros_like(end) if work.window is None else (lengths - work.window + 1).clamp(min=0)
    unit = work.split_tokens // 8
    span = (end - lowest // unit * unit).clamp(min=0)
    rounds = (span // work.first_splits + work.longest_split // 2) // work.longest_split
    rounds = rounds.clamp(max=work.max_splits // work.first_splits).clamp(min=1)
    wanted = _ceil_div(span, work.split_tokens).minimum(rounds * work.first_splits).clamp(min=1, max=work.max_splits)
    tokens = _ceil_div(_ceil_div(span, wanted), unit).clamp(min=1) * unit
    return _ceil_div(span, tokens)


def _ceil_div(value: torch.Tensor, by: int | torch.Tensor) -> torch.Tensor:
    return (value + by - 1) // by


def _fixed_splits(lengths: torch.Tensor, used: torch.Tensor, slots: torch.Tensor, work: WorkShape) -> torch.Tensor:
    """[B] splits of each request, where splits lie at fixed positions."""
    borders = fixed_borders(work.max_length, work.split_tokens, work.first_splits)
    begins = torch.tensor(borders, device=lengths.device)
    end = torch.where(used > 0, (lengths + slots).clamp(max=work.max_length), 0)
    lowest = torch.zeros_like(end) if work.window is None else (lengths - work.window + 1).clamp(min=0)
    last = torch.searchsorted(begins, (end - 1).clamp(min=0), right=True)
    first = torch.searchsorted(begins, lowest, right=True)
    return torch.where(end > 0, last - first + 1, 0)


def mask_paths(mask: torch.Tensor, most: int) -> torch.Tensor:
    """See `specdec_kernels.attention.mask_paths`, which has checked the arguments."""
    bit = torch.arange(mask.shape[2] * 64, device=mask.device)
    seen = (mask[:, :, bit // 64] >> (bit % 64)) & 1 != 0
    place = torch.where(seen, seen.cumsum(2) - 1, most).clamp(max=most)
    paths = mask.new_full((*mask.shape[:2], most + 1), -1, dtype=torch.int32)
    paths.scatter_(2, place, bit.to(torch.int32).expand(place.shape))
    return paths[:, :, :most].contiguous()
