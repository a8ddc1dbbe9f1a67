"""Rotary position embedding of a model in the "neox" layout: dimension i is paired with i + D/2.

The tables are those of the kernels, see `specdec_kernels.rope_table`; `apply_rope` is for code that trains.
"""

from __future__ import annotations

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.runtime.models.config.decoder import DecoderConfig


def rope_table(config: DecoderConfig, max_positions: int, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines of positions 0 … max_positions-1.

    Returns `[max_positions, head_dim]` float32: cosines of the D/2 pairs, then their sines.
    """
    return kernels.rope_table(config.head_dim, max_positions, config.rope_theta, config.rope_scaling, device)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotate `x [..., T, heads, D]` by `positions [..., T]` int64 with a `rope_table`; keeps the dtype of `x`."""
    cos, sin = table[positions].unsqueeze(-2).to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
