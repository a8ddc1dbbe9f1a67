"""The definition of the products in plain torch; also what more rows than the kernel takes go to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.activation.reference import silu_mul
from specdec_kernels.all_reduce.reference import all_reduce_add_rms_norm, tell_numbers
from specdec_kernels.all_reduce.types import Exchange
from specdec_kernels.norm.reference import add_rms_norm
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.projection.types import GROUP, LARGEST_CODE, LEAST_MAGNITUDE, Product, ScaledWeight


def dequantised(weight: ScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K]: code times scale, in float32 or float64."""
    outer, inner = weight.shape
    values = weight.codes.view(torch.float8_e4m3fn).float().to(dtype)
    scales = weight.scales.to(dtype).repeat_interleave(weight.group_rows, 0)[:outer]
    return values.mul_(scales.repeat_interleave(weight.group_inner, 1)[:, :inner])


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [..., K] of x and scales [..., ceil(K / 128)] float32, in float32 whatever the dtype of x."""
    inner = x.shape[-1]
    groups = F.pad(x.float(), (0, -inner % GROUP)).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1).clamp(min=LEAST_MAGNITUDE)
    most = torch.full_like(largest, LARGEST_CODE)  # with a number, torch multiplies by a reciprocal, which rounds twice
    codes = (groups * (most / largest)[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.float8_e4m3fn).flatten(-2)[..., :inner], largest / most


def _rounded_values(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `rounded` leaves it, in `dtype`."""
    codes, scales = rounded(x)
    return codes.float().to(dtype) * scales.to(dtype).repeat_interleave(GROUP, -1)[..., : x.shape[-1]]


def linear(product: Product, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x weight^T + bias, of a `ScaledWeight` in at least float32. torch promises no bits, so `batch_invariant` changes
    nothing here."""
    if isinstance(product.weight, ScaledWeight):
        wide = torch.promote_types(product.x.dtype, torch.float32)
        weight = dequantised(product.weight, wide)
        x = _rounded_values(product.x, wide) if product.weight.float8_x else product.x
    else:
        wide = torch.promote_types(product.x.dtype, out_dtype or product.x.dtype)
        weight, x = product.weight.to(wide), product.x
    result = F.linear(x.to(wide), weight, None if bias is None else bias.to(wide))
    return result.to(torch.promote_types(product.x.dtype, out_dtype or product.x.dtype))


def linear_silu_mul(product: Product) -> Tensor:
    """silu(x gate^T) * (x up^T)."""
    return silu_mul(linear(product))


def linear_add_rms_norm(product: Product, end: NormInputs) -> Normed:
    """The norm of x weight^T + residual, and that sum."""
    return add_rms_norm(linear(product), end)


def linear_all_reduce_add_rms_norm(product: Product, exchange: Exchange, slot: int, end: NormInputs) -> Normed:
    """The norm of residual + the sum over ranks of x weight^T, and that sum."""
    return all_reduce_add_rms_norm(linear(product, out_dtype=torch.float32)[None], exchange, slot, end)


def linear_argmax(product: Product, exchange: Exchange | None = None) -> Tensor:
    """Lowest column of the largest logit, -1 without one; torch's argmax names any of several."""
    logits = linear(product)
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    best = logits.amax(-1, keepdim=True)
    lowest, best = (logits == best).to(torch.uint8).argmax(-1), best[..., 0]
    if exchange is not None:
        best, lowest = _largest_of_ranks(best, lowest + exchange.rank * product.plain.shape[0], exchange)
    return torch.where(best > -torch.inf, lowest, -1)


def _largest_of_ranks(best: Tensor, column: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """(largest logit, lowest column) [...] of all ranks, for an `Exchange` that holds the memory of all of them."""
    # +inf counts as the largest float32.
    best = best.flatten().float().clamp(max=torch.finfo(torch.float32).max)
    told = tell_numbers(torch.stack([best.view(torch.int32), column.flatten().int()], 1), exchange)
    top, lowest = told[..., 0].contiguous().view(torch.float32), told[..., 1].long()
    best = top.amax(0)
    lowest = torch.where(top == best, lowest, torch.iinfo(torch.int64).max).amin(0)
    return best.view(column.shape), lowest.view(column.shape)
