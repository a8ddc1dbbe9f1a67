"""Products of many rows by torch's library, where it has the bits of the kernel.

Products of more than `FAST_ROWS` rows are bound by arithmetic, and the library's tiles are the faster ones. It may add
along the inner dimension in any order, and choose another order for every shape. But no order depends on the numbers
that are added, so one product of random numbers tells whether the library adds as the kernel does: millions of rounded
sums do not agree in all bits by chance. Where the kernel cuts the inner dimension, the library computes each split by
itself; up to `_CUT_ROWS` rows the kernel, which computes all splits at once, is then the faster one.

A shape is compared once for each number of rows, at the first product that no graph captures. A capture of a shape
that was not compared before holds the kernel, which changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec_kernels.projection.configs import FAST_ROWS, LinearConfig

_CUT_ROWS = 128
_MOST_BYTES = 1 << 30
"""Of one result. A comparison holds two of them."""
_ALIGNMENT = 256
"""Bytes. The library may choose by the alignment of its operands; those of a comparison are aligned."""
_SEED = 5

_compared: dict[tuple[object, ...], bool] = {}


def has_the_bits(
    x: torch.Tensor, weight: torch.Tensor, config: LinearConfig, by_kernel: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Whether `products_of_splits` gives the bits of `by_kernel(x)`: the kernel's sums of each split
    [splits, ..., N] in float32 or, where there is one split, its result [..., N]."""
    rows = x.numel() // x.shape[-1]
    size = rows * weight.shape[0] * max(4 * config.splits, x.element_size())
    fewest = FAST_ROWS if config.splits == 1 else _CUT_ROWS
    is_aligned = not (x.data_ptr() % _ALIGNMENT or weight.data_ptr() % _ALIGNMENT)
    if not x.is_cuda or x.dtype == torch.float32 or rows <= fewest or size > _MOST_BYTES or not is_aligned:
        return False
    key = (x.device, x.dtype, rows, *weight.shape)
    if key not in _compared:
        if torch.cuda.is_current_stream_capturing():
            return False
        generator = torch.Generator(x.device).manual_seed(_SEED)
        sample = torch.empty_like(x).normal_(generator=generator)
        _compared[key] = torch.equal(products_of_splits(sample, weight, config), by_kernel(sample))
    return _compared[key]


def products_of_splits(x: torch.Tensor, weight: torch.Tensor, config: LinearConfig) -> torch.Tensor:
    """The product of each split [splits, ..., N] in float32, or the result [..., N] where there is one split."""
    outer, inner = weight.shape
    flat = x.view(-1, inner)
    if config.splits == 1:
        return torch.mm(flat, weight.t()).view(*x.shape[:-1], outer)
    parts = torch.empty((config.splits, flat.shape[0], outer), dtype=torch.float32, device=x.device)
    length = config.split_length(inner)
    for split, part in enumerate(parts):
        columns = slice(split * length, min(inner, (split + 1) * length))
        torch.mm(flat[:, columns], weight[:, columns].t(), out_dtype=torch.float32, out=part)
    return parts.view(config.splits, *x.shape[:-1], outer)
