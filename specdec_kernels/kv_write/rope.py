"""Tables of cosines and sines for rotary position embeddings.

Pair i of R rotated elements turns by p f_i at position p, f_i = theta^(-2i / R) (RoFormer, arXiv 2104.09864).
The kernel decides which elements form pair i (`interleaved`). Long-context checkpoints change the frequencies:

    linear   f / factor (position interpolation, arXiv 2306.15595)
    llama3   f / factor where the wavelength 2 pi / f exceeds original_length / low_freq_factor, f where it is
             below original_length / high_freq_factor, a linear blend by turns between (Llama 3.1 model card)
    yarn     a linear ramp between both over the pairs that make beta_slow to beta_fast turns in
             original_length, and cosines and sines times an attention factor (arXiv 2309.00071)

All in float32: a 16-bit float does not hold the angle of a long position.
"""

import math

import torch
from torch import Tensor

from specdec_kernels.kv_write.types import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


def rope_table(
    rotary_dim: int,
    max_positions: int,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Cosines and sines of positions 0 to max_positions - 1.

    Returns [max_positions, R] float32 for R = `rotary_dim` turning elements: cosines of the R / 2 pairs, then their
    sines. Raises ValueError unless `rotary_dim` is even and at least 2, and `theta` and `scaling.factor` are positive.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number >= 2, got {rotary_dim}")
    if max_positions < 0:
        raise ValueError(f"max_positions: expected at least 0, got {max_positions}")
    if theta <= 0:
        raise ValueError(f"theta: expected a positive number, got {theta}")
    if scaling is not None and scaling.factor <= 0:
        raise ValueError(f"scaling.factor: expected a positive number, got {scaling.factor}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    frequencies = 1.0 / theta**exponents
    amplitude = 1.0
    if isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    elif isinstance(scaling, YarnScaling):
        frequencies = _yarn(frequencies, rotary_dim, theta, scaling)
        amplitude = _yarn_amplitude(scaling)
    angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * amplitude


def _yarn_amplitude(scaling: YarnScaling) -> float:
    """The factor of cosines and sines; scores are multiplied by its square."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(max(scaling.factor, 1.0)) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_length * frequencies / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / band).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, rotary_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes this number of turns within the original length."""
        longest = scaling.original_length / (turns * 2 * math.pi)
        return rotary_dim * math.log(longest) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # A ramp of width zero becomes a step instead of a division by zero.
    width = (high - low) or 1e-3
    pair = torch.arange(rotary_dim // 2, dtype=torch.float32, device=frequencies.device)
    stretch = ((pair - low) / width).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)
