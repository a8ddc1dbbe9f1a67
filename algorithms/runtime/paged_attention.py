"""The mixer of inference: store keys and values in pages, then attend through the page table.

It joins a model that knows no caches, the fused `write_kv` kernel and an attention backend. One mixer serves one
forward over `[B, N]` tokens that stand at slots L … L + N - 1 of their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from algorithms.runtime.algorithm import Batch, Observation, Resources
from algorithms.runtime.backends.protocol import Backend
from algorithms.runtime.cache import KVCache
from algorithms.runtime.models.decoder import MixerWeights
from specdec_kernels import AttentionMetadata, AttentionShape, token_slots, write_kv


@dataclass(frozen=True)
class PagedMixer:
    """See `algorithms.runtime.models.decoder.Mixer`. `slots` and `positions` are flat, `[B * N]`."""

    cache: KVCache
    slots: Tensor
    positions: Tensor
    backend: Backend
    plans: tuple[Any, ...]
    """The backend's plan for each layer; layers of one mode and window share it."""
    impl: str

    @classmethod
    def over(
        cls,
        batch: Batch,
        positions: Tensor,
        cache: KVCache,
        resources: Resources,
        mode: str = "chain",
        *,
        mask: Tensor | None = None,
        counts: Tensor | None = None,
        phase: str = "verify",
        first_slot: int = 0,
        tree_width: int | None = None,
        depths: Tensor | None = None,
        row_depths: Tensor | None = None,
        kinds: Sequence[tuple[str, int | None]] | None = None,
    ) -> PagedMixer:
        """Plan a forward of `positions [B, N]` at slots L + first_slot … L + first_slot + N - 1.

        `mode`, `mask`, `tree_width`, `depths` and `row_depths` mean what they mean to `AttentionMetadata`; depths are
        used by layers with a window. `phase` is prefill, verify or draft. Of row b only the first `counts[b]` columns
        are real (all, if None; none of a padding row): the others store nothing and come out as zeros. `tree_width` is
        for a drafter that runs a few nodes of a tree at a time. `kinds` gives the (mode, window) of each layer where
        they are not `mode` and the window of the model's config.
        """
        width, config, impl = positions.shape[1], cache.config, resources.impl
        if counts is None:
            counts = batch.active * width
        metadata = AttentionMetadata(
            page_table=batch.page_table,
            lengths=batch.lengths,
            mode=mode,
            mask=mask,
            q_lens=counts,
            tree_width=tree_width,
            max_length=batch.max_length + (tree_width or width),
            depths=depths,
            row_depths=row_depths,
        )
        starts, page_size = batch.lengths + first_slot, cache.page_size
        slots = token_slots(batch.page_table, starts, counts, width, page_size, impl=impl)
        sizes = (width, config.num_heads, config.num_kv_heads, config.head_dim, page_size)
        shape = AttentionShape(*sizes, resources.dtype, cache.kv.dtype)
        kinds = kinds or [(mode, config.window(layer)) for layer in range(config.num_layers)]
        plans = {
            kind: resources.backend.plan(_of_layer(metadata, cache, *kind), shape, phase)
            for kind in dict.fromkeys(kinds)
        }
        # Positions may be one row seen by all requests; the kernels want them written out.
        flat = positions.flatten().contiguous()
        return cls(cache, slots.flatten(), flat, resources.backend, tuple(plans[kind] for kind in kinds), impl)

    @classmethod
    def following(cls, seen: Observation, cache: KVCache, resources: Resources) -> PagedMixer:
        """Plan a drafter's forward over the text just observed."""
        phase = "prefill" if seen.is_prefill else "draft"
        return cls.over(seen.batch, seen.positions, cache, resources, counts=seen.counts, phase=phase)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        kv = self.cache.kv[layer]
        scales = None if self.cache.scales is None else self.cache.scales.of_layer(layer)
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
            k_scale=scales and scales.k_scale,
            v_scale=scales and scales.v_scale,
            impl=self.impl,
        )
        sinks = None if weights.sinks is None else weights.sinks.float()
        return self.backend.run(self.plans[layer], rotated.view_as(q), kv, sinks, scales)


def _of_layer(metadata: AttentionMetadata, cache: KVCache, mode: str, window: int | None) -> AttentionMetadata:
    """The metadata of layers with this mode and window; scale and soft cap are those of the cache's model."""
    by_depth = mode == "tree" and window is not None
    return metadata._replace(
        mode=mode,
        window=window,
        depths=metadata.depths if by_depth else None,
        row_depths=metadata.row_depths if by_depth else None,
        soft_cap=cache.config.soft_cap,
        scale=cache.config.scale,
    )
