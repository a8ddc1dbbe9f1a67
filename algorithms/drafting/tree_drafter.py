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
from algorithms.attention.paged_attention import Levels, LevelSizes, LevelViews, PageMemory
from algorithms.drafting.draft_sampling import TreeShape
from algorithms.drafting.sampled_tree import SampledTree
from algorithms.models.layers import Mixer
from specdec_kernels.tree import MAX_NODES, mask_words

RunLevel = Callable[[Tensor, Tensor | None, Mixer], Tensor]
"""(tokens [B, T], parents [B, T] columns of the level before, mixer) -> logits [B, T, V] after each token. The
first level hangs on column 0. In a chain there is one column and no parents."""
Confidence = Callable[[], Tensor | None]
"""A factor [B, T] of the probabilities of the drafts after the tokens that ran last, or None."""


@dataclass(frozen=True)
class Drafts:
    """Chains and trees of the most likely tokens. `vocabulary [V]` int64 is added to an id of the drafter to give the
    target's; None adds nothing."""

    resources: Resources
    vocabulary: Tensor | None

    def grow_chain(
        self, batch: Batch, run: Callable[[int, Tensor], Tensor], depth: int, confidence: Confidence = lambda: None
    ) -> DraftTree:
        """The most likely token of each of `depth` positions given those before it. `run(place, tokens)` gives the
        logits [B, V] after `tokens [B, 1]`."""
        impl, scored = self.resources.impl, self.resources.needs_path_probs
        tokens = [batch.last_tokens]
        probs = [torch.ones_like(batch.lengths, dtype=torch.float32)]
        for place in range(depth):
            picked = kernels.pick_tokens(run(place, tokens[-1][:, None]), return_logprobs=scored, impl=impl)
            tokens.append(in_target(picked.tokens, self.vocabulary))
            if picked.logprobs is not None:
                sure = confidence()
                probs.append(picked.logprobs.exp() if sure is None else sure.squeeze(1))
        links = kernels.build_chain(batch.lengths, depth + 1, impl=impl)
        return DraftTree(torch.stack(tokens, 1), links, path_probs=torch.stack(probs, 1).cumprod(1) if scored else None)

    def grow_tree(
        self,
        batch: Batch,
        logits: Tensor,
        run: Callable[[int, kernels.Frontier], Tensor],
        shape: TreeShape,
        masks: list[Tensor],
        base: int = 0,
        confidence: Confidence = lambda: None,
    ) -> DraftTree:
        """The tree of the most likely tokens, level by level, from `logits [B, V]` after the last token.
        `run(level, frontier)` gives the logits [B, T, V] after each frontier token; `masks` are `level_masks`."""
        topk, rows, impl = shape.topk, len(logits), self.resources.impl
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
                vocabulary=self.vocabulary,
                impl=impl,
            )
            first += ids[0].numel()
            if frontier is not None:
                logits = run(level, frontier).flatten(0, 1)
        chosen = kernels.rerank_tree(*candidates, batch.last_tokens, shape.num_nodes, impl=impl)
        links = kernels.build_tree(chosen.parents, batch.lengths, impl=impl)
        return DraftTree(chosen.tokens, links, path_probs=chosen.scores)

    def likeliest_chain(self, batch: Batch, logits: Tensor, confidence: Tensor | None = None) -> DraftTree:
        """The most likely token of each position of `logits [B, D, V]`, which do not depend on the drafts before. Path
        probabilities are of the drafts' own probabilities or of `confidence [B, D]`."""
        (rows, depth, _), impl = logits.shape, self.resources.impl
        scored = self.resources.needs_path_probs
        picked = kernels.pick_tokens(logits.flatten(0, 1), return_logprobs=scored, impl=impl)
        tokens = batch.last_tokens.new_empty(rows, depth + 1)
        tokens[:, 0] = batch.last_tokens
        tokens[:, 1:] = in_target(picked.tokens, self.vocabulary).view(rows, depth)
        path_probs = None
        if picked.logprobs is not None:
            path_probs = picked.logprobs.new_ones(rows, depth + 1)
            probs = picked.logprobs.view(rows, depth).exp() if confidence is None else confidence
            path_probs[:, 1:] = probs.cumprod(1)
        return DraftTree(tokens, kernels.build_chain(batch.lengths, depth + 1, impl=impl), path_probs=path_probs)

    def likeliest_tree(
        self, batch: Batch, logits: Tensor, topk: int, num_nodes: int, confidence: Tensor | None = None
    ) -> DraftTree:
        """The `num_nodes` most likely paths over the `topk` most likely tokens of each position. `confidence [B, D]` is
        a factor of the probabilities of each position."""
        (rows, depth, _), impl = logits.shape, self.resources.impl
        probs, ids = kernels.draft_topk(logits.flatten(0, 1), topk, impl=impl)
        probs, ids = (x.view(rows, depth, topk) for x in (probs, in_target(ids, self.vocabulary)))
        if confidence is not None:
            probs = probs * confidence[..., None]
        chosen = kernels.best_first_tree(probs, ids, last_tokens=batch.last_tokens, num_nodes=num_nodes, impl=impl)
        links = kernels.build_tree(chosen.parents, batch.lengths, impl=impl)
        return DraftTree(chosen.tokens, links, path_probs=chosen.scores)


