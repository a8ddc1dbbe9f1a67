"""The mixer of inference: store keys and values in pages, then attend through the page table.

It is what joins a model that knows no caches, the fused `write_kv` kernel and an attention backend. One mixer serves
one forward over `[B, N]` tokens that stand at slots L … L + N - 1 of their requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources
from algorithms.runtime.backends import AttentionPlan, Backend
from algorithms.runtime.kv_cache import KVCache
from specdec_kernels import token_slots, write_kv


@dataclass(frozen=True)
class PagedMixer:
    """See `algorithms.runtime.models.decoder.Mixer`. `slots` and `positions` are flat, `[B * N]`."""

    cache: KVCache
    slots: Tensor
    positions: Tensor
    backend: Backend
    plan: AttentionPlan
    impl: str

    @classmethod
    def over(
        cls,
        batch: Batch,
        positions: Tensor,
        cache: KVCache,
        resources: Resources,
        mode: str,
        mask: Tensor | None = None,
        counts: Tensor | None = None,
        phase: str = "verify",
    ) -> PagedMixer:
        """Plan a forward of `positions [B, N]` at slots L … L + N - 1.

        `mode` and `mask` mean what they mean to `paged_attention`; `phase` is prefill, verify or draft. Of row b only
        the first `counts[b]` columns are real (all, if None; none of a padding row): the others store nothing and come
        out as zeros.
        """
        if counts is None:
            counts = batch.active * positions.shape[1]
        return cls._plan(
            batch.page_table, batch.lengths, counts, batch.max_length, positions, cache, resources, mode, mask, phase
        )

    @classmethod
    def following(cls, seen: Observation, cache: KVCache, resources: Resources, phase: str = "draft") -> PagedMixer:
        """Plan a drafter's forward over the text just observed."""
        return cls._plan(
            seen.page_table, seen.start, seen.counts, seen.max_length, seen.positions, cache, resources,
            "chain", None, phase,
        )  # fmt: skip

    @classmethod
    def _plan(
        cls,
        page_table: Tensor,
        lengths: Tensor,
        counts: Tensor,
        max_length: int,
        positions: Tensor,
        cache: KVCache,
        resources: Resources,
        mode: str,
        mask: Tensor | None,
        phase: str,
    ) -> PagedMixer:
        width = positions.shape[1]
        slots = token_slots(page_table, lengths, counts, width, cache.page_size, impl=resources.impl)
        plan = resources.backend.plan(
            AttentionPlan(
                page_table=page_table,
                lengths=lengths,
                mode=mode,
                mask=mask,
                q_lens=counts,
                num_queries=width,
                page_size=cache.page_size,
                max_length=max_length + width,
            )
        )
        return cls(cache, slots.flatten(), positions.flatten(), resources.backend, plan, resources.impl)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> Tensor:
        kv = self.cache.kv[layer]
        rotated = write_kv(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            kv,
            self.slots,
            self.positions,
            self.cache.rope,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.cache.eps,
            impl=self.impl,
        )
        return self.backend.run(self.plan, rotated.view_as(q), kv)
