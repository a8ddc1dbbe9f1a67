"""Projections of a decoding step: few rows against a weight, which are bound by reading the weight once.

The kernel puts the weight on the wide side of the tensor core and the rows on its narrow side, and cuts the
inner dimension so that every processor reads. The cut is fixed by the shape of the weight, never by the number
of rows, and partial sums are added in a fixed order: a row has the same bits whether it is computed alone or
with others. More than 64 rows are bound by arithmetic; they go to torch's matmul unless `batch_invariant` asks
for the bits of the kernel.

All functions here take x [..., K] and a weight [N, K] as Hugging Face stores it, sum in float32 and round once
to the dtype of x. The dtypes are float16, bfloat16 and float32; float64 is always computed by torch.
"""

from __future__ import annotations

import torch

from specdec_kernels.all_reduce.types import Exchange
from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import dispatch
from specdec_kernels.norm.configs import MAX_WIDTH
from specdec_kernels.norm.types import Normed

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """x weight^T + bias.

    Args:
        x: [..., K], contiguous. The leading dimensions are rows.
        weight: [N, K], dtype of x, contiguous.
        bias: [N], dtype of x, or None. It is added before the rounding.
        batch_invariant: use the kernel for more than 64 rows too, so that the bits of a row never depend on the
            number of rows.
        out_dtype: dtype of the result: that of x, also if None, or float32, in which sums are not rounded again.

    Returns:
        [..., N], dtype of x or `out_dtype`.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check(x, weight, bias)
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype: expected {x.dtype} or torch.float32, got {out_dtype}")
    function = dispatch("linear", __package__, impl, x)
    return function(x, weight, bias, batch_invariant=batch_invariant, out_dtype=out_dtype)


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, *, batch_invariant: bool = False, impl: str = "auto"
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T) for a gate and an up weight packed into one.

    Args:
        x: [..., K], contiguous.
        weight: [2 F, K], dtype of x, contiguous: the gate's rows, then the rows of up.
        batch_invariant: as in `linear`.

    Returns:
        [..., F], dtype of x. Both products and the SiLU are rounded to it, as the separate operations do.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight: expected an even number of rows, got {weight.shape[0]}")
    return dispatch("linear_silu_mul", __package__, impl, x)(x, weight, batch_invariant=batch_invariant)


def linear_add_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Normed:
    """The last projection of a sublayer, its addition to the residual stream, and the norm of the next sublayer.

    The result has the bits of `add_rms_norm(linear(x, weight), residual, norm_weight, eps)`; the norm adds the
    partial sums of the projection itself.

    Args:
        x: [..., K], contiguous.
        weight: [D, K], dtype of x, contiguous.
        residual: [..., D] residual stream, dtype of x, contiguous. It is not changed.
        norm_weight: [D], dtype of x, contiguous. eps: added to the mean square.
        batch_invariant: as in `linear`.

    Returns:
        The norm of the sum, and the sum: the new residual stream. Both [..., D].

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check_normed(x, weight, residual, norm_weight)
    function = dispatch("linear_add_rms_norm", __package__, impl, x)
    return function(x, weight, residual, norm_weight, eps, batch_invariant=batch_invariant)


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
    impl: str = "auto",
) -> Normed:
    """`linear_add_rms_norm` of a projection whose inner dimension is shared out over ranks.

    Every rank calls this with its own columns of x and of the weight. The products are summed over ranks in float32 and
    rounded once; see `all_reduce_add_rms_norm`.

    Args:
        x: [..., K], contiguous, at most `exchange.rows` rows. weight: [D, K], dtype of x, contiguous.
        exchange, slot: as in `all_reduce_add_rms_norm`.
        residual, norm_weight, eps, batch_invariant: as in `linear_add_rms_norm`.

    Returns:
        The norm of the sum, and the sum: the new residual stream. Both [..., D].

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check_normed(x, weight, residual, norm_weight)
    function = dispatch("linear_all_reduce_add_rms_norm", __package__, impl, x)
    return function(x, weight, exchange, slot, residual, norm_weight, eps, batch_invariant=batch_invariant)


def linear_argmax(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    batch_invariant: bool = False,
    exchange: Exchange | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """The column of the largest logit of each row, without writing the logits: greedy tokens behind an LM head.

    Args:
        x: [..., K], contiguous.
        weight: [V, K], dtype of x, contiguous.
        batch_invariant: as in `linear`.
        exchange: memory of width 2 over which the ranks tell each other their largest logits, where the rows of the
            weight are shared out over ranks evenly and in order; every rank calls this at once, with at most
            `exchange.rows` rows of the same x. Columns are those of the whole weight. It is used for nothing else.

    Returns:
        [...] int64, the same on every rank: -1 for a row without a logit above -inf. Logits are rounded to the dtype of
        x before they are compared; among equal logits the lowest column wins. As in `pick_tokens` NaN counts as -inf,
        and +inf as the largest float32.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check(x, weight, None)
    if exchange is not None:
        _check_choices(x, exchange)
    function = dispatch("linear_argmax", __package__, impl, x, kernel="kernel_argmax")
    return function(x, weight, batch_invariant=batch_invariant, exchange=exchange)


def _check_choices(x: torch.Tensor, exchange: Exchange) -> None:
    if exchange.width != 2:
        raise ValueError(f"exchange: expected a width of 2, got {exchange.width}")
    rows = x.numel() // x.shape[-1]
    if rows > exchange.rows:
        raise ValueError(f"x: expected at most {exchange.rows} rows to exchange, got {rows}")
    expect_dtype("exchange.memory", exchange.memory, torch.int64)
    expect_same_device(x=x, memory=exchange.memory)


def _check_normed(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor) -> None:
    _check(x, weight, None)
    expect_shape("residual", residual, (*x.shape[:-1], weight.shape[0]))
    expect_shape("norm_weight", norm_weight, (weight.shape[0],))
    for name, tensor in (("residual", residual), ("norm_weight", norm_weight)):
        expect_dtype(name, tensor, x.dtype)
    expect_same_device(x=x, residual=residual, norm_weight=norm_weight)
    expect_contiguous(residual=residual, norm_weight=norm_weight)
    if weight.shape[0] > MAX_WIDTH:
        raise ValueError(f"weight: expected at most {MAX_WIDTH} rows to norm, got {weight.shape[0]}")


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected a last dimension of at least 1, got shape {list(x.shape)}")
    expect_dtype("x", x, *_DTYPES)
    expect_shape("weight", weight, (None, x.shape[-1]))
    if weight.shape[0] == 0:
        raise ValueError("weight: expected at least one row, got none")
    expect_dtype("weight", weight, x.dtype)
    expect_same_device(x=x, weight=weight, bias=bias)
    expect_contiguous(x=x, weight=weight, bias=bias)
    if bias is not None:
        expect_shape("bias", bias, (weight.shape[0],))
        expect_dtype("bias", bias, x.dtype)
