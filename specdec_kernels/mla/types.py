"""What both implementations of latent attention get."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec_kernels.attention.types import AttentionMetadata


class MlaCall(NamedTuple):
    """A call, checked, with `max_length` of its metadata filled in."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    metadata: AttentionMetadata
    split_tokens: int | None
