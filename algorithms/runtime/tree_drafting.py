"""Drafting with a model that writes one token after another: a chain, or a tree level by level.

Trees follow EAGLE-2 (arXiv 2406.16858). Every level runs `topk` frontier tokens. Each of them offers its `topk`
likeliest children. The best of these, by the product of probabilities along the path, are the next frontier. At the end
the best `num_nodes - 1` of all children ever offered are kept.

The drafter's cache does not follow the shape of the tree. Frontier token j of level i is stored
`base + (i - 1) * topk + j` slots behind L, whatever its parent, and a bit mask over these slots says what it sees:
itself, its ancestors, and node 0 (`base` 1) if the drafter has run and stored it. A level reads only the slots that
exist by then: in the others a former request may have left anything, even NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.runtime.algorithm import Batch, DraftTree, Resources
from algorithms.runtime.cache import KVCache
from algorithms.runtime.paged_attention import PagedMixer
from algorithms.runtime.tree_shape import TreeShape
from specdec_kernels import (
    DRAFT_STREAM,
    build_chain,
    build_tree,
    draft_topk,
    expand_tree,
    filtered_probs,
    pick_tokens,
    rerank_tree,
)

RunLevel = Callable[[Tensor, Tensor, PagedMixer], Tensor]
"""(tokens [B, T], parents [B, T] columns of the level before, mixer) -> logits [B, T, V] behind each token."""
_WORD_BITS = 64


@dataclass(frozen=True)
class TreeDrafter:
    """Drafts trees of one shape. `base` counts the slots before the first level; `to_target` maps the drafter's ids to
    the target's."""

    shape: TreeShape
    cache: KVCache
    resources: Resources
    base: int = 0
    to_target: Callable[[Tensor], Tensor] = lambda ids: ids

    @property
    def draft_slots(self) -> int:
        """Slots behind L that the drafter writes."""
        return self.shape.draft_slots(self.base)

    def grow(self, batch: Batch, logits: Tensor, run: RunLevel, drawn: bool = False) -> DraftTree:
        """Draft from `logits [B, V]` behind the last token: the likeliest tokens, as a chain or a tree.

        `drawn` draws a chain under each request's sampling parameters instead, and records its distributions.
        """
        return self._chain(batch, logits, run, drawn) if self.shape.chain else self._tree(batch, logits, run)

    def _chain(self, batch: Batch, logits: Tensor, run: RunLevel, drawn: bool) -> DraftTree:
        impl, depth = self.resources.impl, self.shape.max_depth
        tokens, probs, no_parents = [batch.last_tokens], [], torch.zeros_like(batch.last_tokens)[:, None]
        for level in range(1, depth + 1):
            if drawn:
                probs.append(filtered_probs(logits, batch.sampling, impl=impl))
                # No key may come up again in the next step: block verification would couple the two.
                positions = batch.lengths * (depth + 1) + level
                picked = pick_tokens(logits, batch.sampling, positions, stream=DRAFT_STREAM, impl=impl)
            else:
                picked = pick_tokens(logits, impl=impl)
            tokens.append(self.to_target(picked.tokens))
            if level < depth:
                logits = run(tokens[-1][:, None], no_parents, self.chain_mixer(batch, level)).squeeze(1)
        links = build_chain(batch.lengths, depth + 1, impl=impl)
        return DraftTree(torch.stack(tokens, 1), links, torch.stack(probs, 1) if drawn else None)

    def chain_mixer(self, batch: Batch, level: int) -> PagedMixer:
        """A mixer for the one token of `level` of a chain; level 0 is node 0, where the drafter stores it."""
        stored = replace(batch, lengths=batch.lengths + (self.base + level - 1), max_length=batch.max_length + level)
        return PagedMixer.over(stored, stored.lengths[:, None], self.cache, self.resources, "chain", phase="draft")

    def _tree(self, batch: Batch, logits: Tensor, run: RunLevel) -> DraftTree:
        impl, topk, shape = self.resources.impl, self.shape.topk, self.shape
        rows, columns = logits.shape[0], torch.arange(topk, device=logits.device)
        probs, ids = draft_topk(logits, topk, impl=impl)
        tokens, scores, frontier = self.to_target(ids), probs, columns.expand(rows, topk)
        all_scores, all_tokens = [scores], [tokens]
        all_parents = [torch.full((rows, topk), -1, dtype=torch.int32, device=logits.device)]
        parents = torch.zeros_like(tokens)
        seen = self._mask_of_node_0(rows, topk, logits.device)
        for level in range(1, shape.steps):
            seen = self._with_itself(seen.gather(1, parents[..., None].expand_as(seen)), level)
            wide = run(tokens, parents, self._tree_mixer(batch, level, seen))
            probs, ids = (x.unflatten(0, (rows, topk)) for x in draft_topk(wide.flatten(0, 1), topk, impl=impl))
            children = self.to_target(ids)
            grown = expand_tree(scores, probs, topk, impl=impl)
            all_scores.append(grown.path_scores.flatten(1))
            all_tokens.append(children.flatten(1))
            all_parents.append(frontier.repeat_interleave(topk, 1).to(torch.int32))
            index = grown.index.long()
            scores, tokens, parents = grown.scores, children.flatten(1).gather(1, index), index // topk
            frontier = topk + topk**2 * (level - 1) + index
        chosen = rerank_tree(
            torch.cat(all_scores, 1),
            torch.cat(all_tokens, 1),
            torch.cat(all_parents, 1),
            last_tokens=batch.last_tokens,
            num_nodes=shape.num_nodes,
            impl=impl,
        )
        return DraftTree(chosen.tokens, build_tree(chosen.parents, batch.lengths, impl=impl))

    def _tree_mixer(self, batch: Batch, level: int, seen: Tensor) -> PagedMixer:
        first, topk = self.base + (level - 1) * self.shape.topk, self.shape.topk
        positions, written = (batch.lengths + (self.base + level - 1))[:, None].expand(-1, topk), first + topk
        depths, row_depths = self._depths(len(positions), level, positions.device)
        return PagedMixer.over(
            batch,
            positions,
            self.cache,
            self.resources,
            mode="tree",
            mask=seen[..., : -(-written // _WORD_BITS)].contiguous(),
            phase="draft",
            first_slot=first,
            tree_width=written,
            depths=depths,
            row_depths=row_depths,
        )

    def _depths(self, rows: int, level: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Depths [B, M] of the slots written up to `level` and [B, T] of its tokens, for a drafter with windows."""
        if not any(self.cache.config.sliding_windows):
            return None, None
        topk = self.shape.topk
        slots = torch.arange(self.base + level * topk, device=device, dtype=torch.int32)
        by_slot = torch.where(slots < self.base, slots, self.base + (slots - self.base) // topk)
        return by_slot.repeat(rows, 1), by_slot.new_full((rows, topk), self.base + level - 1)

    def _mask_of_node_0(self, rows: int, topk: int, device: torch.device) -> Tensor:
        """[B, T, W] words in which only a stored node 0 is seen."""
        words = torch.zeros((rows, topk, -(-self.draft_slots // _WORD_BITS)), dtype=torch.int64, device=device)
        words[..., 0] = self.base
        return words

    def _with_itself(self, seen: Tensor, level: int) -> Tensor:
        """Every token of `level` also sees its own slot."""
        first, topk = self.base + (level - 1) * self.shape.topk, self.shape.topk
        slots = torch.arange(first, first + topk, device=seen.device)
        words = torch.arange(seen.shape[-1], device=seen.device)
        own = torch.where(words == (slots // _WORD_BITS)[:, None], torch.ones_like(slots)[:, None], 0)
        return seen | (own << (slots % _WORD_BITS)[:, None])
