"""Arguments of the store, head dimensions that it takes, and the scaling rules of rotary embeddings in long-context
checkpoints; see `rope_table`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class KVStore(NamedTuple):
    """Keys and values of T tokens and their places; `write_kv` has no axis for layers."""

    k: Tensor  # [T, layers, H_kv, D]
    v: Tensor  # [T, layers, H_kv, D]
    kv: Tensor  # [layers, 2, pages, page_size, H_kv, D], written
    slots: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    rope: Tensor  # [max_pos, R]

    def with_layer_axis(self) -> KVStore:
        return self._replace(k=self.k[:, None], v=self.v[:, None], kv=self.kv[None])


class StoreOptions(NamedTuple):
    """How heads are normalised, rotated and scaled; see `write_kv`."""

    eps: float
    interleaved: bool
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None


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
