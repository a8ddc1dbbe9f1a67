"""RMS norm of the residual stream, fused with what comes before it.

Eagerly, a norm is eight kernels that each read and write the row again. Here a row is read once, and the
residual addition or the embedding gather that makes it happens in the same pass. The residual stream is
written beside the norm: it is the captured layer output that drafters read. Each row is computed on its own
and has the same bits whatever the number of rows.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import dispatch
from specdec_kernels.norm.configs import MAX_WIDTH
from specdec_kernels.norm.types import Normed

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str = "auto") -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps), over the last dimension.

    Args:
        x: [..., D], contiguous. The mean is taken in float32; the scaled row is rounded to the dtype of x before
            it is multiplied by the weight, as in Hugging Face's decoders.
        weight: [D], dtype of x.
        eps: added to the mean square.

    Returns:
        [..., D], dtype of x.

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check(x, weight, "x")
    return dispatch("rms_norm", __package__, impl, x)(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str = "auto"
) -> Normed:
    """Add the output of a sublayer to the residual stream, and norm the sum for the next sublayer.

    Args:
        x: [..., D] output of the sublayer, contiguous.
        residual: [..., D] residual stream before it, dtype of x, contiguous. It is not changed.
        weight, eps: as in `rms_norm`.

    Returns:
        The norm of the sum, and the sum, rounded to the dtype of x: the new residual stream. Both [..., D].

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    _check(x, weight, "x")
    expect_shape("residual", residual, x.shape)
    expect_dtype("residual", residual, x.dtype)
    expect_same_device(x=x, residual=residual)
    expect_contiguous(residual=residual)
    return dispatch("add_rms_norm", __package__, impl, x)(x, residual, weight, eps)


def embed_rms_norm(
    tokens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str = "auto"
) -> Normed:
    """Look up the tokens' embeddings, and norm them for the first sublayer.

    Args:
        tokens: [...] int64, contiguous; a token outside the table has an embedding of zeros.
        table: [V, D], contiguous.
        weight: [D], dtype of the table. eps: as in `rms_norm`.

    Returns:
        The norm of the embeddings, and the embeddings: the residual stream. Both [..., D].

    Raises:
        ValueError: a shape, dtype, device or layout does not fit; the message names expected and actual.
    """
    expect_shape("table", table, (None, None))
    _check(table, weight, "table")
    expect_dtype("tokens", tokens, torch.int64)
    expect_contiguous(tokens=tokens)
    expect_same_device(table=table, tokens=tokens)
    if table.shape[0] == 0:
        raise ValueError("table: expected at least one row, got none")
    return dispatch("embed_rms_norm", __package__, impl, table)(tokens, table, weight, eps)


def _check(rows: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    if rows.ndim == 0 or not 1 <= rows.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"{name}: expected a last dimension from 1 to {MAX_WIDTH}, got shape {list(rows.shape)}")
    expect_dtype(name, rows, *_DTYPES)
    expect_shape("weight", weight, (rows.shape[-1],))
    expect_dtype("weight", weight, rows.dtype)
    expect_same_device(**{name: rows}, weight=weight)
    expect_contiguous(**{name: rows}, weight=weight)
