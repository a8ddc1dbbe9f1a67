"""Definition of paged attention in plain torch, and the attention of the CPU backend.

With s[i, t] = scale * q_i . k_t over the keys t that row i sees:

    lse_i = log sum_t exp(s[i, t])        out_i = sum_t exp(s[i, t] - lse_i) v_t

A row that sees no key has lse -inf and out 0. Half types are computed in float32, float64 in float64, so that
the same code serves as the truth of the parity tests.
"""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    mask: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    scale: float | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.attention.paged_attention`; `split_tokens` has no meaning here."""
    batch, num_nodes, heads, head_dim = q.shape
    kv_heads = kv.shape[3]
    maths = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = head_dim**-0.5 if scale is None else scale
    max_length = page_table.shape[1] * kv.shape[2] if max_length is None else max_length
    used = _used_rows(lengths, q_lens, num_nodes)
    keys, values = _gather(kv, page_table, max_length, maths)
    stored = torch.arange(keys.shape[1], device=q.device) < (lengths + used)[:, None]
    values = values.masked_fill(~stored[:, :, None, None], 0.0)

    grouped = q.to(maths).reshape(batch, num_nodes, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bnhgd,bthd->bhgnt", grouped * scale, keys)
    visible = _visible(lengths, used, num_nodes, keys.shape[1], mode, mask)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhgnt,bthd->bnhgd", weights, values).reshape(q.shape).to(q.dtype)
    if not return_lse:
        return out
    return out, lse.permute(0, 3, 1, 2).reshape(batch, num_nodes, heads).contiguous()


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


def _visible(
    lengths: torch.Tensor,
    used: torch.Tensor,
    num_nodes: int,
    width: int,
    mode: str,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """[B, N, S] bool: which positions each query row sees."""
    position = torch.arange(width, device=lengths.device)
    row = torch.arange(num_nodes, device=lengths.device)
    slot = position - lengths[:, None, None]
    in_draft = (slot >= 0) & (slot < used[:, None, None])
    if mode == "chain":
        seen = slot <= row[:, None]
    elif mode == "block":
        seen = torch.ones_like(slot, dtype=torch.bool)
    else:
        assert mask is not None
        clamped = slot.clamp(0, num_nodes - 1).expand(-1, num_nodes, -1)
        seen = (mask.gather(2, clamped // 64) >> (clamped % 64)) & 1 != 0
    return ((slot < 0) | (in_draft & seen)) & (row < used[:, None])[:, :, None]
