"""Tokens per step and acceptance by position, from what a drafter would draft behind every token of known text.

Under greedy decoding the text does not depend on the drafts. So one dense pass gives for every position r how many of
the drafts behind r the target would accept, and decoding visits r = start - 1 (the last prompt token),
r + accepted(r) + 1, and so on. Drafts behind the end of a text are not counted, though an engine may accept them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tally:
    """Counts pooled over sequences for drafts of `draft_len` tokens."""

    draft_len: int
    tokens: int = 0
    steps: int = 0
    reached: list[int] = field(init=False)
    accepted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0] * self.draft_len, [0] * self.draft_len

    def add(self, leading: list[int], start: int, length: int) -> None:
        """One text: `leading[r]` right drafts behind position r, of a continuation at `start` … `length` - 1."""
        last = start - 1
        while last < length - 1:
            accepted = min(leading[last], self.draft_len, length - 1 - last)
            for position in range(min(accepted + 1, self.draft_len, length - 1 - last)):
                self.reached[position] += 1
                self.accepted[position] += position < accepted
            self.steps += 1
            last += accepted + 1
        self.tokens += length - start

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def acceptance_at(self) -> list[float]:
        """Of the steps that reached the i-th draft, the share that accepted it."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached for accepted, reached in pairs if reached]


def leading_hits(hits: Tensor) -> Tensor:
    """How many entries before the first False of `hits [..., K]`: `[...]` int64."""
    return hits.long().cumprod(-1).sum(-1)


def add_batch(tally: Tally, leading: Tensor, starts: Tensor, lengths: Tensor) -> None:
    """Add rows of `leading [B, T]`, `starts [B]`, `lengths [B]`."""
    table = torch.cat([starts[:, None], lengths[:, None], leading], dim=1).tolist()
    for start, length, *row in table:
        tally.add(row, start, length)
