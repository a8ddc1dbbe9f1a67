"""Drafting with a model that writes one token after another: a chain, or a tree level by level.

Trees of the most likely tokens follow EAGLE-2 (arXiv 2406.16858). Every level runs `topk` frontier tokens, each of
which offers its `topk` most likely children. The best of these, by path probability, are the next frontier. At the end
the best `num_nodes - 1` of all offered children are kept.

Frontier token j of level i, counted from 0, is stored `base + i * topk + j` slots after L in the drafter's cache,
and a bit mask over these slots says what it sees: itself, its ancestors, and node 0 (`base` 1) if the drafter has
stored it. A level reads only the slots that exist by then: an earlier request may have left NaN in the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import Batch, DraftTree, Resources
from algorithms.attention.levels import LevelSizes, LevelViews
from algorithms.attention.memory import DraftMemory, Levels
from algorithms.drafting.sampled_tree import SampledTree
from algorithms.drafting.tree_shape import TreeShape
from algorithms.models.layers import Mixer
from specdec_kernels.tree import mask_words

RunLevel = Callable[[Tensor, Tensor | None, Mixer], Tensor]
"""(tokens [B, T], parents [B, T] columns of the level before, mixer) -> logits [B, T, V] after each token. The
first level hangs on column 0. In a chain there is one column and no parents."""


@dataclass(frozen=True)
class TreeDrafter:
    """Drafts trees of one size. `base` is 1 if the drafter stores node 0, else 0. `vocabulary [V]` int64 is added to
    an id of the drafter to give the target's; None adds nothing. `sampled` None takes the most likely tokens."""

    shape: TreeShape
    memory: DraftMemory
    resources: Resources
    base: int = 0
    vocabulary: Tensor | None = None
    sampled: SampledTree | None = None

    def limited(self, num_nodes: int) -> TreeDrafter:
        """The drafter of trees of fewer nodes, over the same memory. A sampled tree keeps its shape."""
        return self if self.sampled is not None else replace(self, shape=self.shape.limited(num_nodes))

    def chain_mixers(self, batch: Batch) -> Levels:
        """Mixers for the tokens of a chain, one a forward: node 0 and the last draft only where node 0 is stored."""
        return self.memory.levels(batch, LevelSizes(self.shape.max_depth - 1 + 2 * self.base))

    def chain(self, batch: Batch, logits: Tensor, run: RunLevel, mixers: Levels | None = None) -> DraftTree:
        """Draft a chain from `logits [B, V]` after the last token; `mixers` are `chain_mixers(batch)`."""
        levels = mixers or self.chain_mixers(batch)
        logits, run = self._adjusted(batch, logits, run)
        if self.sampled is not None:
            return self.sampled.grow(
                batch, logits, lambda level, tokens, _: run(tokens, None, levels[level + self.base])
            )
        impl, depth = self.resources.impl, self.shape.max_depth
        scored = self.resources.needs_path_probs
        added, tokens = self.vocabulary, [batch.last_tokens]
        logprobs = [torch.zeros_like(batch.lengths, dtype=torch.float32)]
        for level in range(1, depth + 1):
            picked = kernels.pick_tokens(logits, return_logprobs=scored, impl=impl)
            if picked.logprobs is not None:
                logprobs.append(picked.logprobs)
            tokens.append(picked.tokens if added is None else picked.tokens + added[picked.tokens])
            if level < depth:
                logits = run(tokens[-1][:, None], None, levels[level - 1 + self.base]).squeeze(1)
        path_probs = torch.stack(logprobs, 1).cumsum(1).exp() if scored else None
        links = kernels.build_chain(batch.lengths, depth + 1, impl=impl)
        return DraftTree(torch.stack(tokens, 1), links, path_probs=path_probs)

    def tree(self, batch: Batch, logits: Tensor, run: RunLevel) -> DraftTree:
        """Draft a tree from `logits [B, V]` after the last token."""
        logits, run = self._adjusted(batch, logits, run)
        if self.sampled is not None:
            levels = self._tree_mixers(batch, self.sampled.masks(len(logits)))
            return self.sampled.grow(batch, logits, lambda level, tokens, parents: run(tokens, parents, levels[level]))
        masks = level_masks(batch, self.shape, self.base)
        mixers = self._tree_mixers(batch, masks)

        def run_level(level: int, frontier: kernels.Frontier) -> Tensor:
            return run(frontier.tokens, frontier.parents, mixers[level])

        return grow_tree(
            batch, logits, run_level, self.shape, masks, self.resources.impl, base=self.base, vocabulary=self.vocabulary
        )

    def _adjusted(self, batch: Batch, logits: Tensor, run: RunLevel) -> tuple[Tensor, RunLevel]:
        """`logits` [B, V] and those of `run`, changed as the requests ask."""
        depth = 0
        batch.adjust(logits[:, None], 0, self.vocabulary)

        def adjusted(tokens: Tensor, parents: Tensor | None, mixer: Mixer) -> Tensor:
            nonlocal depth
            depth, found = depth + 1, run(tokens, parents, mixer)
            batch.adjust(found, depth, self.vocabulary)
            return found

        return logits, adjusted

    def _tree_mixers(self, batch: Batch, masks: list[Tensor]) -> Levels:
        depths = None
        if self.memory.windowed:
            depths = [self._depths(batch, level) for level in range(len(masks))]
        sizes = LevelSizes(len(masks), self.shape.topk, self.base)
        return self.memory.levels(batch, sizes, LevelViews(masks, depths))

    def _depths(self, batch: Batch, level: int) -> tuple[Tensor, Tensor]:
        """Depths [B, M] of the slots written once `level` has run, and [B, T] of its tokens, for sliding windows."""
        topk, rows = self.shape.topk, len(batch.lengths)
        slots = torch.arange(self.base + (level + 1) * topk, device=batch.lengths.device, dtype=torch.int32)
        by_slot = self.base + (slots - self.base) // topk  # one less for node 0, whose slot is in front of the first
        return by_slot.repeat(rows, 1), by_slot.new_full((rows, topk), self.base + level)


