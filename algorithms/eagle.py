"""EAGLE-2 (arXiv 2401.15077, 2406.16858): draft the target's next features with one layer, and tokens from those.

observe   For the prompt and after every verify, slot p of the head's cache is filled from the target's feature of p and
          the token of p + 1 ("draft extend"). The head's output at the last committed position is kept: it is the
          feature from which the first draft is guessed.
propose   The kept feature gives the first candidates. Each level feeds a candidate and the head's output before it back
          into the head. The draft is a dynamic tree of steps, topk and num_nodes, or a chain with topk 1.

The draft is a deterministic function of the context, so the target's own choice alone decides what is accepted, greedy
or sampled. With another `draw` than topk the drafts are drawn under the request's sampling parameters instead, in a
tree of fixed shape, and one of the rules for drawn drafts decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.runtime.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.runtime.drawing import Drawing, LevelSettings
from algorithms.runtime.tree_shape import TreeShape

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.runtime.models.loading import Target, TargetFolder
    from algorithms.runtime.tree_drafting import TreeDrafter


class Eagle(Algorithm):
    """Feature-level drafting with dynamic trees."""

    name = "eagle"
    needs_draft_model = True
    kind: ClassVar[str | None] = "EAGLE"
    """The kind of head that the folder must hold; None takes any."""

    @dataclass
    class Config(LevelSettings):
        name: str = "eagle"
        steps: int = 3

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls:
        from algorithms.runtime.models.loading import read_eagle

        _, head, _ = read_eagle(cls.drafter_folder(draft_path), target, cls.kind)
        _check_topk(config, head.draft_vocab_size)
        return AttentionCalls(head.decoder, {"prefill": "chain", "draft": "chain" if config.topk == 1 else "tree"})

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        from algorithms.runtime.models.loading import load_eagle

        weight, folder = target.model.model.norm.weight, self.drafter_folder(draft_path)
        self._drafter = load_eagle(folder, target, weight.device, weight.dtype, self.kind)
        self._shape = TreeShape.of(config.steps, config.topk, config.num_nodes)
        _check_topk(config, self._drafter.draft_vocab_size)
        self.capture = self._drafter.capture
        self.chain, self.max_depth, self.num_nodes = self._shape.chain, self._shape.max_depth, self._shape.num_nodes
        self.draft_slots = self._shape.draft_slots(0)
        self._drawing = Drawing.of(config.draw, config.rule, self.chain)
        self.rule, self._nodes = self._drawing.rule, self._drawing.shape(self._shape)
        if self._nodes is not None:
            self.max_depth = self._nodes.max_depth

    def attach(self, resources: Resources) -> None:
        from algorithms.runtime.batch import RowStore
        from algorithms.runtime.cache import KVCache
        from algorithms.runtime.drawn_tree import DrawnTree
        from algorithms.runtime.tree_drafting import TreeDrafter

        self._resources = resources
        resources.choose_forward(self._drafter)
        self._cache = KVCache.allocate(self._drafter.config.decoder, resources)
        vocabulary, drawn = self._drafter.vocabulary, None
        if self._nodes is not None:
            width, replacement = self._shape.topk, self._drawing.replacement
            drawn = DrawnTree(self._nodes, resources, replacement, width=width, vocabulary=vocabulary)
        self._tree = TreeDrafter(self._shape, self._cache, resources, vocabulary=vocabulary, drawn=drawn)
        self._kept = RowStore(self._drafter.config.decoder.hidden_size, resources)

    def observe(self, seen: Observation) -> None:
        from algorithms.runtime.paged_attention import PagedMixer

        feature = self._drafter.fuse(seen.features, seen.hidden)
        mixer = PagedMixer.following(seen, self._cache, self._resources)
        self._kept.keep_last(seen, self._drafter(seen.next_tokens, feature, mixer))

    def propose(self, batch: Batch) -> DraftTree:
        return self._draft(batch, self._tree)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        return self._draft(batch, self._tree.limited(num_nodes))

    def _draft(self, batch: Batch, tree: TreeDrafter) -> DraftTree:
        before = self._kept.rows(batch.rows)[:, None]
        feature = before

        def run(tokens: Tensor, parents: Tensor | None, mixer: Any) -> Tensor:
            nonlocal feature
            if parents is not None:
                feature = feature.gather(1, parents[..., None].expand(-1, -1, feature.shape[-1]))
            feature = self._drafter(tokens, feature, mixer)
            return self._drafter.logits(feature)

        logits = self._drafter.logits(before[:, 0])
        return tree.chain(batch, logits, run) if self.chain else tree.tree(batch, logits, run)

    def move_row(self, source: int, target: int) -> None:
        self._kept.move(source, target)


def _check_topk(config: Any, known: int) -> None:
    if config.topk > known:
        raise ValueError(f"algo.topk: the drafter knows {known} tokens, got {config.topk}")
