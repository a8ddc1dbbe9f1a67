"""The mixer of inference: store keys and values in pages, then attend through the page table.

It joins a model that knows no caches, the fused `write_kv` kernel and an attention backend. One mixer serves one
forward over `[B, N]` tokens at slots L … L + N - 1 of their requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms.algorithm import Batch, Observation, Resources
from algorithms.attention.backends.protocol import Backend, LayerInputs, Levels
from algorithms.attention.cache import KVCache
from algorithms.models.layers import MixerWeights
from specdec_kernels import (
    AttentionMetadata,
    AttentionShape,
    Committed,
    level_slots,
    move_accepted,
    token_slots,
    write_kv,
)


class LevelSizes(NamedTuple):
    """How many forwards there are, their tokens per request, and the slots between L and the first of them."""

    forwards: int
    width: int = 1
    first: int = 0


class LevelViews(NamedTuple):
    """What the tokens of each forward see; without it they are a chain, and `width` is 1."""

    masks: Sequence[Tensor]
    """[B, width, W] per forward: which of the slots written by then a token sees. May be filled later than here."""
    depths: Sequence[tuple[Tensor, Tensor]] | None = None
    """Depths of these slots and of the tokens, for a drafter with windows."""


def level_rows(
    batch: Batch, sizes: LevelSizes, views: LevelViews | None, page_size: int, impl: str, scale: float | None = None
) -> tuple[Tensor, Tensor, list[AttentionMetadata]]:
    """Of each forward: slots and positions [B * width] int64, and the metadata of an attention without window."""
    count, width, first = sizes
    places = level_slots(
        batch.page_table, batch.lengths, batch.active, count, width, page_size, first=first, impl=impl
    )  # fmt: skip
    slots, positions = places.slots.flatten(1), places.positions.flatten(1)
    mode, longest = "chain" if views is None else "tree", batch.max_length + first + count * width
    shared = AttentionMetadata(
        batch.page_table, batch.lengths, mode, q_lens=places.counts, max_length=longest, scale=scale
    )
    if views is None:
        # The earlier tokens precede a token of a chain, whose position is the length by then.
        return slots, positions, [shared._replace(lengths=each) for each in positions]
    calls = [
        shared._replace(mask=mask, tree_width=first + (level + 1) * width) for level, mask in enumerate(views.masks)
    ]
    if views.depths is not None:
        calls = [
            call._replace(depths=by_slot, row_depths=by_row)
            for call, (by_slot, by_row) in zip(calls, views.depths, strict=True)
        ]
    return slots, positions, calls


Kind = tuple[str, int | None]  # (mode, window) of a layer's attention


class PagedRows(NamedTuple):
    """A group of rows of a forward: its shape [B, N], and the backend's plan for each layer, one by mode and window."""

    shape: torch.Size
    plans: tuple[Any, ...]


