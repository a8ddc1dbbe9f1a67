"""Speculative decoding with a small language model (arXiv 2211.17192, 2302.01318).

observe   The draft model reads the prompt. After a step its cache holds the accepted part of a chain already; that of a
          tree is scattered, so the model reads those tokens once more, as after steps without drafts.
propose   The draft model writes `steps` tokens: a chain, or a tree as in EAGLE-2, of the most likely or sampled ones.

With `vocabulary=intersection` the draft model may have another tokenizer, see `algorithms.models.shared_vocabulary`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from algorithms.algorithm import AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.drafting.draft_sampling import LevelSettings
from algorithms.drafting.level_drafter import LevelDrafter

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.drafting.tree_drafter import TreeDrafter
    from algorithms.models.loading import Target, TargetFolder


class Standalone(LevelDrafter):
    name = "standalone"
    base = 1

    @dataclass
    class Config(LevelSettings):
        name: str = "standalone"
        steps: int = 4
        vocabulary: Annotated[str, ("same", "intersection")] = "same"
        """`same`: the draft model must have the target's tokenizer; `intersection`: it drafts the tokens in common."""

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.models.loading import read_draft

        draft = read_draft(cls.drafter_folder(draft_path), target, config.vocabulary == "same")
        return cls.calls(config, draft.config, draft.config.vocab_size)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        from algorithms.models.loading import load_draft

        same = config.vocabulary == "same"
        self._draft = load_draft(self.drafter_folder(draft_path), target, same)
        self._vocabulary = None
        if not same:
            from algorithms.models.shared_vocabulary import SharedVocabulary
            from algorithms.models.tokenizer import Tokenizer

            tokenizers = Tokenizer.load(target.path), Tokenizer.load(self._draft.path)
            sizes = target.config.vocab_size, self._draft.config.vocab_size
            shared = SharedVocabulary.of(*tokenizers, *sizes)
            self._draft = shared.apply(self._draft)
            self._vocabulary = shared.offsets.to(target.device)
        self.set_shape(config)

    def bind(self, resources: Resources) -> None:
        resources.choose_forward(self._draft.model)
        self.bind_tree(self._draft.config, resources, self._vocabulary)

    def observe(self, seen: Observation) -> None:
        if seen.is_prefill or seen.drafts_stale or not self.chain:
            self._draft.model(seen.tokens, self._memory.following(seen))

    def draft(self, batch: Batch, tree: TreeDrafter) -> DraftTree:
        root = batch.last_tokens[:, None]
        if not self.chain:
            mixer = self._memory.chained(batch, batch.lengths[:, None])
            return tree.tree(batch, self._run(root, None, mixer)[:, 0], self._run)
        mixers = tree.chain_mixers(batch)
        logits = self._run(root, None, mixers(0))[:, 0]
        draft = tree.chain(batch, logits, self._run, mixers)
        # Stores the last draft, which may be accepted; its logits are not needed.
        self._draft.model(draft.tokens[:, -1:], mixers(tree.shape.max_depth))
        return draft

    def _run(self, tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
        hidden, _ = self._draft.model(tokens, mixer)
        return self._draft.model.logits(hidden)
