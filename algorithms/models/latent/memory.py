"""Latents in pages: the memory of latent attention, which runs in absorbed form.

    q' = q_n W_uk of the head;   out' = softmax(scale (q' . c + q_r . k_r)) c;   out = out' W_uv of the head

So a token is one stored row [c | k_r] for all heads, in prefill as in decoding: results do not depend on how a text
was written. The kernel is the same for every attention backend.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import Batch, Prompts, Resources
from algorithms.attention.cache import KVCache
from algorithms.attention.paged_attention import LevelSizes, LevelViews, PageMemory, split_rows
from algorithms.models.config import DecoderConfig
from algorithms.models.latent.config import LatentConfig
from algorithms.models.latent.module import LATENT_EPS, LatentWeights, attention_scale, latent_rope_table


class Rows(NamedTuple):
    """A group of rows of a forward."""

    shape: torch.Size  # [B, N]
    metadata: kernels.AttentionMetadata
    by_node: bool = False
    """Whether the metadata takes each node for a request, over a table of tokens."""


@dataclass(frozen=True)
class LatentMixer:
    """One forward over groups of rows, one after the other. All store their rows of a layer before any attends."""

    cache: KVCache  # kv [layers, 1, pages, page_size, 1, latent + rope], rope [context, rope]
    sizes: LatentConfig
    slots: Tensor  # [T] int64 over all groups
    positions: Tensor
    groups: tuple[Rows, ...]
    impl: str
    same: bool = False  # a row has the same bits among any others

    @property
    def real(self) -> Tensor:
        return self.slots >= 0

    def __call__(self, layer: int, /, q: Tensor, kv: Tensor, weights: LatentWeights) -> Tensor:
        """`q [..., H, nope + rope]`, `kv [..., latent + rope]`, over T rows in all, to `[..., H, value]`."""
        sizes, cache = self.sizes, self.cache.kv[layer].squeeze((0, 3))
        rows, heads = kv.numel() // kv.shape[-1], q.shape[-2]
        nope, turning = q.reshape(rows, heads, -1).split([sizes.nope, sizes.rope], dim=-1)
        q_rope = kernels.write_latent(
            turning, kv.reshape(rows, -1), cache, self.slots, self.positions, self.cache.rope, norm=weights.norm,
            eps=LATENT_EPS, interleaved=sizes.interleaved, impl=self.impl,
        )  # fmt: skip
        absorbed = self._by_head(nope, weights.up_key).contiguous()
        shapes = [group.shape for group in self.groups]
        parts = zip(self.groups, split_rows(absorbed, shapes), split_rows(q_rope, shapes), strict=True)
        attended = [self._attend(group, cache, q_latent, turned).flatten(0, 1) for group, q_latent, turned in parts]
        latents = attended[0] if len(attended) == 1 else torch.cat(attended)
        out = self._by_head(latents, weights.up_value.transpose(1, 2))
        return out.reshape(*q.shape[:-1], sizes.value)

    def _attend(self, group: Rows, cache: Tensor, q_latent: Tensor, q_rope: Tensor) -> Tensor:
        if group.by_node:
            cache = cache.flatten(0, 1)[:, None]
            q_latent, q_rope = (each.flatten(0, 1)[:, None] for each in (q_latent, q_rope))
        return kernels.mla_attention(q_latent, q_rope, cache, group.metadata, batch_invariant=self.same, impl=self.impl)

    def _by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [T, H, K]` by `weight [H, K, N]`."""
        if self.same:
            return kernels.head_product(x, weight, impl=self.impl)
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


class LatentMemory(PageMemory):
    def __init__(self, config: DecoderConfig, sizes: LatentConfig, resources: Resources) -> None:
        if resources.kv_dtype != resources.dtype:
            raise ValueError("runtime.kv_dtype: expected auto for a target with latent attention, got fp8_e4m3")
        shape = (config.num_layers, 1, resources.num_pages, resources.page_size, 1, sizes.latent + sizes.rope)
        rows = torch.zeros(shape, device=resources.device, dtype=resources.dtype)
        rope = latent_rope_table(config, sizes, resources.context, resources.device)
        self.cache, self.resources = KVCache(rows, rope, config), resources
        self._sizes, self._scale = sizes, attention_scale(config, sizes)
        resources.caches.append(self.cache)

    def nodes(self, batch: Batch, links: kernels.TreeLinks, chain: bool, max_depth: int) -> LatentMixer:
        mode, mask = ("chain", None) if chain else ("tree", links.mask)
        mixer = self._of_target(self.over(batch, links.positions, mode=mode, mask=mask))
        if chain or not mixer.same:
            return mixer
        rows = mixer.groups[0]
        paths = kernels.mask_paths(links.mask, max_depth + 1, impl=self.resources.impl)
        metadata = of_paths(rows.metadata, paths, self.cache.page_size)
        return replace(mixer, groups=(Rows(rows.shape, metadata, by_node=True),))

    def tiles(self, batch: Batch, positions: Tensor, counts: Tensor, prompts: Prompts) -> LatentMixer:
        return self._of_target(super().tiles(batch, positions, counts, prompts))

    def _of_target(self, mixer: LatentMixer) -> LatentMixer:
        return replace(mixer, same=True) if self.resources.deterministic else mixer

    def _group(self, shape: torch.Size, metadata: kernels.AttentionMetadata, *_: object) -> Rows:
        """The kernel is the same in every phase and layer."""
        return Rows(shape, metadata._replace(scale=self._scale))

    def _mixer(self, slots: Tensor, positions: Tensor, group: Rows) -> LatentMixer:
        return LatentMixer(self.cache, self._sizes, slots, positions, (group,), self.resources.impl)

    def levels(self, batch: Batch, sizes: LevelSizes, views: LevelViews | None = None) -> Callable[[int], LatentMixer]:
        rows, shape = self._level_rows(batch, sizes, views), torch.Size((len(batch.lengths), sizes.width))
        mixers = [self._mixer(slots, at, self._group(shape, call)) for slots, at, call in zip(*rows, strict=False)]
        return mixers.__getitem__


def of_paths(metadata: kernels.AttentionMetadata, paths: Tensor, page_size: int) -> kernels.AttentionMetadata:
    """Metadata of each node of trees `[B, N]` as a request of its own, which decodes the last token of its path: over
    pages of one token. `paths` as `mask_paths` makes them."""
    assert metadata.max_length is not None and metadata.q_lens is not None
    batch, nodes, most = paths.shape
    depth = (paths >= 0).sum(2)
    position = torch.arange(metadata.max_length, device=paths.device)
    tokens = metadata.page_table.repeat_interleave(page_size, dim=1)[:, : metadata.max_length] * page_size
    tokens += position[: tokens.shape[1]] % page_size
    behind = position - metadata.lengths[:, None]
    slots = paths.gather(2, behind.clamp(0, most - 1)[:, None].expand(batch, nodes, -1)).clamp(min=0)
    held = torch.where(behind[:, None] < 0, position, metadata.lengths[:, None, None] + slots)
    table = tokens[:, None].expand(batch, nodes, -1).gather(2, held.clamp(max=tokens.shape[1] - 1))
    used = torch.arange(nodes, device=paths.device) < metadata.q_lens[:, None]
    return metadata._replace(
        page_table=table.flatten(0, 1).to(torch.int32),
        lengths=(metadata.lengths[:, None] + (depth - 1).clamp(min=0)).flatten(),
        mode="chain",
        mask=None,
        q_lens=(used & (depth > 0)).flatten().to(torch.int32),
    )
