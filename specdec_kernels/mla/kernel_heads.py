# mypy: ignore-errors
"""A matrix of each head by the rows of that head: the absorbed projections of a batch-invariant run.

    out[t, h] = x[t, h] . weight[h]        in float32, rounded once

A program takes a tile of tokens and of columns of one head. The tile and the order along the inner dimension are the
same for any number of tokens, so a token has the same bits among any others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.launch import current_chip, launch
from specdec_kernels.mla.configs import HEAD_TILES


@triton.jit(do_not_specialize=["tokens", "x_stride", "x_head_stride"])
def _head_product_kernel(
    x_ptr,  # [T, H, K], tokens x_stride and heads x_head_stride elements apart
    weight_ptr,  # [H, K, N] of the strides W_HEAD, W_ROW and W_COLUMN
    out_ptr,  # [T, H, N]
    tokens,
    x_stride,
    x_head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_ROW: tl.constexpr,
    W_COLUMN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    here = (token < tokens)[:, None]
    inside = (column < N)[None, :]
    x_row = x_ptr + token[:, None] * x_stride + head * x_head_stride
    weight_row = weight_ptr + head * W_HEAD + column[None, :] * W_COLUMN
    acc = tl.full([TOKENS, COLUMNS], 0.0, tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + k[None, :], mask=here & (k < K)[None, :], other=0.0)
        weight = tl.load(weight_row + k[:, None] * W_ROW, mask=inside & (k < K)[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    to_ptr = out_ptr + (token[:, None] * H + head) * N + column[None, :]
    tl.store(to_ptr, acc.to(out_ptr.dtype.element_ty), mask=here & inside)


def head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `specdec_kernels.head_product`, which has checked the arguments."""
    if x.dtype == torch.float64:
        raise ValueError("x: the kernel takes float32, float16 and bfloat16, got float64; use impl='reference'")
    tokens, heads, inner = x.shape
    width = weight.shape[2]
    out = x.new_empty(tokens, heads, width)
    tile = HEAD_TILES[current_chip(x)]
    launch(
        _head_product_kernel,
        (triton.cdiv(tokens, tile["TOKENS"]), heads, triton.cdiv(width, tile["COLUMNS"])),
        *(x, weight, out, tokens, x.stride(0), x.stride(1)),
        num_warps=4,
        num_stages=2,
        H=heads,
        K=inner,
        N=width,
        W_HEAD=weight.stride(0),
        W_ROW=weight.stride(1),
        W_COLUMN=weight.stride(2),
        **tile,
    )
    return out
