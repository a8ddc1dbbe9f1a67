"""Definition of absorbed multi-head latent attention, and of the store of its cache, in plain torch.

A cached token is one row c_t = [latent_t | rope_t] that all heads share, and its latent is the value too:

    s[i, h, t] = scale * (q_latent[i, h] . latent_t + q_rope[i, h] . rope_t)
    lse[i, h] = log sum_t exp(s[i, h, t])        out[i, h] = sum_t exp(s[i, h, t] - lse[i, h]) latent_t

over the tokens t that row i sees. A row that sees none has lse -inf and out 0. Half types are computed in float32.

A latent is stored as w * (x / sqrt(mean(x^2) + eps)), rounded after the norm and after the weight, and the key that all
heads share rotated by its position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.attention.reference import gather_pages, stored_keys, visible_keys
from specdec_kernels.mla.types import LatentStore, MlaCall


def mla_attention(call: MlaCall) -> Tensor:
    return mla_attention_with_lse(call)[0]


def mla_attention_with_lse(call: MlaCall) -> tuple[Tensor, Tensor]:
    """`split_tokens` has no meaning here."""
    q_latent, q_rope, cache, metadata = call[:4]
    num_nodes, _, latent = q_latent.shape[1:]
    max_length = metadata.max_length
    assert max_length is not None and metadata.scale is not None
    maths = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    tokens = gather_pages(cache, metadata.page_table, max_length).to(maths)
    stored = stored_keys(metadata, num_nodes, max_length)
    tokens = tokens.masked_fill(~stored[:, :, None], 0.0)
    queries = torch.cat([q_latent, q_rope], dim=-1).to(maths)
    scores = torch.einsum("bnhd,btd->bhnt", queries * metadata.scale, tokens)
    seen = visible_keys(metadata, num_nodes, max_length, stored)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhnt,btd->bnhd", weights, tokens[..., :latent]).to(q_latent.dtype).contiguous()
    return out, lse.transpose(1, 2).contiguous()


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def write_latent(q: Tensor, store: LatentStore, eps: float, interleaved: bool) -> Tensor:
    kv, cache, slots, positions, rope, norm = store
    maths = torch.float64 if q.dtype == torch.float64 else torch.float32
    latents, keys = kv.to(maths).split([len(norm), q.shape[2]], dim=1)
    unit = (latents * torch.rsqrt(latents.square().mean(1, keepdim=True) + eps)).to(kv.dtype)
    normed = (unit.to(maths) * norm.to(maths)).to(kv.dtype)
    known = (positions >= 0) & (positions < len(rope))
    table = rope[positions.clamp(0, len(rope) - 1)].to(maths) * known[:, None]
    _store(cache.flatten(0, 1), slots, torch.cat([normed, _rotated(keys, table, interleaved).to(kv.dtype)], 1))
    return _rotated(q.to(maths), table[:, None], interleaved).to(q.dtype)


def _rotated(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """x [..., rope] by table rows that broadcast to it, as halves."""
    cos, sin = table.chunk(2, dim=-1)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _store(flat: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put `rows` [T, D] at `slots` of `flat` [S, D]. A row without a slot repeats the write of one that has a slot, or
    writes what slot 0 holds where none has: their number is not read back."""
    if not rows.numel() or not flat.numel():
        return
    stored = (slots >= 0) & (slots < len(flat))
    anchor = stored.to(torch.int8).argmax(0, keepdim=True)
    place = torch.where(stored, slots, 0)[anchor]
    held = torch.where(stored[anchor][:, None], rows[anchor], flat[place])
    flat[torch.where(stored, slots, place)] = torch.where(stored[:, None], rows, held)
