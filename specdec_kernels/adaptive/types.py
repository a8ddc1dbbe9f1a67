"""What is remembered of earlier steps, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_SIZES = 16
MAX_NODES = 256
EVIDENCE = ("smaller", "own")
"""Columns of `SizeState.evidence`: decayed sums of the steps in which the size before, and this one, would have written
the tokens of all steps that verified so many nodes."""
LEAST_HALF_LIFE, ROW_HALF_LIFE = 16.0, 112.0
"""A step of R rows counts half after 16 + 112 / R steps like it."""
LEAST_EVIDENCE = 16.0
"""Steps that the evidence about a size above that of the step fades to at most."""
TRIAL_HALF_LIFE = 16.0
"""Rows after which evidence counts half where nothing is drafted, and a step tries whether drafting pays."""
CHAIN_WHOLE = 0.25
"""Share of the steps of a chain that are taken to end at the same wrong draft in every size, see `choose_size`."""
TREE_EXTRA = 0.9
"""Share of the extra steps of a smaller tree that are counted, see `choose_size`."""
PRIOR_STEPS, PRIOR_ACCEPTANCE = 4.0, 0.85
"""Steps that the sums hold from the beginning: of chains whose drafts are accepted with this probability."""
KEEP_STILL, KEEP_SMALLER = 1.01, 1.02
"""How many times the tokens per time of the last choice a smaller size, and a larger one, must promise."""
LEAST_GAIN = 0.05
"""Added to the gain of a size where two gains are compared, so that gains near 0 do not differ many times."""


def prior_tokens(nodes: int) -> float:
    """Tokens that a step of so many nodes is taken to write before any step has told."""
    return (1 - PRIOR_ACCEPTANCE**nodes) / (1 - PRIOR_ACCEPTANCE)


class SizeState(NamedTuple):
    """Sizes of a step, and what steps have told about them. Size 0 is a step without a draft."""

    sizes: torch.Tensor
    """[S + 1] int32, rising from 1: nodes that are verified, node 0 included."""
    evidence: torch.Tensor
    """[S, 2] float32, see `EVIDENCE`; row j is that of size j + 1."""
    choice: torch.Tensor
    """[2] int32: the best size by index, 0 to S, and the best one that drafts, 1 to S; -1 before any step has told."""

    @classmethod
    def create(cls, sizes: Sequence[int], device: torch.device | str) -> SizeState:
        """No evidence yet. Raises ValueError for sizes that do not rise from 2."""
        if not 1 <= len(sizes) <= MAX_SIZES or sorted({*sizes}) != list(sizes):
            raise ValueError(f"sizes: expected 1 to {MAX_SIZES} rising numbers, got {list(sizes)}")
        if not 2 <= sizes[0] <= sizes[-1] <= MAX_NODES:
            raise ValueError(f"sizes: expected 2 to {MAX_NODES} nodes, got {list(sizes)}")
        state = cls(
            torch.tensor([1, *sizes], dtype=torch.int32, device=device),
            torch.empty(len(sizes), len(EVIDENCE), dtype=torch.float32, device=device),
            torch.empty(2, dtype=torch.int32, device=device),
        )
        state.clear()
        return state

    def clear(self) -> None:
        """Forget every step, in place."""
        tokens = [prior_tokens(nodes) for nodes in self.sizes.tolist()]
        ratios = [larger / smaller for smaller, larger in zip(tokens, tokens[1:], strict=False)]
        prior = PRIOR_STEPS * torch.tensor([[ratio, 1.0] for ratio in ratios], dtype=torch.float32)
        self.evidence.copy_(prior)
        self.choice.fill_(-1)
