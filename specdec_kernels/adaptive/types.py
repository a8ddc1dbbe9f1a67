"""What is remembered of earlier steps, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_SIZES = 16
MAX_NODES = 256
EVIDENCE = ("signal", "rows", "accepted", "expected", "before")
"""Columns of `SizeState.evidence`: decayed sums of the signal of a band and of rows, slowly decayed sums of accepted
and of expected drafts, and of those that the band before accepted in the same steps."""
LEAST_HALF_LIFE, ROW_HALF_LIFE = 16.0, 112.0
"""The signal of a step of R rows counts half after 16 + 112 / R steps."""
SLOWER = 32.0
"""The calibration's half-life over that of the signal."""
PRIOR = 1.0
"""Drafts that the slow sums are taken to hold from the beginning, expected and accepted alike."""
NEARLY_EQUAL = 1.02
"""A larger size whose step takes at most so many times the best one's is taken instead, for what it tells."""


class SizeState(NamedTuple):
    """Sizes of a step, and what steps have told about them. Size 0 is a step without a draft.

    Band j holds the nodes of rank `sizes[j]` to `sizes[j + 1]` - 1. Its gain is the number of accepted drafts that it
    adds to a step of one request.
    """

    sizes: torch.Tensor
    """[S + 1] int32, rising from 1: nodes that are verified, node 0 included."""
    evidence: torch.Tensor
    """[S, 5] float32, see `EVIDENCE`."""
    choice: torch.Tensor
    """[2] int32: the best size by index, 0 to S, and the best one that drafts, 1 to S."""

    @classmethod
    def create(cls, sizes: Sequence[int], device: torch.device | str) -> SizeState:
        """No evidence yet: the choice is the largest size. Raises ValueError for sizes that do not rise from 2."""
        if not 1 <= len(sizes) <= MAX_SIZES or sorted({*sizes}) != list(sizes):
            raise ValueError(f"sizes: expected 1 to {MAX_SIZES} rising numbers, got {list(sizes)}")
        if not 2 <= sizes[0] <= sizes[-1] <= MAX_NODES:
            raise ValueError(f"sizes: expected 2 to {MAX_NODES} nodes, got {list(sizes)}")
        state = cls(
            torch.tensor([1, *sizes], dtype=torch.int32, device=device),
            torch.zeros(len(sizes), len(EVIDENCE), dtype=torch.float32, device=device),
            torch.zeros(2, dtype=torch.int32, device=device),
        )
        state.clear()
        return state

    def clear(self) -> None:
        """Forget every step, in place."""
        self.evidence.zero_()
        self.choice.fill_(len(self.evidence))
