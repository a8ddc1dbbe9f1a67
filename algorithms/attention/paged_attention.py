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

import specdec_kernels as kernels
from algorithms.algorithm import Batch, Observation, Prompts, Resources
from algorithms.attention.backends.protocol import Backend, LayerInputs
from algorithms.attention.cache import KVCache
from algorithms.models.layers import Mixer, MixerWeights

Levels = Callable[[int], Mixer]


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


Kind = tuple[str, int | None]  # (mode, window) of a layer's attention


class PagedRows(NamedTuple):
    """A group of rows of a forward: its shape [B, N], and the backend's plan for each layer, one by mode and window."""

    shape: torch.Size
    plans: tuple[Any, ...]


def split_rows(rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """`rows [T, ...]` of several groups, one after the other, as each group's `[B, N, ...]`."""
    parts = rows.split([shape.numel() for shape in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


class PageMemory:
    """A memory in pages, of a target or a drafter. A subclass makes the `_mixer` of a `_group` of rows."""

    cache: KVCache
    resources: Resources
    windowed = False
    """Whether a layer has a sliding window, so that `levels` of a tree needs depths."""
    levels: Callable[..., Levels]
    """Of a batch, `LevelSizes` and `LevelViews | None`: plans the forwards of a draft, and gives the mixer of forward
    i, whose mask is filled by then."""
    _group: Any
    _mixer: Any

    def over(
        self,
        batch: Batch,
        positions: Tensor,
        counts: Tensor | None = None,
        phase: str = "verify",
        mode: str = "chain",
        kinds: Sequence[Kind] = (),
        **seen: Any,
    ) -> Any:
        """Plan a forward of `positions [B, N]` at slots L … L + N - 1.

        In row b only the first `counts[b]` columns are real (all, if None; none of a padding row): the others store
        nothing and come out as zeros. `phase` is one of `FORWARD_PHASES`. `kinds` gives the (mode, window) of each
        layer where they are not `mode` and the window of the model. `mode` and `seen` are fields of
        `AttentionMetadata`.
        """
        width, table, lengths, impl = positions.shape[1], batch.page_table, batch.lengths, self.resources.impl
        if counts is None:
            counts = batch.active if width == 1 else batch.active * width
        slots = kernels.token_slots(table, lengths, counts, width, self.cache.page_size, impl=impl)
        metadata = kernels.AttentionMetadata(
            table, lengths, mode, q_lens=counts, max_length=batch.max_length + width, **seen
        )
        group = self._group(positions.shape, metadata, phase, kinds)
        # Positions may be one row seen by all requests; the kernels want them written out.
        return self._mixer(slots.flatten(), positions.flatten().contiguous(), group)

    def _level_rows(
        self, batch: Batch, sizes: LevelSizes, views: LevelViews | None
    ) -> tuple[Tensor, Tensor, list[kernels.AttentionMetadata]]:
        """Of each forward: slots and positions [B * width] int64, and the metadata of an attention without window."""
        (count, width, first), impl = sizes, self.resources.impl
        places = kernels.level_slots(
            batch.page_table, batch.lengths, batch.active, count, width, self.cache.page_size, first=first, impl=impl
        )  # fmt: skip
        slots, positions = places.slots.flatten(1), places.positions.flatten(1)
        mode, longest = "chain" if views is None else "tree", batch.max_length + first + count * width
        shared = kernels.AttentionMetadata(
            batch.page_table, batch.lengths, mode, q_lens=places.counts, max_length=longest
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

    def tiles(self, batch: Batch, positions: Tensor, counts: Tensor, prompts: Prompts) -> Any:
        return self.over(batch, positions, counts, "prefill")

    def following(self, seen: Observation) -> Any:
        """Plan a drafter's forward over the text just observed."""
        return self.over(seen.batch, seen.positions, seen.counts, "prefill" if seen.is_prefill else "draft")

    def chained(self, batch: Batch, positions: Tensor) -> Any:
        """Plan a drafter's forward over a chain `[B, N]` that begins at position L."""
        return self.over(batch, positions, phase="draft")

    def joint(self, mixers: Sequence[Any]) -> Any:
        """One mixer over the groups of several."""
        slots, positions = (torch.cat([getattr(mixer, name) for mixer in mixers]) for name in ("slots", "positions"))
        groups = tuple(group for mixer in mixers for group in mixer.groups)
        return replace(mixers[0], slots=slots, positions=positions, groups=groups)

    def commit(self, nodes: Any, batch: Batch, committed: kernels.Committed, chain: bool) -> None:
        """What is stored of a chain is in order already; that of a tree moves."""
        if not chain:
            kv, start, path = self.cache.kv, committed.start, committed.nodes
            kernels.move_accepted(kv, batch.page_table, start, path, impl=self.resources.impl)

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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, weights: MixerWeights) -> Tensor:
        stored, scales = self.cache.kv[layer], self.cache.scales and self.cache.scales.of_layer(layer)
        q_rows, k_rows, v_rows = (x.flatten(0, -3) for x in (q, k, v))
        queries = kernels.write_kv(
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


class PagedMemory(PageMemory):
    """Keys and values of a model, and the plans of its forwards."""

    def __init__(self, cache: KVCache, resources: Resources) -> None:
        self.cache, self.resources = cache, resources
        self.windowed = any(cache.config.sliding_windows)

    def nodes(self, batch: Batch, links: kernels.TreeLinks, chain: bool, max_depth: int) -> PagedMixer:
        phase = "verify" if links.positions.shape[1] > 1 else "decode"
        tree: dict[str, Any] = {}
        if not chain:
            tree = dict(mode="tree", mask=links.mask, depths=links.depth)
            if self.resources.deterministic:
                tree["paths"] = kernels.mask_paths(links.mask, max_depth + 1, impl=self.resources.impl)
        return self.over(batch, links.positions, phase=phase, **tree)

    def _group(
        self, shape: torch.Size, metadata: kernels.AttentionMetadata, phase: str, kinds: Sequence[Kind] = ()
    ) -> PagedRows:
        kinds, sizes, backend = kinds or self._kinds(metadata.mode), self._shape(shape[1]), self.resources.backend
        each = dict.fromkeys(kinds)
        plans = {kind: backend.plan(self._of_kind(metadata, *kind), sizes, phase) for kind in each}
        return PagedRows(shape, tuple(plans[kind] for kind in kinds))

    def _mixer(self, slots: Tensor, positions: Tensor, group: PagedRows) -> PagedMixer:
        return PagedMixer(self.cache, slots, positions, self.resources.backend, (group,), self.resources.impl)

    def levels(self, batch: Batch, sizes: LevelSizes, views: LevelViews | None = None) -> Callable[[int], PagedMixer]:
        """Planned at once where the backend can."""
        slots, positions, calls = self._level_rows(batch, sizes, views)
        width, mode, backend = sizes.width, "chain" if views is None else "tree", self.resources.backend
        shape, kinds = self._shape(width), self._kinds(mode)
        of_kinds = {kind: [self._of_kind(call, *kind) for call in calls] for kind in dict.fromkeys(kinds)}
        planned = {kind: backend.plan_levels(levels, shape, "draft") for kind, levels in of_kinds.items()}

        def plan(kind: Kind, level: int) -> Any:
            at_once = planned[kind]
            return backend.plan(of_kinds[kind][level], shape, "draft") if at_once is None else at_once[level]

        def mixer(level: int) -> PagedMixer:
            plans = {kind: plan(kind, level) for kind in of_kinds}
            rows = PagedRows(torch.Size((len(batch.lengths), width)), tuple(plans[kind] for kind in kinds))
            return self._mixer(slots[level], positions[level], rows)

        return mixer

    def _shape(self, width: int) -> kernels.AttentionShape:
        config, cache = self.cache.config, self.cache
        sizes = (width, config.num_heads, config.num_kv_heads, config.head_dim, cache.page_size)
        return kernels.AttentionShape(*sizes, self.resources.dtype, cache.kv.dtype)

    def _kinds(self, mode: str) -> list[Kind]:
        """(mode, window) of each layer."""
        config = self.cache.config
        return [(mode, config.window(layer)) for layer in range(config.num_layers)]

    def _of_kind(self, metadata: kernels.AttentionMetadata, mode: str, window: int | None) -> kernels.AttentionMetadata:
        """The metadata of layers with this mode and window; scale and soft cap come from the model's config."""
        by_depth, config = mode == "tree" and window is not None, self.cache.config
        return metadata._replace(
            mode=mode,
            mask=metadata.mask if mode == "tree" else None,
            window=window,
            depths=metadata.depths if by_depth else None,
            row_depths=metadata.row_depths if by_depth else None,
            soft_cap=config.soft_cap,
            scale=config.scale,
        )
