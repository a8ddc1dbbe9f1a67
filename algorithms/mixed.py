"""Two drafters in one step: both draft, and the union of their trees is verified.

A node that both draft is one node, so a step accepts no less than with one of them alone. Both drafters observe
every token, whoever drafted it. Both must be judged by the target's own choice (`target_only`): the distribution of
sampled drafts is not known for a merged tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import specdec_kernels as kernels
from algorithms.algorithm import Algorithm, AttentionCalls, Batch, DraftTree, Observation, Resources
from algorithms.drafting.draft_sampling import MAX_NODES
from algorithms.lazy import torch
from algorithms.registry import available, configured

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.models.loading import Target, TargetFolder


@dataclass(frozen=True)
class Part:
    """A drafter inside another algorithm; `draft_path` where the settings name a folder."""

    kind: type[Algorithm]
    config: Any
    draft_path: str | None


class Wrapper(Algorithm):
    """Binds, teaches, moves and resets its `inner` algorithms; a subclass makes a tree of their drafts."""

    inner: tuple[Algorithm, ...]
    verifies_others: ClassVar[bool] = False
    """Whether other drafts are verified than those of an inner algorithm."""

    @classmethod
    def parts(cls, config: Any) -> list[Part]:
        """The inner algorithms and their settings."""
        raise NotImplementedError

    @classmethod
    def drafter_for(cls, config: Any) -> str | None:
        asked = [part.kind.drafter_for(part.config) for part in cls.parts(config) if part.draft_path is None]
        asking = [name for name in asked if name is not None]
        if len(asking) > 1:
            both = " and ".join(asking)
            raise ValueError(f"algo={cls.name}: {both} both need a drafter: give one as +algo.second.draft_path=FOLDER")
        return asking[0] if asking else None

    @classmethod
    def check(cls, config: Any, target: TargetFolder, draft_path: str | None) -> AttentionCalls | None:
        calls = [part.kind.check(part.config, target, part.draft_path or draft_path) for part in cls.parts(config)]
        return next(filter(None, calls), None)

    def __init__(self, config: Any, target: Target, draft_path: str | None) -> None:
        parts = self.parts(config)
        self.wrap(*(part.kind(part.config, target, part.draft_path or draft_path) for part in parts))

    def wrap(self, *inner: Algorithm) -> None:
        """Run these, with the target layers and cache slots that they need."""
        self.inner = inner
        self.target_layers = tuple(sorted({layer for each in inner for layer in each.target_layers}))
        self.draft_slots = max((max(each.draft_slots, each.num_nodes) for each in inner), default=0)
        self.observes_verified = any(each.observes_verified for each in inner)
        self.needs_draft_model = any(each.needs_draft_model for each in inner)

    @property
    def learns(self) -> bool:
        return any(each.learns for each in self.inner)

    def bind(self, resources: Resources) -> None:
        self._impl, self._needs_path_probs = resources.impl, resources.needs_path_probs
        for each in self.inner:
            each.bind(resources)

    def drafted(self, batch: Batch, num_nodes: int) -> list[DraftTree]:
        """The draft of each, of at most `num_nodes`."""
        return [
            each.propose_few(batch, num_nodes) if num_nodes < each.num_nodes else each.propose(batch)
            for each in self.inner
        ]

    def observe(self, seen: Observation) -> None:
        for each in self.inner:
            features = [seen.features[self.target_layers.index(layer)] for layer in each.target_layers]
            stale = seen.drafts_stale or self.verifies_others
            each.observe(replace(seen, features=features, drafts_stale=stale))

    def reset(self) -> None:
        for each in self.inner:
            each.reset()

    def move_slot(self, source: int, target: int) -> None:
        for each in self.inner:
            each.move_slot(source, target)


class Mixed(Wrapper):
    name = "mixed"
    chain = False
    verifies_others = True

    @dataclass
    class Config:
        name: str = "mixed"
        first: dict[str, Any] = field(default_factory=lambda: {"name": "suffix"})
        """Name and settings of the first drafter; `draft_path` is its folder if not the model's own."""
        second: dict[str, Any] = field(default_factory=lambda: {"name": "dflash"})
        """Name and settings of the second drafter: algo.second.name=eagle3, '+algo.second={name:eagle3,steps:4}'."""

    @classmethod
    def parts(cls, config: Config) -> list[Part]:
        return [part_of(key, getattr(config, key), (cls.name, "synthetic")) for key in ("first", "second")]

    def __init__(self, config: Config, target: Target, draft_path: str | None) -> None:
        super().__init__(config, target, draft_path)
        for part in self.inner:
            if part.rule != "target_only":
                expected = "expected drafters with the rule target_only"
                raise ValueError(f"algo=mixed: {expected}, got algo={part.name} with rule {part.rule}")
        self.num_nodes = sum(part.num_nodes for part in self.inner) - 1
        if not 2 <= self.num_nodes <= MAX_NODES:
            raise ValueError(f"algo=mixed: expected 2 to {MAX_NODES} nodes in all, got {self.num_nodes}")
        self.max_depth = max(part.max_depth for part in self.inner)

    def propose_few(self, batch: Batch, num_nodes: int) -> DraftTree:
        """The most likely nodes of both drafts together."""
        joined = self._joined(batch, *self.drafted(batch, num_nodes))
        if num_nodes == self.num_nodes or joined.path_probs is None:
            return joined
        parents = kernels.tree_parents(joined.links.mask, impl=self._impl)
        # Node i is candidate i - 1, and one that is not in the tree hangs under none.
        above = (parents - 1).where(parents >= 0, kernels.UNUSED_PARENT)
        sure, tokens, above = (part[:, 1:].contiguous() for part in (joined.path_probs, joined.tokens, above))
        chosen = kernels.rerank_tree(sure, tokens, above, batch.last_tokens, num_nodes, impl=self._impl)
        links = kernels.build_tree(chosen.parents, batch.lengths, impl=self._impl)
        return DraftTree(chosen.tokens, links, path_probs=chosen.scores)

    def _joined(self, batch: Batch, first: DraftTree, second: DraftTree) -> DraftTree:
        """The union of two trees. A node of both is as likely as the first drafter says."""
        parts = [(tree.tokens, kernels.tree_parents(tree.links.mask, impl=self._impl)) for tree in (first, second)]
        tokens, parents = kernels.merge_trees(*parts[0], *parts[1], impl=self._impl)
        path_probs = None
        if self._needs_path_probs:
            both = torch.cat([_path_probs(first), _path_probs(second)[:, 1:]], 1)
            path_probs = torch.where(parents == kernels.UNUSED_PARENT, 0.0, both)
        links = kernels.build_tree(parents, batch.lengths, impl=self._impl)
        return DraftTree(tokens, links, path_probs=path_probs)


def _path_probs(tree: DraftTree) -> Tensor:
    """[B, N] float32, any number for unused nodes; 0.5 for each draft where the drafter gives none."""
    if tree.path_probs is not None:
        return tree.path_probs
    return 0.5 ** tree.links.depth.float()


def part_of(key: str, settings: dict[str, Any], excluded: tuple[str, ...]) -> Part:
    """The algorithm that `algo.<key>` names with its settings. Raises ValueError; those in `excluded` are unknown."""
    kinds = {name: kind for name, kind in available().items() if name not in excluded}
    own = {name: value for name, value in settings.items() if name not in ("name", "draft_path")}
    try:
        chosen = configured(kinds, "algorithm", str(settings.get("name")), own)
    except (TypeError, ValueError) as error:
        raise ValueError(f"algo.{key}: {error}") from error
    return Part(kinds[chosen.name], chosen, settings.get("draft_path"))
