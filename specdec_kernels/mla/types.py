"""What both implementations of latent attention and of its store get."""

from __future__ import annotations

from typing import Any, NamedTuple

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

    def of_requests(self, part: slice) -> MlaCall:
        """The call of some requests, in views of its tensors."""
        rows: dict[str, Any] = {name: x[part] for name, x in self.metadata._asdict().items() if isinstance(x, Tensor)}
        return self._replace(
            q_latent=self.q_latent[part], q_rope=self.q_rope[part], metadata=self.metadata._replace(**rows)
        )


class LatentStore(NamedTuple):
    """Latents and shared keys of T tokens, and their places; see `write_latent`."""

    kv: Tensor  # [T, latent + rope]
    cache: Tensor  # [pages, page_size, latent + rope], written
    slots: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    rope: Tensor  # [max_pos, rope]
    norm: Tensor  # [latent]
