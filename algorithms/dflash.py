"""DFlash (arXiv 2602.06036): a whole block of drafts from one pass of a block-diffusion drafter.

observe   After prefill and after every verify, the target's hidden states at a few layers are fused into one context
          vector per committed token, and the keys and values of every draft layer are computed from it and stored
          in the drafter's own pages ("materialised"). The drafter never runs over the text.
propose   [last token, mask, …, mask] at positions L … L + B - 1 attends to [context; block]. The target's LM head at
          the masks gives one distribution per position. Their likeliest tokens are a chain of B - 1 drafts; a drafter
          with a Markov head (DSpark) chooses each behind the draft before it. With `topk` above 1 the likeliest paths
          under the product of these marginals are a tree of `num_nodes` (best first, as in DDTree). With a Markov head
          a child's probability depends on its parent, and the tree grows level by level (as in EAGLE-2).

With another `draw` than topk the drafts are drawn from these distributions under the request's sampling parameters
instead, a chain or a tree of fixed shape, and one of the rules for drawn drafts decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.runtime.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.runtime.drawing import Drawing, DrawnShape
from algorithms.runtime.tree_shape import DEFAULT_TREE_NODES, MAX_NODES, MAX_TOPK, TreeShape
from specdec_kernels.checks import expect_at_least, expect_between

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.runtime.drawn_tree import DrawnTree
    from algorithms.runtime.models.config import DFlashConfig
    from algorithms.runtime.models.drafters.dflash import MarkovHead
    from algorithms.runtime.models.loading import Target, TargetFolder
    from specdec_kernels import Frontier, TreeLinks


class DFlash(Algorithm):
    """Block-diffusion drafting."""

    name = "dflash"
    needs_draft_model = True

    @dataclass
    class Config:
        name: str = "dflash"
        block_size: int | None = None
        """Tokens of a block, the last committed one included; None takes the size the drafter was trained with."""
        topk: int = 1
        """Tokens of each position that may enter the tree; 1 drafts a chain."""
        num_nodes: int | None = None
        """Nodes of the tree, node 0 included; None takes 32. A chain has block_size nodes."""
        window: int | None = None
        """Positions the drafter's context reaches back; None is all of it."""
        draw: str | None = None
        """topk, sample (independent draws) or without_replacement; None follows from the rule, else it is topk."""
        rule: str | None = None
        """Acceptance rule; None is target_only for topk, block for a drawn chain, and traversal for a drawn tree."""

        def __post_init__(self) -> None:
            expect_between("algo.block_size", self.block_size, 1, MAX_NODES, nullable=True)
            expect_between("algo.topk", self.topk, 1, MAX_TOPK)
            expect_between("algo.num_nodes", self.num_nodes, 2, MAX_NODES, nullable=True)
            expect_at_least("algo.window", self.window, 1, nullable=True)
            if self.topk == 1 and self.num_nodes is not None:
                raise ValueError("algo.num_nodes is the size of a tree: expected algo.topk above 1, got 1")
            Drawing.of(self.draw, self.rule, self.topk == 1)

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.runtime.models.loading import read_dflash

        _, drafter = read_dflash(cls.drafter_folder(draft_path), target)
        _block_of(config, drafter)
        return AttentionCalls(drafter.decoder, {"draft": "chain" if all(drafter.causal_layers) else "block"})

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        from algorithms.runtime.models.loading import load_dflash

        weight = target.model.model.norm.weight
        self._drafter = load_dflash(self.drafter_folder(draft_path), target, weight.device, weight.dtype)
        self._target, self._topk, self._window = target.model, config.topk, config.window
        self._block = _block_of(config, self._drafter.config)
        self.chain = self._topk == 1 or self._block == 1
        self.num_nodes = self._block if self.chain else config.num_nodes or DEFAULT_TREE_NODES
        self.max_depth = min(self._block, self.num_nodes) - 1
        self._drawing = Drawing.of(config.draw, config.rule, config.topk == 1)
        self._nodes = None
        if self._drawing.drawn and self._block > 1:
            self.rule = self._drawing.rule
            self._nodes = DrawnShape.of(TreeShape(self.max_depth, self._topk, self.num_nodes))
            self.max_depth = self._nodes.max_depth
        self.draft_slots = self._block
        self.capture = self._drafter.config.target_layer_ids

    def attach(self, resources: Resources) -> None:
        from algorithms.runtime.cache import KVCache
        from algorithms.runtime.drawn_tree import DrawnTree

        self._resources = resources
        resources.choose_forward(self._drafter)
        self._cache = KVCache.allocate(self._drafter.config.decoder, resources)
        self._stacked = self._drafter.stack_kv()
        self._drawn = None
        if self._nodes is not None:
            self._drawn = DrawnTree(self._nodes, resources, self._drawing.replacement, width=self._topk)

    def propose(self, batch: Batch) -> DraftTree:
        return self.propose_few(batch, self.num_nodes)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """The whole block is drafted, because its places see each other; the LM head runs where a node may stand."""
        impl, depth = self._resources.impl, min(self._block, num_nodes) - 1
        block = kernels.build_chain(batch.lengths, self._block, impl=impl)
        if self._block == 1:
            return DraftTree(batch.last_tokens[:, None], block)
        if self._drawn is not None:
            return self._draw(batch, self._marginals(batch, block.positions, self.max_depth), self._drawn)
        logits = self._marginals(batch, block.positions, depth)
        if self.chain:
            links = block if depth + 1 == self._block else kernels.build_chain(batch.lengths, depth + 1, impl=impl)
            return self._likeliest(logits, batch.last_tokens, links)
        if (head := self._drafter.markov_head) is not None:
            return self._behind_each_other(batch, logits, head, num_nodes)
        probs, ids = kernels.draft_topk(logits.flatten(0, 1), self._topk, impl=impl)
        shape = (len(batch.last_tokens), depth, self._topk)
        chosen = kernels.best_first_tree(
            probs.view(shape), ids.view(shape), last_tokens=batch.last_tokens, num_nodes=num_nodes, impl=impl
        )
        links = kernels.build_tree(chosen.parents, batch.lengths, impl=impl)
        return DraftTree(chosen.tokens, links, confidence=chosen.scores)

    def _likeliest(self, logits: Tensor, last_tokens: Tensor, links: TreeLinks) -> DraftTree:
        """The chain of the last token and the likeliest of each position, from `logits [B, block - 1, V]`; with a
        Markov head the likeliest behind the draft before it."""
        import torch

        with_confidence, head = self._resources.confidence, self._drafter.markov_head
        pick = partial(kernels.pick_tokens, return_logprobs=with_confidence, impl=self._resources.impl)
        rows, depth, _ = logits.shape
        tokens = last_tokens.new_empty(rows, depth + 1)
        tokens[:, 0] = last_tokens
        logprobs = last_tokens.new_zeros(tokens.shape, dtype=torch.float32) if with_confidence else None
        for first, last in [(0, depth)] if head is None else [(place, place + 1) for place in range(depth)]:
            here = logits[:, first:last]
            if head is not None:
                here = here + head(tokens[:, first])[:, None]
            picked = pick(here.flatten(0, 1))
            tokens[:, first + 1 : last + 1] = picked.tokens.view(rows, -1)
            if logprobs is not None and picked.logprobs is not None:
                logprobs[:, first + 1 : last + 1] = picked.logprobs.view(rows, -1)
        return DraftTree(tokens, links, confidence=None if logprobs is None else logprobs.cumsum(1).exp())

    def _draw(self, batch: Batch, logits: Tensor, drawn: DrawnTree) -> DraftTree:
        """Drafts drawn from `logits [B, depth, V]`, with a Markov head each behind its parent."""
        head = self._drafter.markov_head
        if head is None:
            return drawn.draw(batch, logits)

        def run(level: int, tokens: Tensor, parents: Tensor) -> Tensor:
            return logits[:, level + 1, None] + head(tokens)

        return drawn.grow(batch, logits[:, 0] + head(batch.last_tokens), run)

    def _behind_each_other(self, batch: Batch, logits: Tensor, head: MarkovHead, num_nodes: int) -> DraftTree:
        """The tree whose children `head` scores behind their parents, from `logits [B, block - 1, V]`."""
        from algorithms.runtime.tree_drafting import grow_tree, level_masks

        shape = TreeShape(logits.shape[1], self._topk, num_nodes)

        def run(level: int, frontier: Frontier) -> Tensor:
            return logits[:, level + 1, None] + head(frontier.tokens)

        first = logits[:, 0] + head(batch.last_tokens)
        return grow_tree(batch, first, run, shape, level_masks(batch, shape), self._resources.impl)

    def _marginals(self, batch: Batch, positions: Tensor, depth: int) -> Tensor:
        """Logits [B, depth, V] of the first positions behind the last token; `positions [B, block]`."""
        block = self._drafter.embed_block(self._target, batch.last_tokens, positions.shape[1])
        hidden = self._drafter(block, self._mixer(batch, positions))
        return self._drafter.cap(self._target.logits(hidden[:, 1 : depth + 1]))

    def _mixer(self, batch: Batch, positions: Tensor) -> Any:
        from algorithms.runtime.paged_attention import PagedMixer

        kinds = [self._layer_kind(layer) for layer in range(self._drafter.config.decoder.num_layers)]
        return PagedMixer.over(batch, positions, self._cache, self._resources, phase="draft", kinds=kinds)

    def _layer_kind(self, layer: int) -> tuple[str, int | None]:
        """(mode, window): all of the block or its past, all of the context or a window."""
        config = self._drafter.config
        windows = [window for window in (config.decoder.window(layer), self._window) if window is not None]
        return "chain" if config.causal_layers[layer] else "block", min(windows, default=None)

    def observe(self, seen: Observation) -> None:
        impl, batch, width = self._resources.impl, seen.batch, seen.tokens.shape[1]
        keys, values = self._drafter.context_kv(self._drafter.context(seen.features, seen.hidden), self._stacked)
        page_size = self._cache.page_size
        slots = kernels.token_slots(batch.page_table, batch.lengths, seen.counts, width, page_size, impl=impl)
        kernels.materialize_kv(
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self._cache.kv,
            slots.flatten(),
            seen.positions.flatten(),
            self._cache.rope,
            k_norm=self._stacked.k_norm,
            eps=self._cache.eps,
            impl=impl,
        )


def _block_of(config: DFlash.Config, drafter: DFlashConfig) -> int:
    """Tokens of a block; ValueError if the drafter was trained on smaller ones, if the window is smaller, or if a tree
    of drafts that depend on each other or are drawn cannot have the size that is asked for."""
    trained = drafter.block_size
    block = config.block_size or trained
    drawn = Drawing.of(config.draw, config.rule, config.topk == 1).drawn
    if (drafter.markov_rank or drawn) and config.topk > 1 and block > 1:
        nodes = config.num_nodes or DEFAULT_TREE_NODES
        TreeShape(min(block, nodes) - 1, config.topk, nodes)
    if block > trained:
        raise ValueError(f"algo.block_size: expected at most {trained}, as trained, got {block}")
    if config.window is not None and config.window < block:
        raise ValueError(f"algo.window: expected at least the block of {block}, got {config.window}")
    return block
