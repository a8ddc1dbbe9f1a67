"""The definition of the products in plain torch; also what more rows than the kernel takes go to."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specdec_kernels.activation.reference import silu_mul
from specdec_kernels.all_reduce.reference import all_reduce_add_rms_norm, tell_numbers
from specdec_kernels.all_reduce.types import Exchange
from specdec_kernels.norm.reference import add_rms_norm
from specdec_kernels.norm.types import Normed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x weight^T + bias. torch promises no bits, so `batch_invariant` changes nothing here."""
    wide = torch.promote_types(x.dtype, out_dtype or x.dtype)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, *, batch_invariant: bool = False) -> torch.Tensor:
    """silu(x gate^T) * (x up^T)."""
    return silu_mul(F.linear(x, weight))


def linear_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
) -> Normed:
    """The norm of x weight^T + residual, and that sum."""
    return add_rms_norm(F.linear(x, weight), residual, norm_weight, eps)


def linear_all_reduce_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    exchange: Exchange,
    slot: int,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
) -> Normed:
    """The norm of residual + the sum over ranks of x weight^T, and that sum."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = F.linear(x.to(wide), weight.to(wide))
    return all_reduce_add_rms_norm(product[None], exchange, slot, residual, norm_weight, eps)


def linear_argmax(
    x: torch.Tensor, weight: torch.Tensor, *, batch_invariant: bool = False, exchange: Exchange | None = None
) -> torch.Tensor:
    """Lowest column of the largest logit, -1 without one; torch's argmax names any of several."""
    logits = F.linear(x, weight)
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    best = logits.amax(-1, keepdim=True)
    lowest, best = (logits == best).to(torch.uint8).argmax(-1), best[..., 0]
    if exchange is not None:
        best, lowest = _largest_of_ranks(best, lowest + exchange.rank * weight.shape[0], exchange)
    return torch.where(best > -torch.inf, lowest, -1)


def _largest_of_ranks(
    best: torch.Tensor, column: torch.Tensor, exchange: Exchange
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest logit, lowest column) [...] of all ranks, for an `Exchange` that holds the memory of all of them."""
    # +inf counts as the largest float32.
    best = best.flatten().float().clamp(max=torch.finfo(torch.float32).max)
    told = tell_numbers(torch.stack([best.view(torch.int32), column.flatten().int()], 1), exchange)
    top, lowest = told[..., 0].contiguous().view(torch.float32), told[..., 1].long()
    best = top.amax(0)
    lowest = torch.where(top == best, lowest, torch.iinfo(torch.int64).max).amin(0)
    return best.view(column.shape), lowest.view(column.shape)
