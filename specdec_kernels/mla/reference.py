"""Definition of absorbed multi-head latent attention in plain torch.

A cached token is one row c_t = [latent_t | rope_t] that all heads share, and its latent is the value too:

    s[i, h, t] = scale * (q_latent[i, h] . latent_t + q_rope[i, h] . rope_t)
    lse[i, h] = log sum_t exp(s[i, h, t])        out[i, h] = sum_t exp(s[i, h, t] - lse[i, h]) latent_t

over the tokens t that row i sees. A row that sees none has lse -inf and out 0. Half types are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.attention.reference import gather_pages, stored_keys, visible_keys
from specdec_kernels.mla.types import MlaCall


def mla_attention(call: MlaCall) -> Tensor:
    return mla_attention_with_lse(call)[0]


def mla_attention_with_lse(call: MlaCall) -> tuple[Tensor, Tensor]:
    """`split_tokens` has no meaning here."""
    q_latent, q_rope, cache, metadata, _ = call
    num_nodes, _, latent = q_latent.shape[1:]
    max_length = metadata.max_length
    assert max_length is not None and metadata.scale is not None
    maths = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    tokens = gather_pages(cache, metadata.page_table, max_length).to(maths)
    tokens = tokens.masked_fill(~stored_keys(metadata, num_nodes, max_length)[:, :, None], 0.0)
    queries = torch.cat([q_latent, q_rope], dim=-1).to(maths)
    scores = torch.einsum("bnhd,btd->bhnt", queries * metadata.scale, tokens)
    seen = visible_keys(metadata, num_nodes, max_length)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))

    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhnt,btd->bnhd", weights, tokens[..., :latent]).to(q_latent.dtype).contiguous()
    return out, lse.transpose(1, 2).contiguous()
