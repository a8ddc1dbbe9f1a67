"""The size of a draft tree. It is checked before anything is loaded, so this file imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

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
