"""The mixer of inference: store keys and values in pages, then attend through the page table.

It is what joins a model that knows no caches, the fused `write_kv` kernel and an attention backend. One mixer serves
one forward over `[B, N]` tokens that stand at slots L … L + N - 1 of their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources
from algorithms.runtime.backends import AttentionPlan, Backend
from algorithms.runtime.cache import KVCache
from algorithms.runtime.models.decoder import MixerWeights
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
        first_slot: int = 0,
        tree_width: int | None = None,
        window: int | None = None,
    ) -> PagedMixer:
        """Plan a forward of `positions [B, N]` at slots L + first_slot … L + first_slot + N - 1.

        `mode` and `mask` mean what they mean to `paged_attention`; `phase` is prefill, verify or draft. Of row b only
        the first `counts[b]` columns are real (all, if None; none of a padding row): the others store nothing and come
        out as zeros. `tree_width` is for a drafter that runs a few nodes of a tree at a time: the slots behind L that
        `mask` describes, N if None.
        """
        width = positions.shape[1]
        if counts is None:
            counts = batch.active * width
        slots = token_slots(
            batch.page_table, batch.lengths + first_slot, counts, width, cache.page_size, impl=resources.impl
        )
        plan = AttentionPlan(
            page_table=batch.page_table,
            lengths=batch.lengths,
            mode=mode,
            mask=mask,
            q_lens=counts,
            num_queries=width,
            page_size=cache.page_size,
            max_length=batch.max_length + (tree_width or width),
            phase=phase,
            tree_width=tree_width,
            window=window,
        )
        return cls._planned(plan, slots, positions, cache, resources)

    @classmethod
    def following(cls, seen: Observation, cache: KVCache, resources: Resources) -> PagedMixer:
        """Plan a drafter's forward over the text just observed."""
        width = seen.positions.shape[1]
        slots = token_slots(seen.page_table, seen.start, seen.counts, width, cache.page_size, impl=resources.impl)
        plan = AttentionPlan(
            page_table=seen.page_table,
            lengths=seen.start,
            mode="chain",
            mask=None,
            q_lens=seen.counts,
            num_queries=width,
            page_size=cache.page_size,
            max_length=seen.max_length + width,
            phase="prefill" if seen.is_prefill else "draft",
        )
        return cls._planned(plan, slots, seen.positions, cache, resources)

    @classmethod
    def _planned(
        cls, plan: AttentionPlan, slots: Tensor, positions: Tensor, cache: KVCache, resources: Resources
    ) -> PagedMixer:
        backend = resources.backend
        # Positions may be one row seen by all requests; the kernels want them written out.
        flat = positions.flatten().contiguous()
        return cls(cache, slots.flatten(), flat, backend, backend.plan(plan), resources.impl)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        kv = self.cache.kv[layer]
        rotated = write_kv(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            kv,
            self.slots,
            self.positions,
            self.cache.rope,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=self.cache.eps,
            impl=self.impl,
        )
        return self.backend.run(self.plan, rotated.view_as(q), kv)


class LayeredMixer:
    """A mixer of its own for each layer, where layers attend in different ways."""

    def __init__(self, mixers: Sequence[PagedMixer]) -> None:
        self._mixers = mixers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        return self._mixers[layer](layer, q, k, v, weights)
