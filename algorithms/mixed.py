"""Two drafters in one step: their trees are merged, or the surer one drafts.

merge   Both draft, and the tree is the union of theirs: what both draft is one node. It holds every path of either, so
        no step accepts less than it would have with one of them alone. It has the nodes of both.
take    Where the first drafter expects at least `threshold` accepted drafts (its `strength`), its tree is verified, and
        that of the second elsewhere. The step has the nodes of the larger one.

Both drafters observe every token, whoever drafted it. So each drafts what it would have drafted alone behind the same
text, and if both drafts are functions of the context, so is theirs together. Both must be judged by the target's own
choice (`target_only`): the distribution of drawn drafts is not known for a merged tree. Two drafters that look up the
same texts (`ngram` and `suffix`) read one store.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any

import specdec_kernels as kernels
from algorithms.registry import available
from algorithms.runtime.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.runtime.tree_shape import MAX_NODES
from specdec_kernels.checks import expect_between, expect_choice

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.runtime.models.loading import Target, TargetFolder

MODES = ("merge", "take")


@dataclass(frozen=True)
class Part:
    """One of the two drafters: its class, its settings, and its folder where the settings name one."""

    kind: type[Algorithm]
    config: Any
    draft_path: str | None

    @property
    def asks_for_folder(self) -> bool:
        """Whether the folder of its drafter must come from the model's configuration."""
        return self.kind.drafter_for(self.config) is not None and self.draft_path is None


