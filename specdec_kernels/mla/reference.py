"""Definition of absorbed multi-head latent attention in plain torch.

A cached token is one row c_t = [latent_t | rope_t] that all heads share, and its latent is the value too:

    s[i, h, t] = scale * (q_latent[i, h] . latent_t + q_rope[i, h] . rope_t)
    lse[i, h] = log sum_t exp(s[i, h, t])        out[i, h] = sum_t exp(s[i, h, t] - lse[i, h]) latent_t

over the tokens t that row i sees. A row that sees none has lse -inf and out 0. Half types are computed in
float32, float64 in float64, so that the same code serves as the truth of the parity tests.
"""

from __future__ import annotations

import torch


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mode: str,
    scale: float,
    mask: torch.Tensor | None = None,
    q_lens: torch.Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    tree_width: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `specdec_kernels.mla.mla_attention`; `split_tokens` has no meaning here."""
    num_nodes, latent = q_latent.shape[1], q_latent.shape[3]
    maths = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    max_length = page_table.shape[1] * cache.shape[1] if max_length is None else max_length
    used = torch.full_like(lengths, num_nodes) if q_lens is None else q_lens.long().clamp(0, num_nodes)
    drafted = used if tree_width is None else torch.full_like(lengths, tree_width)

    tokens = _gather(cache, page_table, max_length).to(maths)
    position = torch.arange(tokens.shape[1], device=cache.device)
    tokens = tokens.masked_fill((position >= (lengths + drafted)[:, None])[:, :, None], 0.0)
    queries = torch.cat([q_latent, q_rope], dim=-1).to(maths)
    scores = torch.einsum("bnhd,btd->bhnt", queries * scale, tokens)
    seen = _visible(position, lengths, used, drafted, num_nodes, mode, mask)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhnt,btd->bnhd", weights, tokens[..., :latent]).to(q_latent.dtype).contiguous()
    return (out, lse.transpose(1, 2).contiguous()) if return_lse else out


def _gather(cache: torch.Tensor, page_table: torch.Tensor, max_length: int) -> torch.Tensor:
    """Rows [B, max_length, latent + rope] by position; unused table entries give any page's rows."""
    pages, page_size = cache.shape[:2]
    table = page_table[:, : -(-max_length // page_size)].long().clamp(0, pages - 1)
    return cache[table].flatten(1, 2)[:, :max_length]


def _visible(
    position: torch.Tensor,  # [S]
    lengths: torch.Tensor,  # [B]
    used: torch.Tensor,  # [B] rows in use
    drafted: torch.Tensor,  # [B] draft slots behind the prefix
    num_nodes: int,
    mode: str,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """[B, N, S] bool: which positions each row sees."""
    row = torch.arange(num_nodes, device=lengths.device)
    slot = position - lengths[:, None, None]
    if mode == "chain":
        seen = slot <= row[:, None]
    elif mode == "block":
        seen = torch.ones_like(slot, dtype=torch.bool)
    else:
        assert mask is not None
        bit = slot.clamp(0, mask.shape[2] * 64 - 1).expand(-1, num_nodes, -1)
        seen = (mask.gather(2, bit // 64) >> (bit % 64)) & 1 != 0
    in_draft = (slot >= 0) & (slot < drafted[:, None, None])
    return ((slot < 0) | (in_draft & seen)) & (row < used[:, None])[:, :, None]
