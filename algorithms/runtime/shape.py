"""How large a draft tree is; checked before anything is loaded, so without torch."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TREE_NODES = 32
MAX_NODES = 256
MAX_TOPK = 64


@dataclass(frozen=True)
class TreeShape:
    """`steps` levels (K), `topk` children a token (T), `num_nodes` verified with the root (N)."""

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
        for name in ("steps", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"algo.{name}: expected at least 1, got {getattr(self, name)}")
        if self.topk > MAX_TOPK:
            raise ValueError(f"algo.topk: expected at most {MAX_TOPK}, got {self.topk}")
        most = min(1 + self.num_candidates, MAX_NODES)
        if not 2 <= self.num_nodes <= most:
            raise ValueError(
                f"algo.num_nodes: {self.steps} steps with topk {self.topk} draft 2 to {most} nodes, the root "
                f"included, got {self.num_nodes}"
            )

    @property
    def num_candidates(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def chain(self) -> bool:
        return self.topk == 1

    @property
    def max_depth(self) -> int:
        return min(self.steps, self.num_nodes - 1)
