"""Sampled drafts: how siblings are sampled, the rule that accepts them, and the shape of their tree.

The rules take each token for a sample from its parent's distribution, so the shape of the tree must not depend on
the sampled tokens: it is fixed in advance. This file imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from algorithms.checked import Checked
from algorithms.drafting.tree_shape import TreeShape

SAMPLINGS = ("topk", "without_replacement", "sample")
"""The most likely tokens; samples without replacement; independent samples."""
_TREE_RULES = {
    "topk": ("target_only",),
    "without_replacement": ("traversal", "without_replacement"),
    "sample": ("traversal", "greedy_paths", "without_replacement", "k_seq", "multi_round"),
}
_CHAIN_RULES = {"topk": ("target_only",), "without_replacement": (), "sample": ("block", "rejection")}
FIRST_SHARE = 0.6
"""Assumed share of the nodes whose first child is accepted; each later sibling takes the same share of the rest."""


@dataclass(frozen=True)
class DraftSampling:
    """How a drafter chooses siblings (one of `SAMPLINGS`), and the acceptance rule."""

    kind: str
    rule: str

    @classmethod
    def of(cls, kind: str | None, rule: str | None, chain: bool) -> DraftSampling:
        """From the settings `algo.draft_sampling` and `algo.rule`; None follows from the other. Raises ValueError
        for an unknown kind, or a rule that is not exact for it."""
        rules, shape = (_CHAIN_RULES, "chain") if chain else (_TREE_RULES, "tree")
        if kind is None:
            kind = next((each for each in SAMPLINGS if rule is None or rule in rules[each]), None)
            if kind is None:
                names = ", ".join(dict.fromkeys(name for each in SAMPLINGS for name in rules[each]))
                raise ValueError(f"algo.rule: expected one of {names} for a {shape}, got {rule!r}")
        if kind not in SAMPLINGS:
            raise ValueError(f"algo.draft_sampling: expected one of {', '.join(SAMPLINGS)}, got {kind!r}")
        setting = f"algo.draft_sampling={kind}"
        if not rules[kind]:
            raise ValueError(f"{setting} samples siblings: expected algo.topk above 1, got a chain")
        if rule is not None and rule not in rules[kind]:
            expected = ", ".join(rules[kind])
            raise ValueError(f"algo.rule: expected one of {expected} for a {shape} with {setting}, got {rule!r}")
        return cls(kind, rule or rules[kind][0])

    @property
    def sampled(self) -> bool:
        return self.kind != "topk"

    @property
    def replacement(self) -> bool:
        """Whether siblings are independent samples."""
        return self.kind == "sample"

    @property
    def exact_rules(self) -> tuple[str, ...]:
        """All rules for trees that are exact for these samples."""
        return _TREE_RULES[self.kind]

    def shape(self, size: TreeShape) -> SampledShape | None:
        """The shape of the sampled tree, see `SampledShape.of`; None where nothing is sampled."""
        return SampledShape.of(size) if self.sampled else None


@dataclass
class LevelSettings(Checked):
    """Settings of a drafter that drafts a chain token by token, or a tree level by level."""

    GROUP = "algo."
    name: str
    steps: int
    """Most tokens drafted one after another (K)."""
    topk: int = 1
    """Children that a token offers; 1 drafts a chain."""
    num_nodes: int | None = None
    """Nodes verified, node 0 included; None takes steps + 1 for a chain, else at most 32."""
    draft_sampling: str | None = None
    """topk, sample (independent) or without_replacement; None follows from the rule, else it is topk."""
    rule: str | None = None
    """Acceptance rule; None is target_only for topk, block for a sampled chain, and traversal for a sampled tree."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = TreeShape.of(self.steps, self.topk, self.num_nodes)
        DraftSampling.of(self.draft_sampling, self.rule, shape.chain)


@dataclass(frozen=True)
class SampledShape:
    """A tree without tokens: `parents` of its nodes, -1 for node 0. Nodes are numbered level by level."""

    parents: tuple[int, ...]

    @classmethod
    def of(cls, size: TreeShape) -> SampledShape:
        """The `num_nodes` nodes that are reached most often if first children are accepted with `FIRST_SHARE`; at
        most `topk` nodes per level have children."""
        above, depths = [-1], [0]
        ranks: list[tuple[int, ...]] = [()]
        parents_at: dict[int, set[int]] = {}
        queue: list[tuple[float, int, int, int]] = [(-FIRST_SHARE, 0, 0, 0)]
        while queue and len(above) < size.num_nodes:
            value, _, parent, rank = heappop(queue)
            depth = depths[parent]
            of_level = parents_at.setdefault(depth, set())
            if parent not in of_level and len(of_level) == size.topk:
                continue
            of_level.add(parent)
            node = len(above)
            above.append(parent)
            depths.append(depth + 1)
            ranks.append((*ranks[parent], rank))
            if rank + 1 < size.topk:
                heappush(queue, (value * (1 - FIRST_SHARE), node, parent, rank + 1))
            if depth + 1 < size.steps:
                heappush(queue, (value * FIRST_SHARE, node, node, 0))
        order = sorted(range(len(above)), key=lambda node: (depths[node], ranks[node]))
        place = {node: index for index, node in enumerate(order)}
        return cls(tuple(-1 if node == 0 else place[above[node]] for node in order))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        found = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return tuple(found)

    @property
    def max_depth(self) -> int:
        return self.depths[-1]

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def parents_at(self, depth: int) -> list[int]:
        """Nodes of this depth that have children."""
        return [node for node in sorted(set(self.parents[1:])) if self.depths[node] == depth]
