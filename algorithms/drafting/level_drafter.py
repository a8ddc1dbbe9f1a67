"""Base of the drafters that run a model once per token: a chain, or a tree level by level. No torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from algorithms.algorithm import Algorithm, Batch, DraftTree, Resources
from algorithms.drafting.draft_sampling import DraftSampling, LevelSettings
from algorithms.drafting.tree_shape import TreeShape

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.drafting.tree_drafter import TreeDrafter
    from algorithms.models.config import DecoderConfig


class LevelDrafter(Algorithm):
    """The size of the drafts and the `TreeDrafter` that makes them. A subclass runs its model in `draft`."""

    needs_draft_model = True
    base: ClassVar[int] = 0
    """1 if the drafter stores node 0 in its cache."""

    def set_shape(self, config: LevelSettings) -> None:
        """Set rule, sizes, and slots of the drafter's cache."""
        self._shape = TreeShape.of(config.steps, config.topk, config.num_nodes)
        self.chain, self.max_depth, self.num_nodes = self._shape.chain, self._shape.max_depth, self._shape.num_nodes
        self._sampling = DraftSampling.of(config.draft_sampling, config.rule, self.chain)
        self.rule, self._nodes = self._sampling.rule, self._sampling.shape(self._shape)
        if self._nodes is not None:
            self.max_depth = self._nodes.max_depth
        # A chain whose drafter stores node 0 also stores its last draft.
        self.draft_slots = self._shape.draft_slots(self.base) + (self.base and self.chain)

    def bind_tree(self, decoder: DecoderConfig, resources: Resources, vocabulary: Tensor | None = None) -> None:
        """Allocate the drafter's cache; `vocabulary` as in `TreeDrafter`."""
        from algorithms.attention.memory import allocate_draft_memory
        from algorithms.drafting.sampled_tree import SampledTree
        from algorithms.drafting.tree_drafter import TreeDrafter

        self._resources, self._memory = resources, allocate_draft_memory(decoder, resources)
        sampled = None
        if self._nodes is not None:
            replacement, width = self._sampling.replacement, self._shape.topk
            sampled = SampledTree(
                self._nodes, resources, replacement, width=width, base=self.base, vocabulary=vocabulary
            )
        self._tree = TreeDrafter(self._shape, self._memory, resources, self.base, vocabulary, sampled)

    def propose(self, batch: Batch) -> DraftTree:
        return self.draft(batch, self._tree)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        return self.draft(batch, self._tree.limited(num_nodes))

    def draft(self, batch: Batch, tree: TreeDrafter) -> DraftTree:
        """The chain or tree that `tree` makes from the drafter's logits."""
        raise NotImplementedError
