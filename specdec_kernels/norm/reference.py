"""The definition of the norms in plain torch, with the roundings of Hugging Face's decoders."""

import torch
from torch import Tensor

from specdec_kernels.norm.types import Normed, NormInputs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps)."""
    wide = x if x.dtype == torch.float64 else x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled = wide * inverse
    if weight.dtype == x.dtype:
        scaled = scaled.to(x.dtype)
    return (weight * scaled).to(x.dtype)


def add_rms_norm(x: Tensor, inputs: NormInputs) -> Normed:
    """The norm of x + residual, and that sum."""
    total = x + inputs.residual
    return Normed(rms_norm(total, inputs.weight, inputs.eps), total)


def embed_rms_norm(tokens: Tensor, table: Tensor, weight: Tensor, eps: float) -> Normed:
    """The norm of the tokens' rows of the embedding table, and those rows."""
    known = (tokens >= 0) & (tokens < table.shape[0])
    rows = torch.where(known[..., None], table[torch.where(known, tokens, 0)], 0)
    return Normed(rms_norm(rows, weight, eps), rows)


def embed_join_rms_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    feature: Tensor,
    feature_weight: Tensor,
    eps: float,
    sources: Tensor | None = None,
) -> Normed:
    """The norms of the tokens' embeddings and of their features side by side, and those features."""
    if sources is not None:
        known = (sources >= 0) & (sources < feature.shape[-2])
        index = torch.where(known, sources, 0)[..., None].expand(*sources.shape, feature.shape[-1])
        feature = torch.where(known[..., None], feature.gather(-2, index), 0)
    normed = embed_rms_norm(tokens, table, weight, eps).normed
    return Normed(torch.cat([normed, rms_norm(feature, feature_weight, eps)], -1), feature)