@dataclass(frozen=True)
class TreeDrafter(Drafts):
    """Drafts trees of one size. `base` is 1 if the drafter stores node 0, else 0. `sampled` None takes the most likely
    tokens."""

    shape: TreeShape
    memory: PageMemory
    base: int = 0
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
                batch, logits, lambda level, tokens, _: run(tokens, None, levels(level + self.base))
            )

        def run_level(place: int, tokens: Tensor) -> Tensor:
            return logits if place == 0 else run(tokens, None, levels(place - 1 + self.base)).squeeze(1)

        return self.grow_chain(batch, run_level, self.shape.max_depth)

    def tree(self, batch: Batch, logits: Tensor, run: RunLevel) -> DraftTree:
        """Draft a tree from `logits [B, V]` after the last token."""
        logits, run = self._adjusted(batch, logits, run)
        if self.sampled is not None:
            levels = self._tree_mixers(batch, self.sampled.masks(len(logits)))
            return self.sampled.grow(batch, logits, lambda level, tokens, parents: run(tokens, parents, levels(level)))
        masks = level_masks(batch, self.shape, self.base)
        mixers = self._tree_mixers(batch, masks)

        def run_level(level: int, frontier: kernels.Frontier) -> Tensor:
            return run(frontier.tokens, frontier.parents, mixers(level))

        return self.grow_tree(batch, logits, run_level, self.shape, masks, self.base)

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


def in_target(ids: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Ids of a drafter, of any shape, as ids of the target."""
    return ids if vocabulary is None else ids + vocabulary.take(ids)


def insert_chain(tree: DraftTree, chain: Tensor, lengths: Tensor, is_chain: bool, impl: str) -> DraftTree:
    """`tree` with the tokens of `chain` [B, M] int64 after its root, -1 after the last of a row; M < N.

    It keeps its number of nodes N: the last nodes of a tree are dropped, and the first tokens of a chain are
    replaced. `lengths` [B] are the positions of the roots. Tree and chain have at most 256 nodes together; the end
    of a longer chain is left out.
    """
    if is_chain:
        drafts = tree.tokens[:, 1 : 1 + chain.shape[1]]
        rest = tree.tokens[:, 1 + chain.shape[1] :]
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], torch.where(chain < 0, drafts, chain), rest], 1))
    chain = chain[:, : MAX_NODES - tree.tokens.shape[1]]
    place = torch.arange(-1, chain.shape[1], device=chain.device, dtype=torch.int32)
    given = torch.cat([torch.ones_like(tree.tokens[:, :1]), chain], 1) >= 0
    parents = torch.where(given, place, kernels.UNUSED_PARENT).int()
    both = torch.cat([tree.tokens[:, :1], chain.clamp(min=0)], 1)
    drafted = kernels.tree_parents(tree.links.mask, impl=impl)
    tokens, parents = kernels.merge_trees(both, parents, tree.tokens, drafted, impl=impl)
    tokens, parents = _first_nodes(tokens, parents, tree.tokens.shape[1])
    return replace(tree, tokens=tokens, links=kernels.build_tree(parents, lengths, impl=impl))


def _first_nodes(tokens: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` nodes that are in the tree: tokens and parents [B, count], as `build_tree` takes them."""
    kept = parents != kernels.UNUSED_PARENT
    number = kept.long().cumsum(1) - 1
    # Every other node goes to a column past the last.
    column = torch.where(kept, number, count).clamp(max=count)
    parent = number.gather(1, parents.clamp(min=0).long()).int()
    shape = (len(tokens), count + 1)
    moved = tokens[:, :1].expand(shape).scatter(1, column, tokens)
    above = torch.full(shape, kernels.UNUSED_PARENT, dtype=torch.int32, device=tokens.device).scatter(1, column, parent)
    return moved[:, :count].contiguous(), above[:, :count].contiguous()
