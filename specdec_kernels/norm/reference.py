"""The definition of the norms in plain torch.

The roundings are those of Hugging Face's decoders: statistics in float32, one rounding to the dtype of x after
the scaling, and one after the multiplication by the weight. A residual is added in the dtype of x. float64 is
computed in float64, so that it can serve as the truth of the tests.
"""

from __future__ import annotations

import torch

from specdec_kernels.norm.types import Normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps)."""
    wide = x if x.dtype == torch.float64 else x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
    """The norm of x + residual, and that sum."""
    total = x + residual
    return Normed(rms_norm(total, weight, eps), total)


def embed_rms_norm(tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float) -> Normed:
    """The norm of the tokens' rows of the embedding table, and those rows."""
    known = (tokens >= 0) & (tokens < table.shape[0])
    rows = torch.where(known[..., None], table[torch.where(known, tokens, 0)], 0)
    return Normed(rms_norm(rows, weight, eps), rows)
