"""Rotary position embedding in the "neox" layout: dimension i is paired with i + D/2.

For pair i the angle at position p is p * f_i with f_i = theta^(-2i/D). The llama3 rule divides f_i by `factor` where
the wavelength 2 pi / f_i exceeds original_length / low_freq_factor, keeps it below original_length / high_freq_factor,
and blends linearly in between (Llama 3.1 model card). The table is kept in float32: at long positions the angle does
not fit a 16-bit float.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from algorithms.runtime.models.config import DecoderConfig, RopeScaling


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    original = scaling.original_max_position_embeddings
    turns = original * frequencies / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / band).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_table(config: DecoderConfig, max_positions: int, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines of positions 0 … max_positions-1.

    Returns `[max_positions, head_dim]` float32: cosines of the D/2 pairs, then their sines.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotate `x [..., T, heads, D]` by `positions [..., T]` int64 with a `rope_table`; keeps the dtype of `x`."""
    cos, sin = table[positions].unsqueeze(-2).to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
