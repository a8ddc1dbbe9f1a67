"""The mixer of inference: store keys and values in pages, then attend through the page table.

It joins a model that knows no caches, the fused `write_kv` kernel and an attention backend. One mixer serves one
forward over `[B, N]` tokens at slots L … L + N - 1 of their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from algorithms.algorithm import Batch, Observation, Resources
from algorithms.attention.backends.protocol import Backend, Levels
from algorithms.attention.cache import KVCache, KVScales
from algorithms.attention.levels import LevelSizes, LevelViews, level_rows
from algorithms.models.layers import MixerWeights
from specdec_kernels import AttentionMetadata, AttentionShape, token_slots, write_kv

Kind = tuple[str, int | None]  # (mode, window) of a layer's attention


@dataclass(frozen=True)
class PagedMixer:
    """See `algorithms.models.decoder.Mixer`. `slots` and `positions` are flat, `[B * N]`."""

    cache: KVCache
    slots: Tensor
    positions: Tensor
    backend: Backend
    plans: tuple[Any, ...]  # the backend's plan for each layer; layers of one mode and window share it
    impl: str

    @cached_property
    def real(self) -> Tensor:
        """See `algorithms.models.decoder.real_rows`."""
        return self.slots >= 0

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
        depths: Tensor | None = None,
        paths: Tensor | None = None,
        kinds: Sequence[Kind] | None = None,
    ) -> PagedMixer:
        """Plan a forward of `positions [B, N]` at slots L … L + N - 1.

        `mode`, `mask`, `depths` and `paths` mean what they mean to `AttentionMetadata`; depths are used by layers with
        a window. `phase` is prefill, verify or draft. In row b only the first `counts[b]` columns are real (all, if
        None; none of a padding row): the others store nothing and come out as zeros. `kinds` gives the (mode, window)
        of each layer where they are not `mode` and the window of the model's config.
        """
        width, impl = positions.shape[1], resources.impl
        if counts is None:
            counts = batch.active if width == 1 else batch.active * width
        metadata = AttentionMetadata(
            page_table=batch.page_table,
            lengths=batch.lengths,
            mode=mode,
            mask=mask,
            q_lens=counts,
            max_length=batch.max_length + width,
            depths=depths,
            paths=paths,
        )
        slots = token_slots(batch.page_table, batch.lengths, counts, width, cache.page_size, impl=impl)
        shape, kinds = _attention_shape(cache, width, resources), kinds or _kinds_of(cache, mode)
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
        rotated = self.store(layer, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), weights)
        return self.attend(layer, rotated.view_as(q), weights)

    def store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        """Store keys and values `[B * N, H_kv, D]`; returns the queries `[B * N, H, D]`, normed and rotated."""
        scales = self._scales(layer)
        return write_kv(
            q,
            k,
            v,
            self.cache.kv[layer],
            self.slots,
            self.positions,
            self.cache.rope,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=self.cache.eps,
            interleaved=self.cache.config.interleaved_rope,
            k_scale=scales and scales.k_scale,
            v_scale=scales and scales.v_scale,
            impl=self.impl,
        )

    def attend(self, layer: int, q: Tensor, weights: MixerWeights, out: Tensor | None = None) -> Tensor:
        """Attention of `q [B, N, H, D]`, as `store` gave it, over what is stored; of the same shape, in `out` if that
        is given."""
        sinks = None if weights.sinks is None else weights.sinks.float()
        return self.backend.run(self.plans[layer], q, self.cache.kv[layer], sinks, self._scales(layer), out)

    def _scales(self, layer: int) -> KVScales | None:
        return None if self.cache.scales is None else self.cache.scales.of_layer(layer)


class JointMixer:
    """Forwards over several groups of rows as one: over all their tokens, `[T]`, one group after the other. So they
    share the products with the weights. All groups store their keys before any of them attends, each by its own
    plan."""

    def __init__(self, groups: Sequence[tuple[PagedMixer, Tensor]]) -> None:
        """`groups` are mixers over one cache, each with its tokens `[B, N]`."""
        self._mixers = [mixer for mixer, _ in groups]
        self._shapes = [tokens.shape for _, tokens in groups]
        self.tokens = torch.cat([tokens.flatten() for _, tokens in groups])
        """[T] int64."""
        self._store = replace(
            self._mixers[0],
            slots=torch.cat([mixer.slots for mixer in self._mixers]),
            positions=torch.cat([mixer.positions for mixer in self._mixers]),
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        queries = self._store.store(layer, q, k, v, weights)
        out = torch.empty_like(queries)
        for mixer, part, place in zip(self._mixers, self.split(queries), self.split(out), strict=True):
            mixer.attend(layer, part, weights, place)
        return out

    @property
    def real(self) -> Tensor:
        return self._store.real

    def split(self, rows: Tensor) -> list[Tensor]:
        """`rows [T, ...]` as each group's `[B, N, ...]`."""
        parts = rows.split([shape.numel() for shape in self._shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self._shapes, strict=True)]


class PagedLevels:
    """The mixers of the forwards in which a drafter writes one level of its draft after another, planned at once."""

    def __init__(
        self, batch: Batch, cache: KVCache, resources: Resources, sizes: LevelSizes, views: LevelViews | None = None
    ) -> None:
        self._cache, self._resources = cache, resources
        self._slots, self._positions, calls = level_rows(batch, sizes, views, cache.page_size, resources.impl)
        width, mode = sizes.width, "chain" if views is None else "tree"
        self._shape, self._kinds = _attention_shape(cache, width, resources), _kinds_of(cache, mode)
        steps = dict(length_step=1) if views is None else dict(width_step=width)
        self._levels = {
            kind: Levels([_of_layer(call, cache, *kind) for call in calls], **steps)
            for kind in dict.fromkeys(self._kinds)
        }
        self._plans = {
            kind: resources.backend.plan_levels(levels, self._shape, "draft") for kind, levels in self._levels.items()
        }

    def __getitem__(self, level: int) -> PagedMixer:
        """The mixer of forward `level`, whose mask is filled by now."""
        backend = self._resources.backend
        plans = {
            kind: backend.plan(levels.calls[level], self._shape, "draft") if planned is None else planned[level]
            for (kind, planned), levels in zip(self._plans.items(), self._levels.values(), strict=True)
        }
        by_layer = tuple(plans[kind] for kind in self._kinds)
        slots, positions = self._slots[level], self._positions[level]
        return PagedMixer(self._cache, slots, positions, backend, by_layer, self._resources.impl)


def _attention_shape(cache: KVCache, width: int, resources: Resources) -> AttentionShape:
    config = cache.config
    sizes = (width, config.num_heads, config.num_kv_heads, config.head_dim, cache.page_size)
    return AttentionShape(*sizes, resources.dtype, cache.kv.dtype)


def _kinds_of(cache: KVCache, mode: str) -> list[Kind]:
    """(mode, window) of each layer of the cache's model."""
    return [(mode, cache.config.window(layer)) for layer in range(cache.config.num_layers)]


def _of_layer(metadata: AttentionMetadata, cache: KVCache, mode: str, window: int | None) -> AttentionMetadata:
    """The metadata of layers with this mode and window; scale and soft cap come from the cache's model."""
    by_depth = mode == "tree" and window is not None
    return metadata._replace(
        mode=mode,
        mask=metadata.mask if mode == "tree" else None,
        window=window,
        depths=metadata.depths if by_depth else None,
        row_depths=metadata.row_depths if by_depth else None,
        soft_cap=cache.config.soft_cap,
        scale=cache.config.scale,
    )
