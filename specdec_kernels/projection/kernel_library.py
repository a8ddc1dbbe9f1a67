"""Products of many rows by torch's library, where it has the bits of the kernel.

The order in which the library adds depends on shapes, not on numbers, so one product of random numbers shows whether
it adds as the kernel does. Where the kernel uses split-K, the library computes each split by itself; up to `_CUT_ROWS`
rows the kernel is then faster. A shape is compared once for each number of rows, at the first product outside of a
graph capture; a capture of a shape that was not compared before holds the kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_kernels.projection.configs import MAX_KERNEL_ROWS, LinearConfig

_CUT_ROWS = 128
_MOST_BYTES = 1 << 30
"""Bytes of one result. A comparison holds two of them."""
_ALIGNMENT = 256
"""Bytes. The library may choose by the alignment of its operands; the operands of a comparison are aligned."""
_SEED = 5

_compared: dict[tuple[object, ...], bool] = {}


def has_the_bits(x: Tensor, weight: Tensor, config: LinearConfig, by_kernel: Callable[[Tensor], Tensor]) -> bool:
    """Whether `products_of_splits` gives the bits of `by_kernel(x)`: the kernel's sums of each split
    [splits, ..., N] in float32 or, where there is one split, its result [..., N]."""
    rows = x.numel() // x.shape[-1]
    size = rows * weight.shape[0] * max(4 * config.splits, x.element_size())
    fewest = MAX_KERNEL_ROWS if config.splits == 1 else _CUT_ROWS
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


def products_of_splits(x: Tensor, weight: Tensor, config: LinearConfig) -> Tensor:
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
