"""Base of the drafters whose head continues the target's hidden states. No torch at import.

observe   Slot p of the head's cache is filled from the target's feature of p and the token of p + 1 ("draft extend").
          The head's output at the last committed position is kept.
propose   The kept output gives the first candidates. Each level feeds a candidate and the head's output at its parent
          into the head: a dynamic tree of steps, topk and num_nodes, or a chain with topk 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from algorithms.algorithm import Batch, DraftTree, Observation, Resources
from algorithms.drafting.draft_sampling import LevelSettings
from algorithms.drafting.level_drafter import LevelDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.drafting.feature_head import FeatureHead
    from algorithms.drafting.tree_drafter import TreeDrafter


RAW, NORMED = STREAMS = ("raw", "normed")  # a layer's output, or the final norm of it


class FeatureDrafter(LevelDrafter):
    """Runs a `FeatureHead`, which a subclass loads and gives to `set_head`."""

    _drafter: FeatureHead

    @staticmethod
    def check_topk(config: LevelSettings, known: int) -> None:
        """ValueError where a token would offer more children than the `known` tokens."""
        if config.topk > known:
            raise ValueError(f"algo.topk: the drafter knows {known} tokens, got {config.topk}")

    def set_head(self, head: FeatureHead, config: LevelSettings) -> None:
        self.check_topk(config, head.draft_vocab_size)
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
