"""Definition of paged attention in plain torch, and the attention of the CPU backend.

With s[i, t] = scale * k_scale * q_i . k_t over the keys t that row i sees, capped to c tanh(s / c) where there
is a soft cap c:

    lse_i = log(exp(sink) + sum_t exp(s[i, t]))        out_i = v_scale sum_t exp(s[i, t] - lse_i) v_t

A row that sees no key has out 0, and lse -inf or its sink. Half types are computed in float32, float64 in
float64, so that the same code serves as the truth of the parity tests. The work list of `plan_attention` is
defined here too, item by item.
"""

from __future__ import annotations

import torch

from specdec_kernels.attention.types import AttentionPlan, PlanShape


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None,
    q_lens: torch.Tensor | None,
    depths: torch.Tensor | None,
    row_depths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    scale: float,
    soft_cap: float | None,
    return_lse: bool,
    shape: PlanShape,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.attention.paged_attention`, which has checked the arguments."""
    batch, num_nodes, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    maths = torch.float64 if q.dtype == torch.float64 else torch.float32
    used = _used_rows(lengths, q_lens, num_nodes)
    slots = torch.full_like(used, shape.num_slots) if shape.all_slots else used
    keys, values = _gather(kv, page_table, shape.max_length, maths)
    keys, values = keys * _by_head(k_scale), values * _by_head(v_scale)
    stored = torch.arange(keys.shape[1], device=q.device) < (lengths + slots)[:, None]
    values = values.masked_fill(~stored[:, :, None, None], 0.0)

    grouped = q.to(maths).reshape(batch, num_nodes, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bnhgd,bthd->bhgnt", grouped * scale, keys)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row_used = torch.arange(num_nodes, device=q.device) < used[:, None]
    seen = _seen(lengths, slots, num_nodes, keys.shape[1], mode, mask) & row_used[:, :, None]
    if shape.window is not None:
        seen &= _in_window(lengths, slots, num_nodes, keys.shape[1], shape.window, depths, row_depths)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(maths).view(kv_heads, -1, 1))
        lse = torch.where(row_used[:, None, None], with_sink, lse)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhgnt,bthd->bnhgd", weights, values).reshape(q.shape).to(q.dtype)
    if not return_lse:
        return out
    return out, lse.permute(0, 3, 1, 2).reshape(batch, num_nodes, heads).contiguous()


def _by_head(scale: float | torch.Tensor) -> float | torch.Tensor:
    """A scale that multiplies [B, S, H_kv, D]."""
    return scale if isinstance(scale, float) else scale[:, None]


def _used_rows(lengths: torch.Tensor, q_lens: torch.Tensor | None, num_nodes: int) -> torch.Tensor:
    """[B] int64 query rows in use."""
    if q_lens is None:
        return torch.full_like(lengths, num_nodes)
    return q_lens.to(torch.int64).clamp(0, num_nodes)


def _gather(
    kv: torch.Tensor, page_table: torch.Tensor, max_length: int, maths: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, S, H_kv, D] by position; entries of unused table slots are whatever page they
    name."""
    pages, page_size = kv.shape[1:3]
    columns = -(-max_length // page_size)
    table = page_table[:, :columns].to(torch.int64).clamp(0, pages - 1)
    by_position = kv[:, table].flatten(2, 3)[:, :, :max_length].to(maths)
    return by_position[0], by_position[1]


def _seen(
    lengths: torch.Tensor, slots: torch.Tensor, num_nodes: int, width: int, mode: str, mask: torch.Tensor | None
) -> torch.Tensor:
    """[B, N, S] bool: which positions each query row sees by its mode."""
    slot = torch.arange(width, device=lengths.device) - lengths[:, None, None]
    in_draft = (slot >= 0) & (slot < slots[:, None, None])
    if mode == "chain":
        seen = slot <= torch.arange(num_nodes, device=lengths.device)[:, None]
    elif mode == "block":
        seen = torch.ones_like(slot, dtype=torch.bool)
    else:
        assert mask is not None
        clamped = slot.clamp(0, mask.shape[2] * 64 - 1).expand(-1, num_nodes, -1)
        seen = (mask.gather(2, clamped // 64) >> (clamped % 64)) & 1 != 0
    return (slot < 0) | (in_draft & seen)


def _in_window(
    lengths: torch.Tensor,
    slots: torch.Tensor,
    num_nodes: int,
    width: int,
    window: int,
    depths: torch.Tensor | None,
    row_depths: torch.Tensor | None,
) -> torch.Tensor:
    """[B, N, S] bool: position of the row - position of the key < window, where a draft slot of a tree stands
    at its depth."""
    key = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    if depths is None or row_depths is None:
        row = lengths[:, None] + torch.arange(num_nodes, device=lengths.device)
    else:
        slot = key - lengths[:, None]
        in_draft = (slot >= 0) & (slot < slots[:, None])
        by_depth = depths.to(torch.int64).gather(1, slot.clamp(0, depths.shape[1] - 1))
        key = torch.where(in_draft, lengths[:, None] + by_depth, key)
        row = lengths[:, None] + row_depths
    return row[:, :, None] - key[:, None] < window


def plan_attention(lengths: torch.Tensor, q_lens: torch.Tensor | None, shape: PlanShape) -> AttentionPlan:
    """See `specdec_kernels.attention.plan_attention`, which has checked the arguments."""
    used = _used_rows(lengths, q_lens, shape.num_nodes)
    all_tiles = -(-shape.num_nodes * shape.group // shape.block_m)
    if shape.num_splits > 1:
        splits = _num_splits(lengths, used, shape)
        tiles = (used * shape.group + shape.block_m - 1) // shape.block_m
    else:
        splits = torch.ones_like(used)
        tiles = torch.full_like(used, all_tiles)
    items = splits * tiles
    starts = items.cumsum(0) - items
    index = torch.arange(shape.batch * shape.num_splits * all_tiles, device=lengths.device)
    live = index < items.sum()
    request = torch.searchsorted((starts + items).contiguous(), index, right=True).clamp(max=max(0, shape.batch - 1))
    rows = torch.zeros(len(index), 3, dtype=torch.int64, device=lengths.device)
    if shape.batch:
        within = index - starts[request]
        width = tiles[request].clamp(min=1)
        rows = torch.stack([request, width - 1 - within % width, within // width], dim=1)
    offsets = torch.nn.functional.pad(splits.cumsum(0), (1, 0))
    return AttentionPlan(
        torch.where(live[:, None], rows, 0).to(torch.int32),
        offsets.to(torch.int32),
        items.sum()[None].to(torch.int32),
        shape,
    )


def _num_splits(lengths: torch.Tensor, used: torch.Tensor, shape: PlanShape) -> torch.Tensor:
    """[B] splits of each request: their length doubles until `max_splits` cover the keys a row may see."""
    slots = torch.full_like(used, shape.num_slots) if shape.all_slots else used
    end = torch.where(used > 0, (lengths + slots).clamp(max=shape.max_length), 0)
    lowest = torch.zeros_like(end) if shape.window is None else (lengths - shape.window + 1).clamp(min=0)
    span = (end - lowest).clamp(min=1)
    doublings = torch.zeros_like(end)
    for count in range(32):
        # The last split may be a quarter longer. From first_splits on, lengths double with a fourfold span.
        spread = (4 * shape.first_splits + 1) * shape.split_tokens * 4**count // 4
        crowded = (4 * shape.max_splits + 1) * shape.split_tokens * 2**count // 4
        doublings = torch.where((span > min(spread, crowded)) & (doublings == count), count + 1, doublings)
    tokens = shape.split_tokens * 2**doublings
    first = lowest // tokens
    return ((end - first * tokens - tokens // 4).maximum(end.clamp(max=1)) + tokens - 1) // tokens
