"""Drafts that are drawn: how siblings are drawn, the rule that judges them, and the shape of their tree.

The shape of a drawn tree must not depend on the tokens drawn, because the rules take each token for a draw from its
parent's distribution. So it is fixed before anything is drawn. This file imports no torch, because configurations are
checked before it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from algorithms.runtime.tree_shape import TreeShape

DRAWS = ("topk", "without_replacement", "sample")
"""The likeliest tokens; draws without replacement; independent draws."""
_TREE_RULES = {
    "topk": ("target_only",),
    "without_replacement": ("traversal", "without_replacement"),
    "sample": ("traversal", "greedy_paths", "without_replacement", "k_seq", "multi_round"),
}
_CHAIN_RULES = {"topk": ("target_only",), "without_replacement": (), "sample": ("block", "rejection")}
FIRST_SHARE = 0.6
"""Of the nodes that are reached, those whose first child is accepted, as a shape assumes; each later sibling takes the
same share of what is left."""


@dataclass(frozen=True)
class Drawing:
    """How a drafter draws siblings (one of `DRAWS`), and the acceptance rule."""

    draw: str
    rule: str

    @classmethod
    def of(cls, draw: str | None, rule: str | None, chain: bool) -> Drawing:
        """What the settings `algo.draw` and `algo.rule` mean; either may be None and follows from the other.

        Raises:
            ValueError: an unknown draw, or a rule that does not judge what is drawn.
        """
        rules = _CHAIN_RULES if chain else _TREE_RULES
        if draw is None:
            draw = next((kind for kind in DRAWS if rule is None or rule in rules[kind]), None)
            if draw is None:
                known = [name for kind in DRAWS for name in rules[kind]]
                names = ", ".join(dict.fromkeys(known))
                raise ValueError(f"algo.rule: expected one of {names} for a {_kind(chain)}, got {rule!r}")
        if draw not in DRAWS:
            raise ValueError(f"algo.draw: expected one of {', '.join(DRAWS)}, got {draw!r}")
        if not rules[draw]:
            raise ValueError(f"algo.draw={draw} draws siblings: expected algo.topk above 1, got a chain")
        if rule is not None and rule not in rules[draw]:
            raise ValueError(
                f"algo.rule: expected one of {', '.join(rules[draw])} for a {_kind(chain)} with algo.draw={draw}, "
                f"got {rule!r}"
            )
        return cls(draw, rule or rules[draw][0])

    @property
    def drawn(self) -> bool:
        """Whether anything is drawn at all."""
        return self.draw != "topk"

    @property
    def replacement(self) -> bool:
        """Whether siblings are independent draws."""
        return self.draw == "sample"

    @property
    def exact_rules(self) -> tuple[str, ...]:
        """All rules for trees that are exact for these draws."""
        return _TREE_RULES[self.draw]

    def shape(self, size: TreeShape) -> DrawnShape | None:
        """The tree that is drawn, see `DrawnShape.of`; None where nothing is drawn."""
        return DrawnShape.of(size) if self.drawn else None


def _kind(chain: bool) -> str:
    return "chain" if chain else "tree"


@dataclass
class LevelSettings:
    """Settings of a drafter that drafts one token behind the other: a chain, or a tree level by level."""

    name: str
    steps: int
    """Most tokens drafted one behind the other (K)."""
    topk: int = 1
    """Children that a token offers; 1 drafts a chain."""
    num_nodes: int | None = None
    """Nodes verified, node 0 included; None takes steps + 1 for a chain, else at most 32."""
    draw: str | None = None
    """topk, sample (independent draws) or without_replacement; None follows from the rule, else it is topk."""
    rule: str | None = None
    """Acceptance rule; None is target_only for topk, block for a drawn chain, and traversal for a drawn tree."""

    def __post_init__(self) -> None:
        shape = TreeShape.of(self.steps, self.topk, self.num_nodes)
        Drawing.of(self.draw, self.rule, shape.chain)


@dataclass(frozen=True)
class DrawnShape:
    """A tree without tokens: `parents` of its nodes, -1 for node 0. Nodes are numbered level by level."""

    parents: tuple[int, ...]

    @classmethod
    def of(cls, size: TreeShape) -> DrawnShape:
        """The `num_nodes` nodes that are reached most often if first children are accepted with `FIRST_SHARE`: at most
        `steps` levels, `topk` children a node, and `topk` nodes of a level with children."""
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