def split_rows(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """`rows [T, ...]` of several groups, one after the other, as each group's `[B, N, ...]`."""
    parts = rows.split([shape.numel() for shape in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def planned_rows(
    batch: Batch, positions: Tensor, counts: Tensor, page_size: int, impl: str, **seen: Any
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Slots and positions [B * N] int64 of `positions [B, N]` at slots L … L + N - 1, of which `counts [B]` columns are
    real, and the metadata of their attention; `seen` are further fields of it."""
    width, lengths = positions.shape[1], batch.lengths
    slots = token_slots(batch.page_table, lengths, counts, width, page_size, impl=impl)
    longest = batch.max_length + width
    metadata = AttentionMetadata(batch.page_table, lengths, q_lens=counts, max_length=longest, **seen)
    # Positions may be one row seen by all requests; the kernels want them written out.
    return slots.flatten(), positions.flatten().contiguous(), metadata


def joined(mixers: Sequence[Any]) -> Any:
    """One mixer over the groups of several."""
    slots, positions = (torch.cat([getattr(mixer, name) for mixer in mixers]) for name in ("slots", "positions"))
    groups = tuple(group for mixer in mixers for group in mixer.groups)
    return replace(mixers[0], slots=slots, positions=positions, groups=groups)


class PageMemory:
    """What memories in pages share, see `memory`. A subclass plans a forward by `_over`; `pool` is what moves of it."""

    resources: Resources
    pool: Tensor
    windowed = False
    _over: Any

    def following(self, seen: Observation) -> Any:
        phase = "prefill" if seen.is_prefill else "draft"
        return self._over(seen.batch, seen.positions, counts=seen.counts, phase=phase)

    def chained(self, batch: Batch, positions: Tensor) -> Any:
        return self._over(batch, positions, phase="draft")

    def joint(self, mixers: Sequence[Any]) -> Any:
        return joined(mixers)

    def commit(self, nodes: Any, batch: Batch, committed: Committed, chain: bool) -> None:
        """What is stored of a chain is in order already; that of a tree moves."""
        if not chain:
            start, path = committed.start, committed.nodes
            move_accepted(self.pool, batch.page_table, start, path, impl=self.resources.impl)

    def move_slot(self, source: int, target: int) -> None:
        """Pages stay where they are."""


@dataclass(frozen=True)
class PagedMixer:
    """One forward over groups of rows, one after the other, which share the products with the weights. All store their
    keys of a layer before any attends, each by its own plan. `slots` and `positions` are flat, `[T]`."""

    cache: KVCache
    slots: Tensor
    positions: Tensor
    backend: Backend
    groups: tuple[PagedRows, ...]
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
        seen = dict(mode=mode, mask=mask, depths=depths, paths=paths)
        slots, flat, metadata = planned_rows(batch, positions, counts, cache.page_size, impl, **seen)
        shape, kinds = _attention_shape(cache, width, resources), kinds or _kinds_of(cache, mode)
        plans = {
            kind: resources.backend.plan(_of_layer(metadata, cache, *kind), shape, phase)
            for kind in dict.fromkeys(kinds)
        }
        rows = PagedRows(positions.shape, tuple(plans[kind] for kind in kinds))
        return cls(cache, slots, flat, resources.backend, (rows,), impl)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        stored, scales = self.cache.kv[layer], self.cache.scales and self.cache.scales.of_layer(layer)
        q_rows, k_rows, v_rows = (x.flatten(0, -3) for x in (q, k, v))
        queries = write_kv(
            q_rows,
            k_rows,
            v_rows,
            stored,
            self.slots,
            self.positions,
            self.cache.rope,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=self.cache.config.rms_norm_eps,
            interleaved=self.cache.config.interleaved_rope,
            k_scale=scales and scales.k_scale,
            v_scale=scales and scales.v_scale,
            impl=self.impl,
        )
        sinks = None if weights.sinks is None else weights.sinks.float()
        if len(self.groups) == 1:
            return self.backend.run(self.groups[0].plans[layer], LayerInputs(queries.view_as(q), stored, sinks, scales))
        out, shapes = torch.empty_like(queries), [group.shape for group in self.groups]
        for group, part, place in zip(self.groups, split_rows(queries, shapes), split_rows(out, shapes), strict=True):
            result = self.backend.run(group.plans[layer], LayerInputs(part, stored, sinks, scales, place))
            if result is not place:
                place.copy_(result)
        return out


def paged_levels(
    batch: Batch, cache: KVCache, resources: Resources, sizes: LevelSizes, views: LevelViews | None = None
) -> Callable[[int], PagedMixer]:
    """The mixers of the forwards in which a drafter writes one level of its draft after another, planned at once."""
    slots, positions, calls = level_rows(batch, sizes, views, cache.page_size, resources.impl)
    width, mode, backend = sizes.width, "chain" if views is None else "tree", resources.backend
    shape, kinds = _attention_shape(cache, width, resources), _kinds_of(cache, mode)
    steps = dict(length_step=1) if views is None else dict(width_step=width)
    of_kind = {}
    for kind in dict.fromkeys(kinds):
        levels = Levels([_of_layer(call, cache, *kind) for call in calls], **steps)
        of_kind[kind] = levels, backend.plan_levels(levels, shape, "draft")

    def mixer(level: int) -> PagedMixer:
        plans = {
            kind: backend.plan(levels.calls[level], shape, "draft") if planned is None else planned[level]
            for kind, (levels, planned) in of_kind.items()
        }
        rows = PagedRows(torch.Size((len(batch.lengths), width)), tuple(plans[kind] for kind in kinds))
        return PagedMixer(cache, slots[level], positions[level], backend, (rows,), resources.impl)

    return mixer


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