def level_masks(batch: Batch, shape: TreeShape, base: int = 0) -> list[Tensor]:
    """Room for what each frontier sees, [B, T, W] int64 per level; `base` slots come before the first level."""
    ends = [base + (level + 1) * shape.topk for level in range(shape.steps - 1)]
    return [batch.lengths.new_empty(len(batch.lengths), shape.topk, mask_words(end)) for end in ends]


def grow_tree(
    batch: Batch,
    logits: Tensor,
    run: Callable[[int, kernels.Frontier], Tensor],
    shape: TreeShape,
    masks: list[Tensor],
    impl: str,
    *,
    base: int = 0,
    vocabulary: Tensor | None = None,
    confidence: Callable[[], Tensor | None] = lambda: None,
) -> DraftTree:
    """The tree of the most likely tokens, level by level, from `logits [B, V]` after the last token.
    `run(level, frontier)` gives the logits [B, T, V] after each frontier token; `masks` are `level_masks`.
    `confidence()` gives a factor [B, T] of the probabilities of the drafts after the tokens that ran last, or None."""
    topk, rows = shape.topk, len(logits)
    candidates = kernels.Candidates(
        logits.new_empty(rows, shape.num_candidates, dtype=torch.float32),
        batch.lengths.new_empty(rows, shape.num_candidates),
        batch.active.new_empty(rows, shape.num_candidates),
    )
    frontier, first = None, 0
    for level in range(shape.steps):
        probs, ids = (x.view(rows, -1, topk) for x in kernels.draft_topk(logits, topk, impl=impl))
        if (factor := confidence()) is not None:
            probs = probs * factor[..., None]
        is_last = level == shape.steps - 1
        frontier = kernels.expand_tree(
            frontier,
            probs,
            ids,
            candidates,
            first,
            0 if is_last else topk,
            None if is_last else masks[level],
            slot=base + level * topk,
            root_is_stored=base > 0,
            vocabulary=vocabulary,
            impl=impl,
        )
        first += ids[0].numel()
        if frontier is not None:
            logits = run(level, frontier).flatten(0, 1)
    chosen = kernels.rerank_tree(*candidates, batch.last_tokens, shape.num_nodes, impl=impl)
    links = kernels.build_tree(chosen.parents, batch.lengths, impl=impl)
    return DraftTree(chosen.tokens, links, path_probs=chosen.scores)
