"""The paged KV cache: one tensor a model, one free list for all of them.

A page holds `page_size` positions of one request; the pages of a request need not be adjacent. Target and drafter have
pools of their own shape but share page numbers, so one page table and one allocation serve both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from algorithms.runtime.algorithm import Resources
from algorithms.runtime.models.config import DecoderConfig
from algorithms.runtime.models.rope import rope_table


class OutOfPages(RuntimeError):
    """The allocator has fewer free pages than were asked for; nothing was taken."""


class PageAllocator:
    """Hands out page numbers 0 … num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))
        self._owned = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, or raise OutOfPages and take none."""
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        if count > len(self._free):
            raise OutOfPages(f"asked for {count} pages, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owned[page] = True
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back. A page that is not owned raises ValueError before anything is released."""
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages released twice in one call: {pages}")
        strangers = [page for page in pages if not (0 <= page < self.num_pages and self._owned[page])]
        if strangers:
            raise ValueError(f"pages not owned by anyone: {strangers}")
        for page in pages:
            self._owned[page] = False
        self._free.extend(pages)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one model, and what is applied to them on the way in."""

    kv: torch.Tensor
    """[layers, 2, pages, page_size, H_kv, D]."""
    rope: torch.Tensor
    """[context, D] float32."""
    eps: float
    """Of the RMSNorm of queries and keys."""

    @classmethod
    def allocate(cls, config: DecoderConfig, resources: Resources) -> KVCache:
        pages = (resources.num_pages, resources.page_size)
        # Zeros, not empty: a masked-out slot still enters a matmul with weight 0, and 0 * NaN is NaN.
        kv = torch.zeros(
            (config.num_layers, 2, *pages, config.num_kv_heads, config.head_dim),
            device=resources.device,
            dtype=resources.dtype,
        )
        return cls(kv, rope_table(config, resources.context, resources.device), config.rms_norm_eps)

    @property
    def page_size(self) -> int:
        return self.kv.shape[3]
