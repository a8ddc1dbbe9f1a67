"""Sizes of draft trees, and sampled drafts: how siblings are sampled, the rule that accepts them, and their tree.

The rules take each token for a sample from its parent's distribution, so the shape of the tree must not depend on
the sampled tokens: it is fixed in advance. This file imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from algorithms.checked import Checked
from specdec_kernels.checks import expect_at_least, expect_between

DEFAULT_TREE_NODES = 32
MAX_NODES = 256
MAX_TOPK = 64


@dataclass(frozen=True)
class TreeShape:
    """`steps` levels (K), `topk` children per token (T), and `num_nodes` that are verified, node 0 included (N)."""

    steps: int
    topk: int
    num_nodes: int

    @classmethod
    def of(cls, steps: int, topk: int, num_nodes: int | None) -> TreeShape:
        """`num_nodes` None: a chain verifies all of its drafts, a tree up to 32 nodes."""
        if num_nodes is None and steps >= 1 and topk >= 1:
            num_nodes = steps + 1 if topk == 1 else min(DEFAULT_TREE_NODES, 1 + topk + (steps - 1) * topk**2)
        return cls(steps, topk, num_nodes or 0)

    def __post_init__(self) -> None:
        expect_at_least("algo.steps", self.steps, 1)
        expect_between("algo.topk", self.topk, 1, MAX_TOPK)
        most = min(1 + self.num_candidates, MAX_NODES)
        if not 2 <= self.num_nodes <= most:
            raise ValueError(
                f"algo.num_nodes: {self.steps} steps with topk {self.topk} draft 2 to {most} nodes, node 0 "
                f"included, got {self.num_nodes}"
            )

    def limited(self, num_nodes: int) -> TreeShape:
        """The shape of a tree of fewer nodes: no level is drafted that no path of them reaches."""
        return TreeShape(min(self.steps, num_nodes - 1), self.topk, num_nodes)

    @property
    def num_candidates(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2

    def draft_slots(self, stored: int) -> int:
        """Slots that a drafter writes after L: `stored` (1 with node 0, else 0) and one per token that it runs."""
        return stored + (self.steps - 1) * self.topk

    @property
    def chain(self) -> bool:
        return self.topk == 1

    @property
    def max_depth(self) -> int:
        return min(self.steps, self.num_nodes - 1)


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
        """From `algo.draft_sampling` and `algo.rule`; None follows from the other. ValueError: unknown or inexact."""
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
        """The `num_nodes` most often reached nodes by `FIRST_SHARE`; `topk` nodes per level have children at most."""
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
        return [node for node in sorted(set(self.parents[1:])) if self.depths[node] == depth]
