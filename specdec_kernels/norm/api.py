"""RMS norm of the residual stream, fused with the addition or the embedding before it, alone or beside a feature's.

Each row [D] is computed on its own and has the same bits for any number of rows. Tensors are contiguous, weights [D] of
the dtype of the rows, or float32; eps is added to the mean square. ValueError where a shape, dtype, device or layout
does not fit.

A row is scaled in float32. It is rounded to its dtype before it is multiplied by a weight of that dtype, as in most of
Hugging Face's decoders, and after it is multiplied by a float32 weight, as in gpt-oss.
"""

import torch
from torch import Tensor

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape, expect_tensors
from specdec_kernels.launch import dispatch
from specdec_kernels.norm.configs import MAX_WIDTH
from specdec_kernels.norm.types import Normed, NormInputs, weight_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in the dtype of x [..., D]."""
    _check(x, weight, "x")
    return dispatch("rms_norm", __package__, impl, x)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Normed:
    """Add the output x [..., D] of a sublayer to the residual stream [..., D], and norm the sum for the next sublayer.

    The sum, the new residual stream, is rounded to the dtype of x; `residual` is not changed.
    """
    _check(x, weight, "x")
    expect_tensors({"x": x}, residual=(residual, x.shape, x.dtype))
    return dispatch("add_rms_norm", __package__, impl, x)(x, NormInputs(residual, weight, eps))


def embed_rms_norm(tokens: Tensor, table: Tensor, weight: Tensor, eps: float, *, impl: str = "auto") -> Normed:
    """Look up the tokens [...] int64 in an embedding table [V, D], and norm the embeddings for the first sublayer.

    A token outside the table has an embedding of zeros.
    """
    _check_lookup(tokens, table, weight)
    return dispatch("embed_rms_norm", __package__, impl, table)(tokens, table, weight, eps)


def embed_join_rms_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    feature: Tensor,
    feature_weight: Tensor,
    eps: float,
    sources: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Normed:
    """The norms of each token's embedding and of its feature side by side, which the first layer of EAGLE-3 reads.

    Args:
        tokens: [..., T] int64; they are looked up in `table` [V, D] as by `embed_rms_norm`.
        feature: [..., S, D].
        sources: [..., T] int64: the column of `feature` that belongs to each token, outside 0 to S - 1 for a feature of
            zeros. Without it column t belongs to token t, and S = T.

    Returns:
        `normed` [..., T, 2 D], and the features as the residual stream [..., T, D]: without `sources` `feature` itself.
    """
    _check_lookup(tokens, table, weight)
    if tokens.ndim == 0:
        raise ValueError("tokens: expected at least one dimension, got none")
    columns, width = tokens.shape[-1] if sources is None else None, table.shape[1]
    expect_tensors(
        {"table": table},
        feature=(feature, (*tokens.shape[:-1], columns, width), table.dtype),
        feature_weight=(feature_weight, (width,), weight.dtype),
        sources=(sources, tokens.shape, torch.int64),
    )
    if feature.shape[-2] == 0 and tokens.numel():
        raise ValueError("feature: expected at least one column, got none")
    join = dispatch("embed_join_rms_norm", __package__, impl, table)
    return join(tokens, table, weight, feature, feature_weight, eps, sources)


def _check_lookup(tokens: Tensor, table: Tensor, weight: Tensor) -> None:
    expect_shape("table", table, (None, None))
    _check(table, weight, "table")
    expect_dtype("tokens", tokens, torch.int64)
    expect_contiguous(tokens=tokens)
    expect_same_device(table=table, tokens=tokens)
    if table.shape[0] == 0:
        raise ValueError("table: expected at least one row, got none")


def _check(rows: Tensor, weight: Tensor, name: str) -> None:
    if rows.ndim == 0 or not 1 <= rows.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"{name}: expected a last dimension from 1 to {MAX_WIDTH}, got shape {list(rows.shape)}")
    expect_dtype(name, rows, *_DTYPES)
    expect_tensors({name: rows}, weight=(weight, (rows.shape[-1],), weight_dtype(rows, weight)))
    expect_contiguous(**{name: rows})
