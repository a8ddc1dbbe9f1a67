"""Which heads can be stored, and the rules by which long-context checkpoints change the frequencies of rotary
embeddings; see `rope_table`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class YarnScaling:
    """`attention_factor` None: 0.1 m ln(factor) + 1 with m = 1, or the ratio of those of `mscale` and
    `mscale_all_dim` where both are given (and not 0). `truncate`: bounds of the ramp on whole pairs."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def head_dim_problem(head_dim: int) -> str | None:
    """Why heads of `head_dim` elements cannot be stored, or None."""
    if head_dim % 8 or not 16 <= head_dim <= 512:
        return f"expected a head dimension that is a multiple of 8 from 16 to 512, got {head_dim}"
    return None
