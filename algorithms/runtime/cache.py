"""The paged KV cache: one tensor per model.

A page holds `page_size` positions of one request; the pages of a request need not be adjacent. Target and drafter have
pools of their own shape but share page numbers, so one page table and one allocation serve both (see `scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from algorithms.runtime.algorithm import Resources
from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.rope import rope_table


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one model, and what is applied to them on the way in."""

    kv: torch.Tensor
    """[layers, 2, pages, page_size, H_kv, D]."""
    rope: torch.Tensor
    """[context, D] float32."""
    config: DecoderConfig
    """Of the model: the scale, soft cap and windows of its attention, the epsilon of its norms."""

    @classmethod
    def allocate(cls, config: DecoderConfig, resources: Resources) -> KVCache:
        """A pool for a model of this shape, on the run's pages, device and dtype."""
        pages = (resources.num_pages, resources.page_size)
        # Zeros, not empty: a masked-out slot still enters a matmul with weight 0, and 0 * NaN is NaN.
        kv = torch.zeros(
            (config.num_layers, 2, *pages, config.num_kv_heads, config.head_dim),
            device=resources.device,
            dtype=resources.dtype,
        )
        cache = cls(kv, rope_table(config, resources.context, resources.device), config)
        resources.caches.append(cache)
        return cache

    @property
    def page_size(self) -> int:
        return self.kv.shape[3]

    @property
    def eps(self) -> float:
        """Of the RMSNorm of queries and keys."""
        return self.config.rms_norm_eps
