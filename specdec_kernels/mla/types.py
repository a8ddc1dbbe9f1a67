"""What both implementations of latent attention and of its store get."""

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
    split_tokens: int | None = None
    batch_invariant: bool = False


class LatentStore(NamedTuple):
    """Latents and shared keys of T tokens, and their places; see `write_latent`."""

    kv: Tensor  # [T, latent + rope]
    cache: Tensor  # [pages, page_size, latent + rope], written
    slots: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    rope: Tensor  # [max_pos, rope]
    norm: Tensor  # [latent]
