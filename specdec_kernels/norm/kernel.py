"""The norms in Triton: a program a row, which is read and written once.

row = x | x + residual | table[token];   out = weight * round(row / sqrt(mean(row^2) + eps))

A float32 weight multiplies what is not rounded yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.norm.configs import num_warps
from specdec_kernels.norm.types import Normed, NormInputs
from specdec_kernels.pdl import launch_dependents, wait_for_predecessor


@triton.jit
def normed_row(x, weight, eps, D: tl.constexpr):
    """The norm of a row x [BLOCK_D] of D elements, zeros after them, with the roundings of the definition."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / D
    scaled = wide * (1.0 / tl.sqrt_rn(mean + eps))
    if weight.dtype == x.dtype:
        scaled = scaled.to(x.dtype).to(tl.float32)
    return (weight.to(tl.float32) * scaled).to(x.dtype)


@triton.jit
def _looked_up(table_ptr, ids_ptr, row, first, size, dims, D: tl.constexpr):
    """The row of a table [size, D] from `first` on that the id of a row names, zeros for an id outside."""
    index = tl.load(ids_ptr + row)
    known = (index >= 0) & (index < size)
    return tl.load(table_ptr + (first + tl.where(known, index, 0)) * D + dims, mask=(dims < D) & known, other=0.0)


@triton.jit(do_not_specialize=["vocab", "num_parts", "rows"])
def _norm_kernel(
    x_ptr,  # [rows, D]; the embedding table [V, D] if there are tokens; [num_parts, rows, D] float32 if PARTS
    residual_ptr,  # [rows, D] or None
    tokens_ptr,  # [rows] int64 or None
    weight_ptr,  # [D]
    out_ptr,  # [rows, D]
    sum_ptr,  # [rows, D], the row that was normed, or None
    eps,
    vocab,
    num_parts,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    inside = dims < D
    # Loaded before the wait: weights are constants, which no kernel writes.
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    launch_dependents(PDL)
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    if PARTS:
        total = tl.load(x_ptr + row * D + dims, mask=inside, other=0.0)
        for part in tl.range(1, num_parts):
            total += tl.load(x_ptr + (part * rows + row) * D + dims, mask=inside, other=0.0)
        x = total.to(out_ptr.dtype.element_ty)
    elif tokens_ptr is None:
        x = tl.load(x_ptr + row * D + dims, mask=inside, other=0.0)
    else:
        x = _looked_up(x_ptr, tokens_ptr, row, 0, vocab, dims, D)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * D + dims, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    if sum_ptr is not None:
        tl.store(sum_ptr + row * D + dims, x, mask=inside)
    tl.store(out_ptr + row * D + dims, normed_row(x, weight, eps, D), mask=inside)


@triton.jit(do_not_specialize=["vocab", "columns", "num_sources"])
def _join_kernel(
    tokens_ptr,  # [B, columns] int64
    table_ptr,  # [vocab, D]
    weight_ptr,  # [D]
    feature_ptr,  # [B, num_sources, D]
    feature_weight_ptr,  # [D]
    sources_ptr,  # [B, columns] int64, or None: column t of token t
    out_ptr,  # [B, columns, 2, D]: of the embedding, of the feature
    residual_ptr,  # [B, columns, D], or None without sources
    eps,
    vocab,
    columns,
    num_sources,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    inside = dims < D
    row = tl.program_id(0).to(tl.int64)
    of_feature = tl.program_id(1) == 1
    # Loaded before the wait: weights are constants, which no kernel writes.
    weight = tl.load(tl.where(of_feature, feature_weight_ptr, weight_ptr) + dims, mask=inside, other=0.0)
    launch_dependents(PDL)
    wait_for_predecessor(PDL)
    if of_feature:
        if sources_ptr is None:
            x = tl.load(feature_ptr + row * D + dims, mask=inside, other=0.0)
        else:
            x = _looked_up(feature_ptr, sources_ptr, row, row // columns * num_sources, num_sources, dims, D)
            tl.store(residual_ptr + row * D + dims, x, mask=inside)
    else:
        x = _looked_up(table_ptr, tokens_ptr, row, 0, vocab, dims, D)
    out = out_ptr + (row * 2 + tl.program_id(1)) * D
    tl.store(out + dims, normed_row(x, weight, eps, D), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, inputs: NormInputs) -> Normed:
    result = Normed(torch.empty_like(x), torch.empty_like(x))
    _launch(x, *inputs, *result)
    return result


def add_rms_norm_of_parts(parts: Tensor, inputs: NormInputs) -> Normed:
    """`add_rms_norm` of x = the sum of `parts` [P, ..., D] float32 in their order, rounded to the residual's dtype."""
    result = Normed(torch.empty_like(inputs.residual), torch.empty_like(inputs.residual))
    _launch(parts, *inputs, *result, num_parts=parts.shape[0])
    return result


def embed_rms_norm(tokens: Tensor, table: Tensor, weight: Tensor, eps: float) -> Normed:
    shape = (*tokens.shape, table.shape[1])
    result = Normed(table.new_empty(shape), table.new_empty(shape))
    _launch(table, None, weight, eps, *result, tokens)
    return result


def embed_join_rms_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    feature: Tensor,
    feature_weight: Tensor,
    eps: float,
    sources: Tensor | None = None,
) -> Normed:
    width, block = table.shape[1], triton.next_power_of_2(table.shape[1])
    out = table.new_empty(*tokens.shape, 2 * width)
    residual = None if sources is None else table.new_empty(*tokens.shape, width)
    launch(
        _join_kernel,
        (tokens.numel(), 2),
        *(tokens, table, weight, feature, feature_weight, sources, out, residual, float(eps)),
        *(table.shape[0], tokens.shape[-1], feature.shape[-2]),
        num_warps=num_warps(current_chip(table), block),
        D=width,
        BLOCK_D=block,
    )
    return Normed(out, feature if residual is None else residual)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
    tokens: Tensor | None = None,
    num_parts: int = 0,
) -> None:
    width = x.shape[-1]
    rows = out.numel() // width
    block = triton.next_power_of_2(width)
    launch(
        _norm_kernel,
        (rows,),
        *(x, residual, tokens, weight, out, total, float(eps)),
        *(x.shape[0] if tokens is not None else 0, num_parts, rows),
        num_warps=num_warps(current_chip(x), block),
        D=width,
        BLOCK_D=block,
        PARTS=num_parts > 0,
    )
