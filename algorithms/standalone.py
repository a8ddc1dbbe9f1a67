"""Speculative decoding with a small language model (arXiv 2211.17192, 2302.01318).

observe   The draft model reads the prompt. After a step its cache already holds the accepted part of a chain. The
          accepted part of a tree is scattered in its cache, so it reads those tokens once more. So it does with tokens
          behind which nothing was drafted.
propose   The draft model writes `steps` tokens behind the last one: a chain, or a tree as in EAGLE-2.

Drafts of the likeliest tokens are a deterministic function of the context, so the target's own choice decides
(`target_only`). Chains and trees may instead be drawn from the draft model under the request's own sampling parameters
and be verified by a rule for drawn drafts. These emit the target's distribution as well, and accept more when both
models are unsure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from algorithms.runtime.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.runtime.drawing import Drawing, LevelSettings
from algorithms.runtime.tree_shape import TreeShape

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.runtime.models.loading import Target, TargetFolder
    from algorithms.runtime.tree_drafting import TreeDrafter


class Standalone(Algorithm):
    """A small model drafts what a large one verifies."""

    name = "standalone"
    needs_draft_model = True

    @dataclass
    class Config(LevelSettings):
        name: str = "standalone"
        steps: int = 4

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.runtime.models.loading import read_draft

        draft = read_draft(cls.drafter_folder(draft_path), target)
        return AttentionCalls(draft.config, {"prefill": "chain", "draft": "chain" if config.topk == 1 else "tree"})

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        from algorithms.runtime.models.loading import load_draft

        weight = target.model.model.norm.weight
        self._draft = load_draft(self.drafter_folder(draft_path), target, weight.device, weight.dtype)
        self._shape = TreeShape.of(config.steps, config.topk, config.num_nodes)
        self.chain, self.max_depth, self.num_nodes = self._shape.chain, self._shape.max_depth, self._shape.num_nodes
        self._drawing = Drawing.of(config.draw, config.rule, self.chain)
        self.rule, self._nodes = self._drawing.rule, self._drawing.shape(self._shape)
        if self._nodes is not None:
            self.max_depth = self._nodes.max_depth
        # A chain also stores its last draft.
        self.draft_slots = self._shape.draft_slots(1) + self.chain

    def attach(self, resources: Resources) -> None:
        from algorithms.runtime.cache import KVCache
        from algorithms.runtime.drawn_tree import DrawnTree
        from algorithms.runtime.tree_drafting import TreeDrafter

        self._resources = resources
        resources.choose_forward(self._draft.model)
        self._cache = KVCache.allocate(self._draft.config, resources)
        drawn = None
        if self._nodes is not None:
            width, replacement = self._shape.topk, self._drawing.replacement
            drawn = DrawnTree(self._nodes, resources, replacement, width=width, base=1)
        self._tree = TreeDrafter(self._shape, self._cache, resources, base=1, drawn=drawn)

    def observe(self, seen: Observation) -> None:
        from algorithms.runtime.paged_attention import PagedMixer

        if seen.is_prefill or seen.altered or not self.chain:
            self._draft.model(seen.tokens, PagedMixer.following(seen, self._cache, self._resources))

    def propose(self, batch: Batch) -> DraftTree:
        return self._propose(batch, self._tree)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        return self._propose(batch, self._tree.limited(num_nodes))

    def _propose(self, batch: Batch, tree: TreeDrafter) -> DraftTree:
        from algorithms.runtime.paged_attention import PagedMixer

        root = batch.last_tokens[:, None]
        if not self.chain:
            mixer = PagedMixer.over(batch, batch.lengths[:, None], self._cache, self._resources, phase="draft")
            return tree.tree(batch, self._run(root, None, mixer)[:, 0], self._run)
        mixers = tree.chain_mixers(batch)
        logits = self._run(root, None, mixers[0])[:, 0]
        draft = tree.chain(batch, logits, self._run, mixers)
        # Stores the last draft, which may be accepted; its logits are not needed.
        self._draft.model(draft.tokens[:, -1:], mixers[tree.shape.max_depth])
        return draft

    def _run(self, tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        hidden, _ = self._draft.model(tokens, mixer)
        return self._draft.model.logits(hidden)
