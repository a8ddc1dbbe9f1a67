"""Projections of a decoding step: few rows against a weight, which are bound by reading the weight once.

All functions take x [..., K], contiguous, and a weight [N, K] of its dtype, contiguous, as Hugging Face stores it, sum
in float32 and round once to the dtype of x: float16, bfloat16 or float32, or float64 by torch alone. More
than 64 rows go to torch's matmul, whose bits depend on the number of rows. With `batch_invariant` the kernel takes them
too, and a row has the same bits for any number of rows. ValueError where a shape, dtype, device or layout does not fit.

`linear`, `linear_silu_mul` and `linear_add_rms_norm` also take a `ScaledWeight`, whose product is that of the weight
dequantised to float32, and of x as it is or rounded to float8. Where torch has no such product, the kernel takes any
number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.all_reduce.types import Exchange
from specdec_kernels.checks import Expected, expect_dtype, expect_same_device, expect_shape, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.norm.configs import MAX_WIDTH
from specdec_kernels.norm.types import Normed, NormInputs, weight_dtype
from specdec_kernels.projection.types import GROUP, Product, ScaledWeight

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def linear(
    x: Tensor,
    weight: Tensor | ScaledWeight,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> Tensor:
    """x weight^T + bias [..., N], where the bias [N], dtype of x, is added before the rounding.

    `out_dtype`: dtype of the result, x's by default, or float32, in which sums are not rounded again.
    """
    _check(x, weight, bias)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype: expected {x.dtype} or torch.float32, got {out_dtype}")
    return dispatch("linear", __package__, impl, x)(Product(x, weight, batch_invariant), bias, out_dtype)


def linear_silu_mul(
    x: Tensor, weight: Tensor | ScaledWeight, *, batch_invariant: bool = False, impl: str = "auto"
) -> Tensor:
    """silu(x gate^T) * (x up^T) [..., F] for a weight [2 F, K] that holds the rows of gate, then those of up.

    Both products and the SiLU are rounded to the dtype of x, as the separate operations do.
    """
    _check(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight: expected an even number of rows, got {weight.shape[0]}")
    return dispatch("linear_silu_mul", __package__, impl, x)(Product(x, weight, batch_invariant))


def linear_add_rms_norm(
    x: Tensor,
    weight: Tensor | ScaledWeight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Normed:
    """The last projection of a sublayer, its addition to the residual stream, and the norm of the next sublayer.

    The result has the bits of `add_rms_norm(linear(x, weight), residual, norm_weight, eps)`; the norm adds the
    partial sums of the projection itself. `residual` [..., N] is not changed.
    """
    end = _checked_end(x, weight, residual, norm_weight, eps)
    return dispatch("linear_add_rms_norm", __package__, impl, x)(Product(x, weight, batch_invariant), end)


def linear_all_reduce_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    exchange: Exchange,
    slot: int,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Normed:
    """`linear_add_rms_norm` of a projection whose inner dimension is divided among ranks.

    Every rank calls this with its own columns of x, at most `exchange.rows` rows, and of the weight. The products are
    summed over ranks in float32 and rounded once; `exchange` and `slot` as in `all_reduce_add_rms_norm`.
    """
    _expect_plain(weight)
    end = _checked_end(x, weight, residual, norm_weight, eps)
    function = dispatch("linear_all_reduce_add_rms_norm", __package__, impl, x)
    return function(Product(x, weight, batch_invariant), exchange, slot, end)


def linear_argmax(
    x: Tensor, weight: Tensor, *, batch_invariant: bool = False, exchange: Exchange | None = None, impl: str = "auto"
) -> Tensor:
    """The column of the largest logit of each row, without writing the logits: greedy tokens of an LM head.

    Args:
        exchange: memory of width 2, used for nothing else, over which the ranks exchange their largest logits, where
            the rows of the weight are divided among ranks evenly and in order; every rank calls this at once, with at
            most `exchange.rows` rows of the same x. Columns count in the whole weight.

    Returns:
        [...] int64, the same on every rank: -1 for a row without a logit above -inf. Logits are rounded to the dtype of
        x before they are compared; among equal logits the lowest column wins. As in `pick_tokens` NaN counts as -inf,
        and +inf as the largest float32.
    """
    _expect_plain(weight)
    _check(x, weight, None)
    if exchange is not None:
        if exchange.width != 2:
            raise ValueError(f"exchange: expected a width of 2, got {exchange.width}")
        rows = x.numel() // x.shape[-1]
        if rows > exchange.rows:
            raise ValueError(f"x: expected at most {exchange.rows} rows to exchange, got {rows}")
        expect_dtype("exchange.memory", exchange.memory, torch.int64)
        expect_same_device(x=x, memory=exchange.memory)
    function = dispatch("linear_argmax", __package__, impl, x, kernel="kernel_argmax")
    return function(Product(x, weight, batch_invariant), exchange)


def _expect_plain(weight: Tensor | ScaledWeight) -> None:
    if isinstance(weight, ScaledWeight):
        raise ValueError("weight: expected a tensor, got a ScaledWeight, which this product does not take")


def _checked_end(
    x: Tensor, weight: Tensor | ScaledWeight, residual: Tensor, norm_weight: Tensor, eps: float
) -> NormInputs:
    _check(x, weight, None)
    expect_tensors(
        {"x": x},
        residual=(residual, (*x.shape[:-1], weight.shape[0]), x.dtype),
        norm_weight=(norm_weight, (weight.shape[0],), weight_dtype(x, norm_weight)),
    )
    if weight.shape[0] > MAX_WIDTH:
        raise ValueError(f"weight: expected at most {MAX_WIDTH} rows to norm, got {weight.shape[0]}")
    return NormInputs(residual, norm_weight, eps)


def _check(x: Tensor, weight: Tensor | ScaledWeight, bias: Tensor | None) -> None:
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected a last dimension of at least 1, got shape {list(x.shape)}")
    expect_dtype("x", x, *_DTYPES)
    codes = weight.codes if isinstance(weight, ScaledWeight) else weight
    expect_shape("weight", codes, (None, x.shape[-1]))
    if codes.shape[0] == 0:
        raise ValueError("weight: expected at least one row, got none")
    if isinstance(weight, ScaledWeight):
        # The reference in float64 takes scales of its own type.
        scales = torch.float64 if x.dtype == weight.scales.dtype == torch.float64 else torch.float32
        expected = expected_scaled("weight", weight, weight.shape, scales)
    else:
        expected = {"weight": (weight, (None, x.shape[-1]), x.dtype)}
    expect_tensors(x=(x, x.shape, x.dtype), **expected, bias=(bias, (codes.shape[0],), x.dtype))


def expected_scaled(
    name: str, weight: ScaledWeight, shape: tuple[int, ...], scales: torch.dtype
) -> dict[str, Expected]:
    """What the tensors of a weight of `shape` [..., N, K] must be. ValueError for groups that no kernel reads."""
    *experts, outer, inner = shape
    rows, columns = weight.group_rows, weight.group_inner
    if not 0 < rows <= GROUP or rows & rows - 1:
        raise ValueError(f"{name}.group_rows: expected a power of two up to {GROUP}, got {rows}")
    if columns != GROUP and (rows > 1 or columns != inner):
        raise ValueError(f"{name}.group_inner: expected {GROUP}, or {inner} with group_rows=1, got {columns}")
    groups = (*experts, -(-outer // rows), -(-inner // columns))
    return {f"{name}.codes": (weight.codes, shape, torch.uint8), f"{name}.scales": (weight.scales, groups, scales)}
