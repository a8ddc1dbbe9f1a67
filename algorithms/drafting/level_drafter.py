"""Base of the drafters that run a model once per token: a chain, or a tree level by level. No torch at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.drafting.draft_sampling import DraftSampling, LevelSettings, TreeShape

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.drafting.feature_head import FeatureHead
    from algorithms.drafting.tree_drafter import TreeDrafter
    from algorithms.models.config import DecoderConfig


class LevelDrafter(Algorithm):
    """The size of the drafts and the `TreeDrafter` that makes them. A subclass runs its model in `draft`."""

    needs_draft_model = True
    base: ClassVar[int] = 0
    """1 if the drafter stores node 0 in its cache."""

    @staticmethod
    def calls(config: LevelSettings, decoder: DecoderConfig, known: int) -> AttentionCalls:
        """What `check` returns; ValueError where a token would offer more children than the `known` tokens."""
        if config.topk > known:
            raise ValueError(f"algo.topk: the drafter knows {known} tokens, got {config.topk}")
        return AttentionCalls(decoder, {"prefill": "chain", "draft": "chain" if config.topk == 1 else "tree"})

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
        """Allocate the drafter's cache; `vocabulary` as in `Drafts`."""
        from algorithms.attention.memory import allocate_draft_memory
        from algorithms.drafting.sampled_tree import SampledTree
        from algorithms.drafting.tree_drafter import TreeDrafter

        self._resources, self._memory = resources, allocate_draft_memory(decoder, resources)
        sampled = None
        if self._nodes is not None:
            replacement, width = self._sampling.replacement, self._shape.topk
            options: dict[str, Any] = dict(width=width, base=self.base, vocabulary=vocabulary)
            sampled = SampledTree(self._nodes, resources, replacement, **options)
        self._tree = TreeDrafter(resources, vocabulary, self._shape, self._memory, self.base, sampled)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        return self.draft(batch, self._tree if num_nodes == self.num_nodes else self._tree.limited(num_nodes))

    def draft(self, batch: Batch, tree: TreeDrafter) -> DraftTree:
        """The chain or tree that `tree` makes from the drafter's logits."""
        raise NotImplementedError


RAW, NORMED = STREAMS = ("raw", "normed")  # a layer's output, or the final norm of it


class FeatureDrafter(LevelDrafter):
    """Base of drafters whose `FeatureHead` continues the target's hidden states; a subclass loads it for `set_head`.

    observe   Slot p of the head's cache is filled from the target's feature of p and the token of p + 1 ("draft
              extend"). The head's output at the last committed position is kept.
    propose   The kept output gives the first candidates. Each level feeds a candidate and the head's output at its
              parent into the head.
    """

    _drafter: FeatureHead

    def set_head(self, head: FeatureHead, config: LevelSettings) -> None:
        self.calls(config, head.decoder, head.draft_vocab_size)
        self._drafter, self.target_layers = head, head.target_layers
        self.set_shape(config)

    def bind(self, resources: Resources) -> None:
        from algorithms.step.batch import SlotStore

        resources.choose_forward(self._drafter)
        self.bind_tree(self._drafter.decoder, resources, self._drafter.vocabulary)
        self._kept = SlotStore(self._drafter.decoder.hidden_size, resources)

    def observe(self, seen: Observation) -> None:
        feature = self._drafter.fuse(self._drafter.gather(seen.features, seen.tokens), seen.hidden)
        mixer = self._memory.following(seen)
        self._kept.keep_last(seen, self._drafter(seen.next_tokens, feature, mixer))

    def draft(self, batch: Batch, tree: TreeDrafter) -> DraftTree:
        before = self._kept.read(batch.slots)[:, None]
        feature, level = before, 0

        def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
            nonlocal feature, level
            level += 1
            feature, logits = self._drafter.advance(tokens, feature, mixer, level, parents)
            return logits

        logits = self._drafter.logits(before[:, 0])
        return tree.chain(batch, logits, run) if self.chain else tree.tree(batch, logits, run)

    def move_slot(self, source: int, target: int) -> None:
        self._kept.move(source, target)