class Mixed(Algorithm):
    """Two other algorithms in front of one verification."""

    name = "mixed"
    chain = False

    @dataclass
    class Config:
        name: str = "mixed"
        first: dict[str, Any] = field(default_factory=lambda: {"name": "suffix"})
        """Name and settings of the first drafter; `draft_path` is its folder if not the model's own."""
        second: dict[str, Any] = field(default_factory=lambda: {"name": "dflash"})
        """Those of the second."""
        mode: str = "merge"
        """merge: both trees in one; take: the first where it is sure enough, else the second."""
        threshold: float = 4.0
        """With take: accepted drafts that the first must expect."""

        def __post_init__(self) -> None:
            expect_choice("algo.mode", self.mode, MODES)
            expect_between("algo.threshold", self.threshold, 0, inf, above=True)

    @classmethod
    def drafter_for(cls, config: Any) -> str | None:
        asking = [part.kind.name for part in _parts(config) if part.asks_for_folder]
        if len(asking) > 1:
            both = " and ".join(asking)
            raise ValueError(f"algo=mixed: {both} both need a drafter: give one as algo.second.draft_path")
        return asking[0] if asking else None

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls | None:
        calls = [part.kind.check(part.config, target, part.draft_path or draft_path) for part in _parts(config)]
        return next(filter(None, calls), None)

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        self._mode, self._threshold = config.mode, config.threshold
        self._parts = [part.kind(part.config, target, part.draft_path or draft_path) for part in _parts(config)]
        first, second = self._parts
        for part in self._parts:
            if part.rule != "target_only" or part.graph is not None:
                own = f"rule {part.rule}" if part.rule != "target_only" else f"a graph of its own ({part.graph})"
                expected = "expected drafters with the rule target_only and no graph of their own"
                raise ValueError(f"algo=mixed: {expected}, got algo={part.name} with {own}")
        if config.mode == "take" and not first.tells_strength:
            raise ValueError(f"algo.mode=take: expected a first drafter that tells its strength, got algo={first.name}")
        sizes = [part.num_nodes for part in self._parts]
        self.num_nodes = max(sizes) if config.mode == "take" else sum(sizes) - 1
        if not 2 <= self.num_nodes <= MAX_NODES:
            raise ValueError(f"algo=mixed: expected 2 to {MAX_NODES} nodes in all, got {self.num_nodes}")
        self.max_depth = max(part.max_depth for part in self._parts)
        self.draft_slots = max(max(part.draft_slots, part.num_nodes) for part in self._parts)
        self.capture = tuple(sorted({*first.capture, *second.capture}))
        self.needs_draft_model = any(part.needs_draft_model for part in self._parts)

    @property
    def learns(self) -> bool:
        return any(part.learns for part in self._parts)

    def attach(self, resources: Resources) -> None:
        self._impl, self._with_confidence = resources.impl, resources.confidence
        for part in self._parts:
            part.attach(resources)

    def propose(self, batch: Batch) -> DraftTree:
        return self._joined(batch, *(part.propose(batch) for part in self._parts))

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """Of both drafts together, the nodes that are likeliest."""
        joined = self._joined(
            batch,
            *(
                part.propose_few(batch, num_nodes) if num_nodes < part.num_nodes else part.propose(batch)
                for part in self._parts
            ),
        )
        if self._mode == "take" or joined.confidence is None:
            return joined
        parents = kernels.tree_parents(joined.links.mask, impl=self._impl)
        # Node i is candidate i - 1, and one that is not in the tree hangs under none.
        above = (parents - 1).where(parents >= 0, kernels.UNUSED_PARENT)
        sure, tokens, above = (part[:, 1:].contiguous() for part in (joined.confidence, joined.tokens, above))
        chosen = kernels.rerank_tree(sure, tokens, above, batch.last_tokens, num_nodes, impl=self._impl)
        links = kernels.build_tree(chosen.parents, batch.lengths, impl=self._impl)
        return DraftTree(chosen.tokens, links, confidence=chosen.scores)

    def _joined(self, batch: Batch, first: DraftTree, second: DraftTree) -> DraftTree:
        """One tree of two."""
        from torch import where

        if self._mode == "merge":
            return self._merged(batch, first, second)
        assert first.strength is not None
        sure = (first.strength >= self._threshold)[:, None]
        size = max(first.tokens.shape[1], second.tokens.shape[1])
        ours, theirs = (self._padded(tree, size) for tree in (first, second))
        tokens, parents, *confidence = (
            where(sure, a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None
        )
        links = kernels.build_tree(parents, batch.lengths, impl=self._impl)
        return DraftTree(tokens, links, confidence=confidence[0] if confidence else None)

    def _merged(self, batch: Batch, first: DraftTree, second: DraftTree) -> DraftTree:
        """The union of two trees. A node of both is as likely as the first drafter says."""
        from torch import cat, where

        parts = [(tree.tokens, kernels.tree_parents(tree.links.mask, impl=self._impl)) for tree in (first, second)]
        tokens, parents = kernels.merge_trees(*parts[0], *parts[1], impl=self._impl)
        confidence = None
        if self._with_confidence:
            both = cat([_confidence(first), _confidence(second)[:, 1:]], 1)
            confidence = where(parents == kernels.UNUSED_PARENT, 0.0, both)
        links = kernels.build_tree(parents, batch.lengths, impl=self._impl)
        return DraftTree(tokens, links, confidence=confidence)

    def _padded(self, tree: DraftTree, num_nodes: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """tokens, parents int32 and confidence, filled up to [B, num_nodes] with unused nodes."""
        from torch.nn.functional import pad

        parents = kernels.tree_parents(tree.links.mask, impl=self._impl)
        more = (0, num_nodes - tree.tokens.shape[1])
        confidence = None if tree.confidence is None else pad(tree.confidence, more)
        return pad(tree.tokens, more), pad(parents, more, value=kernels.UNUSED_PARENT), confidence

    def observe(self, seen: Observation) -> None:
        for part in self._parts:
            features = [seen.features[self.capture.index(layer)] for layer in part.capture]
            part.observe(replace(seen, features=features, altered=True))

    def forget(self) -> None:
        for part in self._parts:
            part.forget()

    def move_row(self, source: int, target: int) -> None:
        for part in self._parts:
            part.move_row(source, target)


def _confidence(tree: DraftTree) -> Tensor:
    """[B, N] float32, any number for nodes that are not used. A drafter that does not say is taken to be half as sure
    with each draft."""
    if tree.confidence is not None:
        return tree.confidence
    return 0.5 ** tree.links.depth.float()


def _parts(config: Mixed.Config) -> list[Part]:
    """The two drafters that `config` names. Raises ValueError that names the key."""
    return [_part("first", config.first), _part("second", config.second)]


def _part(key: str, settings: dict[str, Any]) -> Part:
    kinds = {name: kind for name, kind in available().items() if name != Mixed.name}
    name: Any = settings.get("name")
    expect_choice(f"algo.{key}.name", name, sorted(kinds))
    schema, own = kinds[name].Config, {k: v for k, v in settings.items() if k not in ("name", "draft_path")}
    known = [item.name for item in fields(schema) if item.name != "name"]
    if unknown := [k for k in own if k not in known]:
        raise ValueError(f"algo.{key}: algo={name} has no setting {unknown[0]!r}; it has {', '.join(known)}")
    try:
        return Part(kinds[name], schema(**own), settings.get("draft_path"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"algo.{key}: {error}") from error
