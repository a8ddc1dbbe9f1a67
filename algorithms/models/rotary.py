"""Rotary position embedding of the first R elements of a head: element i is paired with i + R/2 ("neox"), or, if
interleaved, 2 i with 2 i + 1. The kernels use the same tables."""

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.models.config import DecoderConfig


def rope_table(config: DecoderConfig, max_positions: int, device: torch.device | str | None = None) -> Tensor:
    """[max_positions, R] float32: cosines of the R/2 pairs, then their sines."""
    return kernels.rope_table(config.rotary_dim, max_positions, config.rope_theta, config.rope_scaling, device)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate `x [..., T, heads, D]` by `positions [..., T]` int64 with a `rope_table`; keeps the dtype of `x`."""
    cos, sin = table[positions].unsqueeze(-2).to(x.dtype).chunk(2, dim=-1)
    turning, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    first, second = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([joined, rest], dim=-1)
